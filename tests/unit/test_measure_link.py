from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backhaul.errors import TransferError
from backhaul.runtime import measure_link as module
from backhaul.runtime.adversary import AdversaryLink
from backhaul.runtime.disk import DiskLink
from backhaul.runtime.measure_link import measure_link

CPU = torch.device("cpu")
SIZES_BYTES = (4096, 65536)


class Clock:
    """Tells the time that the copies of a simulated link would have taken."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class ClockedArena:
    """Takes a set time for each byte, and more of it while the other direction is busy."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending: dict[str, list[int]] = {"out": [], "back": []}
        self.release_count = 0

    def start_offload(self, offset: int, source: torch.Tensor) -> None:
        self._pending["out"].append(source.numel())

    def start_reload(self, offset: int, destination: torch.Tensor) -> None:
        self._pending["back"].append(destination.numel())

    def compute(self, count: int) -> None:
        """Take five seconds a product, and thirty more if copies are made meanwhile."""
        self._clock.now_s += 5.0 * count
        if any(self._pending.values()):
            self._clock.now_s += 30.0
            self._pending = {"out": [], "back": []}

    def wait_offload(self, offset: int) -> None:
        if not self._pending["out"]:
            return
        slowdown = 4.0 if self._pending["back"] else 1.0
        self._clock.now_s += slowdown * self._pending["out"].pop() * 2.0
        self._pending["out"].clear()

    def wait_reload(self, offset: int) -> None:
        if not self._pending["back"]:
            return
        slowdown = 2.0 if self._pending["out"] else 1.0
        self._clock.now_s += slowdown * self._pending["back"].pop() * 3.0
        self._pending["back"].clear()

    def release(self) -> None:
        self.release_count += 1


class ClockedLink:
    tier = "clocked"
    location = ""
    capacity_bytes = 123

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.arena = ClockedArena(clock)

    def reserve(self, nbytes: int) -> ClockedArena:
        return self.arena


def test_each_direction_is_timed_alone_and_against_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    link: Any = ClockedLink(clock)
    monkeypatch.setattr(
        module._ComputeBench, "_compute", lambda _, count: link.arena.compute(count)
    )
    profile = measure_link(link, CPU, sizes_bytes=(20, 10))
    assert profile.sizes_bytes == (10, 20)
    assert profile.d2h_s == (20.0, 40.0)
    assert profile.h2d_s == (30.0, 60.0)
    assert profile.duplex_d2h_fraction == 0.25
    assert profile.duplex_h2d_fraction == 0.5
    # One copy each way was made beside compute, which lost 30 seconds to the two.
    assert profile.drag_s == (15.0, 15.0)
    # One arena for the copies alone, and one a size for those beside compute.
    assert link.arena.release_count == 3
    assert (profile.tier, profile.capacity_bytes, profile.source) == ("clocked", 123, "measured")


def test_a_disk_is_measured_and_left_idle(tmp_path: Path) -> None:
    link = DiskLink(tmp_path)
    profile = measure_link(link, CPU, sizes_bytes=SIZES_BYTES, repeat_count=2)
    assert profile.tier == "spill file"
    assert all(duration_s > 0 for duration_s in profile.d2h_s + profile.h2d_s)
    assert 0 < profile.duplex_d2h_fraction <= 1
    assert 0 < profile.duplex_h2d_fraction <= 1
    assert profile.capacity_bytes > 0
    assert (link.open_arena_count, link.idle_arena_count) == (0, 1)
    link.close()


def test_a_failed_copy_releases_the_arena(tmp_path: Path) -> None:
    link = DiskLink(tmp_path)
    link._writer._queue.put(None)
    with pytest.raises(TransferError, match="has died"):
        measure_link(link, CPU, sizes_bytes=SIZES_BYTES)
    assert link.open_arena_count == 0
    link.close()


def test_every_copy_is_of_a_whole_storage() -> None:
    # This link copies the storage under the tensor, and refuses one larger than its slot.
    profile = measure_link(AdversaryLink("last"), CPU, sizes_bytes=SIZES_BYTES, repeat_count=1)
    assert profile.sizes_bytes == SIZES_BYTES


def test_a_tier_without_room_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TransferError):
        measure_link(DiskLink(tmp_path, capacity_bytes=1), CPU, sizes_bytes=SIZES_BYTES)

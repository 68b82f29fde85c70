"""Measures how fast a link moves bytes, each way alone and both at once, and what it costs.

Copies are timed from their start until the compute stream is past their wait.  A new arena is
slow to write for the first time, as the system finds its pages then; a training run sees that
once, so that every byte is written once before anything is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from backhaul.records import LinkProfile, OpCost, SlotRecord
from backhaul.runtime import ops
from backhaul.runtime.links import Arena, Link
from backhaul.runtime.measure_ops import untraced
from backhaul.runtime.op_cache import OpCache
from backhaul.runtime.session import Session

__all__ = ["measure_link"]

_OPS = getattr(torch.ops, ops.NAMESPACE)

SIZES_BYTES = (64 * 2**10, 2**20, 16 * 2**20, 64 * 2**20)
REPEAT_COUNT = 5
# Copies of the same size each that keep one direction busy while the other is timed.
OPPOSING_COUNT = 2
# Time of the copies that run beside compute, and the most of them each way, while it is timed;
# and the side of the matrices that it multiplies.
BESIDE_S = 0.03
BESIDE_MOST = 32
MATRIX_SIDE = 384


def measure_link(
    link: Link,
    device: torch.device,
    *,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    repeat_count: int = REPEAT_COUNT,
    cache: OpCache | None = None,
) -> LinkProfile:
    """Time copies of several sizes on one link.

    Args:
        link: An open link.
        device: The device at its near end.
        sizes_bytes: Copy sizes, two or more; both directions at once are timed at the largest.
        repeat_count: How often each copy is timed; the median counts.
        cache: What was measured before, and is kept for later; None measures anew.

    Returns:
        The measured profile.

    Raises:
        TransferError: The host tier cannot hold twice the largest size, or a copy failed.
    """
    sizes = tuple(sorted(sizes_bytes))
    capacity_bytes = link.capacity_bytes
    keys = _cache_keys(link, sizes)
    known = [cache.get(key) if cache else None for key in keys]
    if all(known):
        times_s = [cost.duration_s for cost in known if cost]
        return _profile(link.tier, sizes, times_s, capacity_bytes)
    with untraced(device):
        times_s = _measure(link, device, sizes, repeat_count)
    if cache is not None:
        cache.add([_cost(key, time_s) for key, time_s in zip(keys, times_s, strict=True)])
    return _profile(link.tier, sizes, times_s, capacity_bytes)


def _measure(
    link: Link, device: torch.device, sizes: tuple[int, ...], repeat_count: int
) -> list[float]:
    bench = _CopyBench(link.reserve(2 * sizes[-1]), device, sizes)
    try:
        bench.warm_up()
        d2h_s = tuple(_median_s(bench.time_offload, size, repeat_count) for size in sizes)
        h2d_s = tuple(_median_s(bench.time_reload, size, repeat_count) for size in sizes)
        busy_d2h_s = _median_s(bench.time_offload_while_reloading, sizes[-1], repeat_count)
        busy_h2d_s = _median_s(bench.time_reload_while_offloading, sizes[-1], repeat_count)
    finally:
        bench.arena.release()
    compute = _ComputeBench(device)
    drag_s = [
        compute.time_drag(link, size, out_s + back_s, repeat_count)
        for size, out_s, back_s in zip(sizes, d2h_s, h2d_s, strict=True)
    ]
    return [*d2h_s, *h2d_s, busy_d2h_s, busy_h2d_s, *drag_s]


def _cache_keys(link: Link, sizes: Sequence[int]) -> list[str]:
    names = [f"{way} {size}" for way in ("offload", "reload") for size in sizes]
    names += ["offload while reloading", "reload while offloading"]
    names += [f"step lost to {size}" for size in sizes]
    return [f"link {link.tier} {link.location}: {name}" for name in names]


def _cost(key: str, duration_s: float) -> OpCost:
    return OpCost(key=key, duration_s=duration_s, workspace_bytes=0, source="measured")


def _profile(
    tier: str, sizes: tuple[int, ...], times_s: Sequence[float], capacity_bytes: int
) -> LinkProfile:
    count = len(sizes)
    d2h_s, h2d_s = tuple(times_s[:count]), tuple(times_s[count : 2 * count])
    busy_d2h_s, busy_h2d_s, *drag_s = times_s[2 * count :]
    return LinkProfile(
        tier=tier,
        sizes_bytes=sizes,
        d2h_s=d2h_s,
        h2d_s=h2d_s,
        duplex_d2h_fraction=min(1.0, d2h_s[-1] / busy_d2h_s),
        duplex_h2d_fraction=min(1.0, h2d_s[-1] / busy_h2d_s),
        capacity_bytes=capacity_bytes,
        source="measured",
        drag_s=tuple(drag_s),
    )


class _CopyBench:
    """Two slots of one arena, one for each direction, and tensors of each size at the near end."""

    def __init__(self, arena: Arena, device: torch.device, sizes_bytes: tuple[int, ...]) -> None:
        self.arena = arena
        self._device = device
        self._largest_bytes = sizes_bytes[-1]
        self._out_offset, self._back_offset = 0, self._largest_bytes
        self._source_by_nbytes = {nbytes: _random(nbytes, device) for nbytes in sizes_bytes}
        self._destination_by_nbytes = {
            nbytes: torch.zeros(nbytes, dtype=torch.uint8, device=device) for nbytes in sizes_bytes
        }

    def warm_up(self) -> None:
        """Write both slots and read them."""
        for offset in (self._out_offset, self._back_offset):
            self.arena.start_offload(offset, self._source_by_nbytes[self._largest_bytes])
            self.arena.wait_offload(offset)
        destination = self._destination_by_nbytes[self._largest_bytes]
        self.arena.start_reload(self._back_offset, destination)
        self.arena.wait_reload(self._back_offset)
        _finish_compute(self._device)

    def time_offload(self, nbytes: int) -> float:
        """Time one copy out."""
        _finish_compute(self._device)
        begin_s = time.perf_counter()
        self.arena.start_offload(self._out_offset, self._source_by_nbytes[nbytes])
        self.arena.wait_offload(self._out_offset)
        _finish_compute(self._device)
        return time.perf_counter() - begin_s

    def time_reload(self, nbytes: int) -> float:
        """Time one copy back."""
        _finish_compute(self._device)
        begin_s = time.perf_counter()
        self.arena.start_reload(self._back_offset, self._destination_by_nbytes[nbytes])
        self.arena.wait_reload(self._back_offset)
        _finish_compute(self._device)
        return time.perf_counter() - begin_s

    def time_offload_while_reloading(self, nbytes: int) -> float:
        """Time one copy out while copies back keep their direction busy."""
        for _ in range(OPPOSING_COUNT):
            self.arena.start_reload(self._back_offset, self._destination_by_nbytes[nbytes])
        duration_s = self.time_offload(nbytes)
        self.arena.wait_reload(self._back_offset)
        return duration_s

    def time_reload_while_offloading(self, nbytes: int) -> float:
        """Time one copy back while copies out keep their direction busy."""
        for _ in range(OPPOSING_COUNT):
            self.arena.start_offload(self._out_offset, self._source_by_nbytes[nbytes])
        duration_s = self.time_reload(nbytes)
        self.arena.wait_offload(self._out_offset)
        return duration_s


class _ComputeBench:
    """A product of matrices, alone and beside copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._matrix = torch.rand(MATRIX_SIDE, MATRIX_SIDE, device=device)
        self._product = torch.empty_like(self._matrix)

    def time_drag(self, link: Link, nbytes: int, copies_s: float, repeat_count: int) -> float:
        """Time how much longer compute takes for each copy, its start and its wait included.

        Args:
            link: Makes the copies.
            nbytes: Size of the copies.
            copies_s: Time of one copy each way, alone.
            repeat_count: How often compute is timed alone and beside copies, in turn.
        """
        pair_count = min(max(round(BESIDE_S / copies_s), 1), BESIDE_MOST)
        self._compute(1)
        one_s = min(self._time(1) for _ in range(repeat_count))
        product_count = 1 + round(2 * copies_s / one_s)
        copies = _Copies(link, _random(nbytes, self._device))
        try:
            self._time(product_count, 1, copies)
            lost_s = [
                self._time(product_count, pair_count, copies)
                - self._time(product_count, pair_count)
                for _ in range(repeat_count)
            ]
        finally:
            copies.close()
        return max(0.0, statistics.median(lost_s) / (2 * pair_count))

    def _time(
        self, product_count: int, pair_count: int = 1, copies: _Copies | None = None
    ) -> float:
        _finish_compute(self._device)
        begin_s = time.perf_counter()
        for _ in range(pair_count):
            if copies is not None:
                copies.start()
            self._compute(product_count)
            if copies is not None:
                copies.wait()
        _finish_compute(self._device)
        return time.perf_counter() - begin_s

    def _compute(self, product_count: int) -> None:
        for _ in range(product_count):
            torch.mm(self._matrix, self._matrix, out=self._product)


class _Copies:
    """A copy each way, made as a rewritten graph makes them: by its ops, back to a new tensor."""

    def __init__(self, link: Link, source: torch.Tensor) -> None:
        nbytes = source.numel()
        slots = [SlotRecord(tensor="", offset_bytes=i * nbytes, nbytes=nbytes) for i in (0, 1)]
        self._session = Session(link, slots, 2 * nbytes)
        self._source = source
        self._token = _OPS.begin_step(self._session.session_id, len(slots))
        # What the copies back bring.
        self._stored = _OPS.offload_wait(_OPS.offload(source, self._token, 1), source)

    def start(self) -> None:
        """Start both."""
        source = self._source
        self._out = _OPS.offload(source, self._token, 0)
        self._back = _OPS.reload(
            self._stored,
            source.shape,
            source.stride(),
            0,
            source.numel(),
            source.dtype,
            source.device,
        )

    def wait(self) -> None:
        """Wait for both."""
        _OPS.offload_wait(self._out, self._source)
        _OPS.reload_wait(self._back, self._stored)
        del self._back

    def close(self) -> None:
        """Give the arena back."""
        self._session.close()


def _random(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return bytes that a file system cannot compress."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)


def _finish_compute(device: torch.device) -> None:
    """Let the host wait for the compute stream, and for no transfer stream."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def _median_s(measure: Callable[[int], float], nbytes: int, repeat_count: int) -> float:
    return statistics.median(measure(nbytes) for _ in range(repeat_count))

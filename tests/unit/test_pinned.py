from __future__ import annotations

import gc
import random
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backhaul.errors import TransferError
from backhaul.runtime import pinned
from backhaul.runtime.host_memory import available_host_bytes
from backhaul.runtime.pinned import PinnedLink
from backhaul.runtime.streams import PinError, PinnedMemory

CPU = torch.device("cpu")
NBYTES = 64


class Recorder:
    """Names streams and events, and writes down what is asked of them."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.compute = "compute"
        self.pin_error = ""
        self._streams = iter(("d2h", "h2d"))
        self._event_count = 0

    def current(self) -> str:
        return self.compute

    def new_stream(self) -> str:
        return next(self._streams)

    def new_event(self) -> str:
        self._event_count += 1
        return f"e{self._event_count}"

    def record(self, event: str, stream: str) -> None:
        self.log.append(("record", event, stream))

    def wait(self, stream: str, event: str) -> None:
        self.log.append(("wait", stream, event))

    def copy(self, destination: Tensor, source: Tensor, stream: str) -> None:
        self.log.append(("copy", stream))
        destination.copy_(source)

    def synchronize(self, stream: str) -> None:
        self.log.append(("synchronize", stream))

    def pin(self, nbytes: int) -> PinnedMemory:
        if self.pin_error:
            raise PinError(self.pin_error)
        self.log.append(("pin", str(nbytes)))
        return PinnedMemory(torch.zeros(nbytes, dtype=torch.uint8), is_registered=True)

    def unpin(self, memory: PinnedMemory) -> None:
        self.log.append(("unpin", str(memory.nbytes)))

    def take_log(self) -> list[tuple[str, ...]]:
        log, self.log = self.log, []
        return log


class SimulatedStreams(Recorder):
    """Runs the work of all streams in any order that their events allow."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._queues: dict[str, deque[tuple[str, Any]]] = {
            name: deque() for name in ("compute", "d2h", "h2d")
        }
        self._recorded: set[str] = set()

    def launch(self, kernel: Callable[[], object], stream: str = "compute") -> None:
        self._queues[stream].append(("run", kernel))

    def record(self, event: str, stream: str) -> None:
        self._queues[stream].append(("record", event))

    def wait(self, stream: str, event: str) -> None:
        self._queues[stream].append(("wait", event))

    def copy(self, destination: Tensor, source: Tensor, stream: str) -> None:
        self.launch(lambda: destination.copy_(source), stream)

    def run_all(self) -> None:
        while runnable := [name for name in self._queues if self._can_run(name)]:
            # Long runs on one stream show more races than fair turns.
            name = self._random.choice(runnable)
            for _ in range(self._random.randint(1, 8)):
                if not self._can_run(name):
                    break
                what, work = self._queues[name].popleft()
                if what == "run":
                    work()
                elif what == "record":
                    self._recorded.add(work)
        assert not any(self._queues.values()), "a stream waits for an event that never happens"

    def _can_run(self, name: str) -> bool:
        if not self._queues[name]:
            return False
        what, work = self._queues[name][0]
        return what != "wait" or work in self._recorded


def make_link(streams: Recorder) -> Any:
    return PinnedLink(CPU, streams=streams)  # type: ignore[arg-type]


def bytes_of(value: int) -> Tensor:
    return torch.full((NBYTES,), value, dtype=torch.uint8)


def test_an_offload_runs_between_the_kernels_before_it_and_those_after_its_wait() -> None:
    streams = Recorder()
    arena = make_link(streams).reserve(NBYTES)
    streams.take_log()
    arena.start_offload(0, bytes_of(1))
    assert streams.take_log() == [
        ("record", "e1", "compute"),
        ("wait", "d2h", "e1"),
        ("copy", "d2h"),
        ("record", "e2", "d2h"),
    ]
    arena.wait_offload(0)
    assert streams.take_log() == [("wait", "compute", "e2")]


def test_a_reload_runs_after_its_allocation_and_its_offload() -> None:
    streams = Recorder()
    arena = make_link(streams).reserve(NBYTES)
    arena.start_offload(0, bytes_of(1))
    arena.wait_offload(0)
    streams.take_log()
    destination = bytes_of(0)
    arena.start_reload(0, destination)
    assert streams.take_log() == [
        ("record", "e3", "compute"),
        ("wait", "h2d", "e3"),
        ("wait", "h2d", "e2"),
        ("copy", "h2d"),
        ("record", "e4", "h2d"),
    ]
    arena.wait_reload(0)
    assert streams.take_log() == [("wait", "compute", "e4")]
    assert torch.equal(destination, bytes_of(1))


def test_the_next_step_writes_a_slot_after_the_last_step_has_read_it() -> None:
    streams = Recorder()
    link = make_link(streams)
    for _ in range(2):
        arena = link.reserve(NBYTES)
        log = streams.take_log()
        arena.start_offload(0, bytes_of(1))
        arena.wait_offload(0)
        offload_log = streams.take_log()
        arena.start_reload(0, bytes_of(0))
        arena.wait_reload(0)
        last_reload = streams.log[-1][2]
        arena.release()
        if log == [("pin", str(NBYTES))]:
            expected_wait = ("wait", "d2h", last_reload)
    assert log[0][0] != "pin"
    assert expected_wait in offload_log
    assert offload_log.index(expected_wait) < offload_log.index(("copy", "d2h"))


def test_the_compute_stream_is_looked_up_at_each_call() -> None:
    streams = Recorder()
    arena = make_link(streams).reserve(NBYTES)
    streams.take_log()
    streams.compute = "a"
    arena.start_offload(0, bytes_of(1))
    assert streams.take_log()[0] == ("record", "e1", "a")
    streams.compute = "b"
    arena.wait_offload(0)
    # Both: the one that goes on, and the one whose memory it is.
    assert streams.take_log() == [("wait", "b", "e2"), ("wait", "a", "e2")]
    streams.compute = "c"
    arena.start_reload(0, bytes_of(0))
    assert streams.take_log()[0] == ("record", "e3", "c")


def test_the_host_never_waits_in_a_step_and_no_memory_is_pinned_twice() -> None:
    streams = Recorder()
    link = make_link(streams)
    for _ in range(5):
        arena = link.reserve(NBYTES)
        arena.start_offload(0, bytes_of(1))
        arena.wait_offload(0)
        arena.start_reload(0, bytes_of(0))
        arena.wait_reload(0)
        arena.release()
    kinds = [entry[0] for entry in streams.take_log()]
    assert "synchronize" not in kinds
    assert kinds.count("pin") == 1


def test_a_reload_that_is_never_waited_for_keeps_its_memory_until_a_stream_waits() -> None:
    streams = Recorder()
    link = make_link(streams)
    arena = link.reserve(NBYTES)
    arena.start_offload(0, bytes_of(1))
    arena.wait_offload(0)
    destination = bytes_of(0)
    storage = destination.untyped_storage()
    arena.start_reload(0, destination)
    landed = streams.log[-1][1]
    del destination
    streams.take_log()
    arena.release()
    del arena
    gc.collect()
    assert streams.take_log() == []  # A finaliser touches no stream.
    assert torch._C._storage_Use_Count(storage._cdata) == 2
    link.reserve(NBYTES)
    assert streams.take_log() == [("wait", "compute", landed)]
    assert torch._C._storage_Use_Count(storage._cdata) == 1


def test_a_waited_copy_lets_its_tensor_go() -> None:
    arena = make_link(Recorder()).reserve(NBYTES)
    source, destination = bytes_of(1), bytes_of(0)
    arena.start_offload(0, source)
    arena.wait_offload(0)
    arena.start_reload(0, destination)
    arena.wait_reload(0)
    for tensor in (source, destination):
        storage = tensor.untyped_storage()
        assert torch._C._storage_Use_Count(storage._cdata) == 2


def run_training(streams: SimulatedStreams, step_count: int = 4, slot_count: int = 3) -> list[bool]:
    """Run steps whose device memory is reused as soon as the rules allow; say what was exact."""
    link = make_link(streams)
    device = [bytes_of(0) for _ in range(2)]  # Two device buffers, reused by all.
    is_exact: list[bool] = []

    def check(tensor: Tensor, value: int) -> None:
        is_exact.append(torch.equal(tensor, bytes_of(value)))

    for step in range(step_count):
        arena = link.reserve(slot_count * NBYTES)
        for slot in range(slot_count):
            x, value = device[slot % 2], 10 * step + slot + 1
            streams.launch(lambda x=x, value=value: x.fill_(value))
            arena.start_offload(slot * NBYTES, x)
            arena.wait_offload(slot * NBYTES)
            streams.launch(lambda x=x: x.fill_(0xFF))  # The memory is another's now.
        for slot in reversed(range(slot_count)):
            y, value = device[slot % 2], 10 * step + slot + 1
            streams.launch(lambda y=y: check(y, 0xFF))  # The one before still reads.
            arena.start_reload(slot * NBYTES, y)
            arena.wait_reload(slot * NBYTES)
            streams.launch(lambda y=y, value=value: check(y, value))
            streams.launch(lambda y=y: y.fill_(0xFF))
        arena.release()
    streams.run_all()
    return is_exact


@pytest.mark.parametrize("seed", range(50))
def test_every_legal_order_of_the_streams_gives_exact_bytes(seed: int) -> None:
    assert all(run_training(SimulatedStreams(seed)))


def test_dropping_any_kind_of_wait_is_seen() -> None:
    # Waits of one step on a fresh buffer: d2h for x, compute for the copy out, h2d for y, h2d
    # for the slot, compute for the copy back.  From the second step also d2h for the slot.
    class Forgetful(SimulatedStreams):
        def __init__(self, seed: int, forgotten: str) -> None:
            super().__init__(seed)
            self._forgotten = forgotten
            self._stream_of_event: dict[str, str] = {}

        def record(self, event: str, stream: str) -> None:
            self._stream_of_event[event] = stream
            super().record(event, stream)

        def wait(self, stream: str, event: str) -> None:
            if f"{stream} after {self._stream_of_event[event]}" != self._forgotten:
                super().wait(stream, event)

    for forgotten in (
        "d2h after compute",
        "compute after d2h",
        "h2d after compute",
        "compute after h2d",
    ):
        assert not all(all(run_training(Forgetful(seed, forgotten))) for seed in range(20)), (
            forgotten
        )


def test_pinning_that_fails_says_that_it_is_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "available_host_bytes", lambda: 12_345)
    streams = Recorder()
    streams.pin_error = "cudaHostRegister: out of memory"
    link = make_link(streams)
    message = r"pinned host memory: cannot pin 64 bytes.*cudaHostRegister: out of memory.*12,345"
    with pytest.raises(TransferError, match=message) as error:
        link.reserve(NBYTES)
    assert "not device memory" in str(error.value)
    assert (error.value.tier, error.value.nbytes) == ("pinned host memory", NBYTES)
    assert link.open_arena_count == 0


def test_close_waits_for_the_copies_before_it_unpins() -> None:
    streams = Recorder()
    link = make_link(streams)
    arena = link.reserve(NBYTES)
    link.reserve(2 * NBYTES).release()
    streams.take_log()
    link.close()
    link.close()
    log = streams.take_log()
    for nbytes in (NBYTES, 2 * NBYTES):
        unpin = log.index(("unpin", str(nbytes)))
        assert log[unpin - 2 : unpin] == [("synchronize", "d2h"), ("synchronize", "h2d")]
    assert len(log) == 6
    for use in (lambda: link.reserve(1), lambda: arena.start_offload(0, bytes_of(1))):
        with pytest.raises(TransferError, match="is closed"):
            use()


def test_a_dropped_link_unpins() -> None:
    streams = Recorder()
    link = make_link(streams)
    link.reserve(NBYTES).release()
    del link
    gc.collect()
    assert streams.log[-1] == ("unpin", str(NBYTES))


def test_a_wait_without_a_start_is_an_error() -> None:
    arena = make_link(Recorder()).reserve(NBYTES)
    for use in (arena.wait_offload, arena.wait_reload):
        with pytest.raises(TransferError, match="was started at offset 3"):
            use(3)
    with pytest.raises(TransferError, match="no offload was started"):
        arena.start_reload(3, bytes_of(0))


def test_a_release_inside_the_pool_itself_does_not_block() -> None:
    link = make_link(Recorder())
    arena = link.reserve(NBYTES)

    def release_as_a_finaliser_would() -> None:
        with link._pool._lock:
            arena.release()

    thread = threading.Thread(target=release_as_a_finaliser_would, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert (link.open_arena_count, link.idle_arena_count) == (0, 1)


def write_machine(root: Path, cgroup: str, files: dict[str, str]) -> None:
    contents = {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:   5000 kB\n",
        "proc/self/cgroup": cgroup,
    }
    for name, text in (contents | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_host_memory_is_what_the_kernel_says_is_available(tmp_path: Path) -> None:
    write_machine(tmp_path, "0::/\n", {"sys/fs/cgroup/memory.max": "max\n"})
    assert available_host_bytes(tmp_path) == 5000 * 1024


@pytest.mark.parametrize(
    ("cgroup", "limit", "used"),
    [
        ("0::/job/task\n", "memory.max", "memory.current"),
        ("4:memory:/job/task\n0::/\n", "memory/@.limit_in_bytes", "memory/@.usage_in_bytes"),
    ],
    ids=["v2", "v1"],
)
@pytest.mark.parametrize("group", ["", "job", "job/task"])
def test_host_memory_is_bounded_by_every_control_group_above(
    cgroup: str, limit: str, used: str, group: str, tmp_path: Path
) -> None:
    def place(name: str) -> str:
        folder, _, file = name.rpartition("/")
        return f"sys/fs/cgroup/{folder}/{group}/{file.replace('@', 'memory')}"

    write_machine(tmp_path, cgroup, {place(limit): "3000\n", place(used): "1000\n"})
    assert available_host_bytes(tmp_path) == 2000


def test_this_machine_has_memory() -> None:
    assert available_host_bytes() > 0

"""The link from an accelerator to pinned host memory.

One stream each way, ordered against the compute stream by events: the host never waits in a
step.  Tensors are allocated and freed on the compute stream alone, which waits for every copy
that touches them, so that the caching allocator may reuse them at once and `record_stream`,
which delays the reuse by an unknown time, is not needed.

The compute stream is whichever is current at a call, looked up then.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from backhaul.errors import TransferError
from backhaul.runtime.host_memory import available_host_bytes
from backhaul.runtime.links import Arena, ArenaPool, Link
from backhaul.runtime.streams import DeviceStreams, PinError, PinnedMemory, Streams

__all__ = ["PinnedLink"]

TIER = "pinned host memory"


class PinnedLink(Link):
    """Moves tensors of an accelerator to pinned host memory, and back.

    Args:
        device: The accelerator.
        streams: Its stream, event and pin calls; tests give a recorder.
    """

    tier = TIER

    def __init__(self, device: torch.device, *, streams: Streams | None = None) -> None:
        self.device = device
        self._streams: Streams = DeviceStreams(device) if streams is None else streams
        self._d2h = self._streams.new_stream()
        self._h2d = self._streams.new_stream()
        self._pool: ArenaPool[_Buffer] = ArenaPool(_Buffer.close)
        self._buffers: weakref.WeakSet[_Buffer] = weakref.WeakSet()
        self._abandoned: deque[_Flight] = deque()
        self._is_closed = False

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that this process can pin, the link's own included."""
        return available_host_bytes() + self._pool.held_bytes

    @property
    def open_arena_count(self) -> int:
        """Count the arenas that are reserved and not released."""
        return self._pool.open_count

    @property
    def idle_arena_count(self) -> int:
        """Count the released arenas that are kept for a later step."""
        return self._pool.idle_count

    def reserve(self, nbytes: int) -> Arena:
        """Lend a pinned buffer for one step; see `Link.reserve`."""
        self.check_open(nbytes)
        self._let_go_abandoned()
        buffer = self._pool.take(nbytes)
        if buffer is None:
            try:
                memory = self._streams.pin(nbytes)
            except PinError as error:
                raise TransferError(
                    f"{TIER}: cannot pin {nbytes:,} bytes for {self.device}: {error}; this is "
                    f"host memory, of which {available_host_bytes():,} bytes are available, not "
                    "device memory: free some, raise the limit of the container, or plan with a "
                    "larger memory budget",
                    tier=TIER,
                    nbytes=nbytes,
                ) from error
            buffer = _Buffer(memory, self._streams, (self._d2h, self._h2d))
            self._buffers.add(buffer)
            self._pool.admit(buffer)
        return _PinnedArena(self, self._pool, self._abandoned, buffer)

    def close(self) -> None:
        """Wait for all copies and unpin everything; see `Link.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._let_go_abandoned()
        self._pool.discard_idle()
        for buffer in tuple(self._buffers):
            buffer.close()

    def check_open(self, nbytes: int) -> None:
        """Refuse a closed link.

        Raises:
            TransferError: It is closed.
        """
        if self._is_closed:
            raise TransferError(
                f"{TIER}: the link of {self.device} is closed and cannot move {nbytes:,} bytes; "
                "keep it open until the last backward is done",
                tier=TIER,
                nbytes=nbytes,
            )

    def start_copy_out(self, buffer: _Buffer, offset: int, source: Tensor) -> _Flight:
        """Copy `source` to the buffer on the d2h stream."""
        self.check_open(source.numel())
        compute = self._streams.current()
        slot = buffer.memory.tensor.narrow(0, offset, source.numel())
        # Hazard: the kernels that write `source` may not have run yet.
        self._streams.wait(self._d2h, self._record_on(compute))
        if buffer.last_reload is not None:
            # Hazard: a reload of an earlier step may still read the bytes that this writes.
            self._streams.wait(self._d2h, buffer.last_reload)
        self._streams.copy(slot, source, self._d2h)
        return _Flight(source, self._record_on(self._d2h), compute)

    def start_copy_back(
        self, buffer: _Buffer, offset: int, destination: Tensor, offloaded: torch.Event
    ) -> _Flight:
        """Copy the slot back on the h2d stream, after its copy out."""
        self.check_open(destination.numel())
        compute = self._streams.current()
        slot = buffer.memory.tensor.narrow(0, offset, destination.numel())
        # Hazard: `destination` may be memory that kernels issued earlier still use under the
        # name of a tensor that is freed.
        self._streams.wait(self._h2d, self._record_on(compute))
        # Hazard: the slot's own copy out may not have arrived.
        self._streams.wait(self._h2d, offloaded)
        self._streams.copy(destination, slot, self._h2d)
        flight = _Flight(destination, self._record_on(self._h2d), compute)
        buffer.last_reload = flight.landed
        return flight

    def land(self, flight: _Flight) -> None:
        """Hold the compute stream until the copy is done; its tensor may then be freed."""
        compute = self._streams.current()
        # Hazard, copying out: the memory of the tensor is reused while it is still read.
        # Hazard, copying back: the tensor is read before its bytes are there.
        self._streams.wait(compute, flight.landed)
        if flight.stream != compute:
            # Hazard: the allocator reuses the tensor's memory on the stream that was current
            # when it was made, and not on the one that waits.
            self._streams.wait(flight.stream, flight.landed)

    def _record_on(self, stream: torch.Stream) -> torch.Event:
        event = self._streams.new_event()
        self._streams.record(event, stream)
        return event

    def _let_go_abandoned(self) -> None:
        while self._abandoned:
            flight = self._abandoned.popleft()
            # Hazard: the step ended by an exception between start and wait, and a copy back
            # would write over whatever takes the memory of its tensor.
            self._streams.wait(flight.stream, flight.landed)


class _Flight(NamedTuple):
    """A copy under way: its tensor, its end, and the stream that owns the tensor's memory."""

    tensor: Tensor
    landed: torch.Event
    stream: torch.Stream


class _Buffer:
    """Pinned memory of one arena after another, with the last copy that read it."""

    def __init__(
        self, memory: PinnedMemory, streams: Streams, used_by: tuple[torch.Stream, torch.Stream]
    ) -> None:
        self.memory = memory
        self.last_reload: torch.Event | None = None
        self._finalizer = weakref.finalize(self, _unpin, memory, streams, used_by)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def close(self) -> None:
        self._finalizer()


class _PinnedArena(Arena):
    """One step's pinned buffer, and its copies by slot."""

    def __init__(
        self,
        link: PinnedLink,
        pool: ArenaPool[_Buffer],
        abandoned: deque[_Flight],
        buffer: _Buffer,
    ) -> None:
        self._link = link
        self._pool = pool
        self._abandoned = abandoned
        self._buffer = buffer
        self._offloaded_by_offset: dict[int, torch.Event] = {}
        self._flights_out: dict[int, _Flight] = {}
        self._flights_back: dict[int, list[_Flight]] = {}
        self._is_released = False

    def start_offload(self, offset: int, source: Tensor) -> None:
        flight = self._link.start_copy_out(self._buffer, offset, source)
        self._flights_out[offset] = flight
        self._offloaded_by_offset[offset] = flight.landed

    def wait_offload(self, offset: int) -> None:
        flight = self._flights_out.get(offset)
        if flight is not None:
            self._link.land(flight)
            del self._flights_out[offset]
        elif offset not in self._offloaded_by_offset:
            raise _never_started("offload", offset)

    def start_reload(self, offset: int, destination: Tensor) -> None:
        offloaded = self._offloaded_by_offset.get(offset)
        if offloaded is None:
            raise _never_started("offload", offset)
        flight = self._link.start_copy_back(self._buffer, offset, destination, offloaded)
        self._flights_back.setdefault(offset, []).append(flight)

    def wait_reload(self, offset: int) -> None:
        flights = self._flights_back.get(offset)
        if flights is None:
            raise _never_started("reload", offset)
        # Concurrent backwards through one retained graph append while others wait.
        started = tuple(flights)
        for flight in started:
            self._link.land(flight)
        del flights[: len(started)]

    def release(self) -> None:
        if self._is_released:
            return
        self._is_released = True
        # No stream is touched here, in a finaliser; the link's next `reserve` does it.
        self._abandoned.extend(self._flights_out.values())
        for flights in self._flights_back.values():
            self._abandoned.extend(flights)
        self._flights_out.clear()
        self._flights_back.clear()
        self._pool.give_back(self._buffer)


def _unpin(
    memory: PinnedMemory, streams: Streams, used_by: tuple[torch.Stream, torch.Stream]
) -> None:
    # Hazard: a copy engine still reads or writes pages that are handed back to the system.
    for stream in used_by:
        streams.synchronize(stream)
    streams.unpin(memory)


def _never_started(what: str, offset: int) -> TransferError:
    return TransferError(f"{TIER}: no {what} was started at offset {offset:,}", tier=TIER, nbytes=0)

"""A link that is as unkind as the rules of links allow, so that a missing wait shows on a CPU.

Copies happen at the first moment, at the last, or at any in between.  Bytes that the graph may
not rely on are poison: a reload's destination until its copy, a slot before its first copy, and
a source that the graph dropped before its copy out was done, as a buffer that is reused would
be.  Poison of 0xFF is a NaN in every floating-point type.

Memory is set and copied through its address and not by tensor operations: those hold references
that the poisoning must be able to count, and obey whatever mode is active when a finaliser runs.
"""

from __future__ import annotations

import ctypes
import random
from typing import Literal

import torch
from torch import Tensor, UntypedStorage

from backhaul.errors import TransferError
from backhaul.runtime.links import Arena, ArenaPool, Link

__all__ = ["AdversaryLink"]

TIER = "adversary"
CAPACITY_BYTES = 2**40

Order = Literal["first", "last", "random"]


class AdversaryLink(Link):
    """Moves CPU tensors to ordinary memory at legal but inconvenient moments.

    Args:
        order: When copies happen: when they start, when they are waited for, or at any call in
            between.  A copy out that nobody waits for happens at its reload.
        seed: Chooses the moments of `random`.
        poison_byte: Fills whatever may not be read; choose a small one where integers are
            used as indices.
    """

    tier = TIER

    def __init__(self, order: Order, seed: int = 0, *, poison_byte: int = 0xFF) -> None:
        self._order = order
        self._random = random.Random(seed)
        self._poison_byte = poison_byte
        self._pool: ArenaPool[_Memory] = ArenaPool(lambda memory: None)
        self._is_closed = False

    @property
    def capacity_bytes(self) -> int:
        """Say a number that no plan reaches."""
        return CAPACITY_BYTES

    @property
    def open_arena_count(self) -> int:
        """Count the arenas that are reserved and not released."""
        return self._pool.open_count

    @property
    def idle_arena_count(self) -> int:
        """Count the released arenas that are kept for a later step."""
        return self._pool.idle_count

    def reserve(self, nbytes: int) -> Arena:
        """Lend poisoned memory; see `Link.reserve`."""
        self.check_open(nbytes)
        memory = self._pool.take(nbytes)
        if memory is None:
            memory = _Memory(nbytes)
            self._pool.admit(memory)
        self.poison(memory.storage)
        return _AdversaryArena(self, self._pool, memory)

    def close(self) -> None:
        """Let no copy happen any more; see `Link.close`."""
        self._is_closed = True
        self._pool.discard_idle()

    def check_open(self, nbytes: int) -> None:
        """Refuse a closed link.

        Raises:
            TransferError: It is closed.
        """
        if self._is_closed:
            raise _transfer_error(f"the link is closed and cannot move {nbytes:,} bytes", nbytes)

    def choose_now(self, count: int) -> list[int]:
        """Choose which of `count` pending copies happen at this moment, and in which order."""
        if self._order != "random":
            return []
        return self._random.sample(range(count), self._random.randint(0, count))

    def poison(self, storage: UntypedStorage) -> None:
        """Fill a storage with the poison byte."""
        ctypes.memset(storage.data_ptr(), self._poison_byte, storage.nbytes())

    @property
    def is_eager(self) -> bool:
        """Say whether a copy happens as it starts."""
        return self._order == "first"


class _Memory:
    """A piece of host memory."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.storage = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()

    def address(self, offset: int, nbytes: int) -> int:
        if offset + nbytes > self.nbytes:
            raise _transfer_error(f"{nbytes:,} bytes at {offset:,} are outside the arena", nbytes)
        return self.storage.data_ptr() + offset


class _Pending:
    """A copy that was started and has not happened."""

    def __init__(self, offset: int, storage: UntypedStorage) -> None:
        self.offset = offset
        # The raw storage and no tensor over it, so that its references can be counted.
        self.storage = storage


class _AdversaryArena(Arena):
    """One step's memory, and the copies that have not happened."""

    def __init__(self, link: AdversaryLink, pool: ArenaPool[_Memory], memory: _Memory) -> None:
        self._link = link
        self._pool = pool
        self._memory = memory
        self._out_by_offset: dict[int, _Pending] = {}
        self._back: list[_Pending] = []
        self._offloads: set[int] = set()
        self._reloads: set[int] = set()
        self._is_released = False

    def start_offload(self, offset: int, source: Tensor) -> None:
        self._link.check_open(source.numel())
        self._memory.address(offset, source.numel())
        self._copy_some()
        self._out_by_offset[offset] = _Pending(offset, source.untyped_storage())
        self._offloads.add(offset)
        if self._link.is_eager:
            self._copy_out(offset)

    def wait_offload(self, offset: int) -> None:
        if offset not in self._offloads:
            raise _transfer_error(f"no offload was started at offset {offset:,}", 0)
        self._copy_some()
        self._copy_out(offset)

    def start_reload(self, offset: int, destination: Tensor) -> None:
        self._link.check_open(destination.numel())
        if offset not in self._offloads:
            raise _transfer_error(f"no offload was started at offset {offset:,}", 0)
        self._memory.address(offset, destination.numel())
        self._copy_some()
        pending = _Pending(offset, destination.untyped_storage())
        self._link.poison(pending.storage)
        self._back.append(pending)
        self._reloads.add(offset)
        if self._link.is_eager:
            self._copy_back([pending])

    def wait_reload(self, offset: int) -> None:
        if offset not in self._reloads:
            raise _transfer_error(f"no reload was started at offset {offset:,}", 0)
        self._copy_some()
        self._copy_back([pending for pending in self._back if pending.offset == offset])

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._out_by_offset.clear()
            self._back.clear()
            self._link.poison(self._memory.storage)
            self._pool.give_back(self._memory)

    def _copy_some(self) -> None:
        """Let some pending copies happen now; legal at any call."""
        out, back = tuple(self._out_by_offset), tuple(self._back)
        for index in self._link.choose_now(len(out) + len(back)):
            if index < len(out):
                self._copy_out(out[index])
            else:
                self._copy_back([back[index - len(out)]])

    def _copy_out(self, offset: int) -> None:
        pending = self._out_by_offset.pop(offset, None)
        if pending is None:
            return
        storage = pending.storage
        if _is_dropped(storage):
            # Nobody waited, and the graph has let go of the bytes: they would be another's now.
            self._link.poison(storage)
        nbytes = storage.nbytes()
        ctypes.memmove(self._memory.address(offset, nbytes), storage.data_ptr(), nbytes)

    def _copy_back(self, copies: list[_Pending]) -> None:
        for pending in copies:
            # The one order that every link keeps: a slot is read after it is written.
            self._copy_out(pending.offset)
            nbytes = pending.storage.nbytes()
            address = self._memory.address(pending.offset, nbytes)
            ctypes.memmove(pending.storage.data_ptr(), address, nbytes)
        self._back = [pending for pending in self._back if pending not in copies]


def _is_dropped(storage: UntypedStorage) -> bool:
    """Say whether the adversary's Python object is all that holds the storage."""
    return _use_count(storage) <= _use_count(torch.empty(0).untyped_storage())


def _use_count(storage: UntypedStorage) -> int:
    # No public call counts the references to a storage.
    return int(torch._C._storage_Use_Count(storage._cdata))


def _transfer_error(message: str, nbytes: int) -> TransferError:
    return TransferError(f"{TIER}: {message}", tier=TIER, nbytes=nbytes)

"""What every link to a host tier offers, and the pool of host memory that links share.

A link moves whole storages between a device and one host tier.  `Link.reserve` lends an
`Arena`: host memory for all the slots of one step.  Both directions are asynchronous: a start,
and later a wait.  A link decides how bytes move and when a copy may begin; where a slot lies in
the arena is the plan's decision, and how long a step lives is the session's.

An arena is given back by the finaliser of a step, which may run on any thread at any moment,
also in a garbage collection that interrupts this very module while it holds a lock.  Giving
back therefore only appends to a deque; `ArenaPool` sorts out what it finds there later.
"""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from torch import Tensor

__all__ = ["Arena", "ArenaPool", "HostMemory", "Link"]


class Arena(abc.ABC):
    """Host memory for the slots of one step.

    Offsets are bytes from the start of the arena and identify a slot.  Tensors are 1-D, uint8
    and cover a whole storage.
    """

    @abc.abstractmethod
    def start_offload(self, offset: int, source: Tensor) -> None:
        """Start to copy `source` into the slot.

        The caller leaves the bytes of `source` as they are until `wait_offload`.

        Raises:
            TransferError: The link is closed, or this process is a fork of the one that made it.
        """

    @abc.abstractmethod
    def wait_offload(self, offset: int) -> None:
        """Order the end of the copy out before all that follows on the compute stream.

        Raises:
            TransferError: The copy failed, and its bytes are lost; or it was never started.
        """

    @abc.abstractmethod
    def start_reload(self, offset: int, destination: Tensor) -> None:
        """Start to copy the slot into `destination`, after the copy into the slot.

        A slot may be reloaded any number of times.

        Raises:
            TransferError: No copy into this slot was started, or the link is closed.
        """

    @abc.abstractmethod
    def wait_reload(self, offset: int) -> None:
        """Order the end of every copy back that was started from this slot before what follows.

        Raises:
            TransferError: A copy failed; or none was started.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Give the memory back; copies that nobody waits for any more may be cut short.

        Never blocks and takes no lock: a finaliser calls it.  A second call does nothing.
        """

    def __del__(self) -> None:
        """Release an arena that an exception separated from its step."""
        self.release()


class Link(abc.ABC):
    """The way between one device and one host tier.

    Attributes:
        tier: The host tier, as reports and errors name it.
    """

    tier: str

    @property
    def location(self) -> str:
        """Say where the host tier lies, as a folder; empty if there is but one."""
        return ""

    @abc.abstractmethod
    def reserve(self, nbytes: int) -> Arena:
        """Lend host memory for one step, a released arena's if one is large enough.

        Args:
            nbytes: Size of the arena.

        Raises:
            TransferError: The tier cannot hold so much, or the link is closed.
        """

    @property
    @abc.abstractmethod
    def capacity_bytes(self) -> int:
        """Most bytes that the tier can hold now, those that this link already holds included."""

    @property
    @abc.abstractmethod
    def open_arena_count(self) -> int:
        """Count the arenas that are reserved and not released."""

    @property
    @abc.abstractmethod
    def idle_arena_count(self) -> int:
        """Count the released arenas that are kept for a later step."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything, open arenas too; a second call does nothing."""


class HostMemory(Protocol):
    """One piece of host memory that a pool can lend."""

    @property
    def nbytes(self) -> int:
        """Size of the piece."""
        ...


M = TypeVar("M", bound=HostMemory)


class ArenaPool(Generic[M]):
    """The host memory of one link: what is lent, and what waits for the next step.

    Best fit: the smallest idle piece that is large enough.  When none is, all idle pieces are
    too small and are discarded before the caller makes a larger one, so that a link settles on
    as many pieces as its steps overlap and never hoards the small ones of an earlier plan.

    Args:
        discard: Frees a piece; called without the pool's lock.
    """

    def __init__(self, discard: Callable[[M], None]) -> None:
        self._discard = discard
        # Finalisers append here and touch nothing else, see the module's docstring.
        self._returned: deque[M] = deque()
        self._lock = threading.Lock()
        self._idle: list[M] = []
        self._open_count = 0
        self._held_bytes = 0

    @property
    def open_count(self) -> int:
        """Count the pieces that are lent."""
        with self._lock:
            self._drain()
            return self._open_count

    @property
    def idle_count(self) -> int:
        """Count the pieces that are kept for later."""
        with self._lock:
            self._drain()
            return len(self._idle)

    @property
    def held_bytes(self) -> int:
        """Sum the sizes of all pieces, lent or idle."""
        with self._lock:
            return self._held_bytes

    def give_back(self, memory: M) -> None:
        """Return a lent piece, at any moment and from any thread."""
        self._returned.append(memory)

    def take(self, nbytes: int) -> M | None:
        """Lend the best idle piece, or None after discarding idle pieces that are too small."""
        with self._lock:
            self._drain()
            fitting = [memory for memory in self._idle if memory.nbytes >= nbytes]
            if fitting:
                best = min(fitting, key=lambda memory: memory.nbytes)
                self._idle.remove(best)
                self._open_count += 1
                return best
        self.discard_idle()
        return None

    def admit(self, memory: M) -> None:
        """Count a piece that the caller has just made as lent."""
        with self._lock:
            self._open_count += 1
            self._held_bytes += memory.nbytes

    def discard_idle(self) -> None:
        """Free every idle piece."""
        with self._lock:
            self._drain()
            idle, self._idle = self._idle, []
            self._held_bytes -= sum(memory.nbytes for memory in idle)
        for memory in idle:
            self._discard(memory)

    def _drain(self) -> None:
        """Move what finalisers returned to the idle pieces; the caller holds the lock."""
        while self._returned:
            self._idle.append(self._returned.popleft())
            self._open_count -= 1

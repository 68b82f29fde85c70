"""The host side of one rewritten graph: which arena belongs to which step, and for how long.

Each forward call makes a *token*, one row of three integers for each slot.  A row is the handle
of an offloaded tensor, and a view of the token.  Autograd saves rows for the backward, so that
the token's storage lives exactly as long as any backward may still ask for a slot; when it dies,
its finaliser releases the step's arena.  A dropped loss, two forwards before one backward, a
retained graph and an exception in the middle need no code of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from backhaul.errors import InternalError, TransferError
from backhaul.records import SlotRecord
from backhaul.runtime.dials import Dials
from backhaul.runtime.links import Arena, Link
from backhaul.runtime.observer import Observer, Read

__all__ = ["SESSIONS", "Handle", "Session", "SessionRegistry"]

# Session id, step id and slot index.
Handle = tuple[int, int, int]


class SessionRegistry:
    """Finds a session by the number that stands for it in graph nodes and handles.

    A session stays as long as somebody holds it, or one of its steps lives.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._session_by_id: weakref.WeakValueDictionary[int, Session] = (
            weakref.WeakValueDictionary()
        )

    def add(self, session: Session) -> int:
        """Give a session its number."""
        session_id = next(self._ids)
        self._session_by_id[session_id] = session
        return session_id

    def find(self, session_id: int) -> Session:
        """Return the session of that number.

        Raises:
            InternalError: There is none in this process.
        """
        session = self._session_by_id.get(session_id)
        if session is None:
            raise InternalError(
                f"no session {session_id} in this process: the graph outlived the module that "
                "it was made for, or came from another process"
            )
        return session


# An op's arguments are tensors and numbers, so that a number must lead to the session.  This
# is the one global that changes, and it holds nothing alive.
SESSIONS = SessionRegistry()


class Session:
    """The arenas of one rewritten graph's live steps.

    The link may serve several sessions; whoever made it closes it, after the sessions.

    Args:
        link: Moves the bytes.
        slots: Where each offloaded tensor lies in the arena.
        host_bytes: Size of the arena of one step.
        dials: Round what the plan rounds.
        observer: Watches the reads of the backward.
        reads: The reads, by number.

    Raises:
        InternalError: Slots overlap, or lie outside the arena.
    """

    def __init__(
        self,
        link: Link,
        slots: Sequence[SlotRecord],
        host_bytes: int,
        dials: Dials | None = None,
        observer: Observer | None = None,
        reads: Sequence[Read] = (),
    ) -> None:
        self.link = link
        self.slots = tuple(slots)
        self.host_bytes = host_bytes
        self.dials = dials or Dials()
        self.observer = observer or Observer()
        self.reads = tuple(reads)
        _check_layout(self.slots, host_bytes)
        self._row_count = max(1, len(self.slots))
        self.session_id = SESSIONS.add(self)
        self._first_rows = array("q")
        for index in range(self._row_count):
            self._first_rows.extend((self.session_id, 0, index))
        self._step_ids = itertools.count(1)
        self._arena_by_step: dict[int, Arena] = {}
        self._is_closed = False

    @property
    def live_step_count(self) -> int:
        """Count the steps whose token still lives."""
        return len(self._arena_by_step)

    def begin_step(self) -> Tensor:
        """Reserve an arena and return the token that owns it.

        Returns:
            An int64 CPU tensor of shape `[max(1, slots), 3]`; row `i` is slot `i`'s `Handle`.

        Raises:
            TransferError: The host tier has no room, or the session is closed.
        """
        if self._is_closed:
            raise self._over_error(self.host_bytes)
        step_id = next(self._step_ids)
        cells = array("q", self._first_rows)
        cells[1::3] = array("q", (step_id,)) * self._row_count
        # The storage holds `cells`, and nothing else does.  The finaliser holds the session, so
        # that a backward still finds it after its module is gone.
        finalizer = weakref.finalize(cells, _end_step, self, step_id)
        finalizer.atexit = False
        self._arena_by_step[step_id] = self.link.reserve(self.host_bytes)
        return torch.frombuffer(cells, dtype=torch.int64).view(self._row_count, 3)

    def start_offload(self, step_id: int, index: int, source: Tensor) -> None:
        """Start to copy a storage out, as 1-D uint8; see `Arena.start_offload`.

        Raises:
            TransferError: The storage's size is not the planned one; the step is over.
        """
        slot = self._check_size(index, source)
        arena = self._find_arena(step_id, slot)
        if slot.nbytes:
            arena.start_offload(slot.offset_bytes, source)

    def wait_offload(self, step_id: int, index: int) -> None:
        """Order the end of the copy out before what follows; see `Arena.wait_offload`."""
        slot = self.slots[index]
        arena = self._find_arena(step_id, slot)
        if slot.nbytes:
            _name_tensor(arena.wait_offload, slot)

    def start_reload(self, step_id: int, index: int, destination: Tensor) -> None:
        """Start to copy a storage back, as 1-D uint8; see `Arena.start_reload`.

        Raises:
            TransferError: The storage's size is not the planned one; the step is over.
        """
        slot = self._check_size(index, destination)
        arena = self._find_arena(step_id, slot)
        if slot.nbytes:
            arena.start_reload(slot.offset_bytes, destination)

    def wait_reload(self, step_id: int, index: int) -> None:
        """Order the end of the copy back before what follows; see `Arena.wait_reload`."""
        slot = self.slots[index]
        arena = self._find_arena(step_id, slot)
        if slot.nbytes:
            _name_tensor(arena.wait_reload, slot)

    def close(self) -> None:
        """Release every step; a backward that is still to come raises `TransferError`."""
        self._is_closed = True
        # One at a time, as a finaliser may take a step in between.
        with contextlib.suppress(KeyError):
            while True:
                self._arena_by_step.popitem()[1].release()

    def _check_size(self, index: int, storage: Tensor) -> SlotRecord:
        slot = self.slots[index]
        if storage.numel() != slot.nbytes:
            raise TransferError(
                f"{self.link.tier}: {slot.tensor} was planned with {slot.nbytes:,} bytes of "
                f"storage but has {storage.numel():,}; plan again for this input",
                tier=self.link.tier,
                nbytes=storage.numel(),
            )
        return slot

    def _find_arena(self, step_id: int, slot: SlotRecord) -> Arena:
        arena = self._arena_by_step.get(step_id)
        if arena is None:
            raise self._over_error(slot.nbytes, f"{slot.tensor} of ")
        return arena

    def _over_error(self, nbytes: int, name: str = "") -> TransferError:
        return TransferError(
            f"{self.link.tier}: {name}{nbytes:,} bytes cannot be moved, the session was closed; "
            "close it after the last backward",
            tier=self.link.tier,
            nbytes=nbytes,
        )


def _end_step(session: Session, step_id: int) -> None:
    """Release a step's arena, once; a finaliser calls it on any thread at any moment."""
    session.dials.end_step(step_id)
    arena = session._arena_by_step.pop(step_id, None)
    if arena is not None:
        arena.release()


def _check_layout(slots: tuple[SlotRecord, ...], host_bytes: int) -> None:
    end_bytes = 0
    for slot in sorted(slots, key=lambda slot: slot.offset_bytes):
        if slot.nbytes and slot.offset_bytes < end_bytes:
            raise InternalError(f"slot {slot} begins before the one below it ends at {end_bytes}")
        end_bytes = max(end_bytes, slot.offset_bytes + slot.nbytes)
    if end_bytes > host_bytes:
        raise InternalError(f"slots end at {end_bytes} of an arena of {host_bytes} bytes")


def _name_tensor(wait: Callable[[int], None], slot: SlotRecord) -> None:
    try:
        wait(slot.offset_bytes)
    except TransferError as error:
        error.add_note(f"The bytes are those of {slot.tensor}.")
        raise

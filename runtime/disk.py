"""The link from CPU memory to a spill file, so that a plan is real on a machine without a GPU.

Every arena is a file of its own: nameless, readable by its owner alone, and preallocated, so
that a full disk is found at the start of a step and not in its middle.  One thread writes and
one reads, each in the order of the starts, straight from and into the memory of the tensors.
What has been written may stay in the page cache, which the kernel empties when memory is short.

An I/O error is kept with its copy and raised by the wait.  A read waits for the write of its
slot.  A released step's copies are cut short at the next chunk.
"""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path

from torch import Tensor

from backhaul.errors import TransferError
from backhaul.runtime.copy_thread import Copy, CopyThread, StepFlag
from backhaul.runtime.links import Arena, ArenaPool, Link
from backhaul.runtime.spill_file import (
    FOLDER_VARIABLE,
    SpillFile,
    default_folder,
    free_bytes,
    is_memory_backed,
)

__all__ = ["DiskLink"]

TIER = "spill file"

_LOGGER = logging.getLogger(__name__)


class DiskLink(Link):
    """Moves CPU tensors to files that nobody else can see, and back.

    Threads start with the first copy.  They and the files go with `close`, or with the last
    reference to the link and its arenas.

    Args:
        folder: Where the files lie.  Without it, `BACKHAUL_SPILL_DIR`; without that, the
            folder for temporary files or, if that is memory-backed, `/var/tmp`.
        capacity_bytes: Most bytes to hold at once; without it, what the file system has.
    """

    tier = TIER

    def __init__(self, folder: Path | None = None, capacity_bytes: int | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)
        self._limit_bytes = capacity_bytes
        self._process_id = os.getpid()
        self._writer = CopyThread("backhaul-spill-writer")
        self._reader = CopyThread("backhaul-spill-reader")
        self._pool: ArenaPool[_LentFile] = ArenaPool(_LentFile.close)
        self._arenas: weakref.WeakSet[_DiskArena] = weakref.WeakSet()
        self._is_closed = False

    @property
    def location(self) -> str:
        """Say which folder the files lie in."""
        return str(self.folder)

    @property
    def is_memory_backed(self) -> bool:
        """Say whether the folder itself lies in memory, so that offloading saves nothing."""
        return is_memory_backed(self.folder)

    @property
    def capacity_bytes(self) -> int:
        """Most bytes that the folder can hold, or the limit that was given if it is less."""
        space_bytes = free_bytes(self.folder) + self._pool.held_bytes
        return space_bytes if self._limit_bytes is None else min(space_bytes, self._limit_bytes)

    @property
    def open_arena_count(self) -> int:
        """Count the arenas that are reserved and not released."""
        return self._pool.open_count

    @property
    def idle_arena_count(self) -> int:
        """Count the released arenas that are kept for a later step."""
        return self._pool.idle_count

    def reserve(self, nbytes: int) -> Arena:
        """Lend a preallocated file for one step; see `Link.reserve`."""
        self.check_usable(nbytes)
        file = self._pool.take(nbytes)
        if file is None:
            file = self._make_file(nbytes)
            self._pool.admit(file)
        try:
            # Hazard: a copy of the file's earlier step that is still under way would write over
            # this step's bytes.  It ends at its next chunk.
            file.settle()
            arena = _DiskArena(self, self._pool, self._writer, self._reader, file)
        except BaseException:
            self._pool.give_back(file)
            raise
        self._arenas.add(arena)
        return arena

    def close(self) -> None:
        """Stop both threads and close every file; see `Link.close`."""
        self._is_closed = True
        arenas = list(self._arenas)
        for arena in arenas:
            arena.cut_short()
        if os.getpid() == self._process_id:
            self._writer.close()
            self._reader.close()
        for arena in arenas:
            arena.file.close()
        self._pool.discard_idle()

    def check_usable(self, nbytes: int) -> None:
        """Refuse a closed link, and one from before a fork, whose threads do not exist here.

        Raises:
            TransferError: It is one of these.
        """
        if os.getpid() != self._process_id:
            raise _transfer_error(
                f"this process was forked from the one that opened the link to {self.folder}, "
                f"and has none of its threads to move {nbytes:,} bytes; build the offloaded "
                "module again in the child, or start the child with spawn",
                nbytes,
            )
        if self._is_closed:
            raise _transfer_error(
                f"the link to {self.folder} is closed and cannot move {nbytes:,} bytes; keep it "
                "open until the last backward is done",
                nbytes,
            )

    def _make_file(self, nbytes: int) -> _LentFile:
        held_bytes = self._pool.held_bytes
        if self._limit_bytes is not None and held_bytes + nbytes > self._limit_bytes:
            raise _transfer_error(
                f"a step needs {nbytes:,} bytes in {self.folder}, but steps that are not over "
                f"hold {held_bytes:,} of the {self._limit_bytes:,} allowed; raise "
                "capacity_bytes, or drop the losses of earlier forwards",
                nbytes,
            )
        try:
            file = _LentFile(self.folder, nbytes)
        except OSError as error:
            raise _transfer_error(
                f"cannot make a file of {nbytes:,} bytes in {self.folder}: {error.strerror}; "
                f"name a folder that exists and is writable, with {FOLDER_VARIABLE} or as the "
                "link's folder",
                nbytes,
            ) from error
        try:
            file.preallocate()
        except OSError as error:
            file.close()
            raise _transfer_error(
                f"cannot reserve {nbytes:,} bytes in {self.folder}, where "
                f"{free_bytes(self.folder):,} are free: {error.strerror}; make room, name "
                f"another folder with {FOLDER_VARIABLE}, or plan with a larger memory budget",
                nbytes,
            ) from error
        _LOGGER.debug("made a spill file of %d bytes in %s", nbytes, self.folder)
        return file


class _LentFile(SpillFile):
    """A spill file that remembers its last copy each way."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        super().__init__(folder, nbytes)
        self.last_write: Copy | None = None
        self.last_read: Copy | None = None

    def settle(self) -> None:
        """Wait for every copy of the step that had the file; each thread works in order."""
        if self.last_write is not None:
            self.last_write.settle()
        if self.last_read is not None:
            self.last_read.settle()
        self.last_write = self.last_read = None


class _DiskArena(Arena):
    """One step's file, and its copies by slot."""

    def __init__(
        self,
        link: DiskLink,
        pool: ArenaPool[_LentFile],
        writer: CopyThread,
        reader: CopyThread,
        file: _LentFile,
    ) -> None:
        self.file = file
        self._link = link
        self._pool = pool
        self._writer = writer
        self._reader = reader
        self._step = StepFlag()
        self._is_released = False
        self._offload_by_offset: dict[int, Copy] = {}
        self._reloads_by_offset: dict[int, list[Copy]] = {}

    def start_offload(self, offset: int, source: Tensor) -> None:
        self._link.check_usable(source.numel())
        copy = Copy("write", self.file, offset, source, self._step)
        self._offload_by_offset[offset] = self.file.last_write = copy
        self._writer.submit(copy)

    def wait_offload(self, offset: int) -> None:
        copy = self._find_offload(offset)
        self._link.check_usable(copy.nbytes)
        copy.settle()
        self._check_arrived(copy, "write")

    def start_reload(self, offset: int, destination: Tensor) -> None:
        self._link.check_usable(destination.numel())
        after = self._find_offload(offset)
        copy = Copy("read", self.file, offset, destination, self._step, after)
        self.file.last_read = copy
        self._reloads_by_offset.setdefault(offset, []).append(copy)
        self._reader.submit(copy)

    def wait_reload(self, offset: int) -> None:
        copies = self._reloads_by_offset.get(offset)
        if not copies:
            raise _transfer_error(f"no reload was started at offset {offset:,}", 0)
        # Concurrent backwards through one retained graph append while others wait.
        started = tuple(copies)
        for copy in started:
            self._link.check_usable(copy.nbytes)
            copy.settle()
            self._check_arrived(copy, "read")
        del copies[: len(started) - 1]

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self.cut_short()
            self._pool.give_back(self.file)

    def cut_short(self) -> None:
        """Let copies end at their next chunk, as nobody can wait for them any more."""
        self._step.is_over = True

    def _find_offload(self, offset: int) -> Copy:
        copy = self._offload_by_offset.get(offset)
        if copy is None:
            raise _transfer_error(f"no offload was started at offset {offset:,}", 0)
        return copy

    def _check_arrived(self, copy: Copy, verb: str) -> None:
        if copy.failure is not None:
            raise _transfer_error(
                f"cannot {verb} {copy.nbytes:,} bytes of a file in {self._link.folder}: "
                f"{copy.failure}; this step is lost, check the disk or name another folder with "
                f"{FOLDER_VARIABLE}",
                copy.nbytes,
            ) from copy.cause


def _transfer_error(message: str, nbytes: int) -> TransferError:
    return TransferError(f"{TIER}: {message}", tier=TIER, nbytes=nbytes)

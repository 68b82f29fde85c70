"""A thread that copies between tensors and files, one chunk at a time, in the order asked.

It never raises: what went wrong is kept with the copy, for whoever waits for it.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from queue import SimpleQueue
from typing import Literal

from torch import Tensor

from backhaul.runtime.spill_file import SpillFile

__all__ = ["Copy", "CopyThread", "StepFlag"]

# Small enough that a released step or a closed link stops within milliseconds.
CHUNK_BYTES = 8 * 2**20
# How often a wait looks whether the thread that it waits for still lives.
LIVENESS_CHECK_S = 0.1


class StepFlag:
    """Says whether a step is over; a plain attribute, because finalisers set it."""

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False


class Copy:
    """One copy of a whole tensor, from its start to its end.

    Attributes:
        nbytes: How many bytes it is for.
        failure: Why the bytes did not arrive, once settled; None if they did.
        cause: The error behind `failure`, if there was one.
    """

    def __init__(
        self,
        direction: Literal["write", "read"],
        file: SpillFile,
        offset: int,
        tensor: Tensor,
        step: StepFlag,
        after: Copy | None = None,
    ) -> None:
        self.nbytes = tensor.numel()
        self.failure: str | None = None
        self.cause: Exception | None = None
        self.thread: threading.Thread | None = None
        self._direction = direction
        self._file: SpillFile | None = file
        self._offset = offset
        # Hazard: without this reference the tensor's memory could be reused under the copy.
        self._tensor: Tensor | None = tensor
        self._step = step
        self._after = after
        self._done = threading.Event()

    def settle(self) -> None:
        """Wait for the end, good or bad, also when the thread that copies has died."""
        while not self._done.wait(LIVENESS_CHECK_S):
            is_alive = self.thread is not None and self.thread.is_alive()
            if not is_alive and not self._done.is_set():
                self._finish("the thread that copies has died")

    def run(self) -> None:
        """Do the copy; called by the thread."""
        try:
            if self._after is not None:
                # Hazard: a read that overtakes the write of its slot returns stale bytes.
                self._after.settle()
                if self._after.failure is not None:
                    self.cause = self._after.cause
                    self._finish(self._after.failure)
                    return
            self._transfer()
        except Exception as error:
            # The traceback's frames hold the tensor, whose memory the step waits for.
            self.cause = error.with_traceback(None)
            reason = error.strerror if isinstance(error, OSError) else None
            self._finish(reason or f"{type(error).__name__}: {error}")
        else:
            self._finish(None)

    def _transfer(self) -> None:
        if self._tensor is None or self._file is None:
            return  # Somebody who found the thread dead has settled it.
        descriptor = self._file.descriptor
        with self._tensor.numpy().data as view:
            position = 0
            while position < self.nbytes:
                if self._step.is_over or _EXIT.is_over:
                    raise InterruptedError(0, "the step or the link was closed before its end")
                with view[position : position + CHUNK_BYTES] as chunk:
                    count = self._transfer_chunk(descriptor, chunk, self._offset + position)
                if count == 0:
                    raise EOFError(f"the file ends {self.nbytes - position:,} bytes early")
                position += count

    def _transfer_chunk(self, descriptor: int, chunk: memoryview, offset: int) -> int:
        if self._direction == "write":
            return os.pwrite(descriptor, chunk, offset)
        return os.preadv(descriptor, [chunk], offset)

    def _finish(self, failure: str | None) -> None:
        # The tensor goes before the waiter wakes, so that memory has fallen when the wait ends.
        self._tensor = None
        # A file keeps its last copies, which must not keep the file.
        self._file = self._after = None
        self.failure = failure
        self._done.set()


class CopyThread:
    """One daemon thread with a queue, started by its first copy.

    The thread knows its queue alone, so that it ends with the last reference to this object.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Copy | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = weakref.finalize(self, self._queue.put, None)

    def submit(self, copy: Copy) -> None:
        """Put a copy behind all earlier ones."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_run_copies, args=(self._queue,), name=self._name, daemon=True
                )
                self._thread.start()
                _QUEUE_BY_THREAD[self._thread] = self._queue
        # An interrupt before this line leaves a copy without a thread, which settles as failed.
        self._queue.put(copy)
        copy.thread = self._thread

    def close(self) -> None:
        """Let the thread end after the copies that it has, and wait for that."""
        self._stop()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()


_EXIT = StepFlag()
_QUEUE_BY_THREAD: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[Copy | None]] = (
    weakref.WeakKeyDictionary()
)


@atexit.register
def _end_threads() -> None:
    """Cut copies short and wait for their threads.

    Hazard: a daemon thread that is in torch's code when the interpreter goes away is unwound
    through C++ frames, which aborts the process.
    """
    _EXIT.is_over = True
    started = list(_QUEUE_BY_THREAD.items())
    for _, queue in started:
        queue.put(None)
    for thread, _ in started:
        thread.join()


def _run_copies(queue: SimpleQueue[Copy | None]) -> None:
    while True:
        copy = queue.get()
        if copy is None:
            return
        copy.run()
        del copy  # Or the last file would stay open while the queue is empty.

"""Every stream, event and pinned-memory call of the pinned link, behind one object.

A recorder that has the same methods drives the link on a machine without an accelerator.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["DeviceStreams", "PinError", "PinnedMemory", "Streams"]


class PinError(Exception):
    """Host memory could not be pinned; the message is the reason alone."""


class PinnedMemory:
    """Page-locked host memory.

    Attributes:
        tensor: 1-D uint8, on the CPU.
        nbytes: Its size.
        is_registered: Whether it must be unregistered before it is freed.
    """

    def __init__(self, tensor: Tensor, *, is_registered: bool) -> None:
        self.tensor = tensor
        self.nbytes = tensor.numel()
        self.is_registered = is_registered


class Streams(Protocol):
    """What the pinned link asks of an accelerator."""

    def current(self) -> torch.Stream:
        """Return the stream that compute is issued to at this moment."""
        ...

    def new_stream(self) -> torch.Stream:
        """Make a stream."""
        ...

    def new_event(self) -> torch.Event:
        """Make an event."""
        ...

    def record(self, event: torch.Event, stream: torch.Stream) -> None:
        """Let the event happen when all work of the stream so far is done."""
        ...

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Hold later work of the stream until the event; the host does not wait."""
        ...

    def copy(self, destination: Tensor, source: Tensor, stream: torch.Stream) -> None:
        """Copy on the stream; the host does not wait."""
        ...

    def synchronize(self, stream: torch.Stream) -> None:
        """Let the host wait for all work of the stream."""
        ...

    def pin(self, nbytes: int) -> PinnedMemory:
        """Take page-locked memory of exactly this size.

        Raises:
            PinError: The system cannot lock so much.
        """
        ...

    def unpin(self, memory: PinnedMemory) -> None:
        """Unlock memory that no copy uses any more."""
        ...


class DeviceStreams:
    """The streams of a real accelerator.

    Args:
        device: The accelerator; without an index, the current one.
    """

    def __init__(self, device: torch.device) -> None:
        if device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self._device = device

    def current(self) -> torch.Stream:
        """See `Streams.current`."""
        return torch.accelerator.current_stream(self._device)

    def new_stream(self) -> torch.Stream:
        """See `Streams.new_stream`."""
        return torch.Stream(device=self._device)

    def new_event(self) -> torch.Event:
        """See `Streams.new_event`."""
        return torch.Event(device=self._device)

    def record(self, event: torch.Event, stream: torch.Stream) -> None:
        """See `Streams.record`."""
        event.record(stream)

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """See `Streams.wait`."""
        stream.wait_event(event)

    def copy(self, destination: Tensor, source: Tensor, stream: torch.Stream) -> None:
        """See `Streams.copy`."""
        with stream:
            destination.copy_(source, non_blocking=True)

    def synchronize(self, stream: torch.Stream) -> None:
        """See `Streams.synchronize`."""
        stream.synchronize()

    def pin(self, nbytes: int) -> PinnedMemory:
        """See `Streams.pin`.

        On CUDA and ROCm, whole pages are registered: the pinned allocator rounds up to a power
        of two, which can be twice the size.
        """
        if nbytes == 0:
            return PinnedMemory(torch.empty(0, dtype=torch.uint8), is_registered=False)
        if self._device.type != "cuda":
            try:
                tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                raise PinError(str(error)) from error
            return PinnedMemory(tensor, is_registered=False)
        try:
            pages = mmap.mmap(-1, nbytes)
        except OSError as error:
            raise PinError(error.strerror) from error
        tensor = torch.frombuffer(pages, dtype=torch.uint8)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch gives no types
        with torch.cuda.device(self._device):
            code = runtime.cudaHostRegister(tensor.data_ptr(), nbytes, 0)
            if int(code) != 0:
                self._take_off_last_error()
                raise PinError(f"cudaHostRegister: {runtime.cudaGetErrorString(code)}")
        return PinnedMemory(tensor, is_registered=True)

    def unpin(self, memory: PinnedMemory) -> None:
        """See `Streams.unpin`."""
        if memory.is_registered:
            memory.is_registered = False
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch gives no types
            runtime.cudaHostUnregister(memory.tensor.data_ptr())

    def _take_off_last_error(self) -> None:
        # CUDA keeps the error of the last failed call, and torch would report it of the next
        # kernel, whatever that is; so let it be this one.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)

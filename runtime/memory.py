"""Measure the most memory that a step holds, exactly as the allocator of its device counts it.

An accelerator's allocator keeps a peak of its own.  The CPU's does not, but the profiler is
told of each allocation and each free, and this module replays them.  Library scratch that
does not come from torch's allocator, as oneDNN's, is not seen on either.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler

__all__ = ["PeakMemory", "can_measure_peak", "measure_peak_bytes"]

_ALLOCATION_EVENT = "[memory]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """What a step held beyond what its device held when it began.

    Attributes:
        peak_bytes: The most at any moment.
        end_bytes: What is left at its end, its own result included.
    """

    peak_bytes: int
    end_bytes: int


def can_measure_peak(device: torch.device) -> bool:
    """Say whether the peak can be measured now: not on the CPU while a profiler runs."""
    if device.type != "cpu":
        return True
    return not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # not exported


def measure_peak_bytes(step: Callable[[], object], device: torch.device) -> PeakMemory:
    """Run a step once and measure the memory that it holds.

    On an accelerator this resets the allocator's peak statistics.  On the CPU a free of memory
    from before the step does not count, since the allocator cannot tell its size; so a step
    that frees its caller's tensors seems to hold more than it does.  Threads that the step
    starts itself are not seen there; autograd's are.

    Args:
        step: The work to measure.
        device: Where it allocates.

    Raises:
        RuntimeError: Another profiler is running, which a second one would end.
    """
    if device.type == "cpu":
        return _replay(_cpu_allocations(step))
    return _ask_allocator(step, device)


def _ask_allocator(step: Callable[[], object], device: torch.device) -> PeakMemory:
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    start_bytes = torch.accelerator.memory_allocated(device)
    result = step()
    peak_bytes = torch.accelerator.max_memory_allocated(device) - start_bytes
    end_bytes = torch.accelerator.memory_allocated(device) - start_bytes
    del result
    return PeakMemory(peak_bytes=peak_bytes, end_bytes=end_bytes)


def _cpu_allocations(step: Callable[[], object]) -> list[Any]:
    """Run a step and list the allocator's events in the order of time."""
    if not can_measure_peak(torch.device("cpu")):
        raise RuntimeError(
            "memory cannot be measured while another profiler runs: it would be cancelled. "
            "Measure first, or outside the profiled region"
        )
    # Neither stacks nor shapes: they cost more than the events, and tell nothing here.
    with _quiet_kineto(), profiler.profile(use_kineto=True, profile_memory=True) as session:
        result = step()
    del result
    recorded = session.kineto_results
    if recorded is None:
        raise RuntimeError("the profiler ended early, so that the memory of a step is not known")
    events = _flatten(recorded.experimental_event_tree())
    # The tree is grouped by thread.  A free is reported before its address can be given out
    # again, and an allocation after it was, so that time puts the two of one address in order.
    return sorted(
        (event for event in events if event.name == _ALLOCATION_EVENT),
        key=lambda event: event.start_time_ns,
    )


def _flatten(roots: Iterable[Any]) -> Iterator[Any]:
    pending = list(roots)[::-1]
    while pending:
        event = pending.pop()
        yield event
        pending.extend(reversed(event.children))


def _replay(allocations: Iterable[Any]) -> PeakMemory:
    held_bytes = peak_bytes = 0
    size_by_address: dict[int, int] = {}
    for event in allocations:
        change = event.extra_fields
        if change.device.type != "cpu":
            continue
        if change.alloc_size > 0:
            size_by_address[change.ptr] = change.alloc_size
            held_bytes += change.alloc_size
        else:
            # The size in the event is not to be trusted: the allocator remembers addresses
            # from earlier sessions, and memory from before this one must not count.
            held_bytes -= size_by_address.pop(change.ptr, 0)
        peak_bytes = max(peak_bytes, held_bytes)
    return PeakMemory(peak_bytes=peak_bytes, end_bytes=held_bytes)


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep the profiler's library from writing two lines to stderr for every session.

    It reads its log level once, at the first session of a process.
    """
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "99"
    try:
        yield
    finally:
        os.environ.pop(name, None)

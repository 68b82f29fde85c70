"""Measure what each distinct op of a graph costs on this machine.

An op is called alone, on tensors of the geometry that the graph gives it, made for it and
freed after it, so that planning needs no more memory than the op itself.  What the values
are does not matter to the cost of almost any op; where it does, as for indices, zeros are
legal.  An op that cannot be called so is given the time of copying its inputs, and says so.

Ops are timed in rounds, one call of each op after the other, as a step runs them: an op does not
find its inputs, its code or its memory in the caches where its last call left them, and a moment
in which the machine is busy spoils one of an op's times and not all of them.

A measurement is taken in the middle of a compilation: it must not be traced, and must leave
no trace, in the random state least of all.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes

from backhaul.records import OpCost
from backhaul.runtime.memory import can_measure_peak, measure_peak_bytes
from backhaul.runtime.op_cache import OpCache, device_name

__all__ = [
    "OpCache",
    "OpCall",
    "TensorSpec",
    "describe_results",
    "device_name",
    "distinct_calls",
    "measure_ops",
    "untraced",
]

_logger = logging.getLogger(__name__)

_ROUNDS = 5
"""How often each op is timed; its cost is the median."""

_LONG_S = 0.3
"""An op that takes longer is timed once."""

_TINY_S = 0.0001
_TINY_ROW = 8
"""A CPU's op that takes less is timed in rows: graphs of tiny ops find their code in the cache."""

_ROW_S = 0.001
_ROW_MOST = 20
"""An accelerator's op is timed in rows of this time and at most this many calls."""

_COPY_BYTES = 64 << 20
_RANDOM_BLOCK_LENGTH = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where a tensor's elements lie, without the tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    dtype: torch.dtype
    device: torch.device

    @property
    def storage_length(self) -> int:
        """Count the elements of the smallest storage that it fits in."""
        if 0 in self.size:
            return self.storage_offset
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return self.storage_offset + last + 1

    @property
    def nbytes(self) -> int:
        """Return the size of the elements that it reads."""
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """One call to measure.

    Attributes:
        key: Operator, shapes, strides, dtypes and arguments; equal keys cost the same.
        target: What is called.
        args: Its arguments, each tensor replaced by its `TensorSpec`, in nested lists too.
        kwargs: Its keyword arguments, likewise.
    """

    key: str
    target: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def distinct_calls(calls: Sequence[OpCall]) -> list[OpCall]:
    """Return the first call of each key, in order of appearance."""
    call_by_key: dict[str, OpCall] = {}
    for call in calls:
        call_by_key.setdefault(call.key, call)
    return list(call_by_key.values())


def measure_ops(
    calls: Sequence[OpCall], device: torch.device, *, cache: OpCache | None
) -> tuple[OpCost, ...]:
    """Measure each distinct op once, or recall it.

    Args:
        calls: The calls of a graph; those of one key are measured as one.
        device: The device whose time and memory are measured.
        cache: What was measured before, and is kept for later; None measures everything.

    Returns:
        One cost for each distinct key, in order of first appearance.
    """
    distinct = distinct_calls(calls)
    known = {call.key: cache.get(call.key) if cache else None for call in distinct}
    missing = [call for call in distinct if known[call.key] is None]
    if missing:
        with untraced(device):
            measured = _measure_all(missing, device)
        known |= {cost.key: cost for cost in measured}
        if cache:
            cache.add(measured)
    return tuple(cost for cost in known.values() if cost is not None)


@contextmanager
def untraced(device: torch.device) -> Iterator[None]:
    """Run real kernels in the middle of a compilation, and give back the random state."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(no_python_dispatcher())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        forked: list[torch.device] = []
        if device.type != "cpu":
            forked.append(device)
            stack.enter_context(torch.accelerator.device_index(device.index))
        stack.enter_context(torch.random.fork_rng(forked, device_type=device.type))
        yield


def _measure_all(calls: Sequence[OpCall], device: torch.device) -> list[OpCost]:
    if not can_measure_peak(device):
        _logger.warning("the workspace of ops is assumed to be 0: another profiler is running")
    trials = [_begin(call, device) for call in calls]
    for _ in range(_ROUNDS):
        for trial in trials:
            trial.time_once_more(device)
    copy_bytes_per_s = _measure_copy(device) if any(trial.fault for trial in trials) else 0.0
    return [
        _assume(trial.call, copy_bytes_per_s, fault=trial.fault) if trial.fault else trial.cost()
        for trial in trials
    ]


def _assume(call: OpCall, copy_bytes_per_s: float, *, fault: str) -> OpCost:
    nbytes = sum(spec.nbytes for spec in _specs((call.args, call.kwargs)))
    _logger.warning(
        "%s cannot be measured alone, so its time is assumed to be that of copying its %d "
        "input bytes: %s",
        call.key,
        nbytes,
        fault,
    )
    return OpCost(
        key=call.key,
        duration_s=nbytes / copy_bytes_per_s,
        workspace_bytes=0,
        source="assumed",
    )


@dataclass(slots=True)
class _Trial:
    """What is known of an op while it is measured.

    Attributes:
        call: The op.
        integer: What its integers are filled with.
        made: See `OpCost.made`.
        workspace_bytes: What it holds beside its results, or None if that cannot be seen.
        durations_s: Its times so far.
        fault: Why it cannot be measured; text, since an exception would keep its tensors alive.
    """

    call: OpCall
    integer: int = 0
    made: tuple[str, ...] = ()
    workspace_bytes: int | None = None
    durations_s: list[float] = field(default_factory=list)
    fault: str = ""

    def warm_up(self, device: torch.device) -> None:
        """Call the op for the first time, which shows all but its time."""
        run = self._prepared()
        self.made = describe_results(run())
        if can_measure_peak(device):
            memory = measure_peak_bytes(run, device)
            # What is left at the end is what the op made, whether its outputs are views or not.
            self.workspace_bytes = max(memory.peak_bytes - memory.end_bytes, 0)

    def time_once_more(self, device: torch.device) -> None:
        """Add a time, unless the op has failed or is a long one that has been timed."""
        last_s = self.durations_s[-1] if self.durations_s else 0.0
        if self.fault or last_s > _LONG_S:
            return
        try:
            self.durations_s.append(_time(self._prepared(), device, _row(device, last_s)))
        # An op may raise anything, and planning goes on without its measurement.
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"

    def cost(self) -> OpCost:
        """Return what was measured."""
        return OpCost(
            key=self.call.key,
            duration_s=statistics.median(self.durations_s),
            workspace_bytes=self.workspace_bytes or 0,
            source="assumed" if self.workspace_bytes is None else "measured",
            made=self.made,
        )

    def _prepared(self) -> Callable[[], object]:
        generators: dict[torch.device, torch.Generator] = {}
        call = self.call
        args, kwargs = _materialise((call.args, call.kwargs), self.integer, generators)
        return lambda: call.target(*args, **kwargs)


def _begin(call: OpCall, device: torch.device) -> _Trial:
    """Call an op with integers of 0, or of 1 if it cannot bear 0, or say why not."""
    if "c10d" in getattr(call.target, "namespace", ""):
        return _Trial(call, fault="it waits for other ranks, which may not call it now")
    fault = ""
    for integer in (0, 1):
        trial = _Trial(call, integer)
        try:
            trial.warm_up(device)
        # An op may raise anything, and planning goes on without its measurement.
        except Exception as error:
            fault = fault or f"{type(error).__name__}: {error}"
        else:
            return trial
    return _Trial(call, fault=fault)


def describe_results(results: object) -> tuple[str, ...]:
    """Write dtype and storage bytes of what an op returned, as in `OpCost.made`."""
    listed = results if isinstance(results, (tuple, list)) else (results,)
    return tuple(
        f"{str(result.dtype).removeprefix('torch.')}:{result.untyped_storage().nbytes()}"
        if isinstance(result, torch.Tensor) and result.layout is torch.strided
        else ""
        for result in listed
    )


def _row(device: torch.device, last_s: float) -> int:
    """Return how many calls of an op to time as one, given how long one took."""
    if device.type == "cpu":
        return _TINY_ROW if 0 < last_s < _TINY_S else 1
    # One short call would show an idle accelerator's launch; a row of them shows its pace.
    return min(max(round(_ROW_S / last_s), 1), _ROW_MOST) if last_s else 1


def _time(run: Callable[[], object], device: torch.device, call_count: int = 1) -> float:
    """Time a row of calls on their device; return the time of one."""
    if device.type == "cpu":
        begin_s = time.perf_counter()
        for _ in range(call_count):
            run()
        return (time.perf_counter() - begin_s) / call_count
    begin = torch.Event(device, enable_timing=True)
    end = torch.Event(device, enable_timing=True)
    begin.record()
    for _ in range(call_count):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / call_count


def _measure_copy(device: torch.device) -> float:
    """Return how many bytes a second a copy on the device reads, and writes as many."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    durations_s = [_time(lambda: target.copy_(source), device) for _ in range(4)]
    return _COPY_BYTES / max(min(durations_s), 1e-9)


def _materialise(value: Any, integer: int, generators: dict[torch.device, torch.Generator]) -> Any:
    if isinstance(value, TensorSpec):
        if value.device not in generators:
            generators[value.device] = torch.Generator(value.device).manual_seed(0)
        return _tensor(value, integer, generators[value.device])
    if isinstance(value, (tuple, list)):
        return type(value)([_materialise(item, integer, generators) for item in value])
    if isinstance(value, Mapping):
        return {name: _materialise(item, integer, generators) for name, item in value.items()}
    return value


def _tensor(spec: TensorSpec, integer: int, generator: torch.Generator) -> torch.Tensor:
    """Make a tensor: floats in [0, 1), bools of either kind, integers all the same."""
    storage = torch.empty(spec.storage_length, dtype=spec.dtype, device=spec.device)
    if _is_integer(spec.dtype):
        storage.fill_(integer)
    elif storage.numel() > 0:
        _fill_randomly(storage, generator)
    return storage.as_strided(spec.size, spec.stride, spec.storage_offset)


def _fill_randomly(storage: torch.Tensor, generator: torch.Generator) -> None:
    """Repeat one random block: a CPU draws numbers far slower than it copies them."""
    length = min(_RANDOM_BLOCK_LENGTH, storage.numel())
    drawn = torch.rand(length, generator=generator, device=storage.device)
    block = (drawn < 0.5) if storage.dtype is torch.bool else drawn.to(storage.dtype)
    whole = storage.numel() // length * length
    storage[:whole].view(-1, length).copy_(block)
    storage[whole:].copy_(block[: storage.numel() - whole])


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _specs(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _specs(item)
    elif isinstance(value, Mapping):
        yield from _specs(tuple(value.values()))

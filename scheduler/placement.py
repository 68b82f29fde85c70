"""Place the copies: when each copy out is waited for and each copy back is started.

Given what happens to each tensor, the freedom left is *when*.  Memory decides it.  A copy
out is waited for at the first op that begins after the copy has ended, so that nothing
stalls, and sooner, oldest first, where the op would not fit beside what is still being
copied.  A copy back is started as late as it can be and still be hidden behind compute,
and later where memory is short.  This is one sweep each way over the ops, as a pager with
known accesses would do it; the simulator then says what the result costs.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from backhaul.records import Action, Compress, GraphRecord, Keep, Offload, TensorRecord
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.schedule import offload_after

__all__ = ["Choice", "Limit", "memory_by_position", "place"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What happens to a tensor, before it is decided when.

    Attributes:
        packs: Whether its first codec packs it.
        moves: Whether it crosses the link.
    """

    packs: bool
    moves: bool


@dataclass(frozen=True, slots=True)
class Limit:
    """Bytes that may be on the device at once.

    Attributes:
        nbytes: The bound, without what the caller holds.
        saved_only: Whether only saved activations count.
    """

    nbytes: float
    saved_only: bool


def place(
    graph: GraphRecord, cost: CostModel, choice_by_tensor: Mapping[str, Choice], limit: Limit
) -> dict[str, Action]:
    """Turn choices into actions with positions.

    The result keeps to the limit wherever these choices can: judge it with the simulator.

    Args:
        graph: The step.
        cost: Its costs.
        choice_by_tensor: What happens to each saved tensor; one that is absent is kept.
        limit: The memory to stay within.
    """
    position_by_op = {op.name: position for position, op in enumerate(graph.ops)}
    sketch = {
        tensor.name: _sketched(tensor, choice_by_tensor.get(tensor.name)) for tensor in graph.saved
    }
    memory = memory_by_position(graph, cost, sketch, limit)
    starts_s = _starts_s(graph, cost, sketch)
    moves = {
        tensor.name: _Move.of(tensor, position_by_op[tensor.name], action, cost)
        for tensor in graph.saved
        if isinstance(action := sketch[tensor.name], Offload)
    }
    wait_after = _place_waits(graph, cost, moves, memory, limit)
    reload_before = _place_reloads(graph, moves, memory, starts_s, limit)
    return {
        name: (
            Offload(
                codec=action.codec,
                wait_after=wait_after[name],
                reload_before=reload_before[name],
            )
            if isinstance(action, Offload)
            else action
        )
        for name, action in sketch.items()
    }


@dataclass(frozen=True, slots=True)
class _Move:
    """One tensor that crosses the link."""

    start_after: int
    idle_after: int
    use: int
    nbytes: int
    held_bytes: int
    d2h_s: float
    h2d_s: float

    @staticmethod
    def of(tensor: TensorRecord, ready: int, action: Offload, cost: CostModel) -> _Move:
        nbytes = tensor.nbytes if action.codec is None else action.codec.packed_bytes
        start = offload_after(tensor, ready, action)
        return _Move(
            start_after=start,
            idle_after=tensor.last_forward_use,
            use=tensor.first_backward_use,
            nbytes=nbytes,
            held_bytes=cost.rounded(nbytes),
            d2h_s=cost.copy_s(nbytes, "d2h"),
            h2d_s=cost.copy_s(nbytes, "h2d"),
        )


def _sketched(tensor: TensorRecord, choice: Choice | None) -> Action:
    """Return the action with the tightest positions: free at once, reload at the last moment."""
    if choice is None or not (choice.packs or choice.moves):
        return Keep()
    codec = tensor.codecs[0] if choice.packs else None
    if not choice.moves:
        assert codec is not None
        return Compress(codec=codec)
    return Offload(
        codec=codec,
        wait_after=tensor.last_forward_use,
        reload_before=tensor.first_backward_use,
    )


def memory_by_position(
    graph: GraphRecord, cost: CostModel, sketch: Mapping[str, Action], limit: Limit
) -> NDArray[np.int64]:
    """Return the bytes that are live during each op when every copy is instant.

    Args:
        graph: The step.
        cost: Its costs.
        sketch: Action of each saved tensor; its positions do not matter.
        limit: Says which tensors count.
    """
    count = len(graph.ops)
    changes = np.zeros(count + 2, dtype=np.int64)

    def occupy(first: int, last: int, nbytes: int) -> None:
        changes[first] += nbytes
        changes[min(last, count) + 1] -= nbytes

    workspace = np.array(cost.workspace_bytes, dtype=np.int64)
    for tensor in graph.tensors:
        if tensor.role == "input" or (limit.saved_only and tensor.role != "saved"):
            continue
        whole = cost.rounded(tensor.nbytes)
        action = sketch.get(tensor.name, Keep())
        idle, use = tensor.last_forward_use, tensor.first_backward_use
        match action:
            case Keep():
                occupy(tensor.born, tensor.dies, whole)
                continue
            case Compress(codec=codec):
                occupy(idle, use, cost.rounded(codec.packed_bytes))
            case Offload(codec=codec):
                packed = 0 if codec is None else cost.rounded(codec.packed_bytes)
                occupy(idle, idle, packed)
                occupy(use, use, packed)
            case _:
                assert_never(action)
        occupy(tensor.born, idle, whole)
        occupy(use, tensor.dies, whole)
        if codec is not None:
            for position, key in ((idle, codec.encode_key), (use, codec.decode_key)):
                needed = cost.key_workspace_bytes(key)
                workspace[position] = max(workspace[position], needed)
    live = np.cumsum(changes)[:count]
    return live if limit.saved_only else live + workspace


def _starts_s(
    graph: GraphRecord, cost: CostModel, sketch: Mapping[str, Action]
) -> NDArray[np.float64]:
    """Return when each op would start if nothing ever stalled."""
    duration_s = list(cost.duration_s)
    for tensor in graph.saved:
        action = sketch[tensor.name]
        if not isinstance(action, Keep) and action.codec is not None:
            duration_s[tensor.last_forward_use] += cost.key_s(action.codec.encode_key)
            duration_s[tensor.first_backward_use] += cost.key_s(action.codec.decode_key)
    return np.array([0.0, *accumulate(duration_s)])


def _place_waits(
    graph: GraphRecord,
    cost: CostModel,
    moves: Mapping[str, _Move],
    memory: NDArray[np.int64],
    limit: Limit,
) -> dict[str, int]:
    """Sweep the forward: hold each source until its copy ends, or until memory is short."""
    started: dict[int, list[str]] = defaultdict(list)
    idle: dict[int, list[str]] = defaultdict(list)
    for name, move in moves.items():
        started[move.start_after].append(name)
        idle[move.idle_after].append(name)
    copied_at_s: dict[str, float] = {}
    # Sources that nothing reads any more, in the order in which their copies end.
    held: list[tuple[float, str]] = []
    wait_after: dict[str, int] = {}
    held_bytes = 0
    now_s = engine_free_s = 0.0
    for position in range(graph.forward_count):
        while held:
            ends_s, name = held[0]
            if ends_s > now_s and memory[position] + held_bytes <= limit.nbytes:
                break
            heapq.heappop(held)
            now_s = max(now_s, ends_s)
            wait_after[name] = position - 1
            held_bytes -= moves[name].held_bytes
        now_s += cost.duration_s[position]
        for name in started.get(position, ()):
            engine_free_s = max(now_s, engine_free_s) + moves[name].d2h_s
            copied_at_s[name] = engine_free_s
        for name in idle.get(position, ()):
            heapq.heappush(held, (copied_at_s[name], name))
            held_bytes += moves[name].held_bytes
    for _, name in held:
        wait_after[name] = graph.forward_count - 1
    return wait_after


def _place_reloads(
    graph: GraphRecord,
    moves: Mapping[str, _Move],
    memory: NDArray[np.int64],
    starts_s: NDArray[np.float64],
    limit: Limit,
) -> dict[str, int]:
    """Sweep the uses backward: start each copy as late as hides it, later if memory is short."""
    reload_before: dict[str, int] = {}
    memory = memory.copy()
    next_start_s = float("inf")
    for name, move in sorted(moves.items(), key=lambda item: -item[1].use):
        next_start_s = min(next_start_s, float(starts_s[move.use])) - move.h2d_s
        position = int(np.searchsorted(starts_s[: move.use + 1], next_start_s, side="right")) - 1
        position = max(position, graph.forward_count)
        window = memory[position : move.use] + move.held_bytes > limit.nbytes
        too_full = np.flatnonzero(window)
        if too_full.size:
            position += int(too_full[-1]) + 1
        memory[position : move.use] += move.held_bytes
        reload_before[name] = position
    return reload_before

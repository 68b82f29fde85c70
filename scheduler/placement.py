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
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from backhaul.records import Action, Compress, Keep, Offload, Recompute
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.schedule import Life, codec_of, offload_after
from backhaul.scheduler.ways import Way

__all__ = ["Limit", "memory_by_position", "place", "sketched"]


@dataclass(frozen=True, slots=True)
class Limit:
    """Bytes that may be on the device at once.

    Attributes:
        nbytes: The bound, without what the caller holds.
        saved_only: Whether only saved activations count.
    """

    nbytes: float
    saved_only: bool


def place(cost: CostModel, ways: Mapping[str, Way], limit: Limit) -> dict[str, Action]:
    """Turn ways into actions with positions.

    The result keeps to the limit wherever these ways can: judge it with the simulator.

    Args:
        cost: The costs of the step.
        ways: What happens to each saved tensor and checkpoint; one that is absent is kept.
        limit: The memory to stay within.
    """
    actions = sketched(cost, ways)
    life_by_tensor = cost.layout.lives_under(actions)
    moves = {
        name: _Move.of(name, life_by_tensor[name], action, cost)
        for name, action in actions.items()
        if isinstance(action, Offload) and life_by_tensor[name].use >= 0
    }
    if not moves:
        return actions
    memory = memory_by_position(cost, actions, life_by_tensor, limit)
    wait_after = _place_waits(cost, moves, memory, limit)
    reload_before = _place_reloads(
        cost, moves, memory, _starts_s(cost, actions, life_by_tensor), limit
    )
    for name in moves:
        action = actions[name]
        actions[name] = Offload(
            codec=codec_of(action),
            wait_after=wait_after[name],
            reload_before=reload_before[name],
        )
    return actions


def sketched(cost: CostModel, ways: Mapping[str, Way]) -> dict[str, Action]:
    """Return actions whose copies are as if instant: freed at once, back at the last moment."""
    actions: dict[str, Action] = {}
    for name, way in ways.items():
        tensor = cost.planned[name]
        match way:
            case "keep":
                continue
            case "pack":
                actions[name] = Compress(codec=tensor.codecs[0])
            case "move" | "pack and move":
                actions[name] = Offload(
                    codec=None if way == "move" else tensor.codecs[0],
                    wait_after=tensor.last_forward_use,
                    reload_before=max(tensor.first_backward_use, 0),
                )
            case "recompute":
                actions[name] = Recompute()
            case _:
                assert_never(way)
    life_by_tensor = cost.layout.lives_under(actions)
    for name, action in actions.items():
        if isinstance(action, Offload):
            actions[name] = replace(action, reload_before=max(life_by_tensor[name].use, 0))
    return actions


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
    def of(name: str, life: Life, action: Offload, cost: CostModel) -> _Move:
        tensor = cost.planned[name]
        nbytes = tensor.nbytes if action.codec is None else action.codec.packed_bytes
        return _Move(
            start_after=offload_after(tensor, cost.layout.ready[name], action),
            idle_after=tensor.last_forward_use,
            use=life.use,
            nbytes=nbytes,
            held_bytes=cost.rounded(nbytes),
            d2h_s=cost.copy_s(nbytes, "d2h"),
            h2d_s=cost.copy_s(nbytes, "h2d"),
        )


def memory_by_position(
    cost: CostModel, actions: Mapping[str, Action], life_by_tensor: Mapping[str, Life], limit: Limit
) -> NDArray[np.int64]:
    """Return the bytes that are live during each op when every copy is instant.

    Args:
        cost: The costs of the step.
        actions: Action of each saved tensor and checkpoint; positions of copies do not matter.
        life_by_tensor: When the backward needs each of them.
        limit: Says which tensors count.
    """
    count = len(cost.duration_s)
    changes = cost.keep_changes(saved_only=limit.saved_only)
    workspace = cost.workspace_array()

    def occupy(first: int, last: int, nbytes: int) -> None:
        changes[first] += nbytes
        changes[min(last, count) + 1] -= nbytes

    for name, tensor in cost.planned.items():
        use, dies = life_by_tensor[name]
        action = actions.get(name)
        if use < 0 or (action is None and dies == tensor.dies):
            continue
        whole = cost.nbytes[name]
        if tensor.role == "saved" or not limit.saved_only:
            occupy(tensor.born, tensor.dies, -whole)
        idle = tensor.last_forward_use
        match action:
            case None | Keep():
                occupy(tensor.born, dies, whole)
                continue
            case Compress(codec=codec):
                occupy(idle, use, cost.rounded(codec.packed_bytes))
            case Offload(codec=codec):
                packed = 0 if codec is None else cost.rounded(codec.packed_bytes)
                occupy(idle, idle, packed)
                occupy(use, use, packed)
            case Recompute():
                codec = None
                assert tensor.recipe is not None
                occupy(tensor.born, use, cost.rounded(tensor.recipe.state_bytes))
                beyond = cost.recipe_peak_bytes[name] - whole
                workspace[use] = max(workspace[use], beyond)
            case _:
                assert_never(action)
        occupy(tensor.born, idle, whole)
        occupy(use, dies, whole)
        if codec is not None:
            for position, key in ((idle, codec.encode_key), (use, codec.decode_key)):
                needed = cost.key_workspace_bytes(key)
                workspace[position] = max(workspace[position], needed)
    live = np.cumsum(changes)[:count]
    return live if limit.saved_only else live + workspace


def _starts_s(
    cost: CostModel, actions: Mapping[str, Action], life_by_tensor: Mapping[str, Life]
) -> NDArray[np.float64]:
    """Return when each op would start if nothing ever stalled."""
    duration_s = list(cost.duration_s)
    for name, action in actions.items():
        use = life_by_tensor[name].use
        if use < 0:
            continue
        if isinstance(action, Recompute):
            duration_s[use] += cost.recipe_s[name]
        elif (codec := codec_of(action)) is not None:
            duration_s[cost.planned[name].last_forward_use] += cost.key_s(codec.encode_key)
            duration_s[use] += cost.key_s(codec.decode_key)
    return np.array([0.0, *accumulate(duration_s)])


def _place_waits(
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
    for position in range(cost.forward_count):
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
        wait_after[name] = cost.forward_count - 1
    return wait_after


def _place_reloads(
    cost: CostModel,
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
        position = max(position, cost.forward_count)
        window = memory[position : move.use] + move.held_bytes > limit.nbytes
        too_full = np.flatnonzero(window)
        if too_full.size:
            position += int(too_full[-1]) + 1
        memory[position : move.use] += move.held_bytes
        reload_before[name] = position
    return reload_before

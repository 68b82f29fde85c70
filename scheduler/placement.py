"""Place the copies: when each copy out is waited for and each copy back is started.

Given what happens to each tensor, the freedom left is *when*.  Memory decides it.  A copy
out is waited for at the first op that begins after the copy has ended, so that nothing
stalls, and sooner, oldest first, where the op would not fit beside what is still being
copied.  A copy back is started as late as it can be and still be hidden behind compute,
and later where memory is short, what is used sooner first.  These are sweeps over the ops, as
a pager with known accesses would do it; the simulator then says what the result costs.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from backhaul.records import Action, Compress, Offload, Recompute
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.memory import Memory
from backhaul.scheduler.schedule import Life, Schedule, codec_of, offload_after
from backhaul.scheduler.spans import LIVE, SAVED
from backhaul.scheduler.ways import Way

__all__ = ["Limit", "place", "sketched"]


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
    schedule = cost.layout.schedule(actions)
    life_by_tensor = schedule.lives
    moves = {
        name: _Move.of(name, life_by_tensor[name], action, cost)
        for name, action in actions.items()
        if isinstance(action, Offload) and life_by_tensor[name].use >= 0
    }
    if not moves:
        return actions
    memory = _memory_by_position(cost, actions, schedule, limit)
    # What is saved counts between ops: to hold it during one is to hold it after it, too.
    held_at = np.roll(memory, -1) if limit.saved_only else memory
    wait_after = _place_waits(cost, moves, held_at, limit)
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
    is_packed: bool
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
            is_packed=action.codec is not None,
            d2h_s=cost.copy_s(nbytes, "d2h"),
            h2d_s=cost.copy_s(nbytes, "h2d"),
        )


def _memory_by_position(
    cost: CostModel, actions: Mapping[str, Action], schedule: Schedule, limit: Limit
) -> NDArray[np.int64]:
    """Return the bytes that are live at each op when every copy is instant."""
    memory = Memory(cost, actions, schedule)
    for kind, _, name, following in schedule.walk(schedule.busy):
        if kind != "run":
            memory.happen(kind, following, name)
    return memory.by_position(with_waits=False)[:-1, SAVED if limit.saved_only else LIVE]


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
        # What this op is the last to read is saved as soon as it has run.
        joining = _joining_bytes([moves[name] for name in idle.get(position, ())])
        room = limit.nbytes - int(memory[position]) - (joining if limit.saved_only else 0)
        while held:
            ends_s, name = held[0]
            if ends_s > now_s and held_bytes <= room:
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


def _joining_bytes(moves: Sequence[_Move]) -> int:
    """Return what sources hold that instant copies do not; those see each source's packing."""
    seen = max((move.held_bytes for move in moves if move.is_packed), default=0)
    return sum(move.held_bytes for move in moves) - seen


def _place_reloads(
    cost: CostModel,
    moves: Mapping[str, _Move],
    memory: NDArray[np.int64],
    starts_s: NDArray[np.float64],
    limit: Limit,
) -> dict[str, int]:
    """Start each copy as late as hides it; where memory is short, the sooner use goes first."""
    hidden_at: dict[str, int] = {}
    next_start_s = float("inf")
    for name, move in sorted(moves.items(), key=lambda item: -item[1].use):
        next_start_s = min(next_start_s, float(starts_s[move.use])) - move.h2d_s
        position = int(np.searchsorted(starts_s[: move.use + 1], next_start_s, side="right")) - 1
        hidden_at[name] = max(position, cost.forward_count)
    reload_before: dict[str, int] = {}
    memory = memory.copy()
    for name in reversed(hidden_at):
        move, position = moves[name], hidden_at[name]
        window = memory[position : move.use] + move.held_bytes > limit.nbytes
        too_full = np.flatnonzero(window)
        if too_full.size:
            position += int(too_full[-1]) + 1
        memory[position : move.use] += move.held_bytes
        reload_before[name] = position
    return reload_before

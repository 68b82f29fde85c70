"""Say what a plan costs: step time, peak memory, and a timeline of both.

One compute stream runs ops, packing, unpacking and recomputing in order.  One engine each way
copies, first in first out; a copy is slowed by the measured duplex fraction while the other
engine is busy.  A wait stalls the compute stream until its copy has ended.  Memory is counted
by storage, at every event, workspaces included.  Every planner is judged by this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from backhaul.records import (
    Action,
    GraphRecord,
    Keep,
    MachineProfile,
    Prediction,
    Recompute,
)
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.schedule import Event, EventKind, Schedule, codec_of

__all__ = ["Moment", "Simulation", "predict", "simulate"]


@dataclass(frozen=True, slots=True)
class Moment:
    """One event of the simulated step.

    Attributes:
        event: What happens.
        start_s: When the compute stream, or the copy engine for a copy, begins it.
        end_s: When it ends.
        live_bytes: Device memory during it, without what the caller holds.
        saved_bytes: The part of it that saved activations take.
    """

    event: Event
    start_s: float
    end_s: float
    live_bytes: int
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """The prediction and the moments that it was read from."""

    prediction: Prediction
    moments: tuple[Moment, ...]


def simulate(
    graph: GraphRecord, machine: MachineProfile, action_by_tensor: Mapping[str, Action]
) -> Simulation:
    """Run one step on paper, and note every moment of it.

    Args:
        graph: The step.
        machine: Measurements that cover the graph.
        action_by_tensor: Action of each saved tensor and checkpoint; one that is absent is kept.

    Raises:
        PlanError: The machine profile lacks an op of the graph.
    """
    moments: list[Moment] = []
    prediction = predict(CostModel(graph, machine), action_by_tensor, moments)
    return Simulation(prediction, tuple(moments))


def predict(
    cost: CostModel,
    action_by_tensor: Mapping[str, Action],
    moments: list[Moment] | None = None,
) -> Prediction:
    """Run one step on paper.

    Args:
        cost: The costs of a step.
        action_by_tensor: Action of each saved tensor and checkpoint; one that is absent is kept.
        moments: Where to note every moment, if anyone asks.
    """
    schedule = cost.layout.schedule(action_by_tensor)
    clock = _Clock(cost, action_by_tensor)
    memory = _Memory(cost, action_by_tensor, schedule)
    before, after = schedule.before, schedule.after
    noted = range(len(cost.duration_s)) if moments is not None else ()
    for position in sorted({*before, *after, *noted}):
        for kind, name in before.get(position, ()):
            start_s, end_s = clock.happen(kind, position, name)
            memory.happen(kind, position, name)
            if moments is not None:
                moments.append(Moment(Event(kind, position, name), start_s, end_s, *memory.during))
        if moments is not None:
            memory.run(position)
            start_s, end_s = clock.at(position), clock.at(position + 1)
            moments.append(Moment(Event("run", position), start_s, end_s, *memory.during))
        for kind, name in after.get(position, ()):
            start_s, end_s = clock.happen(kind, position + 1, name)
            memory.happen(kind, position + 1, name)
            if moments is not None:
                moments.append(Moment(Event(kind, position, name), start_s, end_s, *memory.during))
    peak, saved_peak = memory.peaks()
    return replace(
        clock.told,
        peak_bytes=cost.caller_bytes + peak,
        step_peak_bytes=peak,
        saved_peak_bytes=saved_peak,
    )


class _Clock:
    """Time on the compute stream and on the two copy engines."""

    def __init__(self, cost: CostModel, action_by_tensor: Mapping[str, Action]) -> None:
        self._cost = cost
        self._action_by_tensor = action_by_tensor
        self._copied_at_s: dict[str, float] = {}
        self._d2h_free_s = 0.0
        self._h2d_free_s = 0.0
        self._added_s = 0.0
        self._exposed_s = 0.0
        self._codec_s = 0.0
        self._recompute_s = 0.0
        self._offloaded_bytes = 0

    @property
    def told(self) -> Prediction:
        return Prediction(
            peak_bytes=0,
            step_peak_bytes=0,
            saved_peak_bytes=0,
            step_s=self.at(len(self._cost.duration_s)),
            exposed_s=self._exposed_s,
            codec_s=self._codec_s,
            offloaded_bytes=self._offloaded_bytes,
            recompute_s=self._recompute_s,
        )

    def at(self, position: int) -> float:
        """Return when the compute stream comes to an op, if nothing more holds it up."""
        return self._cost.starts_s[position] + self._added_s

    def happen(self, kind: EventKind, position: int, name: str) -> tuple[float, float]:
        """Add what happens just before the op at a position."""
        now_s = self.at(position)
        match kind:
            case "pack" | "unpack":
                codec = codec_of(self._action_by_tensor[name])
                assert codec is not None
                duration_s = self._cost.key_s(
                    codec.encode_key if kind == "pack" else codec.decode_key
                )
                self._codec_s += duration_s
                return self._compute(now_s, duration_s)
            case "recompute":
                self._recompute_s += self._cost.recipe_s[name]
                return self._compute(now_s, self._cost.recipe_s[name])
            case "offload":
                return self._offload(now_s, name)
            case "reload":
                return self._reload(now_s, name)
            case _:
                return self._wait(now_s, name)

    def _compute(self, now_s: float, duration_s: float) -> tuple[float, float]:
        self._added_s += duration_s
        return now_s, now_s + duration_s

    def _moved_bytes(self, name: str) -> int:
        codec = codec_of(self._action_by_tensor[name])
        return self._cost.planned[name].nbytes if codec is None else codec.packed_bytes

    def _offload(self, now_s: float, name: str) -> tuple[float, float]:
        nbytes = self._moved_bytes(name)
        start_s = max(now_s, self._d2h_free_s)
        both_ways = self._h2d_free_s > start_s
        self._d2h_free_s = start_s + self._cost.copy_s(nbytes, "d2h", both_ways=both_ways)
        self._copied_at_s[name] = self._d2h_free_s
        self._offloaded_bytes += nbytes
        return start_s, self._d2h_free_s

    def _reload(self, now_s: float, name: str) -> tuple[float, float]:
        start_s = max(now_s, self._h2d_free_s, self._copied_at_s[name])
        both_ways = self._d2h_free_s > start_s
        nbytes = self._moved_bytes(name)
        self._h2d_free_s = start_s + self._cost.copy_s(nbytes, "h2d", both_ways=both_ways)
        self._copied_at_s[name] = self._h2d_free_s
        return start_s, self._h2d_free_s

    def _wait(self, now_s: float, name: str) -> tuple[float, float]:
        stall_s = max(0.0, self._copied_at_s[name] - now_s)
        self._exposed_s += stall_s
        return self._compute(now_s, stall_s)


class _Memory:
    """Bytes on the device without the caller's, and the saved activations among them.

    What ops make and what dies with its last reader is known before anything happens; what
    packing, copies and recomputing add to it or take away is summed as it happens.

    Attributes:
        during: Bytes live during the last event, and the saved part of them.
    """

    def __init__(
        self, cost: CostModel, action_by_tensor: Mapping[str, Action], schedule: Schedule
    ) -> None:
        self._cost = cost
        self._action_by_tensor = action_by_tensor
        self.during = (0, 0)
        self._peak = self._saved_peak = 0
        # What events have added to the memory of the ops, all of it saved, and where.
        self._added = 0
        self._change = np.zeros(len(cost.duration_s) + 1, dtype=np.int64)
        born, dead = cost.born_and_dead()
        for name, tensor in cost.planned.items():
            use, dies = schedule.lives[name]
            action = action_by_tensor.get(name)
            if use >= 0 and (action is not None or dies != tensor.dies):
                self._adjust(born, dead, name, action or Keep(), dies)
        after = np.cumsum(born - dead, axis=0)
        self._during = after + dead
        self._during[:, 0] += cost.workspace_bytes
        # Columns apart: lists of plain integers are nothing for the garbage collector to walk.
        self._live_before = [0, *after[:, 0].tolist()]
        self._saved_before = [0, *after[:, 1].tolist()]

    def _adjust(
        self,
        born: NDArray[np.int64],
        dead: NDArray[np.int64],
        name: str,
        action: Action,
        dies: int,
    ) -> None:
        """Let a tensor be born and die where this plan has it."""
        tensor, whole = self._cost.planned[name], self._cost.nbytes[name]
        is_saved = tensor.role == "saved"
        if not is_saved:
            born[tensor.born, 1] += whole
        dead[tensor.dies] -= (whole, whole if is_saved else 0)
        dead[dies] += whole
        if isinstance(action, Recompute):
            dead[tensor.last_forward_use] += whole
            born[tensor.born] += self._state_bytes(name)

    def _state_bytes(self, name: str) -> int:
        recipe = self._cost.planned[name].recipe
        return 0 if recipe is None else self._cost.rounded(recipe.state_bytes)

    def run(self, position: int) -> None:
        """Say what is live while an op runs."""
        live, saved = self._during[position]
        self.during = int(live) + self._added, int(saved) + self._added

    def happen(self, kind: EventKind, position: int, name: str) -> None:
        """Allocate, note the bytes during the event, free, just before the op at a position."""
        cost = self._cost
        whole = cost.nbytes[name]
        codec = codec_of(self._action_by_tensor[name])
        moved = whole if codec is None else cost.rounded(codec.packed_bytes)
        match kind:
            case "pack":
                assert codec is not None
                self._hold(position, moved, cost.key_workspace_bytes(codec.encode_key), whole)
            case "unpack":
                assert codec is not None
                self._hold(position, whole, cost.key_workspace_bytes(codec.decode_key), moved)
            case "recompute":
                beyond = cost.recipe_peak_bytes[name] - whole
                self._hold(position, whole, beyond, self._state_bytes(name))
            case "offload_wait":
                self._hold(position, 0, 0, moved)
            case "reload":
                self._hold(position, moved, 0, 0)
            case _:
                self._hold(position, 0, 0, 0)

    def _hold(self, position: int, allocated: int, workspace: int, freed: int) -> None:
        live = self._live_before[position] + self._added + allocated
        saved = self._saved_before[position] + self._added + allocated
        self.during = live, saved
        self._peak = max(self._peak, live + workspace)
        self._saved_peak = max(self._saved_peak, saved)
        self._added += allocated - freed
        self._change[position] += allocated - freed

    def peaks(self) -> tuple[int, int]:
        """Return the most bytes during any event or op, and the most saved ones."""
        if len(self._during):
            added = np.cumsum(self._change)[:-1, np.newaxis]
            live, saved = (self._during + added).max(axis=0)
            return max(self._peak, int(live)), max(self._saved_peak, int(saved))
        return 0, 0

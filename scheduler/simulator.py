"""Say what a plan costs: step time, peak memory, and a timeline of both.

One compute stream runs ops, packing, unpacking and recomputing in order.  One engine each way
copies, first in first out; a copy is slowed by the measured duplex fraction while the other
engine is busy.  A wait stalls the compute stream until its copy has ended.  Memory is counted
by storage, at every event, workspaces included.  Every planner is judged by this module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from backhaul.records import (
    Action,
    GraphRecord,
    Keep,
    MachineProfile,
    Prediction,
    Recompute,
    TensorRecord,
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
    schedule = Schedule.of(cost.planned, cost.ready, action_by_tensor)
    clock = _Clock(cost, action_by_tensor)
    memory = _Memory(cost, action_by_tensor, schedule)
    before, after = schedule.before, schedule.after

    def happen(kind: EventKind, position: int, name: str) -> None:
        start_s, end_s = clock.happen(kind, name)
        memory.happen(kind, name)
        if moments is not None:
            event = Event(kind, position, name)
            moments.append(Moment(event, start_s, end_s, memory.during, memory.saved_during))

    for position, duration_s in enumerate(cost.duration_s):
        if position in before:
            for kind, name in before[position]:
                happen(kind, position, name)
        start_s = clock.now_s
        clock.now_s = start_s + duration_s
        memory.run(position)
        if moments is not None:
            event = Event("run", position)
            moments.append(Moment(event, start_s, clock.now_s, memory.during, memory.saved_during))
        if position in after:
            for kind, name in after[position]:
                happen(kind, position, name)
    return replace(
        clock.told,
        peak_bytes=cost.caller_bytes + memory.peak,
        step_peak_bytes=memory.peak,
        saved_peak_bytes=memory.saved_peak,
    )


class _Clock:
    """Time on the compute stream and on the two copy engines."""

    def __init__(self, cost: CostModel, action_by_tensor: Mapping[str, Action]) -> None:
        self._cost = cost
        self._action_by_tensor = action_by_tensor
        self._copied_at_s: dict[str, float] = {}
        self._d2h_free_s = 0.0
        self._h2d_free_s = 0.0
        self.now_s = 0.0
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
            step_s=self.now_s,
            exposed_s=self._exposed_s,
            codec_s=self._codec_s,
            offloaded_bytes=self._offloaded_bytes,
            recompute_s=self._recompute_s,
        )

    def happen(self, kind: EventKind, name: str) -> tuple[float, float]:
        match kind:
            case "pack" | "unpack":
                codec = codec_of(self._action_by_tensor[name])
                assert codec is not None
                duration_s = self._cost.key_s(
                    codec.encode_key if kind == "pack" else codec.decode_key
                )
                self._codec_s += duration_s
                return self._compute(duration_s)
            case "recompute":
                self._recompute_s += self._cost.recipe_s[name]
                return self._compute(self._cost.recipe_s[name])
            case "offload":
                return self._offload(name)
            case "reload":
                return self._reload(name)
            case _:
                return self._wait(name)

    def _compute(self, duration_s: float) -> tuple[float, float]:
        start_s, self.now_s = self.now_s, self.now_s + duration_s
        return start_s, self.now_s

    def _moved_bytes(self, name: str) -> int:
        codec = codec_of(self._action_by_tensor[name])
        return self._cost.planned[name].nbytes if codec is None else codec.packed_bytes

    def _offload(self, name: str) -> tuple[float, float]:
        nbytes = self._moved_bytes(name)
        start_s = max(self.now_s, self._d2h_free_s)
        both_ways = self._h2d_free_s > start_s
        self._d2h_free_s = start_s + self._cost.copy_s(nbytes, "d2h", both_ways=both_ways)
        self._copied_at_s[name] = self._d2h_free_s
        self._offloaded_bytes += nbytes
        return start_s, self._d2h_free_s

    def _reload(self, name: str) -> tuple[float, float]:
        start_s = max(self.now_s, self._h2d_free_s, self._copied_at_s[name])
        both_ways = self._d2h_free_s > start_s
        nbytes = self._moved_bytes(name)
        self._h2d_free_s = start_s + self._cost.copy_s(nbytes, "h2d", both_ways=both_ways)
        self._copied_at_s[name] = self._h2d_free_s
        return start_s, self._h2d_free_s

    def _wait(self, name: str) -> tuple[float, float]:
        stall_s = max(0.0, self._copied_at_s[name] - self.now_s)
        self._exposed_s += stall_s
        return self._compute(stall_s)


class _Memory:
    """Bytes on the device: what the caller holds apart, saved activations told apart.

    Attributes:
        during: Bytes live during the last event.
        saved_during: The saved part of them.
        peak: Most bytes during any event so far.
        saved_peak: Most saved bytes so far.
    """

    def __init__(
        self, cost: CostModel, action_by_tensor: Mapping[str, Action], schedule: Schedule
    ) -> None:
        self._cost = cost
        self._action_by_tensor = action_by_tensor
        self._live = self._saved = 0
        self.during = self.saved_during = self.peak = self.saved_peak = 0
        # Bytes, and saved bytes, that are born and die elsewhere than if everything were kept.
        self._born: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        self._dead: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        for name, tensor in cost.planned.items():
            use, dies = schedule.lives[name]
            action = action_by_tensor.get(name)
            if use >= 0 and (action is not None or dies != tensor.dies):
                self._adjust(name, tensor, action or Keep(), dies)

    def _adjust(self, name: str, tensor: TensorRecord, action: Action, dies: int) -> None:
        whole = self._cost.nbytes[name]
        is_saved = tensor.role == "saved"
        if not is_saved:
            self._born[tensor.born][1] += whole
        self._move(self._dead[tensor.dies], -whole, is_saved)
        self._move(self._dead[dies], whole, True)
        if isinstance(action, Recompute):
            self._move(self._dead[tensor.last_forward_use], whole, True)
            self._move(self._born[tensor.born], self._state_bytes(name), True)

    def _move(self, pair: list[int], nbytes: int, is_saved: bool) -> None:
        pair[0] += nbytes
        pair[1] += nbytes if is_saved else 0

    def _state_bytes(self, name: str) -> int:
        recipe = self._cost.planned[name].recipe
        return 0 if recipe is None else self._cost.rounded(recipe.state_bytes)

    def run(self, position: int) -> None:
        """Allocate, note the bytes during the op, free."""
        cost = self._cost
        born, saved_born = cost.born_bytes[position]
        dead, saved_dead = cost.dead_bytes[position]
        if position in self._born:
            more, saved_more = self._born[position]
            born, saved_born = born + more, saved_born + saved_more
        if position in self._dead:
            more, saved_more = self._dead[position]
            dead, saved_dead = dead + more, saved_dead + saved_more
        live, saved = self._live + born, self._saved + saved_born
        self._note(live + cost.workspace_bytes[position], saved)
        self._live, self._saved = live - dead, saved - saved_dead

    def happen(self, kind: EventKind, name: str) -> None:
        """Allocate, note the bytes during the event, free."""
        cost = self._cost
        whole = cost.nbytes[name]
        codec = codec_of(self._action_by_tensor[name])
        moved = whole if codec is None else cost.rounded(codec.packed_bytes)
        match kind:
            case "pack":
                assert codec is not None
                self._hold(moved, cost.key_workspace_bytes(codec.encode_key), freed=whole)
            case "unpack":
                assert codec is not None
                self._hold(whole, cost.key_workspace_bytes(codec.decode_key), freed=moved)
            case "recompute":
                beyond = cost.recipe_peak_bytes[name] - whole
                self._hold(whole, beyond, freed=self._state_bytes(name))
            case "offload_wait":
                self._hold(0, 0, freed=moved)
            case "reload":
                self._hold(moved, 0, freed=0)
            case _:
                self._hold(0, 0, freed=0)

    def _hold(self, allocated: int, workspace: int, *, freed: int) -> None:
        live, saved = self._live + allocated, self._saved + allocated
        self._note(live + workspace, saved)
        self._live, self._saved = live - freed, saved - freed

    def _note(self, live: int, saved: int) -> None:
        self.during, self.saved_during = live, saved
        if live > self.peak:
            self.peak = live
        if saved > self.saved_peak:
            self.saved_peak = saved

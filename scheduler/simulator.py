"""Say what a plan costs: step time, peak memory, and a timeline of both.

One compute stream runs ops, packing, unpacking and recomputing in order.  One engine each way
copies, first in first out; a copy is slowed by the measured duplex fraction while the other
engine is busy, and slows the ops beside it by the measured drag.  A wait stalls the compute
stream until its copy has ended.  Memory is counted by storage, at every event, workspaces
included (`scheduler.memory`).  Every planner is judged by this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from backhaul.records import (
    Action,
    GraphRecord,
    MachineProfile,
    Prediction,
)
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.memory import Memory
from backhaul.scheduler.schedule import Event, EventKind, codec_of

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
    memory = Memory(cost, action_by_tensor, schedule)
    positions = schedule.busy if moments is None else range(len(cost.duration_s))
    for kind, position, name, following in schedule.walk(positions):
        if kind != "run":
            start_s, end_s = clock.happen(kind, following, name)
            memory.happen(kind, following, name)
        elif moments is not None:
            start_s, end_s = clock.at(position), clock.at(position + 1)
            memory.run(position)
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
        self._dragged_s = 0.0
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
            dragged_s=self._dragged_s,
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
        self._drag(nbytes)
        return start_s, self._d2h_free_s

    def _reload(self, now_s: float, name: str) -> tuple[float, float]:
        start_s = max(now_s, self._h2d_free_s, self._copied_at_s[name])
        both_ways = self._d2h_free_s > start_s
        nbytes = self._moved_bytes(name)
        self._h2d_free_s = start_s + self._cost.copy_s(nbytes, "h2d", both_ways=both_ways)
        self._copied_at_s[name] = self._h2d_free_s
        self._drag(nbytes)
        return start_s, self._h2d_free_s

    def _drag(self, nbytes: int) -> None:
        """Slow the ops beside a copy; a wait for it is the shorter for that."""
        drag_s = self._cost.drag_s(nbytes)
        self._dragged_s += drag_s
        self._added_s += drag_s

    def _wait(self, now_s: float, name: str) -> tuple[float, float]:
        stall_s = max(0.0, self._copied_at_s[name] - now_s)
        self._exposed_s += stall_s
        return self._compute(now_s, stall_s)

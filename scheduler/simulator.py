"""Say what a plan costs: step time, peak memory, and a timeline of both.

One compute stream runs ops, packing and unpacking in order.  One engine each way copies,
first in first out; a copy is slowed by the measured duplex fraction while the other engine
is busy.  A wait stalls the compute stream until its copy has ended.  Memory is counted by
storage, at every event, workspaces included.  Every planner is judged by this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from backhaul.records import (
    Action,
    GraphRecord,
    MachineProfile,
    Prediction,
)
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.schedule import Event, codec_of, events

__all__ = ["Moment", "Simulation", "simulate"]


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
    graph: GraphRecord,
    machine: MachineProfile,
    action_by_tensor: Mapping[str, Action],
    cost: CostModel | None = None,
) -> Simulation:
    """Run one step on paper.

    Args:
        graph: The step.
        machine: Measurements that cover the graph.
        action_by_tensor: Action of each saved tensor; one that is absent is kept.
        cost: The cost model of graph and machine, if the caller has one.

    Raises:
        PlanError: The machine profile lacks an op of the graph.
    """
    cost = cost or CostModel(graph, machine)
    clock = _Clock(graph, cost, action_by_tensor)
    memory = _Memory(graph, cost, action_by_tensor)
    moments = []
    for event in events(graph, action_by_tensor):
        start_s, end_s = clock.advance(event)
        live_bytes, saved_bytes = memory.advance(event)
        moments.append(Moment(event, start_s, end_s, live_bytes, saved_bytes))
    step_peak_bytes = max((moment.live_bytes for moment in moments), default=0)
    prediction = Prediction(
        peak_bytes=cost.caller_bytes + step_peak_bytes,
        step_peak_bytes=step_peak_bytes,
        saved_peak_bytes=max((moment.saved_bytes for moment in moments), default=0),
        step_s=clock.now_s,
        exposed_s=clock.exposed_s,
        codec_s=clock.codec_s,
        offloaded_bytes=clock.offloaded_bytes,
    )
    return Simulation(prediction, tuple(moments))


class _Clock:
    """Time on the compute stream and on the two copy engines."""

    def __init__(
        self, graph: GraphRecord, cost: CostModel, action_by_tensor: Mapping[str, Action]
    ) -> None:
        self._cost = cost
        self._codec_by_tensor = {
            name: codec
            for name, action in action_by_tensor.items()
            if (codec := codec_of(action)) is not None
        }
        self._nbytes_by_tensor = {
            tensor.name: (
                self._codec_by_tensor[tensor.name].packed_bytes
                if tensor.name in self._codec_by_tensor
                else tensor.nbytes
            )
            for tensor in graph.saved
        }
        self._copied_at_s: dict[str, float] = {}
        self._d2h_free_s = 0.0
        self._h2d_free_s = 0.0
        self.now_s = 0.0
        self.exposed_s = 0.0
        self.codec_s = 0.0
        self.offloaded_bytes = 0

    def advance(self, event: Event) -> tuple[float, float]:
        match event.kind:
            case "run":
                return self._compute(self._cost.duration_s[event.position])
            case "pack":
                return self._pack(self._codec_by_tensor[event.tensor].encode_key)
            case "unpack":
                return self._pack(self._codec_by_tensor[event.tensor].decode_key)
            case "offload":
                return self._offload(event.tensor)
            case "reload":
                return self._reload(event.tensor)
            case "offload_wait" | "reload_wait":
                return self._wait(event.tensor)

    def _compute(self, duration_s: float) -> tuple[float, float]:
        start_s, self.now_s = self.now_s, self.now_s + duration_s
        return start_s, self.now_s

    def _pack(self, key: str) -> tuple[float, float]:
        self.codec_s += self._cost.key_s(key)
        return self._compute(self._cost.key_s(key))

    def _offload(self, tensor: str) -> tuple[float, float]:
        nbytes = self._nbytes_by_tensor[tensor]
        start_s = max(self.now_s, self._d2h_free_s)
        both_ways = self._h2d_free_s > start_s
        self._d2h_free_s = start_s + self._cost.copy_s(nbytes, "d2h", both_ways=both_ways)
        self._copied_at_s[tensor] = self._d2h_free_s
        self.offloaded_bytes += nbytes
        return start_s, self._d2h_free_s

    def _reload(self, tensor: str) -> tuple[float, float]:
        nbytes = self._nbytes_by_tensor[tensor]
        start_s = max(self.now_s, self._h2d_free_s, self._copied_at_s[tensor])
        both_ways = self._d2h_free_s > start_s
        self._h2d_free_s = start_s + self._cost.copy_s(nbytes, "h2d", both_ways=both_ways)
        self._copied_at_s[tensor] = self._h2d_free_s
        return start_s, self._h2d_free_s

    def _wait(self, tensor: str) -> tuple[float, float]:
        stall_s = max(0.0, self._copied_at_s[tensor] - self.now_s)
        self.exposed_s += stall_s
        return self._compute(stall_s)


class _Memory:
    """Bytes on the device: what the caller holds apart, saved activations told apart."""

    def __init__(
        self, graph: GraphRecord, cost: CostModel, action_by_tensor: Mapping[str, Action]
    ) -> None:
        self._cost = cost
        self._tensor_by_name = {tensor.name: tensor for tensor in graph.tensors}
        self._action_by_tensor = action_by_tensor
        self._live_bytes = 0
        self._saved_bytes = 0

    def advance(self, event: Event) -> tuple[int, int]:
        """Allocate, note the bytes during the event, free."""
        if event.kind == "run":
            return self._run(event.position)
        tensor = self._tensor_by_name[event.tensor]
        action = self._action_by_tensor[event.tensor]
        codec = codec_of(action)
        whole = self._cost.rounded(tensor.nbytes)
        moved = whole if codec is None else self._cost.rounded(codec.packed_bytes)
        match event.kind:
            case "pack":
                assert codec is not None
                return self._hold(moved, codec.encode_key, freed_bytes=whole)
            case "unpack":
                assert codec is not None
                return self._hold(whole, codec.decode_key, freed_bytes=moved)
            case "offload_wait":
                return self._hold(0, "", freed_bytes=moved)
            case "reload":
                return self._hold(moved, "", freed_bytes=0)
            case _:
                return self._hold(0, "", freed_bytes=0)

    def _run(self, position: int) -> tuple[int, int]:
        nbytes, saved_bytes = self._cost.born_bytes[position]
        self._live_bytes += nbytes
        self._saved_bytes += saved_bytes
        during = self._live_bytes + self._cost.workspace_bytes[position], self._saved_bytes
        nbytes, saved_bytes = self._cost.dead_bytes[position]
        self._live_bytes -= nbytes
        self._saved_bytes -= saved_bytes
        return during

    def _hold(self, allocated_bytes: int, key: str, *, freed_bytes: int) -> tuple[int, int]:
        self._live_bytes += allocated_bytes
        self._saved_bytes += allocated_bytes
        during = self._live_bytes + self._cost.key_workspace_bytes(key), self._saved_bytes
        self._live_bytes -= freed_bytes
        self._saved_bytes -= freed_bytes
        return during

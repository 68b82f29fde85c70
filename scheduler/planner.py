"""Planners: functions from graph, machine and budget to a plan.

`greedy` answers the user's budget.  `keep_all`, `compress_all` and `offload_all` treat every
tensor alike whatever the budget: they are the ends of the scale, for tests and comparison.
Each is pure, and deterministic: ties are broken by order of birth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, assert_never

from backhaul.errors import BudgetError
from backhaul.records import (
    Action,
    Budget,
    Compress,
    Decision,
    GraphRecord,
    Keep,
    MachineProfile,
    Offload,
    Plan,
    Prediction,
    SlotRecord,
    TensorRecord,
)
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.placement import Choice, Limit, memory_by_position, place
from backhaul.scheduler.simulator import simulate

__all__ = ["PLANNERS", "Planner", "compress_all", "greedy", "keep_all", "offload_all"]

Planner = Callable[[GraphRecord, MachineProfile, Budget], Plan]
Actions = dict[str, Action]

SLOT_ALIGNMENT_BYTES = 4096
SLOWDOWN_STEPS = 10
TIME_TOLERANCE = 1e-9
"""Sums of the same times in another order differ by less than this share."""
KEEP = Choice(packs=False, moves=False)


def keep_all(graph: GraphRecord, machine: MachineProfile, budget: Budget) -> Plan:
    """Keep every saved activation on the device, whatever the budget."""
    return _Bench(graph, machine, budget).plan("keep_all", {}, "Everything is kept.")


def compress_all(graph: GraphRecord, machine: MachineProfile, budget: Budget) -> Plan:
    """Pack every saved activation that a lossless codec fits; keep the others."""
    bench = _Bench(graph, machine, budget)
    choices = {
        tensor.name: Choice(packs=True, moves=False)
        for tensor in graph.saved
        if tensor.is_movable and tensor.codecs
    }
    summary = f"{len(choices)} of {len(graph.saved)} saved activations are packed."
    return bench.plan("compress_all", bench.placed(choices, bench.no_limit), summary)


def offload_all(graph: GraphRecord, machine: MachineProfile, budget: Budget) -> Plan:
    """Move every saved activation that may be moved, unpacked."""
    bench = _Bench(graph, machine, budget)
    choices = {
        tensor.name: Choice(packs=False, moves=True) for tensor in graph.saved if tensor.is_movable
    }
    summary = f"{len(choices)} of {len(graph.saved)} saved activations are offloaded."
    return bench.plan("offload_all", bench.placed(choices, bench.no_limit), summary)


def greedy(graph: GraphRecord, machine: MachineProfile, budget: Budget) -> Plan:
    """Send everything out, then give back what fits, costliest first.

    Args:
        graph: The step.
        machine: Measurements that cover it.
        budget: Bytes to stay within, or a slowdown to stay within with the least bytes.

    Raises:
        BudgetError: Nothing this planner knows fits the budget; the smallest that fits is in
            the error.
    """
    bench = _Bench(graph, machine, budget)
    match budget.kind:
        case "memory" | "activations":
            actions = bench.least_time(budget.kind, int(budget.value))
        case "slowdown":
            actions = bench.least_memory(budget.value)
        case _:
            assert_never(budget.kind)
    return bench.plan("greedy", actions, bench.summarised(actions))


PLANNERS: Mapping[str, Planner] = {
    "greedy": greedy,
    "keep_all": keep_all,
    "compress_all": compress_all,
    "offload_all": offload_all,
}


class _Bench:
    """One graph on one machine, with what every planner needs at hand."""

    def __init__(self, graph: GraphRecord, machine: MachineProfile, budget: Budget) -> None:
        self.graph = graph
        self.machine = machine
        self.budget = budget
        self.cost = CostModel(graph, machine)
        self.baseline = self.judged({})
        self.caller_bytes = self.baseline.peak_bytes - self.baseline.step_peak_bytes
        self.no_limit = Limit(nbytes=float("inf"), saved_only=False)

    def judged(self, actions: Mapping[str, Action]) -> Prediction:
        return simulate(self.graph, self.machine, actions, self.cost).prediction

    def placed(self, choices: Mapping[str, Choice], limit: Limit) -> Actions:
        return place(self.graph, self.cost, choices, limit)

    def least_time(self, kind: Literal["memory", "activations"], nbytes: int) -> Actions:
        if _used_bytes(self.baseline, kind) <= nbytes:
            return {}
        limit = Limit(
            nbytes=nbytes if kind == "activations" else nbytes - self.caller_bytes,
            saved_only=kind == "activations",
        )
        floor = self._floor(kind)
        floor_bytes = _used_bytes(self.judged(self.placed(floor, self._tight(kind))), kind)
        if floor_bytes > nbytes:
            raise BudgetError(
                f"a budget of {nbytes:,} bytes of {_MEANING[kind]} cannot be met: with everything "
                f"packed and offloaded that may be, this step still needs {floor_bytes:,} bytes; "
                f"give at least that, a smaller batch, or a shorter sequence",
                budget_bytes=nbytes,
                smallest_bytes=floor_bytes,
            )
        best = self.placed(floor, self._tight(kind))
        best_s = self.judged(best).step_s
        for order in (self._latest_first, self._largest_first):
            actions = self._given_back(floor, order(), kind, nbytes, limit)
            if actions is not None and self.judged(actions).step_s < best_s:
                best, best_s = actions, self.judged(actions).step_s
        return best

    def least_memory(self, slowdown: float) -> Actions:
        """Bisect the budget down to where the time limit is met with the fewest bytes."""
        limit_s = self.baseline.step_s * slowdown
        floor = self.placed(self._floor("memory"), self._tight("memory"))
        low, high = self.judged(floor).peak_bytes, self.baseline.peak_bytes
        best: Actions = {}
        for _ in range(SLOWDOWN_STEPS):
            middle = (low + high) // 2
            actions = self.least_time("memory", middle)
            if self.judged(actions).step_s <= limit_s:
                best, high = actions, middle
            else:
                low = middle
        return best

    def _floor(self, kind: Literal["memory", "activations"]) -> dict[str, Choice]:
        """Choose what takes the least memory: everything out, packed or not, whichever is less."""
        movable = [tensor for tensor in self.graph.saved if tensor.is_movable]
        candidates: list[dict[str, Choice]] = [
            {tensor.name: Choice(packs=bool(tensor.codecs), moves=True) for tensor in movable},
            {tensor.name: Choice(packs=False, moves=True) for tensor in movable},
        ]
        return min(
            candidates,
            key=lambda choices: _used_bytes(
                self.judged(self.placed(choices, self._tight(kind))), kind
            ),
        )

    def _tight(self, kind: Literal["memory", "activations"]) -> Limit:
        """Return the limit that holds nothing longer than it must be."""
        return Limit(nbytes=0, saved_only=kind == "activations")

    def _latest_first(self) -> list[TensorRecord]:
        """Order by how little compute there is to hide a round trip behind."""
        return sorted(
            self._movable(), key=lambda tensor: tensor.first_backward_use - tensor.last_forward_use
        )

    def _largest_first(self) -> list[TensorRecord]:
        return sorted(self._movable(), key=lambda tensor: -tensor.nbytes)

    def _movable(self) -> list[TensorRecord]:
        return [tensor for tensor in self.graph.saved if tensor.is_movable]

    def _given_back(
        self,
        floor: Mapping[str, Choice],
        order: list[TensorRecord],
        kind: Literal["memory", "activations"],
        nbytes: int,
        limit: Limit,
    ) -> Actions | None:
        """Undo moves, then packing, in this order, wherever the rest still fits."""
        state = _GivingBack(self, floor, kind, nbytes, limit)
        for packs in (True, False):
            wanted = [
                (tensor, Choice(packs=packs and bool(tensor.codecs), moves=False))
                for tensor in order
            ]
            state.give([pair for pair in wanted if state.choices[pair[0].name] != pair[1]])
        return state.actions

    def plan(self, planner: str, actions: Mapping[str, Action], summary: str) -> Plan:
        simulation = simulate(self.graph, self.machine, actions, self.cost)
        decisions = tuple(
            Decision(
                tensor=tensor.name,
                action=(action := actions.get(tensor.name, Keep())),
                reason=self._reason(tensor, action),
            )
            for tensor in self.graph.saved
        )
        slots, host_bytes = _laid_out(decisions, self.graph)
        return Plan(
            graph=self.graph,
            machine=self.machine,
            budget=self.budget,
            planner=planner,
            summary=summary,
            decisions=decisions,
            slots=slots,
            host_bytes=host_bytes,
            baseline=self.baseline,
            predicted=simulation.prediction,
        )

    def summarised(self, actions: Mapping[str, Action]) -> str:
        if all(isinstance(action, Keep) for action in actions.values()):
            return "The step fits as it is: nothing to do."
        predicted = self.judged(actions)
        saved = self.baseline.step_peak_bytes - predicted.step_peak_bytes
        return (
            f"{saved / 2**20:,.1f} MiB less at the peak for "
            f"{(predicted.step_s - self.baseline.step_s) * 1e3:,.1f} ms more, as simulated."
        )

    def _reason(self, tensor: TensorRecord, action: Action) -> str:
        match action:
            case Keep():
                return tensor.pinned_because or "fits beside the rest within the budget"
            case Compress(codec=codec):
                return (
                    f"{codec.name} holds it in {codec.packed_bytes:,} of {tensor.nbytes:,} bytes "
                    f"for {self.cost.codec_s(codec) * 1e3:.3f} ms of packing and unpacking"
                )
            case Offload(codec=codec):
                nbytes = tensor.nbytes if codec is None else codec.packed_bytes
                out_s, back_s = (self.cost.copy_s(nbytes, way) for way in ("d2h", "h2d"))
                gap_s = sum(
                    self.cost.duration_s[tensor.last_forward_use + 1 : tensor.first_backward_use]
                )
                packing = "" if codec is None else f"packed by {codec.name} to {nbytes:,} bytes; "
                return (
                    f"{packing}{out_s * 1e3:.3f} ms out and {back_s * 1e3:.3f} ms back beside "
                    f"{gap_s * 1e3:.1f} ms of compute between its uses"
                )
            case _:
                assert_never(action)


class _GivingBack:
    """Choices that fit, and what has been given back so far.

    Many are given back at once and the lot is halved where it does not fit, so that a solve
    takes few simulations; what does not fit even with instant copies needs none.
    """

    def __init__(
        self,
        bench: _Bench,
        floor: Mapping[str, Choice],
        kind: Literal["memory", "activations"],
        nbytes: int,
        limit: Limit,
    ) -> None:
        self._bench = bench
        self._kind = kind
        self._nbytes = nbytes
        self._limit = limit
        self.choices = dict(floor)
        self.actions: Actions | None = None
        self._step_s = float("inf")
        self._accept_if_good(self.choices)
        tight = bench.placed(floor, Limit(nbytes=0, saved_only=limit.saved_only))
        self._memory = memory_by_position(bench.graph, bench.cost, tight, limit)

    def give(self, wanted: list[tuple[TensorRecord, Choice]]) -> None:
        """Give these back, all or as many as fit."""
        if not wanted:
            return
        memory = self._memory.copy()
        for tensor, choice in wanted:
            memory[tensor.last_forward_use + 1 : tensor.first_backward_use] += self._held_bytes(
                tensor, choice
            ) - self._held_bytes(tensor, self.choices[tensor.name])
        if memory.max() <= self._limit.nbytes:
            trial = self.choices | {tensor.name: choice for tensor, choice in wanted}
            if self._accept_if_good(trial):
                self._memory = memory
                return
        if len(wanted) > 1:
            middle = len(wanted) // 2
            self.give(wanted[:middle])
            self.give(wanted[middle:])

    def _accept_if_good(self, trial: dict[str, Choice]) -> bool:
        actions = self._bench.placed(trial, self._limit)
        judged = self._bench.judged(actions)
        if _used_bytes(judged, self._kind) > self._nbytes or judged.step_s > self._step_s * (
            1 + TIME_TOLERANCE
        ):
            return False
        self.choices, self.actions, self._step_s = trial, actions, judged.step_s
        return True

    def _held_bytes(self, tensor: TensorRecord, choice: Choice) -> int:
        """Count what a choice holds on the device between the last use and the first."""
        if choice.moves:
            return 0
        nbytes = tensor.codecs[0].packed_bytes if choice.packs else tensor.nbytes
        return self._bench.cost.rounded(nbytes)


_MEANING = {
    "memory": "device memory, parameters included",
    "activations": "saved activations",
}


def _used_bytes(prediction: Prediction, kind: Literal["memory", "activations"]) -> int:
    return prediction.peak_bytes if kind == "memory" else prediction.saved_peak_bytes


def _laid_out(
    decisions: tuple[Decision, ...], graph: GraphRecord
) -> tuple[tuple[SlotRecord, ...], int]:
    """Lay the host arena out.

    Every copy out happens in the forward and every copy back in the backward, so all slots
    are live together at the end of the forward and none can share bytes with another.
    """
    tensor_by_name = {tensor.name: tensor for tensor in graph.saved}
    slots, offset_bytes = [], 0
    for decision in decisions:
        if isinstance(decision.action, Offload):
            codec = decision.action.codec
            whole = tensor_by_name[decision.tensor].nbytes
            nbytes = whole if codec is None else codec.packed_bytes
            slots.append(
                SlotRecord(tensor=decision.tensor, offset_bytes=offset_bytes, nbytes=nbytes)
            )
            offset_bytes += -(-nbytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
    return tuple(slots), offset_bytes

"""Planners: functions from graph, machine and budget to a plan.

`frontier` answers the user's budget.  `keep_all`, `compress_all`, `offload_all` and
`recompute_all` treat every tensor alike whatever the budget: they are the ends of the scale,
for tests and comparison.  Each is pure, and deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import assert_never

from backhaul.errors import BudgetError, PlanError
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
    Recompute,
    SlotRecord,
    TensorRecord,
)
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.frontier import Candidate, Frontier, Kind
from backhaul.scheduler.placement import Limit, place
from backhaul.scheduler.schedule import Life
from backhaul.scheduler.simulator import predict
from backhaul.scheduler.ways import ALL_WAYS, Option, Way, options_of, slot_bytes

__all__ = [
    "PLANNERS",
    "Planner",
    "compress_all",
    "frontier",
    "keep_all",
    "offload_all",
    "plan_of_actions",
    "planner_of",
    "recompute_all",
]

Planner = Callable[[GraphRecord, MachineProfile, Budget], Plan]

TIME_TOLERANCE = 1e-9
"""Sums of the same times in another order differ by less than this share."""


def keep_all(graph: GraphRecord, machine: MachineProfile, budget: Budget) -> Plan:
    """Keep every saved activation on the device, whatever the budget."""
    return plan_of_actions(graph, machine, budget, "keep_all", {}, "Everything is kept.")


def compress_all(graph: GraphRecord, machine: MachineProfile, budget: Budget) -> Plan:
    """Pack every saved activation that a lossless codec fits; keep the others."""
    return _treat_all(graph, machine, budget, "compress_all", "pack", "packed")


def offload_all(graph: GraphRecord, machine: MachineProfile, budget: Budget) -> Plan:
    """Move every saved activation that may be moved, unpacked."""
    return _treat_all(graph, machine, budget, "offload_all", "move", "offloaded")


def recompute_all(graph: GraphRecord, machine: MachineProfile, budget: Budget) -> Plan:
    """Compute every saved activation again that has a recipe; keep the others."""
    return _treat_all(graph, machine, budget, "recompute_all", "recompute", "recomputed")


def frontier(
    graph: GraphRecord,
    machine: MachineProfile,
    budget: Budget,
    allowed: frozenset[Way] = ALL_WAYS,
) -> Plan:
    """Answer a budget from the trade-off between memory and time.

    Args:
        graph: The step.
        machine: Measurements that cover it.
        budget: Bytes to stay within in the least time, or a slowdown to stay within with the
            least bytes.
        allowed: The ways to consider.

    Raises:
        BudgetError: Nothing that the planner knows fits the budget; the smallest that fits is in
            the error.
    """
    cost = CostModel(graph, machine)
    kind: Kind = "activations" if budget.kind == "activations" else "memory"
    keep = predict(cost, {})
    is_asked = any(tensor.asked is not None and tensor.is_movable for tensor in graph.planned)
    if budget.kind != "slowdown" and not is_asked and _used_bytes(keep, kind) <= budget.value:
        summary = "The step fits as it is: nothing to do."
        return plan_of_actions(graph, machine, budget, "frontier", {}, summary, cost)
    candidates = Frontier(cost, kind, allowed)
    found = _answer(candidates, keep, budget, kind)
    if is_asked and found is candidates.keep:
        summary = f"The step does with what is asked of {len(found.ways)} saved activations."
    else:
        summary = _summary(keep, found)
    return plan_of_actions(graph, machine, budget, "frontier", found.actions, summary, cost)


def planner_of(allowed: frozenset[Way]) -> Planner:
    """Return the planner that considers these ways alone."""
    return partial(frontier, allowed=allowed)


PLANNERS: Mapping[str, Planner] = {
    "frontier": frontier,
    "keep_all": keep_all,
    "compress_all": compress_all,
    "offload_all": offload_all,
    "recompute_all": recompute_all,
}


def _answer(candidates: Frontier, keep: Prediction, budget: Budget, kind: Kind) -> Candidate:
    if budget.kind == "slowdown":
        limit_s = keep.step_s * budget.value * (1 + TIME_TOLERANCE)
        least = candidates.smallest(limit_s)
        if least.prediction.step_s > limit_s:
            slowdown = least.prediction.step_s / keep.step_s
            raise PlanError(
                f"what the policy asks for takes {slowdown:.3f} times the time of keeping "
                f"everything, more than the {budget.value:g} that are allowed: ask for less"
            )
        return least
    found = candidates.fastest(int(budget.value))
    if found is None:
        nbytes, smallest = int(budget.value), candidates.floor.used_bytes
        raise BudgetError(
            f"a budget of {nbytes:,} bytes of {_MEANING[kind]} cannot be met: the smallest that "
            f"this step can do with is {smallest:,} bytes; give at least that, a smaller batch, "
            "or a shorter sequence",
            budget_bytes=nbytes,
            smallest_bytes=smallest,
        )
    # What takes no time and frees memory is done only where memory is short.
    asked = candidates.keep
    fits = asked.used_bytes <= budget.value
    return asked if fits and asked.prediction.step_s <= found.prediction.step_s else found


def _treat_all(
    graph: GraphRecord, machine: MachineProfile, budget: Budget, planner: str, way: Way, done: str
) -> Plan:
    cost = CostModel(graph, machine)
    ways = {
        name: way
        for name, tensor in cost.planned.items()
        if tensor.role == "saved" and any(option.way == way for option in options_of(cost, tensor))
    }
    actions = place(cost, ways, Limit(nbytes=float("inf"), saved_only=False))
    summary = f"{len(ways)} of {len(graph.saved)} saved activations are {done}."
    return plan_of_actions(graph, machine, budget, planner, actions, summary, cost)


def plan_of_actions(
    graph: GraphRecord,
    machine: MachineProfile,
    budget: Budget,
    planner: str,
    actions: Mapping[str, Action],
    summary: str,
    cost: CostModel | None = None,
) -> Plan:
    """Write down what is to happen, with what it costs and why.

    Args:
        graph: The step.
        machine: Measurements that cover it.
        budget: What was asked for.
        planner: Who answered.
        actions: The answer; a tensor that is absent is kept.
        summary: The answer in a sentence.
        cost: The costs of the step, if the caller has them.
    """
    cost = cost or CostModel(graph, machine)
    life_by_tensor = cost.layout.lives_under(actions)
    decisions = tuple(
        Decision(
            tensor=name,
            action=(action := actions.get(name, Keep())),
            reason=_reason(cost, tensor, action, life_by_tensor[name]),
        )
        for name, tensor in cost.planned.items()
        if tensor.role == "saved" or life_by_tensor[name].use >= 0
    )
    slots, host_bytes = _laid_out(decisions, graph)
    return Plan(
        graph=graph,
        machine=machine,
        budget=budget,
        planner=planner,
        summary=summary,
        decisions=decisions,
        slots=slots,
        host_bytes=host_bytes,
        baseline=predict(cost, {}),
        predicted=predict(cost, actions),
    )


def _summary(keep: Prediction, found: Candidate) -> str:
    if not found.ways:
        return "Nothing that saves memory is fast enough: everything is kept."
    saved = keep.step_peak_bytes - found.prediction.step_peak_bytes
    return (
        f"{saved / 2**20:,.1f} MiB less at the peak for "
        f"{(found.prediction.step_s - keep.step_s) * 1e3:,.1f} ms more, as simulated."
    )


def _reason(cost: CostModel, tensor: TensorRecord, action: Action, life: Life) -> str:
    """Say what the action costs and frees, and what the next cheapest way would have cost."""
    if tensor.pinned_because:
        return tensor.pinned_because
    way = _way_of(action)
    options = options_of(cost, tensor)
    chosen = next(option for option in options if option.way == way)
    others = [option for option in options[1:] if option.way != way]
    rejected = min(others, key=lambda option: option.alone_s, default=None)
    told = _told(cost, tensor, chosen, life)
    if tensor.asked is not None:
        told = f"{tensor.asked.by} asks for it: {told}"
    if rejected is None:
        return told
    return f"{told}; rather than {_PARTICIPLE[rejected.way]}: {_priced(rejected)}"


def _told(cost: CostModel, tensor: TensorRecord, option: Option, life: Life) -> str:
    match option.way:
        case "keep" if tensor.role == "checkpoint":
            return "held because what is recomputed begins with it"
        case "keep":
            return "fits beside the rest within the budget"
        case "pack":
            codec = tensor.codecs[0]
            return (
                f"{codec.name} holds it in {codec.packed_bytes:,} of {tensor.nbytes:,} bytes "
                f"for {option.compute_s * 1e3:.3f} ms of packing and unpacking"
            )
        case "move" | "pack and move":
            gap_s = cost.gap_s(tensor.last_forward_use, life.use)
            packing = ""
            if option.way == "pack and move":
                codec = tensor.codecs[0]
                packing = f"packed by {codec.name} to {codec.packed_bytes:,} bytes; "
            return (
                f"{packing}{option.d2h_s * 1e3:.3f} ms out and {option.h2d_s * 1e3:.3f} ms back "
                f"beside {gap_s * 1e3:.1f} ms of compute between its uses"
            )
        case "recompute":
            assert tensor.recipe is not None
            return (
                f"{len(tensor.recipe.ops)} ops make its {tensor.nbytes:,} bytes again in "
                f"{option.compute_s * 1e3:.3f} ms"
            )
        case _:
            assert_never(option.way)


def _priced(option: Option) -> str:
    if "move" in option.way:
        return f"{option.d2h_s * 1e3:.3f} ms out, {option.h2d_s * 1e3:.3f} ms back" + (
            f", {option.compute_s * 1e3:.3f} ms of compute" if option.compute_s else ""
        )
    return f"{option.compute_s * 1e3:.3f} ms"


def _way_of(action: Action) -> Way:
    match action:
        case Keep():
            return "keep"
        case Compress():
            return "pack"
        case Offload(codec=None):
            return "move"
        case Offload():
            return "pack and move"
        case Recompute():
            return "recompute"
        case _:
            assert_never(action)


_PARTICIPLE: Mapping[Way, str] = {
    "keep": "kept",
    "pack": "packed",
    "move": "offloaded",
    "pack and move": "packed and offloaded",
    "recompute": "recomputed",
}

_MEANING = {
    "memory": "device memory, parameters included",
    "activations": "saved activations",
}


def _used_bytes(prediction: Prediction, kind: Kind) -> int:
    return prediction.peak_bytes if kind == "memory" else prediction.saved_peak_bytes


def _laid_out(
    decisions: tuple[Decision, ...], graph: GraphRecord
) -> tuple[tuple[SlotRecord, ...], int]:
    """Lay the host arena out.

    Every copy out happens in the forward and every copy back in the backward, so all slots
    are live together at the end of the forward and none can share bytes with another.
    """
    tensor_by_name = {tensor.name: tensor for tensor in graph.planned}
    slots, offset_bytes = [], 0
    for decision in decisions:
        if isinstance(decision.action, Offload):
            codec = decision.action.codec
            whole = tensor_by_name[decision.tensor].nbytes
            nbytes = whole if codec is None else codec.packed_bytes
            slots.append(
                SlotRecord(tensor=decision.tensor, offset_bytes=offset_bytes, nbytes=nbytes)
            )
            offset_bytes += slot_bytes(nbytes)
    return tuple(slots), offset_bytes

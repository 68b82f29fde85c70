"""Plans of random graphs keep to their budget, by an oracle that shares no code with them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from backhaul.errors import BudgetError
from backhaul.records import (
    Action,
    Ask,
    Budget,
    CodecRecord,
    Compress,
    GraphRecord,
    Keep,
    LinkProfile,
    MachineProfile,
    Offload,
    OpCost,
    OpRecord,
    Plan,
    Recipe,
    Recompute,
    TensorRecord,
)
from backhaul.scheduler.planner import PLANNERS, frontier
from backhaul.scheduler.schedule import events

Case = tuple[GraphRecord, MachineProfile]
CODEC_BYTES = 8


@st.composite
def cases(draw: Any) -> Case:
    """Draw a step whose forward ops each make one tensor, some saved, some packable or pinned."""
    count = draw(st.integers(1, 7))
    end = 2 * count
    tensors = [tensor("x", -1, end, role="input", nbytes=draw(st.integers(0, 50)))]
    for i in range(count):
        nbytes = draw(st.sampled_from([0, 10, 40, 100, 1000]))
        last = draw(st.integers(i, count - 1))
        if draw(st.booleans()) or i == 0:
            use = draw(st.integers(count, end - 1))
            tensors.append(
                dataclasses.replace(
                    tensor(f"f{i}", i, draw(st.integers(use, end - 1)), nbytes=nbytes),
                    last_forward_use=last,
                    first_backward_use=use,
                    codecs=(codec(is_exact=draw(st.booleans())),)
                    if nbytes > CODEC_BYTES and draw(st.booleans())
                    else (),
                    pinned_because="pinned" if draw(st.integers(0, 4)) == 0 else "",
                )
            )
        else:
            role = draw(st.sampled_from(["temporary", "checkpoint"]))
            made = tensor(f"f{i}", i, last, role=role, nbytes=nbytes)
            tensors.append(dataclasses.replace(made, last_forward_use=last))
    for index, each in enumerate(tensors):
        if each.role in ("saved", "checkpoint") and not each.pinned_because and draw(st.booleans()):
            tensors[index] = dataclasses.replace(each, recipe=draw(recipes(each, tensors[:index])))
    tensors.append(tensor("g", count, end, role="gradient", nbytes=draw(st.integers(0, 300))))
    names = [f"f{i}" for i in range(count)] + [f"b{i}" for i in range(count)]
    graph = GraphRecord(
        fingerprint="random",
        ops=tuple(
            OpRecord(name=n, target="aten.relu.default", module="", cost_key=n) for n in names
        ),
        forward_count=count,
        tensors=tuple(sorted(tensors, key=lambda t: t.born)),
    )
    costs = [
        OpCost(
            key=key,
            duration_s=draw(st.sampled_from([0.0, 0.1, 1.0])),
            workspace_bytes=draw(st.sampled_from([0, 0, 70])),
            source="assumed",
        )
        for key in (*names, "encode", "decode")
    ]
    speed = draw(st.sampled_from([10.0, 1000.0, 1e6]))
    link = LinkProfile(
        tier="random",
        sizes_bytes=(0, 10_000),
        d2h_s=(0.0, 10_000 / speed),
        h2d_s=(0.01, 10_000 / speed + 0.01),
        duplex_d2h_fraction=0.7,
        duplex_h2d_fraction=0.6,
        capacity_bytes=2**40,
        source="assumed",
    )
    machine = MachineProfile(
        device="random",
        torch_version="none",
        alignment_bytes=draw(st.sampled_from([1, 64])),
        link=link,
        ops=tuple(costs),
    )
    return graph, machine


@st.composite
def asked_cases(draw: Any) -> Case:
    """Draw a step of which something is asked, without contradictions."""
    graph, machine = draw(cases())
    asked: dict[str, TensorRecord] = {}
    for each in graph.tensors:
        offered = ["offload", *["compress"] * len(each.codecs), *["recompute"] * bool(each.recipe)]
        if each.role == "saved" and each.is_movable and draw(st.booleans()):
            action = draw(st.sampled_from(offered))
            sources = each.recipe.sources if action == "recompute" and each.recipe else ()
            spoilt = [asked[n] for n in sources if n in asked and not is_exact(asked[n])]
            if not spoilt:
                asked[each.name] = dataclasses.replace(each, asked=Ask(action=action, by="test"))
    tensors = tuple(asked.get(each.name, each) for each in graph.tensors)
    return dataclasses.replace(graph, tensors=tensors), machine


def is_exact(each: TensorRecord) -> bool:
    assert each.asked is not None
    return each.asked.action != "compress" or each.codecs[0].is_exact


@st.composite
def recipes(draw: Any, each: TensorRecord, earlier: list[TensorRecord]) -> Recipe:
    """Draw how a tensor is made again, from some of those that were made before it."""
    sources = [t.name for t in earlier if t.role in ("saved", "checkpoint") and draw(st.booleans())]
    first = draw(st.integers(0, each.born))
    ops = tuple(range(first, each.born + 1))
    made = [(each.nbytes, len(ops) - 1, len(ops) - 1)]
    if len(ops) > 1 and draw(st.booleans()):
        made.append((draw(st.integers(0, 90)), 0, draw(st.integers(0, len(ops) - 1))))
    return Recipe(
        ops=ops, sources=tuple(sources), made=tuple(made), state_bytes=draw(st.sampled_from([0, 3]))
    )


def tensor(name: str, born: int, dies: int, *, role: Any = "saved", nbytes: int) -> TensorRecord:
    return TensorRecord(
        name=name,
        module="",
        target="aten.relu.default",
        shape=(nbytes,),
        dtype="uint8",
        nbytes=nbytes,
        role=role,
        born=born,
        dies=dies,
        last_forward_use=-1,
        first_backward_use=-1,
        codecs=(),
        pinned_because="",
    )


def codec(*, is_exact: bool) -> CodecRecord:
    return CodecRecord(
        is_exact=is_exact,
        name="bits",
        arguments=(),
        packed_bytes=CODEC_BYTES,
        encode_key="encode",
        decode_key="decode",
    )


class Oracle:
    """Allocates and frees as the rewritten graph would, one event after the other."""

    def __init__(self, graph: GraphRecord, machine: MachineProfile, actions: Any) -> None:
        self.graph, self.machine, self.actions = graph, machine, actions
        self.workspace = {cost.key: cost.workspace_bytes for cost in machine.ops}
        self.live: dict[tuple[str, str], int] = {}
        # What is packed counts in its packed form alone.
        self.in_use = {name for name, each in actions.items() if getattr(each, "codec", None)}
        self.peak = self.saved_peak = 0
        for each in graph.tensors:
            if each.role == "input":
                self.hold(each.name, "whole", each.nbytes)
        happening = list(events(graph, actions))
        recomputed = {e.tensor: e.position for e in happening if e.kind == "recompute"}
        # What a recipe reads lives at least until then.
        self.dies = {each.name: each.dies for each in graph.tensors}
        self.is_saved = {each.name for each in graph.tensors if each.role == "saved"}
        self.until = {each.name: each.first_backward_use for each in graph.tensors}
        for name, position in recomputed.items():
            for source in self.recipe(name).sources:
                self.dies[source] = max(self.dies[source], position)
                self.until[source] = max(self.until[source], position)
                self.is_saved.add(source)
                if source in recomputed:
                    assert recomputed[source] <= position
        self.recomputed = recomputed
        for event in happening:
            getattr(self, event.kind)(event.position, event.tensor)

    def hold(self, name: str, form: str, nbytes: int) -> None:
        unit = self.machine.alignment_bytes
        self.live[name, form] = -(-nbytes // unit) * unit

    def drop(self, name: str, form: str) -> None:
        del self.live[name, form]

    def note(self, following: int, workspace: int = 0) -> None:
        """Note what happens between an op and the following one."""
        idle = {each.name: each.last_forward_use for each in self.graph.tensors}
        saved = 0
        for (name, form), nbytes in self.live.items():
            # Whole, it is there for the backward alone once the forward is done with it, and
            # until the backward begins to use it.
            waits = idle[name] < following <= self.until[name] and name not in self.in_use
            if name in self.is_saved and (form != "whole" or waits):
                saved += nbytes
        self.peak = max(self.peak, sum(self.live.values()) + workspace)
        self.saved_peak = max(self.saved_peak, saved)

    def arrive(self, at: int, name: str) -> None:
        if self.until[name] == at:
            self.in_use.add(name)

    def of(self, name: str) -> tuple[TensorRecord, CodecRecord | None, str]:
        found = next(each for each in self.graph.tensors if each.name == name)
        chosen = self.actions[name].codec
        return found, chosen, "whole" if chosen is None else "packed"

    def run(self, position: int, _: str) -> None:
        self.note(position)
        for each in self.graph.tensors:
            if each.born == position and each.role != "input":
                self.hold(each.name, "whole", each.nbytes)
                if each.name in self.recomputed:
                    self.hold(each.name, "state", self.recipe(each.name).state_bytes)
        workspace = self.workspace[self.graph.ops[position].cost_key]
        self.peak = max(self.peak, sum(self.live.values()) + workspace)
        for each in self.graph.tensors:
            if self.dies[each.name] == position and each.role != "input":
                self.drop(each.name, "whole")
            if each.name in self.recomputed and each.last_forward_use == position:
                self.drop(each.name, "whole")

    def recipe(self, name: str) -> Recipe:
        recipe = next(each.recipe for each in self.graph.tensors if each.name == name)
        assert recipe is not None
        return recipe

    def recompute(self, at: int, name: str) -> None:
        recipe, unit = self.recipe(name), self.machine.alignment_bytes
        for source in recipe.sources:
            assert (source, "whole") in self.live
            action = self.actions.get(source, Keep())
            if not isinstance(action, (Keep, Recompute)) and action.codec is not None:
                assert action.codec.is_exact
        found = next(each for each in self.graph.tensors if each.name == name)
        self.hold(name, "whole", found.nbytes)
        self.arrive(at, name)
        for index, position in enumerate(recipe.ops):
            busy = self.workspace[self.graph.ops[position].cost_key]
            for nbytes, first, last in recipe.made[1:]:
                if first <= index <= last:
                    busy += -(-nbytes // unit) * unit
            if index < len(recipe.ops) - 1:
                busy -= self.live[name, "whole"]
            self.note(at, busy)
        self.drop(name, "state")

    def pack(self, at: int, name: str) -> None:
        self.hold(name, "packed", CODEC_BYTES)
        self.note(at + 1, self.workspace["encode"])
        self.drop(name, "whole")
        self.in_use.remove(name)

    def offload(self, at: int, _: str) -> None:
        self.note(at + 1)

    def offload_wait(self, at: int, name: str) -> None:
        self.note(at + 1)
        self.drop(name, self.of(name)[2])

    def reload(self, at: int, name: str) -> None:
        found, chosen, form = self.of(name)
        self.hold(name, form, found.nbytes if chosen is None else chosen.packed_bytes)
        self.note(at)

    def reload_wait(self, at: int, name: str) -> None:
        self.note(at)
        assert (name, self.of(name)[2]) in self.live
        if self.of(name)[2] == "whole":
            self.arrive(at, name)

    def unpack(self, at: int, name: str) -> None:
        self.hold(name, "whole", self.of(name)[0].nbytes)
        self.arrive(at, name)
        self.note(at, self.workspace["decode"])
        self.drop(name, "packed")


def checked(plan: Plan) -> Plan:
    """Check what every plan owes, by the oracle."""
    actions = {each.tensor: each.action for each in plan.decisions}
    oracle = Oracle(plan.graph, plan.machine, actions)
    assert plan.predicted.peak_bytes == oracle.peak
    assert plan.predicted.saved_peak_bytes == oracle.saved_peak
    for each in plan.graph.planned:
        if each.name in actions:
            legal(plan.graph, each, actions[each.name])
    spans = sorted((slot.offset_bytes, slot.nbytes) for slot in plan.slots)
    for (start, nbytes), (following, _) in itertools.pairwise(spans):
        assert start + nbytes <= following
    assert {slot.tensor for slot in plan.slots} == {
        name for name, action in actions.items() if isinstance(action, Offload)
    }
    return plan


def legal(graph: GraphRecord, each: TensorRecord, action: Action) -> None:
    if each.pinned_because:
        assert isinstance(action, Keep)
    if each.asked is not None:
        assert type(action).__name__.lower() == each.asked.action
    if isinstance(action, Compress):
        assert action.codec in each.codecs
    if isinstance(action, Recompute):
        assert each.recipe is not None
    if isinstance(action, Offload):
        assert action.codec is None or action.codec in each.codecs
        assert each.last_forward_use <= action.wait_after < graph.forward_count
        assert graph.forward_count <= action.reload_before
        if each.first_backward_use >= 0:
            assert action.reload_before <= each.first_backward_use


def used_bytes(plan: Plan, kind: str) -> int:
    cost = plan.predicted
    return cost.peak_bytes if kind == "memory" else cost.saved_peak_bytes


@pytest.mark.parametrize("name", ["keep_all", "compress_all", "offload_all", "recompute_all"])
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_the_ends_of_the_scale_are_legal(name: str, case: Case) -> None:
    checked(PLANNERS[name](*case, Budget(kind="memory", value=0)))


@pytest.mark.parametrize("kind", ["memory", "activations"])
@settings(max_examples=150, deadline=None)
@given(case=cases(), share=st.floats(0.0, 1.1))
def test_a_plan_keeps_to_its_budget_or_says_the_smallest(
    kind: Any, case: Case, share: float
) -> None:
    whole = used_bytes(PLANNERS["keep_all"](*case, Budget(kind=kind, value=0)), kind)
    nbytes = int(whole * share)
    try:
        plan = frontier(*case, Budget(kind=kind, value=nbytes))
    except BudgetError as error:
        nbytes = error.smallest_bytes
        assert nbytes > int(whole * share)
        plan = frontier(*case, Budget(kind=kind, value=nbytes))
        with pytest.raises(BudgetError):
            frontier(*case, Budget(kind=kind, value=nbytes - 1))
    assert used_bytes(checked(plan), kind) <= nbytes
    assert plan == frontier(*case, Budget(kind=kind, value=nbytes))
    if nbytes >= whole:
        assert all(isinstance(each.action, Keep) for each in plan.decisions)


@settings(max_examples=60, deadline=None)
@given(case=cases(), shares=st.lists(st.floats(0.0, 1.1), min_size=4, max_size=4))
def test_more_budget_never_costs_time_and_less_never_raises_the_peak(
    case: Case, shares: list[float]
) -> None:
    for kind in ("memory", "activations"):
        whole = used_bytes(PLANNERS["keep_all"](*case, Budget(kind="memory", value=0)), kind)
        plans = []
        for share in sorted(shares):
            with contextlib.suppress(BudgetError):
                plans.append(frontier(*case, Budget(kind=kind, value=int(whole * share))))
        for less, more in itertools.pairwise(plans):
            assert less.predicted.step_s >= more.predicted.step_s
            assert used_bytes(less, kind) <= used_bytes(more, kind)


@pytest.mark.parametrize("kind", ["memory", "activations"])
@settings(max_examples=100, deadline=None)
@given(case=asked_cases(), shares=st.lists(st.floats(0.0, 2.0), min_size=3, max_size=3))
def test_what_is_asked_is_done_under_every_budget(
    kind: Any, case: Case, shares: list[float]
) -> None:
    graph, machine = case
    free = dataclasses.replace(
        graph, tensors=tuple(dataclasses.replace(each, asked=None) for each in graph.tensors)
    )
    whole = used_bytes(PLANNERS["keep_all"](free, machine, Budget(kind=kind, value=0)), kind)
    plans = []
    for share in sorted(shares):
        with contextlib.suppress(BudgetError):
            plans.append(checked(frontier(*case, Budget(kind=kind, value=int(whole * share)))))
            assert used_bytes(plans[-1], kind) <= int(whole * share)
    for less, more in itertools.pairwise(plans):
        assert less.predicted.step_s >= more.predicted.step_s


@settings(max_examples=60, deadline=None)
@given(case=cases(), slowdown=st.sampled_from([1.0, 1.1, 2.0, 100.0]))
def test_a_plan_keeps_to_its_slowdown(case: Case, slowdown: float) -> None:
    plan = checked(frontier(*case, Budget(kind="slowdown", value=slowdown)))
    assert plan.predicted.step_s <= plan.baseline.step_s * slowdown * (1 + 1e-9)
    assert plan.predicted.peak_bytes <= plan.baseline.peak_bytes

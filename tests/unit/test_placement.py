"""Copies are placed where they cost nothing, and sooner or later only where memory is short."""

from __future__ import annotations

import dataclasses
from typing import Any

from backhaul.records import GraphRecord, Offload
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.placement import Limit, place

TIGHT = Limit(nbytes=0, saved_only=False)
FREE = Limit(nbytes=float("inf"), saved_only=False)


def placed(tiny: Any, graph: GraphRecord, limit: Limit, **machine: Any) -> dict[str, Any]:
    cost = CostModel(graph, tiny.machine(graph, **machine))
    return place(cost, {tensor.name: "move" for tensor in graph.saved}, limit)


def test_with_room_a_copy_is_waited_for_when_it_has_ended(tiny: Any) -> None:
    # Op i ends at i + 1 and its copy a second after the engine is free: at i + 2.
    actions = placed(tiny, tiny.chain(4), FREE)
    assert [actions[f"f{i}"].wait_after for i in range(4)] == [1, 2, 3, 3]


def test_without_room_a_copy_is_waited_for_when_nothing_reads_its_source(tiny: Any) -> None:
    actions = placed(tiny, tiny.chain(4), TIGHT)
    assert [actions[f"f{i}"].wait_after for i in range(4)] == [1, 2, 3, 3]
    slow = placed(tiny, tiny.chain(4), TIGHT, link=tiny.link(d2h_bytes_per_s=100.0))
    assert [slow[f"f{i}"].wait_after for i in range(4)] == [1, 2, 3, 3]


def test_a_tensor_that_everything_reads_holds_nothing_up(tiny: Any) -> None:
    graph = tiny.chain(6)
    long_lived = dataclasses.replace(graph.tensors[0], last_forward_use=5)
    graph = dataclasses.replace(graph, tensors=(long_lived, *graph.tensors[1:]))
    actions = placed(tiny, graph, TIGHT)
    assert [actions[f"f{i}"].wait_after for i in range(1, 5)] == [2, 3, 4, 5]


def test_a_copy_back_starts_as_late_as_hides_it(tiny: Any) -> None:
    actions = placed(tiny, tiny.chain(4), FREE)
    for name, use in (("f0", 7), ("f1", 6), ("f2", 5)):
        assert actions[name].reload_before == use - 1
    half = placed(tiny, tiny.chain(4), FREE, link=tiny.link(h2d_bytes_per_s=2000.0))
    assert half["f0"].reload_before == 6


def test_without_room_a_copy_back_starts_at_its_use(tiny: Any) -> None:
    actions = placed(tiny, tiny.chain(4), TIGHT)
    assert [actions[f"f{i}"].reload_before for i in range(4)] == [7, 6, 5, 4]


def test_only_what_is_chosen_moves(tiny: Any) -> None:
    graph = tiny.chain(3)
    cost = CostModel(graph, tiny.machine(graph))
    actions = place(cost, {"f1": "move"}, FREE)
    assert [name for name, action in actions.items() if isinstance(action, Offload)] == ["f1"]

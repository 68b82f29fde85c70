from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backhaul.errors import PlanError
from backhaul.scheduler.cost import CostModel


def test_each_op_costs_what_was_measured(tiny: Any) -> None:
    graph = tiny.chain(2)
    machine = tiny.machine(graph, duration_s={"f1": 3.0}, workspace_bytes={"b0": 7})
    cost = CostModel(graph, machine)
    assert cost.duration_s == (1.0, 3.0, 1.0, 1.0)
    assert cost.workspace_bytes == (0, 0, 0, 7)


def test_op_without_kernel_is_free(tiny: Any) -> None:
    graph = tiny.chain(1)
    free = replace(graph, ops=tuple(replace(op, cost_key="") for op in graph.ops))
    cost = CostModel(free, tiny.machine(graph))
    assert cost.duration_s == (0.0, 0.0)
    assert cost.workspace_bytes == (0, 0)


def test_missing_measurement_is_named(tiny: Any) -> None:
    machine = tiny.machine(tiny.chain(1))
    with pytest.raises(PlanError, match=r"no timing for 2 ops .* the first is b1"):
        CostModel(tiny.chain(2), machine)


@pytest.mark.parametrize(
    ("nbytes", "rounded"), [(0, 0), (1, 512), (512, 512), (513, 1024), (1024, 1024)]
)
def test_sizes_round_up_as_the_allocator_does(tiny: Any, nbytes: int, rounded: int) -> None:
    graph = tiny.chain(1)
    assert CostModel(graph, tiny.machine(graph, alignment_bytes=512)).rounded(nbytes) == rounded


def test_codec_costs_packing_and_unpacking(tiny: Any) -> None:
    graph = tiny.chain(1)
    assert CostModel(graph, tiny.machine(graph)).codec_s(tiny.codec()) == 0.75


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [
        (100, 2.0),  # a measured size
        (200, 3.0),  # between two
        (300, 4.0),
        (500, 8.0),  # beyond the last, along the last segment
        (0, 2.0),  # before the first, never below the least measured: it holds the latency
    ],
)
def test_copy_times_are_interpolated(tiny: Any, nbytes: int, seconds: float) -> None:
    graph = tiny.chain(1)
    link = replace(
        tiny.link(), sizes_bytes=(100, 300, 400), d2h_s=(2.0, 4.0, 6.0), h2d_s=(1.0, 1.0, 1.0)
    )
    cost = CostModel(graph, tiny.machine(graph, link))
    assert cost.copy_s(nbytes, "d2h") == seconds
    assert cost.copy_s(nbytes, "h2d") == 1.0


def test_each_direction_slows_by_its_own_duplex_fraction(tiny: Any) -> None:
    graph = tiny.chain(1)
    machine = tiny.machine(graph, tiny.link(duplex_d2h=0.5, duplex_h2d=0.25))
    cost = CostModel(graph, machine)
    assert cost.copy_s(1000, "d2h", both_ways=True) == 2.0
    assert cost.copy_s(1000, "h2d", both_ways=True) == 4.0

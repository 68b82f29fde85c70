"""Errors of activations that are cast reach weights' gradients alone, and are bounded."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul.errors import VerifyError
from backhaul.passes.step_graphs import StepGraphs
from backhaul.passes.verify import verify
from backhaul.records import Plan
from backhaul.runtime.casts import CAST_DTYPES


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Conv2d(8, 4, 3),
        nn.Flatten(),
        nn.Linear(4 * 14 * 14, 5),
    )


X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    module.zero_grad()
    module(X).square().sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", CAST_DTYPES)
def test_only_weights_whose_input_was_cast_hear_of_it(dtype: torch.dtype) -> None:
    net = model()
    module = backhaul.optimize(
        copy.deepcopy(net), X, planner="compress_all", lossless=False, activation_dtype=dtype
    )
    exact, found = gradients(net), gradients(module)
    differing = {name for name in exact if not torch.equal(exact[name], found[name])}
    assert differing == {"2.weight", "5.weight", "7.weight"}
    for name in differing:
        error = (found[name] - exact[name]).norm() / exact[name].norm()
        assert 0 < error < CAST_DTYPES[dtype]
    codecs = [
        codec
        for decision in module.plan.decisions
        if (codec := getattr(decision.action, "codec", None)) and codec.name == "cast"
    ]
    assert {codec.relative_bound for codec in codecs} == {CAST_DTYPES[dtype]} and len(codecs) == 3
    assert not any(codec.is_exact for codec in codecs)


def test_a_plan_with_casts_is_made_beforehand_saved_and_applied(tmp_path: Path) -> None:
    given = {"lossless": False, "activation_dtype": torch.bfloat16}
    plan = backhaul.plan(model(), X, activation_budget=0.75, actions=("compress",), **given)
    assert "cast" in str(plan)
    plan.save(tmp_path / "plan.json")
    applied = backhaul.apply(model(), X, Plan.load(tmp_path / "plan.json"))
    same = backhaul.optimize(model(), X, activation_budget=0.75, actions=("compress",), **given)
    expected, found = gradients(same), gradients(applied)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    exact = gradients(model())
    assert any(not torch.equal(exact[name], found[name]) for name in exact)


def test_what_is_half_precision_already_is_not_cast_to_half() -> None:
    half = model().bfloat16()
    plan = backhaul.plan(
        half, X.bfloat16(), planner="compress_all", lossless=False, activation_dtype=torch.float16
    )
    assert "name='cast'" not in str(plan)


def test_a_step_that_reads_a_cast_value_elsewhere_is_refused() -> None:
    module = backhaul.optimize(
        model(), X, planner="compress_all", lossless=False, activation_dtype=torch.bfloat16
    )
    step: StepGraphs = module._capture.works[0].step
    verify(step)
    graph = step.backward.graph
    source = graph.find_nodes(op="call_function", target=torch.ops.backhaul.cast_up.default)[0]
    with graph.inserting_after(source):
        reader = graph.call_function(torch.ops.aten.sigmoid.default, (source,))
    reader.meta["val"] = source.meta["val"]
    with pytest.raises(VerifyError, match="rounded_values_reach_weights_alone"):
        verify(step)


@pytest.mark.parametrize(
    ("options", "fault"),
    (
        ({"activation_dtype": torch.int8}, "activation_dtype=torch.int8: give one of torch.bf"),
        ({"activation_dtype": torch.bfloat16, "lossless": True}, "give lossless=False"),
        ({"activation_dtype": torch.bfloat16, "error_budget": 0.1}, "give one of them"),
    ),
)
def test_options_without_a_meaning_are_refused(options: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        backhaul.optimize(nn.Linear(3, 3), torch.randn(2, 3), **{"lossless": False, **options})

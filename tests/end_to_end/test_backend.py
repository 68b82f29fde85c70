"""The `torch.compile` backend: graph breaks, symbolic shapes, options, and what it refuses."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backhaul import backend as backend_module
from backhaul.backend import OPTIONS_VARIABLE
from backhaul.errors import BackhaulError
from backhaul.records import Compress, Plan

# Dynamo looks at `.grad` of what goes from one region to the next, and autograd warns.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

OFFLOADED = {"planner": "offload_all", "executor": "eager"}


class Broken(nn.Module):
    """Two regions, as a graph break lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(8, 8, 3), nn.GELU(), nn.Flatten(), nn.LazyLinear(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        result: Tensor = self.last(y)
        return result


def net() -> nn.Module:
    torch.manual_seed(0)
    model = Broken()
    model(torch.randn(2, 3, 8, 8))
    return model


def compiled(model: nn.Module, options: dict[str, Any], **settings: Any) -> tuple[Any, list[Plan]]:
    plans: list[Plan] = []
    options = {"on_plan": plans.append, **options}
    return torch.compile(model, backend="backhaul", options=options, **settings), plans


def assert_same_step(module: Any, model: nn.Module, reference: nn.Module, x: Tensor) -> None:
    for each in (model, reference):
        each.zero_grad()
    results = module(x), reference(x)
    for result in results:
        result.square().sum().backward()
    assert torch.equal(*results)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name
    for (name, ours), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize(
    "options", [OFFLOADED, {"activation_budget": 0.5, "executor": "eager"}], ids=["all", "half"]
)
def test_regions_and_batches_of_any_size_are_bit_equal(
    dynamic: bool | None, options: dict[str, Any]
) -> None:
    model = net()
    reference = copy.deepcopy(model)
    module, plans = compiled(model, options, dynamic=dynamic)
    for batch in (4, 4, 6, 3, 4):
        assert_same_step(module, model, reference, torch.randn(batch, 3, 8, 8))
    # Two regions; a batch that was first static may be planned once more when it is symbolic.
    assert 6 <= len(plans) <= 8
    with torch.no_grad():
        x = torch.randn(5, 3, 8, 8)
        assert torch.equal(module.eval()(x), reference.eval()(x))


def test_a_new_shape_is_said_and_the_oldest_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend_module, "SHAPES_KEPT", 2)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    reference = copy.deepcopy(model)
    module, plans = compiled(model, OFFLOADED, dynamic=True)
    with caplog.at_level(logging.WARNING, logger="backhaul.backend"):
        for batch in (4, 6, 8, 6, 8, 4):
            assert_same_step(module, model, reference, torch.randn(batch, 8))
    assert len(plans) == 4
    assert sum("new shapes" in record.message for record in caplog.records) == 3


def test_by_default_inductor_runs_the_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    monkeypatch.setenv(OPTIONS_VARIABLE, '{"activation_budget": 0.5}')
    run = backend_module._Region._rewrite

    def noted(region: Any, step: Any) -> Any:
        work = run(region, step)
        plans.append(work.plan)
        return work

    monkeypatch.setattr(backend_module._Region, "_rewrite", noted)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()).double()
    reference = copy.deepcopy(model)
    x = torch.randn(16, 8, dtype=torch.float64)
    module = torch.compile(model, backend="backhaul")
    for each in (module, reference):
        each(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-11)
    assert [plan.graph.executor for plan in plans] == ["inductor"]
    assert plans[0].budget.kind == "activations"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"memory": 1}, "options has memory: give some of memory_budget"),
        ({"held_bytes": 1}, "options has held_bytes"),
        ({"executor": "xla"}, "executor='xla'"),
        ({"lossless": False}, "error bounds come from training"),
        ({"activation_budget": 2.0}, "a fraction lies in"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], told: str) -> None:
    module, _ = compiled(nn.Linear(2, 2), options)
    with pytest.raises(Exception, match=told):
        module(torch.randn(2, 2))


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_activations_are_cast_where_errors_are_allowed(executor: str) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
    reference = copy.deepcopy(model)
    options = {"lossless": False, "activation_dtype": torch.bfloat16, "planner": "compress_all"}
    module, plans = compiled(model, {**options, "executor": executor})
    x = torch.randn(16, 8)
    for each in (module, reference):
        each(x).square().sum().backward()
    assert any(isinstance(decision.action, Compress) for decision in plans[0].decisions)
    last, exact = model[2].weight.grad, reference[2].weight.grad
    assert last is not None and exact is not None
    torch.testing.assert_close(last, exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))
    assert not torch.equal(last, exact)


@pytest.mark.parametrize(("text", "told"), [("{", "is no JSON"), ("[]", "give an object")])
def test_a_variable_that_holds_no_options_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, text)
    with pytest.raises(Exception, match=told):
        torch.compile(nn.Linear(2, 2), backend="backhaul")(torch.randn(2, 2))


def test_hooks_of_saved_tensors_are_refused_where_handles_are_saved() -> None:
    model = net()
    module, _ = compiled(model, OFFLOADED)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        pytest.raises(BackhaulError, match="saved-tensor hooks are on"),
    ):
        module(torch.randn(4, 3, 8, 8))

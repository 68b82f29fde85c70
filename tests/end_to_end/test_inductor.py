"""The step that Inductor compiles: close to eager under every plan, and never without its plan."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn

import backhaul
from backhaul.records import Plan
from backhaul.runtime.adversary import AdversaryLink
from backhaul.runtime.memory import can_measure_peak, measure_peak_bytes

CPU = torch.device("cpu")


class Mixer(nn.Module):
    """Convolution, norms, attention, an in-place op, a view of a view, and a shared tensor.

    In float64, so that the order of sums is no excuse.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.last = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu_(self.norm(self.conv(x)))
        rows = y.flatten(2).transpose(1, 2)
        scores = self.query(rows) @ self.key(rows).transpose(1, 2)
        mixed = rows + (scores / 4).softmax(-1) @ self.value(rows)
        left, right = self.last(mixed).chunk(2, dim=-1)
        return (left * right.sigmoid()).sum(1), y.mean((2, 3))


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, dtype=torch.float64)


def assert_close(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert list(expected) == list(actual)
    for key, value in expected.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            torch.testing.assert_close(actual[key], value, rtol=1e-9, atol=1e-11, msg=key)


@pytest.mark.parametrize(
    ("plan", "order"),
    [
        ("keep_all", "first"),
        ("offload_all", "last"),
        ("recompute_all", "first"),
        ("random", "random"),
        ("frontier", "random"),
    ],
)
def test_gradients_are_those_of_eager(
    train: Callable[..., Any], random_planner: Any, plan: str, order: Any
) -> None:
    torch.manual_seed(0)
    model, sample = Mixer(), images()
    reference = copy.deepcopy(model)
    options: dict[str, Any] = {
        "random": {"planner": random_planner(3)},
        "frontier": {"activation_budget": 0.4},
    }.get(plan, {"planner": plan})
    link = AdversaryLink(order, seed=1)
    module = backhaul.optimize(model, sample, executor="inductor", link=link, **options)
    assert_close(train(reference, sample), train(module, sample))
    assert module.plan.graph.executor == "inductor"
    assert bool(module.plan.slots) >= (plan == "offload_all")


def test_a_missing_wait_shows(monkeypatch: pytest.MonkeyPatch, train: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, sample = Mixer(), images()
    reference = copy.deepcopy(model)
    link = AdversaryLink("last", seed=1)
    module = backhaul.optimize(model, sample, executor="inductor", planner="offload_all", link=link)
    monkeypatch.setattr("backhaul.runtime.session.Session.wait_reload", lambda *_: None)
    with pytest.raises(Exception):  # noqa: B017  # a wrong number, or a poisoned buffer
        assert_close(train(reference, sample), train(module, sample))


def test_an_unused_output_leaves_its_parameters_without_gradients() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.parts["a"](x).relu(), self.parts["b"](x).relu()

    module = backhaul.optimize(Two(), torch.randn(4, 8), executor="inductor", planner="keep_all")
    module(torch.randn(4, 8))[0].sum().backward()
    assert model["a"].weight.grad is not None
    assert model["b"].weight.grad is None


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(x)
        dropped = nn.functional.dropout(hidden, 0.5)
        return hidden, dropped.sin() + dropped


@pytest.mark.parametrize("draws_as_eager", [False, True])
@pytest.mark.parametrize("plan", ["recompute_all", "offload_all"])
def test_the_backward_drops_what_the_forward_dropped(plan: str, draws_as_eager: bool) -> None:
    model, x = Dropped().double(), torch.randn(64, 8, dtype=torch.float64)
    with inductor_config.patch(fallback_random=draws_as_eager):
        module = backhaul.optimize(model, x, executor="inductor", planner=plan)
        for _ in range(3):
            hidden, result = module(x)
            (gradient,) = torch.autograd.grad(result.sum(), model.linear.bias)
            slope = 2 * ((2 * hidden).cos() + 1) * (result != 0)
            torch.testing.assert_close(gradient, slope.sum(0))


def test_a_saved_plan_brings_its_executor(tmp_path: Path, train: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, sample = Mixer(), images()
    reference = copy.deepcopy(model)
    made = backhaul.plan(model, sample, executor="inductor", activation_budget=0.4)
    made.save(tmp_path / "plan.json")
    module = backhaul.apply(model, sample, Plan.load(tmp_path / "plan.json"))
    assert module.plan == made
    assert_close(train(reference, sample), train(module, sample))


def test_an_unknown_executor_is_refused() -> None:
    with pytest.raises(ValueError, match="executor='xla': give one of eager, inductor"):
        backhaul.optimize(nn.Linear(2, 2), torch.randn(2, 2), executor="xla")  # type: ignore[arg-type]


@pytest.mark.skipif(not can_measure_peak(CPU), reason="another profiler is running")
def test_the_peak_is_the_predicted_one_within_a_tenth(tmp_path: Path) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    model = nn.Sequential(*(copy.deepcopy(block) for _ in range(6)))
    sample = torch.randn(8, 8, 64, 64)
    module = backhaul.optimize(
        model, sample, executor="inductor", activation_budget=0.5, spill_folder=tmp_path
    )
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), sample))

    def step() -> None:
        module(sample).square().mean().backward()

    step()
    model.zero_grad()
    peak_bytes = measure_peak_bytes(step, CPU).peak_bytes + held
    # The loss and its gradient are no part of the step.
    loss_bytes = 2 * 8 * 8 * 64 * 64 * 4
    assert peak_bytes < 1.1 * module.plan.predicted.peak_bytes + loss_bytes


CACHED = """
import json, sys, torch, backhaul
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
x = torch.randn(32, 64)
from torch._dynamo.utils import counters
module = backhaul.optimize(model, x, executor="inductor", planner=sys.argv[1])
module(x).sum().backward()
print(json.dumps({
    "planner": module.plan.planner,
    "slots": len(module.plan.slots),
    "gradient": float(model[0].weight.grad.double().sum()),
    "hits": counters["inductor"]["fxgraph_cache_hit"],
}))
"""


def test_a_warm_cache_of_another_process_never_skips_the_plan(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "BACKHAUL_CACHE_DIR": str(tmp_path / "measured"),
    }

    def run(planner: str) -> dict[str, Any]:
        command = [sys.executable, "-W", "ignore", "-c", CACHED, planner]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    kept, moved, again = run("keep_all"), run("offload_all"), run("offload_all")
    assert (kept["slots"], moved["planner"]) == (0, "offload_all")
    assert moved["slots"] == again["slots"] > 0
    assert kept["gradient"] == moved["gradient"] == again["gradient"]


def test_an_error_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="has no error_budget yet"):
        backhaul.optimize(nn.Linear(2, 2), torch.randn(2, 2), executor="inductor", lossless=False)

"""A small net trains under every plan, bit for bit as in eager, with the links that users get."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backhaul
from backhaul.errors import BudgetError, CaptureError, PlanError

PLANS: dict[str, dict[str, Any]] = {
    "keep_all": {"planner": "keep_all"},
    "offload_all": {"planner": "offload_all"},
    "compress_all": {"planner": "compress_all"},
    "frontier": {"activation_budget": 0.6},
}


@pytest.fixture(name="net")
def _net(small_net: Callable[[], tuple[nn.Module, torch.Tensor]]) -> nn.Module:
    return small_net()[0]


IMAGES = torch.linspace(-1, 1, 4 * 3 * 16 * 16).reshape(4, 3, 16, 16)


def train_once(net: nn.Module, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    net.zero_grad(set_to_none=True)
    loss = net(IMAGES).square().mean()
    loss.backward()
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(buffer.clone() for buffer in net.buffers())]


@pytest.mark.parametrize("plan", PLANS)
def test_three_steps_are_bit_equal_to_eager(net: nn.Module, plan: str, tmp_path: Path) -> None:
    eager = copy.deepcopy(net)
    planned = backhaul.optimize(net, IMAGES, spill_folder=tmp_path, **PLANS[plan])
    for seed in range(3):
        expected, actual = train_once(eager, seed), train_once(planned, seed)
        assert len(expected) == len(actual)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_optimize_leaves_no_trace(net: nn.Module, tmp_path: Path) -> None:
    before = {name: value.clone() for name, value in net.state_dict().items()}
    random_state = torch.get_rng_state()
    planned = backhaul.optimize(net, IMAGES, planner="offload_all", spill_folder=tmp_path)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert list(planned.state_dict()) == list(before)


def test_a_saved_plan_is_applied_and_another_model_is_refused(
    net: nn.Module, tmp_path: Path
) -> None:
    planned = backhaul.optimize(net, IMAGES, planner="offload_all", spill_folder=tmp_path)
    planned.plan.save(tmp_path / "plan.json")
    loaded = backhaul.Plan.load(tmp_path / "plan.json")
    assert loaded == planned.plan
    applied = backhaul.apply(copy.deepcopy(net), IMAGES, loaded, spill_folder=tmp_path)
    assert applied.plan.decisions == loaded.decisions
    with pytest.raises(PlanError, match="another graph"):
        backhaul.apply(nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4), loaded)


def test_a_budget_below_the_floor_names_the_smallest_that_fits(
    net: nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(BudgetError) as caught:
        backhaul.optimize(net, IMAGES, activation_budget=1, spill_folder=tmp_path)
    smallest = caught.value.smallest_bytes
    backhaul.optimize(net, IMAGES, activation_budget=smallest, spill_folder=tmp_path)


def test_a_model_without_gradients_is_refused(net: nn.Module) -> None:
    with pytest.raises(CaptureError, match="requires grad"):
        backhaul.optimize(net.requires_grad_(False), IMAGES)

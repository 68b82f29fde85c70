"""What is computed again gives the same bits, whatever it is and however little is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import backhaul
from backhaul.records import Offload, Recompute
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.frontier import Frontier

Check = Callable[..., Any]


class Chain(nn.Module):
    """Linear, tanh and dropout, again and again."""

    def __init__(self, length: int, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(length))
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.noise(layer(x).tanh())
        return x


NOISES: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "rand": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + x.sin() * torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().abs().clamp(0.1, 0.9)),
    "rrelu": lambda x: nn.functional.rrelu(x, training=True),
}


@pytest.mark.parametrize("length", [1, 3, 10])
def test_dropouts_under_every_budget(length: int, train: Check, assert_same_facts: Check) -> None:
    original, sample = Chain(length, NOISES["dropout"]), torch.randn(64, 32)
    kept = backhaul.plan(copy.deepcopy(original), sample, planner="keep_all")
    cost = CostModel(kept.graph, kept.machine)
    budgets = [each.used_bytes for each in Frontier(cost, "activations").candidates]
    assert len(budgets) > 1
    expected = train(copy.deepcopy(original), sample)
    for nbytes in budgets:
        torch._dynamo.reset()
        model = copy.deepcopy(original)
        module = backhaul.optimize(model, sample, activation_budget=max(nbytes, 1))
        assert_same_facts(expected, train(module, sample), f"{nbytes} bytes")


@pytest.mark.parametrize("noise", NOISES)
def test_random_ops_that_are_computed_again(noise: str, assert_bit_equal: Check) -> None:
    plans = assert_bit_equal(
        lambda: Chain(3, NOISES[noise]), lambda: torch.randn(8, 32), plans=["recompute_all"]
    )
    decisions = plans["recompute_all"].decisions
    assert any(isinstance(each.action, Recompute) for each in decisions)


def test_what_is_saved_besides_never_takes_the_place_of_another(assert_bit_equal: Check) -> None:
    # A checkpointed region is there twice, so that the backward knows its names already.
    def densenet(is_checkpointed: bool) -> nn.Module:
        return torchvision.models.DenseNet(
            4, (3, 3), 8, bn_size=2, num_classes=4, memory_efficient=is_checkpointed
        )

    assert_bit_equal(
        lambda: densenet(True),
        lambda: torch.randn(2, 3, 32, 32),
        make_reference=lambda: densenet(False),
    )


def test_a_recipe_never_reads_an_input_that_the_step_changes(assert_bit_equal: Check) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sin(x * torch.exp(self.scale))
            self.scale.add_(1)
            return y.tanh()

    assert_bit_equal(Counting, lambda: torch.randn(16), plans=["recompute_all", "random"])


def test_batch_norm_counts_once(assert_bit_equal: Check) -> None:
    def block(inputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    plans = assert_bit_equal(
        lambda: nn.Sequential(block(3), block(4), block(4)),
        lambda: torch.randn(2, 3, 12, 12),
        plans=["recompute_all"],
    )
    recomputed = [each.tensor for each in plans["recompute_all"].decisions]
    assert any(name.startswith("relu") for name in recomputed)


def test_only_the_actions_that_are_allowed_are_taken() -> None:
    model, sample = Chain(6, NOISES["dropout"]), torch.randn(64, 32)
    for action, kind in (("recompute", Recompute), ("offload", Offload)):
        torch._dynamo.reset()
        plan = backhaul.plan(model, sample, activation_budget=0.6, actions=(action,))
        taken = {type(each.action) for each in plan.decisions}
        assert kind in taken and len(taken) == 2
    with pytest.raises(ValueError, match="actions="):
        backhaul.plan(model, sample, actions="recompute")


def test_what_the_caller_holds_counts() -> None:
    model, sample = Chain(2, NOISES["dropout"]), torch.randn(8, 32)
    alone = backhaul.plan(model, sample, planner="keep_all")
    torch._dynamo.reset()
    beside = backhaul.plan(model, sample, planner="keep_all", held_bytes=1 << 20)
    assert beside.baseline.peak_bytes == alone.baseline.peak_bytes + (1 << 20)
    assert beside.baseline.step_peak_bytes == alone.baseline.step_peak_bytes
    with pytest.raises(ValueError, match="held_bytes=-1"):
        backhaul.plan(model, sample, held_bytes=-1)


class HalfPrecisionResidual(nn.Module):
    """Blocks that normalise in float32 beside a residual stream in bfloat16, as Llama's."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(32) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        for weight, layer in zip(self.weights, self.layers, strict=True):
            wide = x.float()
            normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
            x = x + layer(weight * normed.to(torch.bfloat16))
        return x


def test_the_residual_stream_is_held_and_not_its_wide_copies(assert_bit_equal: Check) -> None:
    plans = assert_bit_equal(
        lambda: HalfPrecisionResidual(4),
        lambda: torch.randn(64, 32, dtype=torch.bfloat16),
        plans=["recompute_all", "random", "frontier"],
    )
    plan = plans["recompute_all"]
    checkpoints = [each for each in plan.graph.tensors if each.role == "checkpoint"]
    assert checkpoints and {each.dtype for each in checkpoints} == {"bfloat16"}
    held = {each.tensor for each in plan.decisions if not isinstance(each.action, Recompute)}
    assert held & {each.name for each in checkpoints}
    assert plan.predicted.saved_peak_bytes < 0.5 * plan.baseline.saved_peak_bytes


@pytest.mark.parametrize("seed", range(6))
def test_checkpoints_may_be_moved_and_recomputed(
    seed: int, train: Check, assert_same_facts: Check, random_planner: Check
) -> None:
    original, sample = HalfPrecisionResidual(4), torch.randn(64, 32, dtype=torch.bfloat16)
    expected = train(copy.deepcopy(original), sample)
    model = copy.deepcopy(original)
    module = backhaul.optimize(model, sample, planner=random_planner(seed))
    assert_same_facts(expected, train(module, sample))

"""Faults of rounding that testers reported, each held to what they expected."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import backhaul
from backhaul.compression import LARGEST_BOUND
from backhaul.module import OptimizedModule

RANDOM = torch.Generator().manual_seed(0)


def lossy(model: nn.Module, sample: object, **options: object) -> OptimizedModule:
    given = {"planner": "compress_all", "lossless": False, **options}
    return backhaul.optimize(model, sample, **given)  # type: ignore[arg-type]


def run(module: nn.Module, x: Tensor, times: int = 1) -> None:
    for _ in range(times):
        module.zero_grad()
        module(x).square().mean().backward()


def small_convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 4, 1),
    )


def test_no_budget_allows_errors_as_large_as_what_is_rounded() -> None:
    x = torch.randn(8, 3, 16, 16, generator=RANDOM)
    net = small_convolutions()
    module = lossy(copy.deepcopy(net), x, error_budget=0.9, warmup_steps=4)
    run(module, x, 9)
    values = [net[:2](x).detach(), net[:4](x).detach()]
    largest = [LARGEST_BOUND * float(y[y > 0].square().mean().sqrt()) for y in values]
    bounds = sorted(module.compression.history[0].bounds.values())
    assert bounds == pytest.approx(sorted(largest), rel=1e-3)
    assert module.compression.history[0].noise_share < 0.9
    run(net, x)
    for name, p in net.named_parameters():
        error = (module.get_parameter(name).grad - p.grad).norm() / p.grad.norm()
        assert error < 0.1


class InputAsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) @ y


class ComputedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linear = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        self.net = nn.Sequential(linear, nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x) + y.sum(0)


@pytest.mark.parametrize("kind", (InputAsWeight, ComputedWeight))
@pytest.mark.parametrize("rounding", ({"activation_dtype": torch.float8_e5m2}, {"warmup_steps": 3}))
def test_gradients_of_inputs_are_exact(kind: type[nn.Module], rounding: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = kind()
    module = lossy(copy.deepcopy(model), (torch.randn(128, 64), torch.randn(64, 32)), **rounding)
    for _ in range(10):
        exact, found = [], []
        given = (torch.randn(128, 64), torch.randn(64, 32))
        for each, gradients in ((model, exact), (module, found)):
            inputs = [x.clone().requires_grad_() for x in given]
            each(*inputs).square().mean().backward()
            gradients += [x.grad for x in inputs]
        assert all(torch.equal(a, b) for a, b in zip(exact, found, strict=True))


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = self.linear(torch.relu(self.convolution(x)).flatten(2).transpose(1, 2))
        return patches


@pytest.mark.parametrize("rounding", ({"activation_dtype": torch.bfloat16}, {"warmup_steps": 3}))
def test_a_linear_layer_may_read_a_transposed_activation(rounding: dict[str, object]) -> None:
    x = torch.randn(8, 3, 32, 32)
    module = lossy(Patches(), x, **rounding)
    run(module, x, 10)
    assert "'cast'" in str(module.plan) or module.plan.rounded


def test_double_precision_is_rounded() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).double()
    x = torch.randn(256, 64, dtype=torch.float64)
    module = lossy(model, x, warmup_steps=3)
    run(module, x, 10)
    assert module.plan.rounded


def test_autocast_is_rounded() -> None:
    x = torch.randn(16, 3, 16, 16)
    module = lossy(small_convolutions(), x, warmup_steps=3)
    for _ in range(10):
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        y.float().square().mean().backward()
    assert module.plan.rounded


def test_a_new_shape_gets_the_bounds_that_are_in_force() -> None:
    x = torch.randn(16, 3, 16, 16)
    module = lossy(small_convolutions(), x, warmup_steps=8, refresh_steps=20)
    run(module, x, 14)
    run(module, 0.05 * x, 60)
    in_force = {given.tensor: given.bound for given in module.compression.error_bounds}
    assert in_force != module.compression.history[0].bounds
    run(module, 0.05 * x[:12])
    assert {name: codec.bound for name, codec in module.plans[-1].rounded} == in_force


def test_a_smaller_last_batch_does_not_upset_the_controller() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(small_convolutions(), nn.Flatten(), nn.Linear(4 * 64, 10))
    x, y = torch.randn(64, 3, 8, 8), torch.randint(0, 10, (64,))
    module = lossy(net, x, error_budget=0.05, warmup_steps=10, refresh_steps=200)
    for step in range(64):
        count = 4 if step % 9 == 8 else 64
        module.zero_grad()
        functional.cross_entropy(module(x[:count]), y[:count]).backward()
    history = module.compression.history
    assert len(history) == 1 and max(history[0].bits.values()) < 12
    assert not any(module.overflow_counts.values())


def test_a_state_that_is_none_changes_nothing() -> None:
    module = lossy(nn.Linear(3, 3), torch.randn(2, 3))
    before = module.compression.state_dict()
    with pytest.raises(KeyError):
        module.compression.load_state_dict({"step": 7})
    assert module.compression.state_dict() == before

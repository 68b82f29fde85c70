"""The noise that theory tells is the noise that gradients get, and budgets are spent whole."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backhaul.runtime.quantiser import dequantise, misfit_count, quantise
from backhaul.scheduler.error_budget import LinearNoise, bounds_of, comet_bound


def layer(numel: int = 1000, nonzero: float = 1.0, norm: float = 1.0, fan: int = 9) -> LinearNoise:
    return LinearNoise(numel=numel, nonzero_fraction=nonzero, fan_in=fan, gradient_norm=norm)


def test_the_budget_is_spent_whole() -> None:
    layers = {"a": layer(1000, 0.5, 2.0), "b": layer(50, 1.0, 0.1, 64), "c": layer(7, 0.3, 9.0, 1)}
    bounds = bounds_of(layers, 0.25)
    spent = math.hypot(*(layers[name].noise(bound) for name, bound in bounds.items()))
    assert spent == pytest.approx(0.25)


def test_no_other_split_of_the_budget_takes_fewer_bits() -> None:
    layers = {"a": layer(1000, 0.5, 2.0), "b": layer(300, 1.0, 0.1, 64)}
    best = bounds_of(layers, 1.0)

    def bits(bounds: dict[str, float]) -> float:
        return -sum(layers[name].numel * math.log2(bound) for name, bound in bounds.items())

    for part in (0.1, 0.5, 0.7, 0.76, 0.78, 0.9):
        split = {"a": math.sqrt(part), "b": math.sqrt(1 - part)}
        other = {name: noise / layers[name].noise(1.0) for name, noise in split.items()}
        assert bits(best) <= bits(other)


def test_an_activation_that_no_gradient_meets_may_have_any_error() -> None:
    bounds = bounds_of({"a": layer(), "dead": layer(norm=0.0), "zero": layer(nonzero=0.0)}, 1.0)
    assert bounds["dead"] == bounds["zero"] == math.inf
    assert bounds["a"] == bounds_of({"a": layer()}, 1.0)["a"]


def test_a_budget_of_nothing_allows_no_error() -> None:
    assert bounds_of({"a": layer()}, 0.0) == {"a": 0.0}
    with pytest.raises(ValueError, match="nan"):
        bounds_of({"a": layer()}, math.nan)


def test_comets_rule() -> None:
    bound = comet_bound(momentum_mean=2.0, gradient_mean=0.5, batch=16, nonzero_fraction=0.25)
    assert bound == pytest.approx(0.01 * 2.0 / (0.32 * 0.5 * 2.0))
    dead = comet_bound(momentum_mean=2.0, gradient_mean=0.0, batch=16, nonzero_fraction=0.25)
    assert dead == math.inf


def conv(groups: int) -> Callable[[Tensor, Tensor], Tensor]:
    def gradient(x: Tensor, g: Tensor) -> Tensor:
        size = (g.shape[1], x.shape[1] // groups, 3, 3)
        return torch.nn.grad.conv2d_weight(x, size, g, padding=1, groups=groups)

    return gradient


CASES = {
    "conv": ((2, 16, 24, 24), (2, 24, 24, 24), conv(1)),
    "depthwise": ((2, 128, 24, 24), (2, 128, 24, 24), conv(128)),
    "linear": ((256, 64), (256, 48), lambda x, g: g.t() @ x),
}


@pytest.mark.parametrize("is_relu", (False, True))
@pytest.mark.parametrize("name", CASES)
def test_noise_is_what_theory_tells(name: str, is_relu: bool) -> None:
    torch.manual_seed(0)
    size, output_size, gradient = CASES[name]
    x, g = torch.randn(size), torch.randn(output_size)
    x = x.relu() if is_relu else x
    bound = 0.02
    packed = quantise(x, torch.tensor(bound), 8, 0)
    assert int(misfit_count(packed, x.numel(), 8, 0, x.dtype)) == 0
    lossy = dequantise(packed, 8, 0, x.shape, x.stride(), x.dtype)
    exact = gradient(x, g)
    told = LinearNoise(
        numel=x.numel(),
        nonzero_fraction=float((x != 0).float().mean()),
        fan_in=exact[0].numel(),
        gradient_norm=float(g.norm()),
    ).noise(bound)
    found = float((gradient(lossy, g) - exact).norm())
    # The padding of a 3 x 3 kernel leaves out a few of the products that theory counts.
    assert found == pytest.approx(told, rel=0.1)

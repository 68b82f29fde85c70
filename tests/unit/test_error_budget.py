"""The noise that theory tells is the noise that gradients get, and budgets are spent whole."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backhaul.records import Mode
from backhaul.runtime.observer import Observer, Read
from backhaul.runtime.quantiser import dequantise, fitting_forms, measure, quantise
from backhaul.scheduler.error_budget import LinearNoise, bounds_of, comet_bound


def rounded(x: Tensor, bound: float, mode: Mode) -> Tensor:
    told = torch.tensor(bound)
    form = fitting_forms(measure(x, told, mode).tolist(), mode)[-1]
    return dequantise(quantise(x, told, form), form, x.shape, x.stride(), x.dtype)


def layer(numel: int = 1000, nonzero: float = 1.0, norm: float = 1.0, fan: int = 9) -> LinearNoise:
    return LinearNoise(numel=numel, spread=fan * nonzero * norm**2)


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
    "conv": ((2, 16, 24, 24), (2, 24, 24, 24), conv(1), 16, True),
    "small conv": ((64, 16, 2, 2), (64, 24, 2, 2), conv(1), 16, True),
    "depthwise": ((2, 128, 24, 24), (2, 128, 24, 24), conv(128), 1, True),
    "grouped": ((4, 32, 12, 12), (4, 48, 12, 12), conv(4), 8, True),
    "linear": ((256, 64), (256, 48), lambda x, g: g.t() @ x, 64, False),
}


@pytest.mark.parametrize("mode", ("zero", "sign", "dither"))
@pytest.mark.parametrize("name", CASES)
def test_noise_is_what_theory_tells(name: str, mode: Mode) -> None:
    torch.manual_seed(0)
    size, output_size, gradient, channels, is_conv = CASES[name]
    x, g = torch.randn(size), torch.randn(output_size)
    x = x if mode == "dither" else x.relu()
    # Zeros lie where gradients are small.
    if mode != "dither":
        kept = torch.rand(size[0], size[1] if name in ("depthwise", "grouped") else 1)
        if name == "grouped":
            kept = kept[:, ::8].repeat_interleave(8, dim=1)
        scale = kept if name != "grouped" else kept[:, ::8].repeat_interleave(12, dim=1)
        shape = (*kept.shape, *[1] * (len(size) - 2))
        x = torch.where(torch.rand(size) < kept.view(shape), x, 0.0)
        g = g * scale.view(*scale.shape, *[1] * (len(size) - 2))
    bound = 0.02
    lossy = rounded(x, bound, mode)
    exact = gradient(x, g)
    observer = Observer()
    observer.mode = "norms"
    inner = [3] * (size[-1] - 2)
    taps = (2, *inner, 2) * 2 if is_conv else ()
    observer.watch(read := Read("x", "op", channels, taps), g, x, exact)
    told = LinearNoise(numel=x.numel(), spread=observer.sums()[read].spread).noise(bound)
    found = float((gradient(lossy, g) - exact).norm())
    assert found == pytest.approx(told, rel=0.05)


def test_errors_of_a_dense_tensor_are_not_biased() -> None:
    """What is far below the bound would vanish from every sample if it were rounded to 0."""
    x, bound = torch.full((1 << 16,), 0.01), 0.3
    y = rounded(x, bound, "dither")
    assert float(y.mean()) == pytest.approx(0.01, abs=4 * 0.3 / 3**0.5 / 256)
    assert float(y.std()) == pytest.approx(0.3 / 3**0.5, rel=0.01)

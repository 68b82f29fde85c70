"""How large an error each saved activation may have, so that gradients get no more than a share.

A linear op (a convolution, a matrix product) computes its weight's gradient as sums of products
of what it saved, x, and of its output's gradient, g.  If every element of x that is not zero has an
independent error of variance `bound**2 / 3`, as rounding to steps of `2 * bound` gives it, then an
element of the weight's gradient that belongs to output channel c gets an error of

    sigma_c**2 = bound**2 / 3 * R * |g_c|**2

where R is the share of x that is not zero and |g_c| the Euclidean norm of the channel's g: each
product's error is one error of x times one element of g.  COMET (Jin et al. 2021, eq. 6-8) has
the same form with a fitted constant and the mean of g.  Over the whole weight the noise's squared
norm is the sum of that over its elements,

    noise**2 = bound**2 / 3 * spread        spread = channels * sum(R_n * taps(p) * |g_np|**2)

with the input channels of a group, the share R_n of sample n that is not zero in that group and, at
each position p of g, the taps of the kernel that meet x there and not its padding.  A matrix
product has one tap everywhere, and each of its rows is a sample.

The budget is on the sum of these over all layers.  An element takes about `log2(range / 2 bound)`
bits, so that halving a bound costs a tensor of n elements n bits, whatever the bound.  The least
bytes for a given sum of squares therefore give each tensor a part in proportion to its elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LinearNoise", "bounds_of", "comet_bound"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearNoise:
    """What linear ops make of an error of an activation that they saved.

    Attributes:
        numel: Elements of the activation.
        spread: Squared norm of the noise of the weights' gradients, for errors of variance 1.
    """

    numel: int
    spread: float

    def noise(self, bound: float) -> float:
        """Return the Euclidean norm of the error of the weights' gradients that is expected."""
        return bound * math.sqrt(self.spread / 3)


def bounds_of(layers: Mapping[str, LinearNoise], allowed_noise: float) -> dict[str, float]:
    """Spend a budget of noise where it saves most bytes.

    Args:
        layers: The saved activations by name.
        allowed_noise: Euclidean norm of the error of all weights' gradients together.

    Returns:
        A bound for each activation.  It is infinite where no error reaches the gradient, as
        behind a gradient of zero: such an op takes no part of the budget.

    Raises:
        ValueError: The budget is negative or no number.
    """
    if not allowed_noise >= 0:
        raise ValueError(f"the noise allowed is {allowed_noise}; give a number from 0 on")
    heard = {name: layer for name, layer in layers.items() if layer.noise(1.0) > 0}
    total = sum(layer.numel for layer in heard.values())
    return {
        name: allowed_noise * math.sqrt(layer.numel / total) / layer.noise(1.0)
        if name in heard
        else math.inf
        for name, layer in layers.items()
    }


def comet_bound(
    *,
    momentum_mean: float,
    gradient_mean: float,
    batch: int,
    nonzero_fraction: float,
    share: float = 0.01,
    coefficient: float = 0.32,
) -> float:
    """Return the bound of COMET's own rule for one layer, for comparison.

    `eb = share * momentum_mean / (coefficient * gradient_mean * sqrt(batch * nonzero_fraction))`

    Args:
        momentum_mean: Mean absolute momentum of the layer's weight.
        gradient_mean: Mean absolute gradient of the op's output, Lmean.
        batch: Samples in a batch, N.
        nonzero_fraction: Share of the activation that is not zero, R.
        share: Part of the momentum that noise may have.
        coefficient: The constant a, fitted by the authors.

    Returns:
        The bound; infinite where the gradient or the activation is zero.
    """
    spread = coefficient * gradient_mean * math.sqrt(batch * nonzero_fraction)
    return share * momentum_mean / spread if spread else math.inf

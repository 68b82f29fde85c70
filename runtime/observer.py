"""Watch the backward of some steps: how much an error of each activation would be heard.

A read is one op that computes a weight's gradient from an activation.  Sums stay on the device
until they are asked for, so that watching a step does not stop it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from backhaul.records import Mode
from backhaul.runtime import quantiser

__all__ = ["Observer", "Read", "ReadSums"]

Watch = Literal["off", "norms", "sizes"]


@dataclass(frozen=True, slots=True)
class Read:
    """One op that computes a weight's gradient from an activation.

    Attributes:
        tensor: Name of the activation.
        op: Name of the op.
        channels: Elements of the weight for each output channel and tap of the kernel.
        taps: How many taps of the kernel meet the activation, and not its padding, at each
            position of each spatial dimension, one dimension after the other; none for a matrix
            product.
    """

    tensor: str
    op: str
    channels: int
    taps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSums:
    """Means over the steps that were watched.

    Attributes:
        spread: Squared noise of the weight's gradient, for errors of variance 1.
        squared_norm: Squared Euclidean norm of the weight's gradient.
        nonzero_fraction: Share of the activation that is not zero.
        gradient_mean: Mean absolute gradient of the layer's output.
        weight_gradient_mean: Mean absolute gradient of the weight.
    """

    spread: float
    squared_norm: float
    nonzero_fraction: float
    gradient_mean: float
    weight_gradient_mean: float

    @property
    def is_finite(self) -> bool:
        """Say whether every gradient was finite, as those of a loss that is scaled may not be."""
        return math.isfinite(self.spread) and math.isfinite(self.squared_norm)


class Observer:
    """What has been seen of every read.

    Attributes:
        mode: What the next backward is watched for.
        bounds: Bound of each activation, and how it is rounded, for `sizes`.
        sized_count: Backwards that were watched for `sizes`.
    """

    def __init__(self) -> None:
        self.mode: Watch = "off"
        self.bounds: Mapping[str, tuple[float, Mode]] = {}
        self.sized_count = 0
        self._sums: dict[Read, tuple[Tensor, int]] = {}
        self._needs: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Begin anew."""
        self._sums.clear()
        self._needs.clear()
        self.sized_count = 0

    def watch(self, read: Read, gradient: Tensor, activation: Tensor, result: Tensor) -> None:
        """Look at one read, if its step is watched.

        Args:
            read: The read.
            gradient: Gradient of the layer's output, channels second, or all of it a matrix.
            activation: The activation, of any shape.
            result: Gradient of the weight.
        """
        if self.mode == "norms":
            seen = _sums_of(read, gradient, activation, result)
            total, count = self._sums.get(read, (torch.zeros_like(seen), 0))
            self._sums[read] = total + seen, count + 1
        elif self.mode == "sizes" and read.tensor in self.bounds:
            value, mode = self.bounds[read.tensor]
            bound = torch.tensor(value, dtype=torch.float32, device=activation.device)
            needs = quantiser.measure(activation, bound, mode)
            self.sized_count += read.tensor == next(iter(self.bounds))
            known = self._needs.get(read.tensor)
            self._needs[read.tensor] = needs if known is None else torch.maximum(known, needs)

    def sums(self) -> dict[Read, ReadSums]:
        """Return the means of all that was watched."""
        return {read: _means(total, count) for read, (total, count) in self._sums.items()}

    def needs(self) -> dict[str, tuple[int, int]]:
        """Return the most rows and exact blocks that each activation needed."""
        return {name: tuple(needs.tolist()) for name, needs in self._needs.items()}


def _sums_of(read: Read, gradient: Tensor, activation: Tensor, result: Tensor) -> Tensor:
    nonzero = torch.count_nonzero(activation).float() / max(activation.numel(), 1)
    heard = read.channels * nonzero * _weighted_square(gradient, read.taps)
    return torch.stack(
        (heard, _norm(result).square(), nonzero, _absolute_mean(gradient), _absolute_mean(result))
    )


def _weighted_square(gradient: Tensor, taps: Sequence[int]) -> Tensor:
    """Sum the squares, each as often as taps of the kernel meet the activation there."""
    if not taps:
        return _norm(gradient).square()
    norms: Tensor = torch.linalg.vector_norm(gradient, dim=(0, 1), dtype=torch.float32)
    squares = norms.square()
    weights = torch.tensor(taps, dtype=torch.float32, device=gradient.device)
    for part in torch.split(weights, list(squares.shape)):
        squares = torch.tensordot(part, squares, dims=1)
    return squares


def _absolute_mean(x: Tensor) -> Tensor:
    return _norm(x, 1) / max(x.numel(), 1)


def _norm(x: Tensor, order: int = 2) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, order, dtype=torch.float32)
    return norm


def _means(total: Tensor, count: int) -> ReadSums:
    values = (total / count).tolist()
    return ReadSums(
        spread=values[0],
        squared_norm=values[1],
        nonzero_fraction=values[2],
        gradient_mean=values[3],
        weight_gradient_mean=values[4],
    )

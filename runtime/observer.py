"""Watch the backward of some steps: how much an error of each activation would be heard.

A read is one op that computes a weight's gradient from an activation.  Sums stay on the device
until they are asked for, so that watching a step does not stop it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
        rows: Of a matrix product, the dimension of the gradient and that of the activation
            that it sums over.
    """

    tensor: str
    op: str
    channels: int
    taps: tuple[int, ...] = ()
    rows: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSums:
    """Means over the steps that were watched.

    Attributes:
        spread: Squared noise of the weight's gradient, for errors of variance 1.
        squared_norm: Squared Euclidean norm of the weight's gradient.
        nonzero_fraction: Share of the activation that is not zero.
        nonzero_square: Mean square of what is not zero.
        gradient_mean: Mean absolute gradient of the layer's output.
        weight_gradient_mean: Mean absolute gradient of the weight.
    """

    spread: float
    squared_norm: float
    nonzero_fraction: float
    nonzero_square: float
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
            gradient: Gradient of the layer's output, as the op reads it: channels second, or a
                matrix.
            activation: The activation, likewise.
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

    def needs(self) -> dict[str, quantiser.Needs]:
        """Return the most that each activation needed in each form; see `quantiser.measure`."""
        return {name: needs.tolist() for name, needs in self._needs.items()}


def _sums_of(read: Read, gradient: Tensor, activation: Tensor, result: Tensor) -> Tensor:
    count = torch.count_nonzero(activation).float()
    nonzero = count / max(activation.numel(), 1)
    square = _norm(activation).square() / count.clamp(min=1)
    heard = _heard_by_samples if read.taps else _heard_by_rows
    return torch.stack(
        (
            heard(read, gradient, activation),
            _norm(result).square(),
            nonzero,
            square,
            _absolute_mean(gradient),
            _absolute_mean(result),
        )
    )


def _heard_by_rows(read: Read, gradient: Tensor, activation: Tensor) -> Tensor:
    """Sum each row's square with how many errors it meets."""
    in_gradient, in_activation = read.rows
    squares = _squares(gradient, dim=1 - in_gradient)
    return squares @ activation.count_nonzero(dim=1 - in_activation).float()


def _heard_by_samples(read: Read, gradient: Tensor, activation: Tensor) -> Tensor:
    """Sum the squares of each sample and group, each as often as the kernel meets an error there.

    Errors are taken to lie evenly over the positions and channels of a sample and group.
    """
    groups = max(activation.shape[1] // read.channels, 1)
    parts = _by_group(activation, groups)
    counts = parts.count_nonzero(dim=tuple(range(2, parts.dim())))
    nonzero = counts.float() / max(math.prod(parts.shape[2:]), 1)
    squares = _squares(_by_group(gradient, groups), dim=2)
    weights = torch.tensor(read.taps, dtype=torch.float32, device=gradient.device)
    for part in reversed(torch.split(weights, list(squares.shape[2:]))):
        squares = squares @ part
    heard: Tensor = read.channels * (squares * nonzero).sum()
    return heard


def _by_group(x: Tensor, groups: int) -> Tensor:
    return x.view(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _squares(x: Tensor, dim: int) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=dim, dtype=_wide(x))
    return norms.float().square()


def _absolute_mean(x: Tensor) -> Tensor:
    return _norm(x, 1) / max(x.numel(), 1)


def _norm(x: Tensor, order: int = 2) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, order, dtype=_wide(x))
    return norm.float()


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _means(total: Tensor, count: int) -> ReadSums:
    values = (total / count).tolist()
    return ReadSums(
        spread=values[0],
        squared_norm=values[1],
        nonzero_fraction=values[2],
        nonzero_square=values[3],
        gradient_mean=values[4],
        weight_gradient_mean=values[5],
    )

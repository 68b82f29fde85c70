"""Find where the backward reads a saved activation to compute a weight's gradient, and no more.

There an error of the activation makes an error of the gradient that can be foretold: the op is
linear in the activation, and its result leaves the step as the gradient of a parameter.

    convolution_backward(g, x, w, ...)      reads x for the gradient of w alone
    mm(t(g), x), mm(t(x), g)                the weight's gradient of a linear layer

Everything else reads exact values: norms and activation functions are not linear in what they
saved, and what attention saves leads on to other gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from backhaul.passes.op_calls import arguments_of
from backhaul.passes.step_graphs import StepGraphs, Storages, is_alias_op, results_of

__all__ = ["LinearRead", "linear_reads_of"]

aten = torch.ops.aten

SUMS = {aten.add.Tensor, aten.sum.dim_IntList, aten._to_copy.default}
"""What a weight's gradient may still pass through: sums of several uses, and autocast's casts."""


@dataclass(frozen=True, slots=True)
class LinearRead:
    """One op of the backward that computes a weight's gradient from an activation.

    Attributes:
        op: Name of the op.
        gradient: Which of its arguments is the gradient of the layer's output.
        activation: Which of them holds the activation.
        result: Name of the node that holds the weight's gradient.
        channels: Elements of the weight for each output channel and tap of the kernel.
        taps: How many taps of the kernel meet the activation, and not its padding, at each
            position of each spatial dimension of the gradient, one dimension after the other.
        rows: Of a matrix product, the dimension of the gradient and that of the activation
            that it sums over.
    """

    op: str
    gradient: int
    activation: int
    result: str
    channels: int
    taps: tuple[int, ...] = ()
    rows: tuple[int, int] = (0, 0)


def linear_reads_of(step: StepGraphs) -> dict[fx.Node, LinearRead]:
    """Return what each op of a captured step's backward reads linearly, by the op."""
    storages = Storages.of(step.backward)
    saved = {key for node in step.received for key in storages.ids[node]}
    weights = _weight_gradients(step)
    found = {}
    for node in step.backward.graph.nodes:
        read = _read_of(node, storages, saved)
        if read is not None and _leaves(read[0], storages, weights):
            found[node] = read[1]
    return found


def _read_of(
    node: fx.Node, storages: Storages, saved: set[int]
) -> tuple[fx.Node, LinearRead] | None:
    if node.target is aten.convolution_backward.default:
        return _convolution(node)
    if node.target is aten.mm.default:
        return _product(node, storages, saved)
    return None


def _convolution(node: fx.Node) -> tuple[fx.Node, LinearRead] | None:
    given = arguments_of(node)
    result = next((u for u in node.users if u.target is operator.getitem and u.args[1] == 1), None)
    if result is None or not given["output_mask"][1] or given["transposed"]:
        return None
    gradient, activation, weight = given["grad_output"], given["input"], given["weight"]
    taps: list[int] = []
    spatial = weight.meta["val"].dim() - 2
    for dim in range(spatial):
        taps += _taps(
            length=activation.meta["val"].shape[2 + dim],
            positions=gradient.meta["val"].shape[2 + dim],
            kernel=weight.meta["val"].shape[2 + dim],
            stride=_of(given["stride"], dim),
            padding=_of(given["padding"], dim),
            dilation=_of(given["dilation"], dim),
        )
    channels = int(weight.meta["val"].shape[1])
    return result, LinearRead(node.name, 0, 1, result.name, channels, tuple(taps))


def _taps(
    *, length: int, positions: int, kernel: int, stride: int, padding: int, dilation: int
) -> Iterator[int]:
    for position in range(positions):
        first = position * stride - padding
        yield sum(0 <= first + tap * dilation < length for tap in range(kernel))


def _product(
    node: fx.Node, storages: Storages, saved: set[int]
) -> tuple[fx.Node, LinearRead] | None:
    left, right = node.args[:2]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    is_saved = [bool(saved & set(storages.ids[side])) for side in (left, right)]
    if is_saved == [False, True]:
        channels = int(right.meta["val"].shape[1])
        return node, LinearRead(node.name, 0, 1, node.name, channels, rows=(1, 0))
    if is_saved == [True, False]:
        channels = int(left.meta["val"].shape[0])
        return node, LinearRead(node.name, 1, 0, node.name, channels, rows=(0, 1))
    return None


def _weight_gradients(step: StepGraphs) -> set[fx.Node]:
    """Return the results of the backward that are gradients of parameters, and of nothing else."""
    results = results_of(step.backward)
    others = {node for i, node in enumerate(results) if i not in step.parameter_gradients}
    return {results[i] for i in step.parameter_gradients} - others


def _leaves(result: fx.Node, storages: Storages, weights: set[fx.Node]) -> bool:
    """Say whether a node reaches gradients of parameters alone, and is only added to."""
    return bool(result.users) and all(
        result in weights
        if user.op == "output"
        else (user.target in SUMS or is_alias_op(user, storages))
        and _leaves(user, storages, weights)
        for user in result.users
    )


def _of(values: Sequence[Any], dim: int) -> int:
    return int(values[dim] if len(values) > 1 else values[0])

"""Turn a graph with symbolic shapes into the graph for the shapes that came.

before   def forward(s0, x, momentum):         momentum is a number, as a tensor of no dimension
             rate = momentum.item(); y = x.view(s0, -1); ...

after    def forward(s0, x, momentum):         for s0 = 8 and momentum = 0.1
             y = x.view(8, -1); ...            with 0.1 where rate was
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["SymbolicGraph", "has_symbols"]


def has_symbols(inputs: Sequence[Any]) -> bool:
    """Say whether a graph with these example inputs is for more than one set of shapes."""
    lengths = [
        length
        for value in inputs
        for length in (value.shape if isinstance(value, torch.Tensor) else (value,))
    ]
    return any(isinstance(length, torch.SymInt) for length in lengths)


class SymbolicGraph:
    """A graph of Dynamo's with symbolic shapes.

    Args:
        gm: The graph; left as it is.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._inputs = gm.graph.find_nodes(op="placeholder")
        # Asked in every step, and the same in each.
        self._is_read_as_number = [bool(_items(node)) for node in self._inputs]

    def key(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return what a specialised graph depends on; equal keys have one graph."""
        return tuple(
            _geometry(value) if number is None else number
            for value, number in zip(inputs, self._numbers(inputs), strict=True)
        )

    def specialised(self, inputs: Sequence[Any]) -> fx.GraphModule:
        """Return a copy in which the numbers among its inputs are constants.

        Args:
            inputs: What it is called with.
        """
        found = fx.GraphModule(self._gm, fx.Graph())
        copies: dict[fx.Node, fx.Node] = {}
        found.graph.output(found.graph.graph_copy(self._gm.graph, copies))
        for node, number in zip(self._inputs, self._numbers(inputs), strict=True):
            copied = copies[node]
            if number is not None:
                items = _items(copied)
                for reader in items or [copied]:
                    _replace(reader, number)
                for item in items:
                    found.graph.erase_node(item)
        found.recompile()
        return found

    def _numbers(self, inputs: Sequence[Any]) -> list[int | float | None]:
        """Return what each input is as a number, None if it is none."""
        return [
            value
            if isinstance(value, int)
            else value.item()
            if is_number and value.dim() == 0
            else None
            for value, is_number in zip(inputs, self._is_read_as_number, strict=True)
        ]


def _items(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.op == "call_method" and user.target == "item"]


def _replace(node: fx.Node, number: float) -> None:
    """Put a number where a node is read."""
    for user in list(node.users):
        user.args = _replaced(user.args, node, number)
        user.kwargs = _replaced(user.kwargs, node, number)


def _replaced(arguments: Any, node: fx.Node, number: float) -> Any:
    return fx.map_arg(arguments, lambda read: number if read is node else read)


def _geometry(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), tuple(value.stride()), value.dtype, value.requires_grad
    return value

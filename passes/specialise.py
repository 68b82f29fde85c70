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

__all__ = ["has_symbols", "shapes_key", "specialised"]


def has_symbols(inputs: Sequence[Any]) -> bool:
    """Say whether a graph with these example inputs is for more than one set of shapes."""
    lengths = [
        length
        for value in inputs
        for length in (value.shape if isinstance(value, torch.Tensor) else (value,))
    ]
    return any(isinstance(length, torch.SymInt) for length in lengths)


def shapes_key(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a specialised graph depends on; equal keys have one graph."""
    numbers = dict(_numbers(gm, inputs))
    return tuple(
        numbers.get(node, _geometry(value))
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)
    )


def specialised(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """Return a copy of a graph in which the numbers among its inputs are constants.

    Args:
        gm: A graph of Dynamo's; left as it is.
        inputs: What it is called with.
    """
    found = fx.GraphModule(gm, fx.Graph())
    copies: dict[fx.Node, fx.Node] = {}
    output = found.graph.graph_copy(gm.graph, copies)
    found.graph.output(output)
    for node, number in _numbers(gm, inputs):
        copied = copies[node]
        for reader in [copied] if isinstance(number, int) else _items(copied):
            for user in list(reader.users):
                user.args = _replaced(user.args, reader, number)
                user.kwargs = _replaced(user.kwargs, reader, number)
            if reader is not copied:
                found.graph.erase_node(reader)
    found.recompile()
    return found


def _numbers(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[tuple[fx.Node, Any]]:
    """List the inputs that are numbers, with what they are."""
    found: list[tuple[fx.Node, Any]] = []
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(value, int):
            found.append((node, value))
        elif isinstance(value, torch.Tensor) and value.dim() == 0 and _items(node):
            found.append((node, value.item()))
    return found


def _replaced(arguments: Any, node: fx.Node, number: Any) -> Any:
    return fx.map_arg(arguments, lambda read: number if read is node else read)


def _items(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.op == "call_method" and user.target == "item"]


def _geometry(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), tuple(value.stride()), value.dtype, value.requires_grad
    return value

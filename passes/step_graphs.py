"""The forward and backward graph of one step, and how storages live in them."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from backhaul.errors import InternalError
from backhaul.passes.torch_compat import storage_id, storage_nbytes
from backhaul.records import Executor

__all__ = [
    "StepGraphs",
    "Storages",
    "is_alias_op",
    "module_of",
    "nbytes_of",
    "results_of",
    "tensors_in",
    "tensors_of",
]


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """A step as two graphs that hand saved activations from one to the other.

    Attributes:
        forward: Returns its outputs, then the saved values.
        backward: Takes the saved values in the same order, then the tangents.
        output_count: How many of the forward's results are outputs.
        parameter_gradients: Which results of the backward are gradients of parameters.
        executor: What runs the graphs.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    output_count: int
    parameter_gradients: frozenset[int] = frozenset()
    executor: Executor = "eager"

    @property
    def outputs(self) -> list[fx.Node]:
        """List what the forward hands to the caller."""
        return results_of(self.forward)[: self.output_count]

    @property
    def saved(self) -> list[fx.Node]:
        """List what the forward hands to the backward."""
        return results_of(self.forward)[self.output_count :]

    @property
    def received(self) -> list[fx.Node]:
        """List the backward's placeholders for what the forward saved, in the same order."""
        return self._placeholders()[: len(self.saved)]

    @property
    def tangents(self) -> list[fx.Node]:
        """List the backward's placeholders for the gradients of the outputs."""
        return self._placeholders()[len(self.saved) :]

    def ops(self) -> list[fx.Node]:
        """List the ops of the forward, then those of the backward, in execution order."""
        return [
            node
            for gm in (self.forward, self.backward)
            for node in gm.graph.nodes
            if node.op not in ("placeholder", "output")
        ]

    @property
    def forward_count(self) -> int:
        """Count the ops of the forward."""
        return sum(node.op not in ("placeholder", "output") for node in self.forward.graph.nodes)

    def _placeholders(self) -> list[fx.Node]:
        return self.backward.graph.find_nodes(op="placeholder")


@dataclass(slots=True)
class Storages:
    """Which nodes of one graph hold which storage.

    Attributes:
        holders: Nodes that hold each storage, views and tuples included, in graph order.
        ids: Storages that each node holds.
    """

    holders: dict[int, list[fx.Node]] = field(default_factory=dict)
    ids: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)

    @staticmethod
    def of(gm: fx.GraphModule) -> Storages:
        """Read the storages of a graph from its fake tensors."""
        storages = Storages()
        for node in gm.graph.nodes:
            if node.op == "output":
                continue
            ids = tuple(dict.fromkeys(storage_id(value) for value in tensors_of(node)))
            storages.ids[node] = ids
            for key in ids:
                storages.holders.setdefault(key, []).append(node)
        return storages

    def base(self, key: int) -> fx.Node:
        """Return the first node that holds this storage and no other."""
        for node in self.holders[key]:
            if isinstance(node.meta.get("val"), torch.Tensor):
                return node
        return self.holders[key][0]


def results_of(gm: fx.GraphModule) -> list[Any]:
    """List what a graph returns: nodes, and None where a gradient is not asked for."""
    results = gm.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    return list(results)


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """Yield the fake tensors that a node's value is made of."""
    yield from tensors_in(node.meta.get("val"))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def module_of(node: fx.Node) -> str:
    """Return the path of the module that a node comes from, empty for the root."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    return re.sub(r"\._modules\['([^']*)'\]", r".\1", path).lstrip(".")


def nbytes_of(node: fx.Node, key: int) -> int:
    """Return the size of one of the storages that a node holds.

    Raises:
        InternalError: The node does not hold it.
    """
    for value in tensors_of(node):
        if storage_id(value) == key:
            return storage_nbytes(value)
    raise InternalError(f"node {node.name} does not hold the storage it is named for")


def is_alias_op(node: fx.Node, storages: Storages) -> bool:
    """Say whether a node only views or picks from an earlier node: it allocates nothing."""
    if node.target is operator.getitem:
        return True
    ids = storages.ids.get(node, ())
    return bool(ids) and all(storages.holders[key][0] is not node for key in ids)

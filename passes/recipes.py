"""Find how a saved tensor can be computed again in the backward, bit for bit.

A recipe walks back from the tensor to what is held anyway: inputs of the step, and saved or
checkpoint tensors, whatever the plan does with those.  An op is copied only if a second run
must give the same bits and does nothing else:

    random ops           run again from the random state that the forward had, see `draws`, but
                         never under Inductor, whose random numbers have no such state
    BatchNorm            run again without its running statistics, which change once
    inputs that change   never read again
    other effects        ops that write to an argument, or that are not torch's own, never run
    unordered sums       never run again: their last bits depend on the order of threads
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from backhaul.passes.mutated_inputs import mutated_inputs
from backhaul.passes.op_calls import arguments_of
from backhaul.passes.step_graphs import StepGraphs, Storages, is_alias_op, tensors_of
from backhaul.passes.torch_compat import storage_id, storage_nbytes
from backhaul.records import Recipe
from backhaul.runtime.device import random_state_bytes

__all__ = ["Recipes", "copied_call", "draws"]

aten = torch.ops.aten

LENGTH_LIMIT = 64
"""Ops of the longest recipe: nothing longer was ever the cheapest way to hold a tensor."""

UNORDERED = {
    aten.index_add,
    aten.index_put,
    aten.put,
    aten.scatter_add,
    aten.scatter_reduce,
    aten.histc,
    aten.bincount,
    aten.cumsum,
    aten.cumprod,
    aten.median,
    aten.kthvalue,
    aten.grid_sampler_2d,
    aten.grid_sampler_3d,
}
"""Operators whose kernels for accelerators add, or break ties, in no fixed order."""


class Recipes:
    """The ops of one forward that may run twice.

    Args:
        step: The step.
        storages: The storages of its forward.
        device: The device of the step.
    """

    def __init__(self, step: StepGraphs, storages: Storages, device: torch.device) -> None:
        self._storages = storages
        self._name_by_base: dict[fx.Node, str] = {}
        self._position = {node: i for i, node in enumerate(step.ops()[: step.forward_count])}
        self._received = set(step.saved)
        self._mutated = mutated_inputs(step)
        self._device = device
        self._draws_in_order = step.executor == "eager"

    def begin_with(self, name_by_key: Mapping[int, str]) -> None:
        """Say where a recipe may begin: saved and checkpoint tensors, by their storage."""
        self._name_by_base = {self._storages.base(key): name for key, name in name_by_key.items()}

    def recipe_for(self, base: fx.Node) -> Recipe | None:
        """Return the recipe of the tensor that a node is named after, or None if it has none."""
        chain: set[fx.Node] = set()
        sources: set[str] = set()
        waiting = [base]
        work = 0
        while waiting:
            node = waiting.pop()
            if node in chain or (node in self._received and node.op == "placeholder"):
                continue
            if node is not base and node in self._name_by_base:
                sources.add(self._name_by_base[node])
                continue
            if node.op == "placeholder" and node not in self._mutated:
                continue
            if not self.can_run_again(node):
                return None
            work += not is_alias_op(node, self._storages)
            if work > LENGTH_LIMIT:
                return None
            chain.add(node)
            waiting += _read_again(node)
        ordered = sorted(chain, key=self._position.__getitem__)
        return Recipe(
            ops=tuple(self._position[node] for node in ordered),
            sources=tuple(sorted(sources)),
            made=self._made(ordered, base),
            state_bytes=sum(random_state_bytes(self._device) for node in ordered if draws(node)),
        )

    def can_run_again(self, node: fx.Node) -> bool:
        """Say whether a second run of a node gives the same bits and has no other effect."""
        if node.op != "call_function" or (draws(node) and not self._draws_in_order):
            return False
        target = node.target
        if target is operator.getitem:
            return True
        if not isinstance(target, torch._ops.OpOverload) or target.namespace not in (
            "aten",
            "prims",
        ):
            return False
        if target._schema.is_mutable or target.overloadpacket in UNORDERED:
            return False
        values = list(tensors_of(node))
        return bool(values) and all(
            value.layout is torch.strided and value.device == self._device for value in values
        )

    def _made(self, chain: list[fx.Node], base: fx.Node) -> tuple[tuple[int, int, int], ...]:
        index = {node: i for i, node in enumerate(chain)}
        kept = storage_id(base.meta["val"])
        made = []
        for node in chain:
            if is_alias_op(node, self._storages):
                continue
            for value in tensors_of(node):
                holders = [h for h in self._storages.holders[storage_id(value)] if h in index]
                touched = {*holders, *(user for h in holders for user in h.users)} & index.keys()
                last = max(index[each] for each in touched)
                if storage_id(value) == kept:
                    last = len(chain) - 1
                made.append((storage_nbytes(value), index[node], last))
        return tuple(made)


def draws(node: fx.Node) -> bool:
    """Say whether a node draws random numbers."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return arguments_of(node).get("dropout_p") not in (0, 0.0)


def copied_call(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the op and arguments that compute a node again without its side effects."""
    if node.target is aten._native_batch_norm_legit_functional.default:
        x, weight, bias, _, _, training, momentum, eps = node.args
        if training:
            target = aten._native_batch_norm_legit.no_stats
            return target, (x, weight, bias, training, momentum, eps)
    return node.target, node.args


def _read_again(node: fx.Node) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg((copied_call(node)[1], node.kwargs), nodes.append)
    return nodes

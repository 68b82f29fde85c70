"""Write a plan into the two graphs as nodes that compress, move and recompute.

    before   relu = relu(x)                          ->  saved: relu
             grad = threshold_backward(tangent, relu, 0)

    after    token = begin_step(session, 1)
             relu = relu(x)
             h = offload(relu, token, 0)
             h = offload_wait(h, relu)               ->  saved: h
             y = reload(h, size, stride, ...)
             y = reload_wait(y, h)
             grad = threshold_backward(tangent, y, 0)

For a compiler, which lays tensors out as it likes, `x = laid_out(relu, nbytes)` stands before the
offload, and both the offload and its wait read x.

What is rounded reads its bound from the step, and finds its original there if it had no room:

    packed = quantise(relu, token, 0, *form)   ->  saved: packed, token
    y = dequantise(packed, token, 0, size, stride, dtype, *form)

A tensor that is recomputed is not saved; the ops of its recipe are copied in front of its first
use, and read what the backward holds by then.  A random op among them runs from the state that
the generator had in the forward:

    state = random_state(device)
    dropout = native_dropout(x, 0.5, True)          ->  saved: x, state
    dropout = run_with_rng_state(state, native_dropout, x, 0.5, True)

Saved values are storages: the views that the backward read are replayed on what comes back,
just before their first use.  The order of nodes is the schedule that was simulated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from backhaul.errors import InternalError
from backhaul.passes.describe import view_chain
from backhaul.passes.linear_reads import LinearRead
from backhaul.passes.recipes import copied_call, draws
from backhaul.passes.step_graphs import StepGraphs, Storages, results_of, tensors_of
from backhaul.passes.torch_compat import (
    fake_mode_of,
    fake_result,
    replayed,
    storage_id,
    storage_nbytes,
)
from backhaul.records import CodecRecord, Keep, Plan, Recompute
from backhaul.runtime import codec_ops as _codec_ops  # noqa: F401  # registers its ops
from backhaul.runtime.ops import NAMESPACE
from backhaul.scheduler.schedule import Event, codec_of, events

__all__ = ["insert_plan"]


def insert_plan(
    step: StepGraphs, plan: Plan, session_id: int, watched: Sequence[LinearRead] = ()
) -> StepGraphs:
    """Return the step with the plan's nodes in it.

    Args:
        step: The step that was planned; left as it is.
        plan: Its plan.
        session_id: The session that will own the host slots.
        watched: Ops of the backward to observe, in the order of the session's reads.

    Raises:
        InternalError: The plan names a tensor that the step does not have.
    """
    if not watched and all(isinstance(decision.action, Keep) for decision in plan.decisions):
        return step
    writer = _Writer(
        step, plan, session_id, needs_token=bool(plan.slots or plan.rounded or watched)
    )
    for event in events(plan.graph, {d.tensor: d.action for d in plan.decisions}):
        writer.write(event)
    for number, read in enumerate(watched):
        writer.watch(read, number)
    return writer.finished()


class _Writer:
    """Copies of the two graphs, and where each moved tensor is at this point of the step."""

    def __init__(self, step: StepGraphs, plan: Plan, session_id: int, *, needs_token: bool) -> None:
        self._step = replace(step, forward=_copied(step.forward), backward=_copied(step.backward))
        self._decision = {
            decision.tensor: decision
            for decision in plan.decisions
            if not isinstance(decision.action, Keep)
        }
        self._recipe = {t.name: t.recipe for t in plan.graph.planned if t.recipe is not None}
        self._recomputed = {
            name
            for name, decision in self._decision.items()
            if isinstance(decision.action, Recompute)
        }
        self._dial = {name: index for index, (name, _) in enumerate(plan.rounded)}
        self._slot = {slot.tensor: index for index, slot in enumerate(plan.slots)}
        self._ops = self._step.ops()
        self._storages = Storages.of(self._step.forward)
        self._fake_mode = fake_mode_of(self._step.forward)
        self._base = self._find_bases()
        self._group = self._group_saved()
        self._carried = dict(self._base)
        self._source: dict[str, fx.Node] = {}
        self._arrived: dict[str, fx.Node] = {}
        self._placeholder: dict[str, fx.Node] = {}
        self._received_by_saved = dict(zip(self._step.saved, self._step.received, strict=True))
        self._is_tail_of = [*self._step.tangents, *self._ops[self._step.forward_count :]][0]
        self._state_by_random_op: dict[fx.Node, fx.Node] = {}
        self._also_saved: list[fx.Node] = []
        self._cursor = self._ops[0]
        self._token: fx.Node | None = None
        if needs_token:
            with self._step.forward.graph.inserting_before(self._ops[0]):
                args = (session_id, len(plan.slots))
                self._token = self._call(
                    self._step.forward, torch.ops.backhaul.begin_step.default, args
                )

    def write(self, event: Event) -> None:
        """Insert the node of one event, where the schedule has come to."""
        if event.kind == "run":
            self._cursor = self._ops[event.position]
        elif event.kind in ("pack", "offload", "offload_wait"):
            self._write_forward(event)
        elif event.kind == "recompute":
            self._recompute(event)
        else:
            self._write_backward(event)

    def watch(self, read: LinearRead, number: int) -> None:
        """Observe an op of the backward, as soon as it has run."""
        graph = self._step.backward.graph
        node_by_name = {node.name: node for node in graph.nodes}
        op, result = node_by_name[read.op], node_by_name[read.result]
        operands = (op.args[read.gradient], op.args[read.activation], result)
        with graph.inserting_after(result):
            target = torch.ops.backhaul.observe.default
            self._call(self._step.backward, target, (*operands, self._received_token(), number))

    def finished(self) -> StepGraphs:
        """Hand over what was moved in place of what was saved."""
        output = self._step.forward.graph.output_node()
        replaced = {saved: name for name, pairs in self._group.items() for saved, _ in pairs}
        results: list[Any] = []
        descriptions: list[Any] = []
        returned = results_of(self._step.forward)
        for result, description in zip(
            returned, output.meta.get("desc", [None] * len(returned)), strict=True
        ):
            is_saved = len(results) >= self._step.output_count
            name = replaced.get(result) if is_saved else None
            if name is not None:
                carried = self._carried.pop(name, None)
                result = None if name in self._recomputed else carried
            if not is_saved or result is not None:
                results.append(result)
                descriptions.append(description)
        results += self._also_saved
        descriptions += [None] * len(self._also_saved)
        output.args = (tuple(results),)
        if "desc" in output.meta:
            output.meta["desc"] = descriptions
        for pairs in self._group.values():
            for _, received in pairs:
                self._step.backward.graph.erase_node(received)
        for gm in (self._step.forward, self._step.backward):
            gm.graph.lint()
            gm.recompile()
        return self._step

    def _write_forward(self, event: Event) -> None:
        name, ops = event.tensor, torch.ops.backhaul
        # What is inserted goes before one node, so that two nodes keep their order.
        with self._step.forward.graph.inserting_before(self._cursor.next):
            match event.kind:
                case "pack" if name in self._dial:
                    target, args = ops.quantise.default, self._rounding(name, self._base[name])
                case "pack":
                    target, args = _packing(self._codec(name), self._base[name])
                case "offload":
                    self._source[name] = self._laid_out(name)
                    target = ops.offload.default
                    args = (self._source[name], self._token, self._slot[name])
                case _:
                    target = ops.offload_wait.default
                    args = (self._carried[name], self._source[name])
            self._cursor = self._call(self._step.forward, target, args, name)
        self._carried[name] = self._cursor

    def _laid_out(self, name: str) -> fx.Node:
        """Return what a copy reads: under Inductor, the one buffer that lies as traced."""
        if self._step.executor == "eager":
            return self._carried[name]
        x = self._carried[name]
        args = (x, storage_nbytes(x.meta["val"]))
        return self._call(self._step.forward, torch.ops.backhaul.laid_out.default, args, name)

    def _write_backward(self, event: Event) -> None:
        name, ops = event.tensor, torch.ops.backhaul
        carried = self._received(name)
        with self._step.backward.graph.inserting_before(self._ops[event.position]):
            match event.kind:
                case "reload":
                    target, args = ops.reload.default, (carried, *_geometry(self._source[name]))
                case "reload_wait":
                    target, args = ops.reload_wait.default, (self._arrived[name], carried)
                case _ if name in self._dial:
                    packed = self._arrived.get(name, carried)
                    target, args = ops.dequantise.default, self._unrounding(name, packed)
                case _:
                    packed = self._arrived.get(name, carried)
                    target, args = _unpacking(self._codec(name), packed)
            self._arrived[name] = self._call(self._step.backward, target, args, name)
            is_whole = event.kind == "unpack" or codec_of(self._decision[name].action) is None
            if is_whole and event.kind != "reload":
                self._replay_views(name)

    def _recompute(self, event: Event) -> None:
        """Copy the ops of a recipe in front of the op that needs what they make."""
        name = event.tensor
        recipe = self._recipe[name]
        copies: dict[fx.Node, fx.Node] = {}
        with self._step.backward.graph.inserting_before(self._ops[event.position]):
            for position in recipe.ops:
                node = self._ops[position]
                target, read_args = copied_call(node)
                args, kwargs = fx.map_arg(
                    (read_args, node.kwargs),
                    lambda read: copies.get(read) or self._value_of(read),
                )
                if draws(node):
                    target, args = replayed(self._random_state(node), target, args)
                copies[node] = self._call(self._step.backward, target, args, name, kwargs)
            self._arrived[name] = copies[self._base[name]]
            self._replay_views(name)

    def _value_of(self, node: fx.Node) -> fx.Node:
        """Return what the backward holds of a forward node that a recipe begins with."""
        arrived = self._arrived.get(node.name)
        return self._receive(node) if arrived is None else arrived

    def _receive(self, node: fx.Node) -> fx.Node:
        """Return the backward's placeholder for a forward node, saved for it if need be."""
        if node not in self._received_by_saved:
            placeholder = self._add_placeholder(node.name, self._is_tail_of)
            placeholder.meta = {"val": node.meta["val"]}
            self._received_by_saved[node] = placeholder
            self._also_saved.append(node)
        return self._received_by_saved[node]

    def _random_state(self, node: fx.Node) -> fx.Node:
        """Return the backward's copy of the random state that a forward op begins with."""
        if node not in self._state_by_random_op:
            device = next(tensors_of(node)).device
            with self._step.forward.graph.inserting_before(node):
                state = self._call(
                    self._step.forward, torch.ops.backhaul.random_state.default, (device,)
                )
            self._state_by_random_op[node] = state
        return self._receive(self._state_by_random_op[node])

    def _received(self, name: str) -> fx.Node:
        """Return the backward's placeholder for what the forward hands over."""
        carried = self._carried[name]
        if name not in self._group:
            return self._receive(carried)
        if name not in self._placeholder:
            first = self._group[name][0][1]
            placeholder = self._add_placeholder(carried.name, first)
            placeholder.meta = {**first.meta, **carried.meta}
            self._placeholder[name] = placeholder
        return self._placeholder[name]

    def _rounding(self, name: str, source: fx.Node) -> tuple[Any, ...]:
        _, _, _, *form = self._codec(name).arguments
        return source, self._token, self._dial[name], *form

    def _unrounding(self, name: str, packed: fx.Node) -> tuple[Any, ...]:
        size, stride, dtype, *form = self._codec(name).arguments
        geometry = _integers(size), _integers(stride), _dtype(dtype)
        return packed, self._received_token(), self._dial[name], *geometry, *form

    def _received_token(self) -> fx.Node:
        assert self._token is not None
        return self._receive(self._token)

    def _add_placeholder(self, name: str, before: fx.Node) -> fx.Node:
        with self._step.backward.graph.inserting_before(before):
            placeholder = self._step.backward.graph.placeholder(name)
        # Hazard: the generated code calls the parameter by the target and assigns it to the name.
        # A node that has to take another name would overwrite the parameter that has that one.
        placeholder.target = placeholder.name
        return placeholder

    def _replay_views(self, name: str) -> None:
        base, arrived = self._base[name], self._arrived[name]
        key = storage_id(base.meta["val"])
        for saved, received in self._group.get(name, ()):
            chain = view_chain(saved, base, self._storages, key)
            if chain is None:
                raise InternalError(f"{saved.name} cannot be replayed on {name}")
            node = arrived
            for view in chain:
                args = fx.map_arg(view.args, _always(node))
                node = self._call(self._step.backward, view.target, args, name, view.kwargs)
            received.replace_all_uses_with(node)

    def _call(
        self, gm: fx.GraphModule, target: Any, args: Any, name: str = "", kwargs: Any = None
    ) -> fx.Node:
        """Insert one call with everything that a node must carry."""
        node = gm.graph.call_function(target, args, dict(kwargs or {}))
        node.meta["val"] = fake_result(node, self._fake_mode)
        if getattr(target, "namespace", "") == NAMESPACE:
            # Inductor, which chooses layouts of its own, then hands over the strides of the plan.
            read = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            node.meta["eager_input_vals"] = read
        if name:
            base = self._base[name]
            node.meta["backhaul"] = self._decision[name]
            for key in ("nn_module_stack", "stack_trace"):
                if key in base.meta:
                    node.meta[key] = base.meta[key]
        return node

    def _codec(self, name: str) -> CodecRecord:
        codec = codec_of(self._decision[name].action)
        if codec is None:
            raise InternalError(f"the plan packs {name} without a codec")
        return codec

    def _find_bases(self) -> dict[str, fx.Node]:
        made = {node.name: node for node in self._ops[: self._step.forward_count]}
        missing = sorted(set(self._decision) - set(made))
        if missing:
            raise InternalError(f"the plan moves {missing[0]}, which no op of the forward makes")
        return {name: made[name] for name in self._decision}

    def _group_saved(self) -> dict[str, list[tuple[fx.Node, fx.Node]]]:
        """Pair what is saved with what is received, by the storage that is moved."""
        name_by_key = {storage_id(node.meta["val"]): name for name, node in self._base.items()}
        groups: dict[str, list[tuple[fx.Node, fx.Node]]] = {}
        for saved, received in zip(self._step.saved, self._step.received, strict=True):
            for key in self._storages.ids.get(saved, ()):
                if key in name_by_key:
                    groups.setdefault(name_by_key[key], []).append((saved, received))
        return groups


def _packing(codec: CodecRecord, source: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    ops = torch.ops.backhaul
    match codec.name:
        case "bits":
            return ops.pack_bits.default, (source,)
        case "pool_offsets":
            _, _, *window = codec.arguments
            return ops.pack_pool_offsets.default, (source, *map(_integers, window))
        case "narrow":
            return ops.narrow_integers.default, (source, _dtype(codec.arguments[3]))
        case "cast":
            return ops.cast_down.default, (source, _dtype(codec.arguments[3]))
        case "quantise":
            raise InternalError("a tensor that is rounded has a dial")


def _unpacking(codec: CodecRecord, packed: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    ops = torch.ops.backhaul
    size, stride, *rest = codec.arguments
    match codec.name:
        case "bits":
            args = (packed, _integers(size), _integers(stride), _dtype(rest[0]))
            return ops.unpack_bits.default, args
        case "pool_offsets":
            return ops.unpack_pool_offsets.default, (packed, *map(_integers, codec.arguments))
        case "narrow":
            args = (packed, _integers(size), _integers(stride), _dtype(rest[0]))
            return ops.widen_integers.default, args
        case "cast":
            dtypes = map(_dtype, rest)
            return ops.cast_up.default, (packed, _integers(size), _integers(stride), *dtypes)
        case "quantise":
            raise InternalError("a tensor that is rounded has a dial")


def _geometry(source: fx.Node) -> tuple[Any, ...]:
    """Return what a reload needs to build the same tensor over a new storage."""
    value = source.meta["val"]
    return (
        list(value.size()),
        list(value.stride()),
        int(value.storage_offset()),
        int(value.untyped_storage().nbytes()),
        value.dtype,
        value.device,
    )


def _integers(argument: object) -> list[int]:
    if not isinstance(argument, tuple):
        raise InternalError(f"a codec's argument is {argument!r}, not a tuple of integers")
    return list(argument)


def _always(node: fx.Node) -> Callable[[fx.Node], fx.Node]:
    return lambda _: node


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name))
    assert isinstance(dtype, torch.dtype)
    return dtype


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy the graph; constants and parameters stay shared."""
    return fx.GraphModule(gm, copy.deepcopy(gm.graph))

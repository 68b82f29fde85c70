"""Check a rewritten step: rules that a graph must keep or a gradient could be wrong.

Each check walks the two graphs once and raises at the first fault, with the neighbourhood
printed.  They always run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import NoReturn

import torch
from torch import fx

from backhaul.errors import VerifyError
from backhaul.passes.codec_choice import reads_sign
from backhaul.passes.mutated_inputs import mutated_inputs
from backhaul.passes.op_calls import arguments_of, written_by
from backhaul.passes.recipes import copied_call, draws
from backhaul.passes.step_graphs import StepGraphs, Storages
from backhaul.passes.torch_compat import op_of
from backhaul.records import Decision, PackedForm, Recompute
from backhaul.runtime import codec_ops, ops  # noqa: F401  # registers the ops that are checked

__all__ = ["CHECKS", "verify"]

backhaul = torch.ops.backhaul
OFFLOAD, OFFLOAD_WAIT = backhaul.offload.default, backhaul.offload_wait.default
RELOAD, RELOAD_WAIT = backhaul.reload.default, backhaul.reload_wait.default
UNPACK_BITS, CAST_UP = backhaul.unpack_bits.default, backhaul.cast_up.default
QUANTISE, DEQUANTISE = backhaul.quantise.default, backhaul.dequantise.default
OBSERVE = backhaul.observe.default
MM = torch.ops.aten.mm.default
FORM = tuple(field.name for field in fields(PackedForm))
CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
NEIGHBOURS = 5

Check = Callable[[StepGraphs], None]


def verify(step: StepGraphs) -> None:
    """Run every check.

    Raises:
        VerifyError: A rule is broken; the error names it and the node.
    """
    for check in CHECKS:
        check(step)


def every_node_has_a_value(step: StepGraphs) -> None:
    """Each inserted node carries the fake value that later passes and compilers read."""
    for node in step.ops():
        if "val" not in node.meta and _is_ours(node):
            _fail("every_node_has_a_value", node, 'it has no meta["val"]')


def no_parameter_is_overwritten(step: StepGraphs) -> None:
    """Each placeholder goes by the same name as a parameter and as a variable.

    The generated code first assigns each parameter, which is called by its target, to a variable,
    which is called by its name: a variable by the name of a later parameter would overwrite it.
    """
    for gm in (step.forward, step.backward):
        for node in gm.graph.find_nodes(op="placeholder"):
            if node.target != node.name:
                _fail("no_parameter_is_overwritten", node, f"its parameter is {node.target}")


def each_offload_is_waited_for_once(step: StepGraphs) -> None:
    """Each copy out has one wait, which holds on to the tensor that is copied."""
    for node in _find(step.forward, OFFLOAD):
        waits = [user for user in node.users if user.target is OFFLOAD_WAIT]
        if len(waits) != 1 or len(node.users) != 1:
            _fail(
                "each_offload_is_waited_for_once",
                node,
                f"its handle has {len(waits)} waits and {len(node.users)} users, not 1 and 1",
            )
        if _arg(waits[0], 1) is not _arg(node, 0):
            _fail(
                "each_offload_is_waited_for_once",
                waits[0],
                f"it keeps {_arg(waits[0], 1)} alive, but {_arg(node, 0)} is being copied",
            )


def each_reload_is_waited_for_once(step: StepGraphs) -> None:
    """Each copy back has one wait, and everything else reads the result of that wait."""
    for node in _find(step.backward, RELOAD):
        waits = [user for user in node.users if user.target is RELOAD_WAIT]
        if len(waits) != 1 or len(node.users) != 1:
            _fail(
                "each_reload_is_waited_for_once",
                node,
                f"it has {len(waits)} waits and {len(node.users)} users, not 1 and 1: "
                "a user could read it before the copy has ended",
            )


def each_offload_is_reloaded_once(step: StepGraphs) -> None:
    """Each handle crosses to the backward once and is reloaded there once."""
    handle_of = dict(zip(step.saved, step.received, strict=True))
    for node in _find(step.forward, OFFLOAD_WAIT):
        received = handle_of.get(node)
        if received is None:
            _fail("each_offload_is_reloaded_once", node, "the backward does not receive it")
        reloads = [user for user in received.users if user.target is RELOAD]
        if len(reloads) != 1:
            _fail("each_offload_is_reloaded_once", node, f"it has {len(reloads)} reloads, not 1")
    received_handles = {handle_of[n] for n in _find(step.forward, OFFLOAD_WAIT) if n in handle_of}
    for node in _find(step.backward, RELOAD):
        if _arg(node, 0) not in received_handles:
            _fail("each_offload_is_reloaded_once", node, "nothing in the forward offloads it")


def each_slot_is_used_once(step: StepGraphs) -> None:
    """No two copies out of one step share a slot."""
    seen: dict[object, fx.Node] = {}
    for node in _find(step.forward, OFFLOAD):
        if node.args[2] in seen:
            _fail("each_slot_is_used_once", node, f"{seen[node.args[2]]} uses its slot too")
        seen[node.args[2]] = node


def every_geometry_comes_back(step: StepGraphs) -> None:
    """A reload declares the size, strides, offset, bytes, dtype and device that left."""
    offloaded = {
        received: _arg(_arg(saved, 0), 0)
        for saved, received in zip(step.saved, step.received, strict=True)
        if isinstance(saved, fx.Node) and saved.target is OFFLOAD_WAIT
    }
    for node in _find(step.backward, RELOAD):
        source = offloaded.get(_arg(node, 0))
        if source is None:
            continue
        left, back = source.meta["val"], node.meta["val"]
        for name, before, after in (
            ("size", tuple(left.size()), tuple(back.size())),
            ("strides", tuple(left.stride()), tuple(back.stride())),
            ("offset", left.storage_offset(), back.storage_offset()),
            ("bytes", left.untyped_storage().nbytes(), back.untyped_storage().nbytes()),
            ("dtype", left.dtype, back.dtype),
            ("device", left.device, back.device),
        ):
            if before != after:
                _fail(
                    "every_geometry_comes_back", node, f"its {name} left as {before} and is {after}"
                )


def only_activations_move(step: StepGraphs) -> None:
    """Nothing that the caller holds is moved: outputs, inputs, parameters, mutated buffers."""
    storages = Storages.of(step.forward)
    held: dict[int, fx.Node] = {}
    for node in step.forward.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            held.update(dict.fromkeys(storages.ids[node], node))
    for output in step.outputs:
        if isinstance(output, fx.Node):
            held.update(dict.fromkeys(storages.ids[output], output))
    for node in _find(step.forward, OFFLOAD):
        for key in storages.ids.get(_arg(node, 0), ()):
            if key in held:
                _fail(
                    "only_activations_move", node, f"the caller holds its storage, as {held[key]}"
                )


def nothing_is_read_after_it_was_freed(step: StepGraphs) -> None:
    """Between the wait for a copy out and the end of the forward nothing reads the storage.

    Views extend a storage's life: a reader after the wait would keep the memory that the
    plan counts as free.  Nor is the storage saved for the backward beside its copy.
    """
    storages = Storages.of(step.forward)
    order = {node: i for i, node in enumerate(step.forward.graph.nodes)}
    saved = {node for node in step.saved if isinstance(node, fx.Node)}
    for wait in _find(step.forward, OFFLOAD_WAIT):
        for key in storages.ids.get(_arg(wait, 1), ()):
            for holder in storages.holders[key]:
                late = [user for user in holder.users if order[user] > order[wait]]
                readers = [user for user in late if user.op != "output"]
                if readers:
                    _fail(
                        "nothing_is_read_after_it_was_freed",
                        readers[0],
                        f"it reads {holder}, whose memory is freed at {wait}",
                    )
                if holder in saved:
                    _fail(
                        "nothing_is_read_after_it_was_freed",
                        holder,
                        f"it is saved for the backward, but its memory is freed at {wait}",
                    )


def nothing_is_written_while_it_is_copied(step: StepGraphs) -> None:
    """Between the start of a copy out and its wait nothing mutates the storage."""
    storages = Storages.of(step.forward)
    order = {node: i for i, node in enumerate(step.forward.graph.nodes)}
    for node in _find(step.forward, OFFLOAD):
        wait = next(user for user in node.users if user.target is OFFLOAD_WAIT)
        for key in storages.ids.get(_arg(node, 0), ()):
            for holder in storages.holders[key]:
                for user in holder.users:
                    if order[node] < order[user] < order[wait] and holder in written_by(user):
                        _fail(
                            "nothing_is_written_while_it_is_copied",
                            user,
                            f"it writes to {holder}, which {node} is copying",
                        )


def random_ops_run_again_from_their_state(step: StepGraphs) -> None:
    """A recomputed op that draws random numbers begins with the state that the forward had."""
    for node in _recomputed(step):
        if draws(node):
            _fail("random_ops_run_again_from_their_state", node, "it would draw other numbers")


def nothing_changes_twice(step: StepGraphs) -> None:
    """A recomputed op writes to nothing, and makes no new running statistics."""
    for node in _recomputed(step):
        target = op_of(node)[0]
        is_op = isinstance(target, torch._ops.OpOverload)
        if is_op and (target._schema.is_mutable or copied_call(node)[0] is not node.target):
            _fail("nothing_changes_twice", node, "the forward has had its side effects already")


def changed_inputs_are_read_as_they_were(step: StepGraphs) -> None:
    """The backward is given no input that the forward changes, but a copy from before."""
    mutated = mutated_inputs(step)
    for node in step.saved:
        if node in mutated:
            _fail("changed_inputs_are_read_as_they_were", node, "the forward changes it")


def recipes_read_exact_values(step: StepGraphs) -> None:
    """A recomputed op reads no tensor whose codec kept only what the backward reads of it."""
    for node in _recomputed(step):
        for source in node.all_input_nodes:
            if source.target is UNPACK_BITS and source.meta["val"].dtype is not torch.bool:
                _fail("recipes_read_exact_values", node, f"{source} holds only signs")
            if source.target in (DEQUANTISE, CAST_UP):
                _fail("recipes_read_exact_values", node, f"{source} was rounded")


def each_rounded_tensor_comes_back_as_it_left(step: StepGraphs) -> None:
    """Each dial packs one tensor, which is unpacked from the same form to its geometry."""
    packed_by_dial: dict[object, fx.Node] = {}
    for node in _find(step.forward, QUANTISE):
        given = arguments_of(node)
        if given["dial"] in packed_by_dial:
            other = packed_by_dial[given["dial"]]
            _fail("each_rounded_tensor_comes_back_as_it_left", node, f"{other} has its dial, too")
        packed_by_dial[given["dial"]] = node
    for node in _find(step.backward, DEQUANTISE):
        back = arguments_of(node)
        packed = packed_by_dial.get(back["dial"])
        if packed is None:
            _fail("each_rounded_tensor_comes_back_as_it_left", node, "nothing packed it")
        left = arguments_of(packed)
        source = left["x"].meta["val"]
        left |= {"size": list(source.size()), "stride": list(source.stride())}
        left |= {"dtype": source.dtype}
        for name in (*FORM, "size", "stride", "dtype"):
            before, after = left[name], back[name]
            if before != after:
                _fail(
                    "each_rounded_tensor_comes_back_as_it_left",
                    node,
                    f"its {name} left as {before} and is {after}",
                )


def rounded_values_reach_weights_alone(step: StepGraphs) -> None:
    """What was rounded is read for weights' gradients, and where signs are exact for those."""
    for node in (*_find(step.backward, DEQUANTISE), *_find(step.backward, CAST_UP)):
        has_signs = node.target is CAST_UP or arguments_of(node)["mode"] == "sign"
        for reader, view in _readers(node):
            is_sign = has_signs and reads_sign(reader, view)
            if not (is_sign or reader.target in (OBSERVE, MM) or _reads_for_weight(reader, view)):
                _fail("rounded_values_reach_weights_alone", reader, f"it reads {view}")


CHECKS: tuple[Check, ...] = (
    every_node_has_a_value,
    no_parameter_is_overwritten,
    each_offload_is_waited_for_once,
    each_reload_is_waited_for_once,
    each_offload_is_reloaded_once,
    each_slot_is_used_once,
    every_geometry_comes_back,
    only_activations_move,
    nothing_is_read_after_it_was_freed,
    nothing_is_written_while_it_is_copied,
    random_ops_run_again_from_their_state,
    nothing_changes_twice,
    changed_inputs_are_read_as_they_were,
    recipes_read_exact_values,
    each_rounded_tensor_comes_back_as_it_left,
    rounded_values_reach_weights_alone,
)


def _arg(node: fx.Node, index: int) -> fx.Node:
    """Return an argument that is a node."""
    argument = node.args[index]
    assert isinstance(argument, fx.Node)
    return argument


def _find(gm: fx.GraphModule, target: object) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target is target]


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield what reads a node or a view of it, with that view."""
    for user in node.users:
        target = user.target
        returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
        is_view = any(made.alias_info is not None for made in returns)
        # Its schema does not say that it is one.
        if is_view or target is torch.ops.aten._unsafe_view.default:
            yield from _readers(user)
        else:
            yield user, node


def _reads_for_weight(reader: fx.Node, view: fx.Node) -> bool:
    return reader.target is CONVOLUTION_BACKWARD and reader.args[1] is view is not reader.args[0]


def _recomputed(step: StepGraphs) -> list[fx.Node]:
    """List the nodes of the backward that compute again."""
    return [
        node
        for node in step.backward.graph.nodes
        if isinstance(decision := node.meta.get("backhaul"), Decision)
        and isinstance(decision.action, Recompute)
    ]


def _is_ours(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "backhaul"


def _fail(check: str, node: fx.Node, fault: str) -> NoReturn:
    nodes = list(node.graph.nodes)
    at = nodes.index(node)
    around = nodes[max(0, at - NEIGHBOURS) : at + NEIGHBOURS]
    lines = "\n".join(
        f"  {'->' if near is node else '  '} {near.format_node() or near.name}" for near in around
    )
    raise VerifyError(f"{check}: {node.name}: {fault}\n{lines}", check=check, node=node.name)

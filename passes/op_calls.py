"""Turn graph nodes into calls that can be timed without the graph.

Two nodes with the same operator, shapes, strides, dtypes, devices and arguments share one
key, and so one measurement.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from backhaul.passes.step_graphs import Storages, is_alias_op, tensors_of
from backhaul.passes.torch_compat import op_of
from backhaul.runtime.measure_ops import OpCall, TensorSpec

__all__ = ["arguments_of", "call_of", "codec_call", "spec_of", "written_by"]


def call_of(node: fx.Node, storages: Storages) -> OpCall | None:
    """Describe the call that a node makes, or None if it takes no time.

    A view runs no kernel.  It takes the time of a call where the host computes, and none where
    the host is ahead of an accelerator.

    Args:
        node: A node of a forward or backward graph.
        storages: The storages of its graph.
    """
    if node.op != "call_function" or node.target is operator.getitem:
        return None
    if is_alias_op(node, storages) and any(t.device.type != "cpu" for t in tensors_of(node)):
        return None
    target, given = op_of(node)
    args = fx.map_arg(given, _specified)
    kwargs = fx.map_arg(node.kwargs, _specified)
    return _call(target, args, kwargs)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a node that calls an op, by name, in schema order, with defaults."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return {
        argument.name: node.args[index]
        if index < len(node.args)
        else node.kwargs.get(argument.name, argument.default_value)
        for index, argument in enumerate(node.target._schema.arguments)
    }


def written_by(node: fx.Node) -> list[Any]:
    """Return the arguments that the op of a node writes to."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    given = arguments_of(node)
    return [
        given[argument.name]
        for argument in node.target._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def codec_call(target: Any, *args: Any) -> OpCall:
    """Describe a call of a codec op; tensors are given as specs."""
    return _call(target, args, {})


def spec_of(value: torch.Tensor) -> TensorSpec:
    """Describe a tensor's geometry."""
    return TensorSpec(
        size=tuple(value.size()),
        stride=tuple(value.stride()),
        storage_offset=int(value.storage_offset()),
        dtype=value.dtype,
        device=value.device,
    )


def _call(target: Any, args: Any, kwargs: Any) -> OpCall:
    described = [_described(arg) for arg in args]
    described += [f"{name}={_described(arg)}" for name, arg in sorted(kwargs.items())]
    key = f"{_target_name(target)}({', '.join(described)})"
    return OpCall(key=key, target=target, args=tuple(args), kwargs=dict(kwargs))


def _specified(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return spec_of(value)
    if isinstance(value, (tuple, list)):
        return type(value)(spec_of(item) for item in tensors_of(node))
    return value


def _described(arg: Any) -> str:
    if isinstance(arg, TensorSpec):
        return (
            f"{str(arg.dtype).removeprefix('torch.')}{list(arg.size)}"
            f"/{list(arg.stride)}+{arg.storage_offset}@{arg.device.type}"
        )
    if isinstance(arg, (tuple, list)):
        return f"[{', '.join(_described(item) for item in arg)}]"
    return repr(arg)


def _target_name(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else target.__name__

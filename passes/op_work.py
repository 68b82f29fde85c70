"""What each op of a graph has to do: its class, its arithmetic, and the bytes that it touches.

Arithmetic comes from torch's own flop counter, on fake tensors: nothing is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from backhaul.passes.step_graphs import tensors_in
from backhaul.passes.torch_compat import FakeTensorMode, storage_id
from backhaul.runtime.measure_ops import OpCall, TensorSpec, distinct_calls
from backhaul.scheduler.hardware import OpClass, OpWork

__all__ = ["is_costly", "works_of"]

aten = torch.ops.aten

_CLASS_BY_PACKET: dict[Any, OpClass] = {
    aten.mm: "matmul",
    aten.addmm: "matmul",
    aten.bmm: "matmul",
    aten.baddbmm: "matmul",
    aten.convolution: "convolution",
    aten._convolution: "convolution",
    aten.convolution_backward: "convolution",
}
_ATTENTION = "_scaled_dot_product"


def works_of(calls: Sequence[OpCall]) -> tuple[OpWork, ...]:
    """Say what each distinct call does, in order of first appearance."""
    with torch.no_grad(), FakeTensorMode():
        return tuple(_work_of(call) for call in distinct_calls(calls))


def is_costly(node: fx.Node) -> bool:
    """Say whether arithmetic, not memory, bounds the op of a node."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return _class_of(packet) != "memory"


def _work_of(call: OpCall) -> OpWork:
    args, kwargs = _faked((call.args, call.kwargs))
    result = call.target(*args, **kwargs)
    given, made = list(tensors_in((args, kwargs))), list(tensors_in(result))
    packet = getattr(call.target, "overloadpacket", call.target)
    op_class: OpClass = "view" if _is_view(call, given, made) else _class_of(packet)
    floats = [tensor for tensor in given if tensor.is_floating_point()]
    return OpWork(
        key=call.key,
        op_class=op_class,
        dtype=str(floats[0].dtype).removeprefix("torch.") if floats else "",
        flops=0 if op_class in ("memory", "view") else _flops(packet, args, kwargs, result),
        nbytes=sum(tensor.numel() * tensor.element_size() for tensor in (*given, *made)),
    )


def _is_view(call: OpCall, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> bool:
    """Say whether a call only looks at what it is given: it runs no kernel."""
    is_mutable = isinstance(call.target, torch._ops.OpOverload) and call.target._schema.is_mutable
    if not made or is_mutable:
        return False
    return {storage_id(tensor) for tensor in made} <= {storage_id(tensor) for tensor in given}


def _class_of(packet: Any) -> OpClass:
    if _ATTENTION in str(packet):
        return "attention"
    return _CLASS_BY_PACKET.get(packet, "memory")


def _flops(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    if _ATTENTION in str(packet):
        return _attention_flops(packet, args)
    return int(flop_registry[packet](*args, **kwargs, out_val=result))


def _attention_flops(packet: Any, args: Any) -> int:
    """Count the two products of a forward, or the five of a backward, over all heads."""
    is_backward = "backward" in str(packet)
    query, key, value = args[1:4] if is_backward else args[:3]
    batch, heads, length, width = query.shape
    scores = 2 * batch * heads * length * key.shape[2]
    if is_backward:
        return int(scores * (3 * width + 2 * value.shape[-1]))
    return int(scores * (width + value.shape[-1]))


def _faked(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        storage = torch.empty(value.storage_length, dtype=value.dtype, device=value.device)
        return storage.as_strided(value.size, value.stride, value.storage_offset)
    if isinstance(value, (tuple, list)):
        return type(value)([_faked(item) for item in value])
    if isinstance(value, dict):
        return {name: _faked(item) for name, item in value.items()}
    return value

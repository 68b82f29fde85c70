"""Find the lossless codec, if any, that keeps every backward use of a saved tensor exact.

    bool                               one bit an element
    ReLU output read for its sign      one bit an element; the values come back as 0 and 1,
                                       which every reader here treats alike
    max-pool indices                   the offset in the window, one byte
    indices along a short dimension    the narrowest integer that holds the dimension

A tensor is read *for its sign* by `threshold_backward` at threshold 0, and for its shape and
layout alone by `max_pool2d_with_indices_backward`, whose kernels take the positions from the
indices.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from backhaul.passes.op_calls import arguments_of, codec_call, spec_of
from backhaul.records import CodecRecord
from backhaul.runtime import codecs
from backhaul.runtime.dense import is_dense
from backhaul.runtime.measure_ops import OpCall, TensorSpec

__all__ = ["CodecCalls", "codec_for"]

aten = torch.ops.aten
CodecCalls = tuple[CodecRecord, OpCall, OpCall]

RELU_LIKE = {aten.relu.default, aten.relu_.default}
INDEX_ALONG_DIM: dict[Any, tuple[int, int | None]] = {
    aten.sort.default: (1, -1),
    aten.sort.stable: (1, -1),
    aten.topk.default: (1, -1),
    aten.max.dim: (1, 0),
    aten.min.dim: (1, 0),
}
"""Operators with an index output: which output, and the default of their `dim` argument."""


def codec_for(base: fx.Node, readers: list[tuple[fx.Node, fx.Node]]) -> CodecCalls | None:
    """Return the codec for one saved storage with the calls that pack and unpack it.

    Args:
        base: The forward node that the storage is named after.
        readers: Each backward node that reads the storage, with the view it reads.
    """
    value = base.meta["val"]
    if not is_dense(value.size(), value.stride()) or value.numel() == 0:
        return None
    if value.untyped_storage().nbytes() != value.numel() * value.element_size():
        return None
    for offered in (_mask, _sign, _pool_offsets, _narrow):
        found = offered(base, readers)
        if found is not None:
            return found if found[0].packed_bytes < value.untyped_storage().nbytes() else None
    return None


def _mask(base: fx.Node, _readers: list[tuple[fx.Node, fx.Node]]) -> CodecCalls | None:
    return _bits(base) if base.meta["val"].dtype is torch.bool else None


def _sign(base: fx.Node, readers: list[tuple[fx.Node, fx.Node]]) -> CodecCalls | None:
    if base.target not in RELU_LIKE:
        return None
    return _bits(base) if all(_reads_sign(*reader) for reader in readers) else None


def _reads_sign(reader: fx.Node, view: fx.Node) -> bool:
    if reader.target is aten.threshold_backward.default:
        return reader.args[0] is not view and reader.args[1] is view and reader.args[2] in (0, 0.0)
    if reader.target is aten.max_pool2d_with_indices_backward.default:
        return reader.args[0] is not view and reader.args[1] is view
    return False


def _bits(base: fx.Node) -> CodecCalls:
    value = base.meta["val"]
    size, stride = tuple(value.size()), tuple(value.stride())
    return _record(
        "bits",
        (size, stride, _dtype_name(value)),
        base,
        packed=((codecs.pack_bits_nbytes(value.numel()),), torch.uint8),
        pack=(torch.ops.backhaul.pack_bits.default,),
        unpack=(torch.ops.backhaul.unpack_bits.default, list(size), list(stride), value.dtype),
    )


def _pool_offsets(base: fx.Node, _readers: list[tuple[fx.Node, fx.Node]]) -> CodecCalls | None:
    pool = _picked(base, 1)
    if pool is None or pool.target is not aten.max_pool2d_with_indices.default:
        return None
    pooled, kernel, *rest = arguments_of(pool).values()
    stride, padding, dilation = rest[:3]
    kernel, stride, padding, dilation = (
        _pair(kernel),
        _pair(stride or kernel),
        _pair(padding),
        _pair(dilation),
    )
    if math.prod(kernel) > 256:
        return None
    value = base.meta["val"]
    window = [list(pooled.meta["val"].shape[-2:]), kernel, stride, padding, dilation]
    size, strides = list(value.size()), list(value.stride())
    return _record(
        "pool_offsets",
        tuple(tuple(item) for item in (size, strides, *window)),
        base,
        packed=(tuple(size), torch.uint8),
        pack=(torch.ops.backhaul.pack_pool_offsets.default, *window),
        unpack=(torch.ops.backhaul.unpack_pool_offsets.default, size, strides, *window),
    )


def _narrow(base: fx.Node, _readers: list[tuple[fx.Node, fx.Node]]) -> CodecCalls | None:
    source = base.args[0] if base.target is operator.getitem else None
    if not isinstance(source, fx.Node) or source.target not in INDEX_ALONG_DIM:
        return None
    output, default_dim = INDEX_ALONG_DIM[source.target]
    if base.args[1] != output:
        return None
    arguments = arguments_of(source)
    searched = next(iter(arguments.values())).meta["val"]
    given = arguments.get("dim")
    dim = int(given) if given is not None else default_dim or 0
    bound = searched.shape[dim] if searched.dim() else 1
    value = base.meta["val"]
    dtype = codecs.narrowest_dtype(bound)
    size, stride = tuple(value.size()), tuple(value.stride())
    return _record(
        "narrow",
        (size, stride, _dtype_name(value), str(dtype).removeprefix("torch.")),
        base,
        packed=(size, dtype),
        pack=(torch.ops.backhaul.narrow_integers.default, dtype),
        unpack=(
            torch.ops.backhaul.widen_integers.default,
            list(size),
            list(stride),
            value.dtype,
        ),
    )


def _record(
    name: Any,
    arguments: tuple[Any, ...],
    base: fx.Node,
    *,
    packed: tuple[tuple[int, ...], torch.dtype],
    pack: tuple[Any, ...],
    unpack: tuple[Any, ...],
) -> CodecCalls:
    value = base.meta["val"]
    packed_size, packed_dtype = packed
    packed_value = TensorSpec(
        size=packed_size,
        stride=_contiguous(packed_size),
        storage_offset=0,
        dtype=packed_dtype,
        device=value.device,
    )
    encode = codec_call(pack[0], spec_of(value), *pack[1:])
    decode = codec_call(unpack[0], packed_value, *unpack[1:])
    record = CodecRecord(
        name=name,
        arguments=arguments,
        packed_bytes=math.prod(packed_size) * packed_dtype.itemsize,
        encode_key=encode.key,
        decode_key=decode.key,
        is_exact=name != "bits" or value.dtype is torch.bool,
    )
    return record, encode, decode


def _picked(node: fx.Node, index: int) -> fx.Node | None:
    """Return the tuple that a node picks this item from."""
    if node.target is operator.getitem and node.args[1] == index:
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    return None


def _pair(value: Any) -> list[int]:
    items = [value, value] if isinstance(value, int) else list(value)
    return items * 2 if len(items) == 1 else items


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for length in reversed(size):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def _dtype_name(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")

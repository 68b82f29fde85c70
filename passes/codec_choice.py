"""Find the codec for a saved tensor: the lossless one, if any, that keeps every backward use exact.

    bool                               one bit an element
    ReLU output read for its sign      one bit an element; the values come back as 0 and 1,
                                       which every reader here treats alike
    max-pool indices                   the offset in the window, one byte
    indices along a short dimension    the narrowest integer that holds the dimension

A tensor is read *for its sign* by `threshold_backward` at threshold 0, and for its shape and
layout alone by `max_pool2d_with_indices_backward`, whose kernels take the positions from the
indices.

If the user allows errors, a tensor that weights' gradients are computed from, and nothing else
is but signs, may be rounded to a bound:

    quantise                           steps of twice the bound; a ReLU output keeps its signs
    cast                               a smaller dtype; what is positive stays positive
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import torch
from torch import fx

from backhaul.passes.linear_reads import LinearRead
from backhaul.passes.op_calls import arguments_of, codec_call, spec_of
from backhaul.records import CodecRecord, ErrorBound
from backhaul.runtime import casts, codecs, quantiser
from backhaul.runtime.dense import is_dense
from backhaul.runtime.measure_ops import OpCall, TensorSpec

__all__ = ["CodecCalls", "Readers", "can_be_rounded", "codec_for", "reads_sign"]

aten = torch.ops.aten
CodecCalls = tuple[CodecRecord, OpCall, OpCall]
Readers = list[tuple[fx.Node, fx.Node]]

RELU_LIKE = {aten.relu.default, aten.relu_.default}
INDEX_ALONG_DIM: dict[Any, tuple[int, int | None]] = {
    aten.sort.default: (1, -1),
    aten.sort.stable: (1, -1),
    aten.topk.default: (1, -1),
    aten.max.dim: (1, 0),
    aten.min.dim: (1, 0),
}
"""Operators with an index output: which output, and the default of their `dim` argument."""


def codec_for(
    base: fx.Node,
    readers: Readers,
    error_bound: ErrorBound | None = None,
    cast_dtype: torch.dtype | None = None,
) -> CodecCalls | None:
    """Return the codec for one saved storage with the calls that pack and unpack it.

    Args:
        base: The forward node that the storage is named after.
        readers: Each backward node that reads the storage, with the view it reads.
        error_bound: How it may be rounded, if `can_be_rounded`.
        cast_dtype: What it may be cast to, if `can_be_rounded`.
    """
    value = base.meta["val"]
    if not _fills_its_storage(value):
        return None
    found = _rounded(base, readers, error_bound) if error_bound else None
    if cast_dtype and casts.can_cast(value.dtype, cast_dtype):
        found = _cast(base, cast_dtype)
    for offered in (_mask, _sign, _pool_offsets, _narrow):
        found = found or offered(base, readers)
    if found is None or found[0].packed_bytes >= value.untyped_storage().nbytes():
        return None
    return found


def can_be_rounded(base: fx.Node, readers: Readers, reads: Mapping[fx.Node, LinearRead]) -> bool:
    """Say whether an error in a storage reaches weights' gradients alone.

    Args:
        base: The forward node that the storage is named after.
        readers: Each backward node that reads the storage, with the view it reads.
        reads: What each op of the backward reads linearly.
    """
    value = base.meta["val"]
    if not value.is_floating_point() or not _fills_its_storage(value):
        return False
    is_linear = [
        reader in reads
        and reader.args[reads[reader].activation] is view
        and view.meta["val"].numel() == value.numel()
        for reader, view in readers
    ]
    others = [each for each, linear in zip(readers, is_linear, strict=True) if not linear]
    return any(is_linear) and (not others or _is_read_for_sign(base, others))


def _fills_its_storage(value: torch.Tensor) -> bool:
    if not is_dense(value.size(), value.stride()) or value.numel() == 0:
        return False
    return value.untyped_storage().nbytes() == value.numel() * value.element_size()


def _rounded(base: fx.Node, readers: Readers, given: ErrorBound) -> CodecCalls:
    value = base.meta["val"]
    size, stride = list(value.size()), list(value.stride())
    form = astuple(given.form)
    nbytes = quantiser.quantised_nbytes(value.numel(), given.form, value.dtype)
    bound = TensorSpec(
        size=(), stride=(), storage_offset=0, dtype=torch.float32, device=value.device
    )
    return _record(
        "quantise",
        (tuple(size), tuple(stride), _dtype_name(value), *form),
        base,
        packed=((nbytes,), torch.uint8),
        pack=(torch.ops.backhaul.quantise_tensor.default, bound, *form),
        unpack=(
            torch.ops.backhaul.dequantise_tensor.default,
            size,
            stride,
            value.dtype,
            *form,
        ),
        bound=given.bound,
    )


def _cast(base: fx.Node, to: torch.dtype) -> CodecCalls:
    value = base.meta["val"]
    size, stride = list(value.size()), list(value.stride())
    to_name = str(to).removeprefix("torch.")
    return _record(
        "cast",
        (tuple(size), tuple(stride), _dtype_name(value), to_name),
        base,
        packed=((casts.cast_down_nbytes(value.numel(), to),), torch.uint8),
        pack=(torch.ops.backhaul.cast_down.default, to),
        unpack=(torch.ops.backhaul.cast_up.default, size, stride, value.dtype, to),
        relative_bound=casts.CAST_DTYPES[to],
    )


def _mask(base: fx.Node, _readers: Readers) -> CodecCalls | None:
    return _bits(base) if base.meta["val"].dtype is torch.bool else None


def _sign(base: fx.Node, readers: Readers) -> CodecCalls | None:
    return _bits(base) if _is_read_for_sign(base, readers) else None


def _is_read_for_sign(base: fx.Node, readers: Readers) -> bool:
    return base.target in RELU_LIKE and all(reads_sign(*reader) for reader in readers)


def reads_sign(reader: fx.Node, view: fx.Node) -> bool:
    """Say whether a reader wants no more of what it reads than which elements are positive."""
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


def _pool_offsets(base: fx.Node, _readers: Readers) -> CodecCalls | None:
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


def _narrow(base: fx.Node, _readers: Readers) -> CodecCalls | None:
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
    bound: float | None = None,
    relative_bound: float | None = None,
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
        is_exact=name in ("pool_offsets", "narrow") or value.dtype is torch.bool,
        bound=bound,
        relative_bound=relative_bound,
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

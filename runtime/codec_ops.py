"""Define the codecs as ops, so that a rewritten graph shows them as nodes.

Each op stands with its kernel and its fake.  A kernel reads its input in memory order, so an
op must be given the strides that it was traced with: `needs_exact_strides` says so to
compilers that change layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import Library

from backhaul.records import PackedForm
from backhaul.runtime import casts, codecs, quantiser

__all__ = ["FORM_SCHEMA", "dequantise", "fake_dequantise", "fake_quantise"]

FORM_SCHEMA = "int rows, int exact_blocks, bool is_sparse, str mode"
"""The arguments of an op that are the fields of a `PackedForm`."""


def _quantise(x: torch.Tensor, bound: torch.Tensor, *form: Any) -> torch.Tensor:
    return quantiser.quantise(x, bound, PackedForm(*form))


def fake_quantise(x: torch.Tensor, bound: torch.Tensor, *form: Any) -> torch.Tensor:
    """Call `quantiser.fake_quantise` with the arguments of an op."""
    return quantiser.fake_quantise(x, bound, PackedForm(*form))


def dequantise(
    packed: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    *form: Any,
) -> torch.Tensor:
    """Call `quantiser.dequantise` with the arguments of an op."""
    return quantiser.dequantise(packed, PackedForm(*form), size, stride, dtype)


def fake_dequantise(
    packed: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    *form: Any,
) -> torch.Tensor:
    """Call `quantiser.fake_dequantise` with the arguments of an op."""
    return quantiser.fake_dequantise(packed, PackedForm(*form), size, stride, dtype)


_CODEC_OPS: tuple[tuple[str, Callable[..., torch.Tensor], Callable[..., torch.Tensor]], ...] = (
    (
        "pack_bits(Tensor x) -> Tensor",
        codecs.pack_bits,
        codecs.fake_pack_bits,
    ),
    (
        "unpack_bits(Tensor packed, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor",
        codecs.unpack_bits,
        codecs.fake_unpack_bits,
    ),
    (
        "pack_pool_offsets(Tensor indices, SymInt[] input_size, int[] kernel, int[] stride, "
        "int[] padding, int[] dilation) -> Tensor",
        codecs.pack_pool_offsets,
        codecs.fake_pack_pool_offsets,
    ),
    (
        "unpack_pool_offsets(Tensor packed, SymInt[] size, SymInt[] tensor_stride, "
        "SymInt[] input_size, int[] kernel, int[] stride, int[] padding, int[] dilation) "
        "-> Tensor",
        codecs.unpack_pool_offsets,
        codecs.fake_unpack_pool_offsets,
    ),
    (
        "narrow_integers(Tensor x, ScalarType dtype) -> Tensor",
        codecs.narrow,
        codecs.fake_narrow,
    ),
    (
        "widen_integers(Tensor packed, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor",
        codecs.widen,
        codecs.fake_widen,
    ),
    (
        "cast_down(Tensor x, ScalarType dtype) -> Tensor",
        casts.cast_down,
        casts.fake_cast_down,
    ),
    (
        "cast_up(Tensor packed, SymInt[] size, SymInt[] stride, ScalarType dtype, "
        "ScalarType stored_dtype) -> Tensor",
        casts.cast_up,
        casts.fake_cast_up,
    ),
    (
        "quantise_tensor(Tensor x, Tensor bound, " + FORM_SCHEMA + ") -> Tensor",
        _quantise,
        fake_quantise,
    ),
    (
        "dequantise_tensor(Tensor packed, SymInt[] size, SymInt[] stride, ScalarType dtype, "
        + FORM_SCHEMA
        + ") -> Tensor",
        dequantise,
        fake_dequantise,
    ),
)

# Held for the life of the process: the ops vanish with it.
_LIBRARY = Library("backhaul", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch gives no types
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

for _schema, _kernel, _fake in _CODEC_OPS:
    _name = _LIBRARY.define(_schema, tags=_TAGS)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"backhaul::{_name}", _fake, lib=_LIBRARY)

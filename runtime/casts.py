"""Pack floating-point tensors as a smaller dtype, each element with a relative error.

A float16 and a float8 reach neither as high nor as low as what they are made of.  The tensor is
therefore divided by a power of two first, which lies in front of it as one float32.  Halfway
between two values of the dtype is the largest error, but for what is positive and would become 0:
it comes back as the least that is positive.

    dtype           error of x, at most
    bfloat16        2**-8 |x|, and 2**-133 where that is more
    float16         2**-11 |x|, and 2**-38 of the largest finite element where that is more
    float8_e5m2     2**-3 |x|, and 2**-30 of the largest finite element where that is more

The power of two is 2**-126 at least, so that of tensors of denormal numbers alone the error may be
2**-149 and 2**-142.  NaN and infinities come back as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backhaul.runtime.dense import chunk_length, empty_dense, memory_ordered

__all__ = [
    "CAST_DTYPES",
    "can_cast",
    "cast_down",
    "cast_down_nbytes",
    "cast_up",
    "fake_cast_down",
    "fake_cast_up",
]

CAST_DTYPES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float8_e5m2: 2.0**-3}
"""What may be cast to, with the largest relative error."""

_HEADER_BYTES = 4
# The largest power of two of a float16 and of a float8_e5m2.
_HIGHEST_EXPONENT = 15
_LEAST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float8_e5m2: 2.0**-16}


def can_cast(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Say whether tensors of a dtype may be packed as another."""
    is_known = dtype in (torch.float32, torch.float16, torch.bfloat16) and to in CAST_DTYPES
    return is_known and to.itemsize < dtype.itemsize


def cast_down_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Return the packed size of `numel` elements in bytes."""
    return _HEADER_BYTES + numel * dtype.itemsize


def cast_down(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pack a tensor as another dtype.

    Args:
        x: Dense floating-point tensor of any shape.
        dtype: What to pack it as, see `can_cast`.

    Returns:
        Flat uint8 tensor of `cast_down_nbytes` bytes, in memory order.

    Raises:
        ValueError: x is not dense, or the dtype is none of those.
    """
    packed = fake_cast_down(x, dtype)
    flat, stored = memory_ordered(x), packed[_HEADER_BYTES:].view(dtype)
    scale = _scale_of(flat, dtype)
    packed[:_HEADER_BYTES].view(torch.float32).copy_(scale)
    chunk = chunk_length(x.device, bytes_per_element=16.0)
    for part, target in zip(torch.split(flat, chunk), torch.split(stored, chunk), strict=True):
        values = _finite_where(part, part.float() / scale, dtype)
        target.copy_(torch.where(part > 0, values.clamp(min=_LEAST[dtype]), values))
    return packed


def fake_cast_down(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Make the output of `cast_down` without reading the input."""
    if not can_cast(x.dtype, dtype):
        raise ValueError(f"a tensor of {x.dtype} is not cast to {dtype}")
    return x.new_empty((cast_down_nbytes(x.numel(), dtype),), dtype=torch.uint8)


def cast_up(
    packed: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    stored_dtype: torch.dtype,
) -> torch.Tensor:
    """Unpack to a tensor with this geometry.

    Args:
        packed: What `cast_down` returned.
        size: Size of the original.
        stride: Its strides, dense.
        dtype: Its dtype.
        stored_dtype: What it was cast to.
    """
    stored = packed[_HEADER_BYTES:].view(stored_dtype)
    x = empty_dense(stored, size, stride, dtype)
    scale = packed[:_HEADER_BYTES].view(torch.float32)
    chunk = chunk_length(packed.device, bytes_per_element=8.0)
    parts = torch.split(memory_ordered(x), chunk)
    for part, source in zip(parts, torch.split(stored, chunk), strict=True):
        values = source.float()
        part.copy_(_finite_where(values, values * scale, dtype))
    return x


def fake_cast_up(
    packed: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    stored_dtype: torch.dtype,
) -> torch.Tensor:
    """Make the output of `cast_up` without reading the input."""
    return packed.new_empty_strided(size, stride, dtype=dtype)


def _finite_where(x: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keep what was finite from becoming an infinity of the dtype."""
    most = torch.finfo(dtype).max
    return torch.where(x.isinf(), values, values.clamp(-most, most))


def _scale_of(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the power of two to divide by, float32 `[1]`."""
    if dtype is torch.bfloat16 or not flat.numel():
        return torch.ones(1, device=flat.device)
    chunk = chunk_length(flat.device, bytes_per_element=8.0)
    most = [
        part.abs().nan_to_num(0.0, posinf=0.0).amax().to(torch.float32)
        for part in torch.split(flat, chunk)
    ]
    _, exponent = torch.frexp(torch.stack(most).amax())
    # A float32 has no inverse of its least numbers; those become less than they could be.
    power = (exponent - _HIGHEST_EXPONENT).clamp(min=-126)
    return torch.ldexp(torch.ones((), device=flat.device), power).view(1)

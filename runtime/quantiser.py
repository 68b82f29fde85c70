"""Pack floating-point tensors with an error that no element exceeds.

A tensor is cut, in memory order, into blocks of `BLOCK` elements.  Each element is rounded to a
whole number of steps, a step being twice the bound at most, and the numbers of a block are
stored as their distance from the least of them, in a fixed count of bits.  The packed form is one
buffer of bytes, which a link moves as it moves any tensor:

    exact     as x     [exact_blocks, BLOCK]         blocks that do not fit, as they were
    where     int32    [exact_blocks]                which blocks those are
    lowest    int32    [blocks]                      the least number of each block
    misfits   int32    [1]                           how many do not fit: more than `exact_blocks`
                                                     of them, and the packed form is void
    bound     float32  [1]                           the bound that it was packed with
    codes     uint8    [blocks, BLOCK // 8 * bits]   the distances

A block fits if its numbers span fewer than two to the bits, and each of its elements has been
checked to come back within the bound; one with a NaN or an infinity never does.  Every size is
known beforehand, and nothing waits for the device.

What comes back is the nearest value of the tensor's dtype to a multiple of the step, which may be
farther from x than the multiple is.  For dtypes of 16 bits the step is therefore a power of two:
then its multiples either are values of the dtype, or lie closer to x than the next value does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from backhaul.runtime.dense import chunk_length, memory_ordered

__all__ = [
    "BLOCK",
    "dequantise",
    "fake_dequantise",
    "fake_quantise",
    "misfit_count",
    "quantise",
    "quantised_nbytes",
]

BLOCK = 256
_LANES = BLOCK // 8

# Beyond this a number of steps and its code are no longer exact as float32.
_MOST_STEPS = 2.0**22
# Leaves room for the rounding of x / step, where the step is no power of two.
_MARGIN = 1 - 2.0**-10


def quantised_nbytes(numel: int, bits: int, exact_blocks: int, dtype: torch.dtype) -> int:
    """Return the packed size of `numel` elements in bytes."""
    return sum(
        dtype.itemsize * math.prod(shape)
        for dtype, shape in _layout(numel, bits, exact_blocks, dtype)
    )


def quantise(x: torch.Tensor, bound: torch.Tensor, bits: int, exact_blocks: int) -> torch.Tensor:
    """Pack a tensor so that each finite element comes back within the bound.

    Elements of at most the bound come back as exactly 0, and NaN and infinities as they were.

    Args:
        x: Dense floating-point tensor of any shape.
        bound: Largest absolute error, a float32 scalar on the same device; not below 0.
        bits: Width of a code, 1 to 8.
        exact_blocks: How many blocks that do not fit there is room for; more than there are
            blocks is cut down to that.

    Returns:
        Flat uint8 tensor of `quantised_nbytes` bytes.  It holds x only if `misfit_count` says that
        there was room for every block that does not fit.

    Raises:
        ValueError: `bits` is not between 1 and 8, x is not dense, or not floating-point.
    """
    buffer = fake_quantise(x, bound, bits, exact_blocks)
    flat = memory_ordered(x)
    packed = _Packed.of(buffer, x.numel(), bits, exact_blocks, x.dtype)
    packed.bound.copy_(bound)
    blocks = packed.lowest.numel()
    is_misfit = x.new_empty(blocks, dtype=torch.bool)
    chunk = _blocks_at_once(x.device)
    for start in range(0, blocks, chunk):
        stop = min(start + chunk, blocks)
        codes, lowest, misfit = _quantise_blocks(_blocks_of(flat, start, stop), packed.bound, bits)
        packed.codes[start:stop] = codes
        packed.lowest[start:stop] = lowest
        is_misfit[start:stop] = misfit
    packed.misfits.copy_(is_misfit.sum())
    if packed.where.numel():
        _store_exact(packed, flat, is_misfit, bits)
    return buffer


def fake_quantise(
    x: torch.Tensor, bound: torch.Tensor, bits: int, exact_blocks: int
) -> torch.Tensor:
    """Make the output of `quantise` without reading the input."""
    if not 1 <= bits <= 8:
        raise ValueError(f"codes have 1 to 8 bits, not {bits}")
    if not x.is_floating_point():
        raise ValueError(f"a tensor of {x.dtype} has no rounding error to bound")
    nbytes = quantised_nbytes(x.numel(), bits, exact_blocks, x.dtype)
    return x.new_empty((nbytes,), dtype=torch.uint8)


def misfit_count(
    packed: torch.Tensor, numel: int, bits: int, exact_blocks: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return how many blocks did not fit, an int32 scalar on the device of the packed form."""
    return _Packed.of(packed, numel, bits, exact_blocks, dtype).misfits[0]


def dequantise(
    packed: torch.Tensor,
    bits: int,
    exact_blocks: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Unpack to a tensor with this geometry.

    Args:
        packed: What `quantise` returned, with no more misfits than there was room for.
        bits: As given to `quantise`.
        exact_blocks: As given to `quantise`.
        size: Size of the original.
        stride: Its strides, dense.
        dtype: Its dtype.

    Raises:
        ValueError: The geometry is not dense, or the packed form is not of that many bytes.
    """
    numel = math.prod(size)
    if packed.numel() != quantised_nbytes(numel, bits, exact_blocks, dtype):
        raise ValueError(
            f"{packed.numel():,} bytes are not what a {dtype} tensor of size {tuple(size)} is "
            f"packed to with {bits} bits and room for {exact_blocks} exact blocks"
        )
    x = fake_dequantise(packed, bits, exact_blocks, size, stride, dtype)
    flat = memory_ordered(x)
    parts = _Packed.of(packed, numel, bits, exact_blocks, dtype)
    blocks = parts.lowest.numel()
    chunk = _blocks_at_once(x.device)
    for start in range(0, blocks, chunk):
        stop = min(start + chunk, blocks)
        rows = _dequantise_blocks(
            parts.codes[start:stop], parts.lowest[start:stop], parts.bound, bits, dtype
        )
        part = flat[start * BLOCK : stop * BLOCK]
        part.copy_(rows.view(-1)[: part.numel()])
    if parts.where.numel():
        _restore_exact(parts, flat)
    return x


def fake_dequantise(
    packed: torch.Tensor,
    bits: int,
    exact_blocks: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Make the output of `dequantise` without reading the input."""
    return packed.new_empty_strided(size, stride, dtype=dtype)


class _Packed(NamedTuple):
    """Views of the parts of a packed form, in their order; see the module."""

    exact: torch.Tensor
    where: torch.Tensor
    lowest: torch.Tensor
    misfits: torch.Tensor
    bound: torch.Tensor
    codes: torch.Tensor

    @staticmethod
    def of(
        buffer: torch.Tensor, numel: int, bits: int, exact_blocks: int, dtype: torch.dtype
    ) -> _Packed:
        """Cut a buffer into its parts."""
        parts, start = [], 0
        for part_dtype, shape in _layout(numel, bits, exact_blocks, dtype):
            stop = start + part_dtype.itemsize * math.prod(shape)
            parts.append(buffer[start:stop].view(part_dtype).view(shape))
            start = stop
        return _Packed(*parts)


def _layout(
    numel: int, bits: int, exact_blocks: int, dtype: torch.dtype
) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """List dtype and shape of each part; each begins where its dtype may."""
    blocks = -(-numel // BLOCK)
    room = min(exact_blocks, blocks)
    return (
        (dtype, (room, BLOCK)),
        (torch.int32, (room,)),
        (torch.int32, (blocks,)),
        (torch.int32, (1,)),
        (torch.float32, (1,)),
        (torch.uint8, (blocks, _LANES * bits)),
    )


def _quantise_blocks(
    x: torch.Tensor, bound: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, lowest numbers and misfits of whole blocks, one a row."""
    wide = _widened(x)
    bound = bound.to(wide.dtype)
    step = _step(bound, x.dtype)
    size = wide.abs()
    numbers = torch.where(size <= bound, 0.0, wide.mul(_inverse(step)).round_())
    lowest, highest = torch.aminmax(numbers, dim=1, keepdim=True)
    error = (numbers * step).to(x.dtype).to(wide.dtype).sub_(wide).abs_()
    # One rounding below the bound, as the difference may have been rounded down to it.
    is_within = (error <= bound * (1 - 4 * torch.finfo(wide.dtype).eps)) | (size <= bound)
    span = highest - lowest
    extreme = torch.maximum(lowest.abs(), highest.abs())
    # A NaN fails every comparison.
    fits = (span < 2**bits) & (extreme <= _MOST_STEPS) & is_within.all(dim=1, keepdim=True)
    lowest = torch.where(fits, lowest, 0.0)
    codes = torch.where(fits, numbers - lowest, 0.0).to(torch.uint8)
    return _interleaved(codes, bits), lowest.to(torch.int32).view(-1), ~fits.view(-1)


def _dequantise_blocks(
    codes: torch.Tensor,
    lowest: torch.Tensor,
    bound: torch.Tensor,
    bits: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the elements of whole blocks, one a row."""
    wide_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = _separated(codes, bits).to(wide_dtype).add_(lowest[:, None])
    return numbers.mul_(_step(bound.to(wide_dtype), dtype)).to(dtype)


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _step(bound: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the largest step that keeps to the bound after what comes back is rounded."""
    step = 2 * bound.clamp(max=torch.finfo(bound.dtype).max / 4)
    if dtype.itemsize > 2:
        return step * _MARGIN
    _, exponent = torch.frexp(step)
    return torch.ldexp(torch.ones_like(step), exponent - 1)


def _inverse(step: torch.Tensor) -> torch.Tensor:
    """Return 1 / step, or the largest finite number, with which only 0 stays small."""
    return step.reciprocal().clamp(max=torch.finfo(step.dtype).max)


def _interleaved(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Put the codes of eight lanes into `bits` bytes: `[m, 8 * n]` to `[m, bits * n]`."""
    lanes = codes.view(-1, 8, _LANES)
    rows = codes.new_zeros((codes.shape[0], bits, _LANES))
    for lane in range(8):
        byte, shift = divmod(lane * bits, 8)
        rows[:, byte] |= lanes[:, lane] << shift
        if shift + bits > 8:
            rows[:, byte + 1] |= lanes[:, lane] >> (8 - shift)
    return rows.view(-1, bits * _LANES)


def _separated(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo `_interleaved`."""
    rows = rows.view(-1, bits, _LANES)
    lanes = rows.new_empty((rows.shape[0], 8, _LANES))
    for lane in range(8):
        byte, shift = divmod(lane * bits, 8)
        code = rows[:, byte] >> shift
        if shift + bits > 8:
            code = code | rows[:, byte + 1] << (8 - shift)
        lanes[:, lane] = code & (2**bits - 1)
    return lanes.view(-1, BLOCK)


def _store_exact(packed: _Packed, flat: torch.Tensor, is_misfit: torch.Tensor, bits: int) -> None:
    """Copy the blocks that do not fit; rows to spare repeat one of the others."""
    room = packed.where.numel()
    slot = is_misfit.cumsum(0).sub_(1)
    slot = torch.where(is_misfit & (slot < room), slot, room)
    where = packed.where.new_full((room + 1,), -1)
    where.scatter_(0, slot, torch.arange(slot.numel(), dtype=where.dtype, device=where.device))
    where = where[:room]
    packed.where.copy_(torch.where(where < 0, where[0].clamp(min=0), where))
    for rows, where in _chunks_of_rows(packed.exact, packed.where):
        index, is_inside = _elements(where, flat.numel())
        original = flat[index]
        original = torch.where(
            is_inside & ~(_widened(original).abs() <= packed.bound), original, 0.0
        )
        picked = where.long()
        unpacked = _dequantise_blocks(
            packed.codes[picked], packed.lowest[picked], packed.bound, bits, flat.dtype
        )
        rows.copy_(torch.where(is_misfit[picked, None], original, unpacked))


def _chunks_of_rows(
    rows: torch.Tensor, where: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    chunk = _blocks_at_once(rows.device)
    return zip(torch.split(rows, chunk), torch.split(where, chunk), strict=True)


def _restore_exact(packed: _Packed, flat: torch.Tensor) -> None:
    for rows, where in _chunks_of_rows(packed.exact, packed.where):
        index, is_inside = _elements(where, flat.numel())
        # What lies past the end is the first element of its row once more.
        flat.scatter_(0, index.view(-1), torch.where(is_inside, rows, rows[:, :1]).view(-1))


def _elements(where: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements of blocks, one block a row, and which of them the tensor has.

    One that it has not is the first of its block once more.
    """
    first = where.long()[:, None] * BLOCK
    index = first + torch.arange(BLOCK, device=where.device)
    is_inside = index < numel
    return torch.where(is_inside, index, first), is_inside


def _blocks_of(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """View blocks as rows; the last one of the tensor is filled up with zeros."""
    part = flat[start * BLOCK : stop * BLOCK]
    missing = (stop - start) * BLOCK - part.numel()
    if missing:
        part = torch.nn.functional.pad(part, (0, missing))
    return part.view(-1, BLOCK)


def _blocks_at_once(device: torch.device) -> int:
    return max(1, chunk_length(device, bytes_per_element=16.0) // BLOCK)

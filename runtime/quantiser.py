"""Pack floating-point tensors with an error that no element exceeds, in as few bits as each needs.

A tensor is cut, in memory order, into blocks of `BLOCK` elements.  Each element is rounded to a
number of steps, a step being twice the bound at most.  A block stores its numbers as their distance
from the least of them, in planes of one bit: as many planes as its largest distance needs, 0 to 8.
The packed form is one buffer of bytes, which a link moves as it moves any tensor:

    exact     as x     [exact_blocks, BLOCK]     blocks that do not fit, as they were
    where     int32    [exact_blocks]            which blocks those are, -1 for none
    lowest    int32    [blocks]                  the least number of each block
    needs     int32    [2]                       rows and exact blocks that there should be
    bound     float32  [1]                       the bound that it was packed with
    pool      uint8    [rows + 2, BLOCK // 8]    the planes of the blocks; zeros; waste
    widths    uint8    [blocks]                  how many planes each block has

A block fits if its distances do not exceed 8 bits, and each of its elements has been checked to
come back within the bound; one with a NaN or an infinity never does.  Every size is known
beforehand, and nothing waits for the device: where `needs` exceeds what there is, the packed form
is void.

There are three ways to round; in all of them 0 comes back as 0:

    zero      to the nearest number of steps: what is within the bound comes back as exactly 0
    sign      the same, for ReLU outputs, but what is positive comes back positive: what is within
              the bound as the least normal number of the dtype
    dither    to the number below after a pseudo-random part of a step was added, which is taken
              away again: errors are uniform and independent of the tensor, and so do not add
              up over elements that are alike

What comes back is the nearest value of the tensor's dtype to the number times the step, which may
be farther from x than that is.  For dtypes of 16 bits the step is therefore a power of two: then
its multiples either are values of the dtype, or lie closer to x than the next value does.  Dithered
values are no multiples: there the step is 1.5 times the bound, which leaves room for the rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from backhaul.records import Mode
from backhaul.runtime.dense import chunk_length, memory_ordered

__all__ = [
    "BLOCK",
    "dequantise",
    "fake_dequantise",
    "fake_quantise",
    "measure",
    "needs",
    "quantise",
    "quantised_nbytes",
]

BLOCK = 256
_LANES = 8
_ROW = BLOCK // _LANES

# Beyond this a number of steps and its distance are no longer exact as float32.
_MOST_STEPS = 2.0**22
# Leaves room for the rounding of x / step, where the step is no power of two.
_MARGIN = 1 - 2.0**-10


def quantised_nbytes(numel: int, rows: int, exact_blocks: int, dtype: torch.dtype) -> int:
    """Return the packed size of `numel` elements in bytes."""
    return sum(
        part_dtype.itemsize * math.prod(shape)
        for part_dtype, shape in _layout(numel, rows, exact_blocks, dtype)
    )


def quantise(
    x: torch.Tensor, bound: torch.Tensor, rows: int, exact_blocks: int, mode: Mode = "zero"
) -> torch.Tensor:
    """Pack a tensor so that each finite element comes back within the bound.

    NaN and infinities come back as they were; see the module for what small elements do.

    Args:
        x: Dense floating-point tensor of any shape.
        bound: Largest absolute error, a float32 scalar on the same device; not below 0.
        rows: How many planes there is room for.
        exact_blocks: How many blocks that do not fit there is room for; more than there are
            blocks is cut down to that.
        mode: How to round.  For `sign` a block with an element below 0 does not fit.

    Returns:
        Flat uint8 tensor of `quantised_nbytes` bytes.  It holds x only if `needs` says that there
        was room.

    Raises:
        ValueError: x is not dense, or not floating-point.
    """
    buffer = fake_quantise(x, bound, rows, exact_blocks, mode)
    flat = memory_ordered(x)
    packed = _Packed.of(buffer, x.numel(), rows, exact_blocks, x.dtype)
    packed.bound.copy_(bound)
    packed.pool[rows:].zero_()
    is_misfit = x.new_empty(packed.lowest.numel(), dtype=torch.bool)
    used = packed.needs.new_zeros(())
    for start, stop in _chunks(flat):
        part = _blocks_of(flat, start, stop)
        numbers, lowest, widths, misfit = _rounded(part, packed.bound, mode, start)
        packed.lowest[start:stop] = lowest
        packed.widths[start:stop] = widths
        is_misfit[start:stop] = misfit
        planes = _planes((numbers - lowest[:, None]).int().mul_(~misfit[:, None]))
        to = _places(widths, used, rows, otherwise=rows + 1)
        packed.pool.index_copy_(0, to.view(-1), planes.view(-1, _ROW))
        used = used + widths.sum()
    packed.needs[0], packed.needs[1] = used, is_misfit.sum()
    _store_exact(packed, flat, is_misfit, mode)
    return buffer


def fake_quantise(
    x: torch.Tensor, bound: torch.Tensor, rows: int, exact_blocks: int, mode: Mode = "zero"
) -> torch.Tensor:
    """Make the output of `quantise` without reading the input."""
    if not x.is_floating_point():
        raise ValueError(f"a tensor of {x.dtype} has no rounding error to bound")
    nbytes = quantised_nbytes(x.numel(), rows, exact_blocks, x.dtype)
    return x.new_empty((nbytes,), dtype=torch.uint8)


def needs(
    packed: torch.Tensor, numel: int, rows: int, exact_blocks: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return rows and exact blocks that a tensor needed, int32 of shape `[2]` on its device."""
    return _Packed.of(packed, numel, rows, exact_blocks, dtype).needs


def measure(x: torch.Tensor, bound: torch.Tensor, mode: Mode = "zero") -> torch.Tensor:
    """Return rows and exact blocks that a tensor would need; see `needs`."""
    flat = memory_ordered(x)
    found = torch.zeros(2, dtype=torch.int32, device=x.device)
    for start, stop in _chunks(flat):
        _, _, widths, misfit = _rounded(_blocks_of(flat, start, stop), bound, mode, start)
        found += torch.stack((widths.sum(), misfit.sum()))
    return found


def dequantise(
    packed: torch.Tensor,
    rows: int,
    exact_blocks: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    mode: Mode = "zero",
) -> torch.Tensor:
    """Unpack to a tensor with this geometry.

    Args:
        packed: What `quantise` returned, with room for what it needed.
        rows: As given to `quantise`.
        exact_blocks: As given to `quantise`.
        size: Size of the original.
        stride: Its strides, dense.
        dtype: Its dtype.
        mode: As given to `quantise`.

    Raises:
        ValueError: The geometry is not dense, or the packed form is not of that many bytes.
    """
    numel = math.prod(size)
    if packed.numel() != quantised_nbytes(numel, rows, exact_blocks, dtype):
        raise ValueError(
            f"{packed.numel():,} bytes are not what a {dtype} tensor of size {tuple(size)} is "
            f"packed to with {rows} rows and room for {exact_blocks} exact blocks"
        )
    x = fake_dequantise(packed, rows, exact_blocks, size, stride, dtype, mode)
    flat = memory_ordered(x)
    parts = _Packed.of(packed, numel, rows, exact_blocks, dtype)
    used = parts.needs.new_zeros(())
    for start, stop in _chunks(flat):
        widths = parts.widths[start:stop].int()
        places = _places(widths, used, rows, otherwise=rows)
        planes = parts.pool.index_select(0, places.view(-1)).view(-1, 8, _ROW)
        used = used + widths.sum()
        numbers = _distances(planes) + parts.lowest[start:stop, None]
        values = _values(numbers, parts.bound, dtype, mode, _dither(mode, start, numbers))
        part = flat[start * BLOCK : stop * BLOCK]
        part.copy_(values.view(-1)[: part.numel()])
    _restore_exact(parts, flat)
    return x


def fake_dequantise(
    packed: torch.Tensor,
    rows: int,
    exact_blocks: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    mode: Mode = "zero",
) -> torch.Tensor:
    """Make the output of `dequantise` without reading the input."""
    return packed.new_empty_strided(size, stride, dtype=dtype)


class _Packed(NamedTuple):
    """Views of the parts of a packed form, in their order; see the module."""

    exact: torch.Tensor
    where: torch.Tensor
    lowest: torch.Tensor
    needs: torch.Tensor
    bound: torch.Tensor
    pool: torch.Tensor
    widths: torch.Tensor

    @staticmethod
    def of(
        buffer: torch.Tensor, numel: int, rows: int, exact_blocks: int, dtype: torch.dtype
    ) -> _Packed:
        """Cut a buffer into its parts."""
        parts, start = [], 0
        for part_dtype, shape in _layout(numel, rows, exact_blocks, dtype):
            stop = start + part_dtype.itemsize * math.prod(shape)
            parts.append(buffer[start:stop].view(part_dtype).view(shape))
            start = stop
        return _Packed(*parts)


def _layout(
    numel: int, rows: int, exact_blocks: int, dtype: torch.dtype
) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """List dtype and shape of each part; each begins where its dtype may."""
    blocks = -(-numel // BLOCK)
    room = min(exact_blocks, blocks)
    return (
        (dtype, (room, BLOCK)),
        (torch.int32, (room,)),
        (torch.int32, (blocks,)),
        (torch.int32, (2,)),
        (torch.float32, (1,)),
        (torch.uint8, (rows + 2, _ROW)),
        (torch.uint8, (blocks,)),
    )


def _rounded(
    x: torch.Tensor, bound: torch.Tensor, mode: Mode, first: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers, least numbers, widths and misfits of whole blocks, one a row."""
    wide = _widened(x)
    bound = bound.to(wide.dtype)
    size = wide.abs()
    steps = wide * _inverse(_step(bound, x.dtype, mode))
    dither = _dither(mode, first, x)
    match mode:
        case "zero":
            numbers = torch.where(size <= bound, 0.0, steps.round_())
        case "sign":
            numbers = torch.where(size <= bound, 0.0, steps.round_())
            numbers = torch.where(wide > 0, numbers + 1, 0.0)
        case "dither":
            numbers = steps.add_(dither).floor_()
            numbers = torch.where(wide == 0, 0.0, numbers + (numbers >= 0).to(numbers.dtype))
    extreme = numbers.abs().amax(dim=1)
    back = _widened(_values(numbers, bound, x.dtype, mode, dither))
    # One rounding below the bound, as the difference may have been rounded down to it.
    is_right = (back - wide).abs() <= bound * (1 - 4 * torch.finfo(wide.dtype).eps)
    match mode:
        case "zero":
            is_right |= size <= bound
        case "sign":
            is_right |= (size <= bound) & (back <= bound)
            is_right &= wide >= 0
        case "dither":
            is_right |= wide == 0
    lowest, highest = torch.aminmax(numbers, dim=1)
    span = highest - lowest
    # A NaN fails every comparison.
    fits = (span < 256) & (extreme <= _MOST_STEPS) & is_right.all(dim=1)
    lowest, span = torch.where(fits, lowest, 0.0), torch.where(fits, span, 0.0)
    widths = torch.frexp(span.float()).exponent
    return numbers, lowest.int(), widths.int(), ~fits


def _values(
    numbers: torch.Tensor, bound: torch.Tensor, dtype: torch.dtype, mode: Mode, dither: torch.Tensor
) -> torch.Tensor:
    """Return the elements that numbers stand for, whole blocks, one a row."""
    wide_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    step = _step(bound.to(wide_dtype), dtype, mode)
    numbers = numbers.to(wide_dtype)
    match mode:
        case "zero":
            return numbers.mul(step).to(dtype)
        case "sign":
            values = numbers.sub(1).mul_(step)
            values = torch.where(numbers == 1, torch.finfo(dtype).tiny, values)
        case "dither":
            values = (numbers - (numbers > 0).to(wide_dtype)).add_(0.5 - dither).mul_(step)
    return torch.where(numbers == 0, 0.0, values).to(dtype)


def _dither(mode: Mode, first: int, blocks: torch.Tensor) -> torch.Tensor:
    """Return a number in [0, 1) for each element of whole blocks, which depends on its place.

    The modes that do not dither get nothing.
    """
    if mode != "dither":
        return blocks.new_empty(0)
    start = first * BLOCK & 0x7FFFFFFF
    hashed = torch.arange(blocks.numel(), dtype=torch.int32, device=blocks.device).add_(start)
    for factor, shift in ((-2048144789, 13), (-1028477387, 16)):
        hashed.mul_(factor)
        hashed ^= (hashed >> shift) & (1 << (32 - shift)) - 1
    return (hashed & 0xFFFFFF).float().mul_(2.0**-24).view(blocks.shape)


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _step(bound: torch.Tensor, dtype: torch.dtype, mode: Mode) -> torch.Tensor:
    """Return the largest step that keeps to the bound after what comes back is rounded."""
    if dtype.itemsize <= 2 and mode == "dither":
        return 1.5 * bound.clamp(max=torch.finfo(bound.dtype).max / 4)
    step = 2 * bound.clamp(max=torch.finfo(bound.dtype).max / 4)
    if dtype.itemsize > 2:
        return step * _MARGIN
    _, exponent = torch.frexp(step)
    return torch.ldexp(torch.ones_like(step), exponent - 1)


def _inverse(step: torch.Tensor) -> torch.Tensor:
    """Return 1 / step, or the largest finite number, with which only 0 stays small."""
    return step.reciprocal().clamp(max=torch.finfo(step.dtype).max)


def _places(widths: torch.Tensor, used: torch.Tensor, rows: int, *, otherwise: int) -> torch.Tensor:
    """Return the row of each of the 8 planes of each block, where it has one and there is room."""
    first = used + widths.cumsum(0) - widths
    plane = torch.arange(8, dtype=torch.int32, device=widths.device)
    place = first[:, None] + plane
    has_room = (plane < widths[:, None]) & (place < rows)
    return torch.where(has_room, place, otherwise)


def _planes(distances: torch.Tensor) -> torch.Tensor:
    """Cut distances into planes of bits: `[m, BLOCK]` int32 to `[m, 8, BLOCK // 8]` uint8.

    Bit i of byte b of a plane belongs to element `i * BLOCK // 8 + b`.
    """
    lanes = distances.to(torch.uint8).view(-1, _LANES, _ROW)
    planes = torch.zeros((len(lanes), 8, _ROW), dtype=torch.uint8, device=lanes.device)
    for plane in range(8):
        for lane in range(_LANES):
            planes[:, plane] |= (lanes[:, lane] >> plane & 1) << lane
    return planes


def _distances(planes: torch.Tensor) -> torch.Tensor:
    """Undo `_planes`."""
    lanes = torch.zeros((len(planes), _LANES, _ROW), dtype=torch.uint8, device=planes.device)
    for plane in range(8):
        for lane in range(_LANES):
            lanes[:, lane] |= (planes[:, plane] >> lane & 1) << plane
    return lanes.view(-1, BLOCK).int()


def _store_exact(packed: _Packed, flat: torch.Tensor, is_misfit: torch.Tensor, mode: Mode) -> None:
    """Copy the blocks that do not fit, as many as there is room for."""
    room = packed.where.numel()
    if not room:
        return
    slot = is_misfit.cumsum(0).sub_(1)
    slot = torch.where(is_misfit & (slot < room), slot, room)
    where = packed.where.new_full((room + 1,), -1)
    where.scatter_(0, slot, torch.arange(slot.numel(), dtype=where.dtype, device=where.device))
    packed.where.copy_(where[:room])
    for rows, where in _chunks_of_rows(packed.exact, packed.where):
        index, is_inside = _elements(where.clamp(min=0), flat.numel())
        original = flat[index]
        if mode == "zero":
            is_inside = is_inside & ~(_widened(original).abs() <= packed.bound)
        rows.copy_(torch.where(is_inside, original, 0.0))


def _restore_exact(packed: _Packed, flat: torch.Tensor) -> None:
    if not packed.where.numel():
        return
    for rows, where in _chunks_of_rows(packed.exact, packed.where):
        is_used, first = where >= 0, packed.where[0]
        # A row to spare repeats the first one; where that is to spare, too, block 0 stays as it is.
        index, is_inside = _elements(torch.where(is_used, where, first.clamp(min=0)), flat.numel())
        spare = torch.where(first >= 0, packed.exact[0], flat[index])
        values = torch.where(is_used[:, None], rows, spare)
        # What lies past the end is the first element of its row once more.
        values = torch.where(is_inside, values, values[:, :1])
        flat.scatter_(0, index.view(-1), values.view(-1))


def _chunks_of_rows(
    rows: torch.Tensor, where: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    chunk = _blocks_at_once(rows.device)
    return zip(torch.split(rows, chunk), torch.split(where, chunk), strict=True)


def _elements(where: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements of blocks, one block a row, and which of them the tensor has.

    One that it has not is the first of its block once more.
    """
    first = where.long()[:, None] * BLOCK
    index = first + torch.arange(BLOCK, device=where.device)
    is_inside = index < numel
    return torch.where(is_inside, index, first), is_inside


def _chunks(flat: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Cut the blocks of a tensor into runs, so that temporaries stay small."""
    blocks, chunk = -(-flat.numel() // BLOCK), _blocks_at_once(flat.device)
    for start in range(0, blocks, chunk):
        yield start, min(start + chunk, blocks)


def _blocks_of(flat: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """View blocks as rows; the last one of the tensor is filled up with zeros."""
    part = flat[start * BLOCK : stop * BLOCK]
    missing = (stop - start) * BLOCK - part.numel()
    if missing:
        part = torch.nn.functional.pad(part, (0, missing))
    return part.view(-1, BLOCK)


def _blocks_at_once(device: torch.device) -> int:
    return max(1, chunk_length(device, bytes_per_element=16.0) // BLOCK)

"""Round blocks of elements to numbers of steps, and cut those into bit planes.

The arithmetic of `quantiser`, over static shapes but for how many blocks there are.  The functions
run as they stand, or compiled by Inductor (see `kernel_compiler`), which is to make one loop over
memory of `round_blocks` and of `load_blocks` each: that is why a block is `[LANES, ROW]` here, and
why nothing but `pool` is written in place.

A block's head is one int32: its lowest number times 16, plus its width in bits; or `MISFIT`.  Its
planes are the lowest bits of its numbers, which tell those apart: storing subtracts nothing.

A nibble of each of eight lanes makes a word, and a multiplication gathers one bit of every nibble
into the word's highest byte: that is how planes are made of lanes, and lanes of planes.  Bytes are
int8 here, as the vector unit turns an int32 into that in one instruction.

What is sparse is first compacted: elements that are not zero move, by columns of lanes, to the
front of their section.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from backhaul.records import Mode

__all__ = [
    "BLOCK",
    "LANES",
    "MISFIT",
    "PLANES",
    "ROW",
    "SECTION",
    "compact_blocks",
    "count_blocks",
    "expand_blocks",
    "heads_of",
    "load_blocks",
    "mask_blocks",
    "round_blocks",
    "scale_of",
    "starts_of",
    "store_blocks",
    "widths_of",
]

LANES, ROW, NIBBLE = 8, 32, 4
BLOCK = LANES * ROW
SECTION = 4096
"""Blocks that are compacted together."""
PLANES = 12
"""The most that a block may have."""
MISFIT = 15

# Beyond this a number of steps is no longer exact as float32.
_MOST_STEPS = 2**22
_OUT_OF_RANGE = 2**30
# Leaves room for the rounding of x / step, where the step is no power of two.
_MARGIN = 1 - 2.0**-10
# Lanes in the order of their nibbles in a word are 0, 4, 1, 5, 2, 6, 3, 7: the order that gathering
# undoes.  These share a word at the distance of half of it.
_PAIRS = ((0, 2), (4, 6), (1, 3), (5, 7))
_NIBBLE_BITS, _GATHER_BITS = 0x11111111, 0x01020408
# 2**32 over the golden ratio, and a number of `lowbias32`, both as int32.
_GOLDEN, _MIXER = -1640531535, -1028477379


def scale_of(bound: torch.Tensor, dtype: torch.dtype, mode: Mode) -> torch.Tensor:
    """Return the bound, the step and its inverse, in the dtype that the kernels compute in.

    The step is the largest that keeps to the bound after what comes back is rounded to the dtype.
    """
    wide = torch.promote_types(dtype, torch.float32)
    limits = torch.finfo(wide)
    bound = bound.to(wide).view(()).clamp(max=limits.max / 4)
    if dtype.itemsize > 2:
        step = bound * (2 * _MARGIN)
    elif mode == "zero":  # The largest power of two: its multiples are values of the dtype.
        _, exponent = torch.frexp(2 * bound)
        step = torch.ldexp(torch.ones_like(bound), exponent - 1)
    else:
        step = bound * 1.5
    # The largest finite number, if 1 / step is not; with that only 0 stays small.
    return torch.stack((bound, step, step.reciprocal().clamp(max=limits.max)))


def round_blocks(
    x: torch.Tensor, first: torch.Tensor, scale: torch.Tensor, mode: Mode
) -> tuple[torch.Tensor, ...]:
    """Round elements to numbers of steps.

    Args:
        x: Floating-point `[n, LANES, ROW]`.
        first: int32 `[]`, which block of the tensor the first one is.
        scale: What `scale_of` returned.
        mode: How to round; see `quantiser`.

    Returns:
        The lowest and the highest number of each block, float32 `[n]`, out of range if an element
        does not come back within the bound, as in mode `sign` one below 0 never does; there the
        lowest is 0.  After them the numbers' lowest bits as words of nibbles, the lowest nibble
        first, int32 `[n, ROW]`.
    """
    wide, dither = x.to(scale.dtype), _dither(x.shape[0], first, mode)
    numbers = _numbers(wide, dither, scale, mode)
    # Near the bound this difference is exact: there the one is between half and twice the other.
    # An infinity differs from anything by no number, and no comparison is true of that.
    values = _middles(numbers, dither, scale, mode).to(x.dtype).to(scale.dtype)
    is_within = (values - wide).abs() <= scale[0]
    if mode == "sign":
        is_within = is_within & ((values > 0) | (wide == 0))
    are_within = _folded(torch.bitwise_and, is_within.unbind(1))
    lanes = numbers.to(torch.int32).unbind(1)
    least, most = _folded(torch.minimum, lanes), _folded(torch.maximum, lanes)
    if mode == "sign":  # Most blocks have a 0, and there is no distance to take then.
        # What has no place in an int32 may have become less than that.
        are_within, lowest = are_within & (least >= 0), torch.zeros(x.shape[0], device=x.device)
    else:
        lowest = least.to(torch.float32).amin(1)
    highest = torch.where(are_within, most.to(torch.float32), _OUT_OF_RANGE).amax(1)
    return lowest, highest, *_nibble_words(lanes, PLANES)


def heads_of(lowest: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """Return the heads of blocks whose numbers are between these, int32 `[n]`."""
    span = highest - lowest
    fits = (span < 2**PLANES) & (lowest >= -_MOST_STEPS) & (highest <= _MOST_STEPS)
    width = torch.zeros_like(span, dtype=torch.int32)
    for bit in range(PLANES):
        width = width + (span >= 2**bit).to(torch.int32)
    return torch.where(fits, lowest.to(torch.int32) * 16 + width, MISFIT)


def widths_of(heads: torch.Tensor) -> torch.Tensor:
    """Return how many planes blocks have, int32."""
    widths = heads & 15
    return torch.where(widths == MISFIT, 0, widths)


def store_blocks(
    mode: Mode,
    used: torch.Tensor,
    pool: torch.Tensor,
    lowest: torch.Tensor,
    highest: torch.Tensor,
    *words: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the planes of blocks to their rows; what finds no room goes to the last one.

    Args:
        mode: How the blocks were rounded.
        used: int32 `[]`, how many rows the blocks before take.
        pool: int8 `[rows + 1, ROW]`, written.
        lowest: float32 `[n]`, what `round_blocks` returned, like what follows.
        highest: float32 `[n]`.
        words: int32 `[n, ROW]` each.

    Returns:
        Heads, int32 `[n]`, and how many rows the blocks up to the last take, int32 `[]`.
    """
    heads = heads_of(lowest, highest)
    ends = used + widths_of(heads).cumsum(0, dtype=torch.int32)
    bit = torch.arange(NIBBLE, dtype=torch.int32, device=pool.device)
    for index, word in enumerate(words):
        planes = _gathered(word[:, None] >> bit[:, None]).to(torch.int8)
        rows = _rows_of(heads[:, None], ends[:, None], pool, bit + NIBBLE * index)
        pool.index_put_((rows,), planes)
    return heads, ends[-1]


def load_blocks(
    heads: torch.Tensor,
    first: torch.Tensor,
    used: torch.Tensor,
    pool: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    mode: Mode,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the elements of blocks; those of a misfit are of no value.

    Args:
        heads: As stored.
        first: int32 `[]`, which block of the tensor the first one is.
        used: int32 `[]`, how many rows the blocks before take.
        pool: int8 `[rows + 1, ROW]`.
        scale: What `scale_of` returned.
        dtype: Dtype of the elements.
        mode: As stored.

    Returns:
        Elements, `[n, LANES, ROW]`, and how many rows the blocks up to the last take, int32 `[]`.
    """
    widths = widths_of(heads)
    ends = used + widths.cumsum(0, dtype=torch.int32)
    stored = [
        torch.where(
            (widths > plane)[:, None],
            pool[_rows_of(heads, ends, pool, plane)].to(torch.int32),
            0,
        )
        for plane in range(PLANES)
    ]
    lowest, dither = (heads >> 4)[:, None], _dither(heads.shape[0], first, mode)
    dithers = dither.unbind(1) if dither.dim() else LANES * (dither,)
    numbers = _lanes_of(stored)
    if mode != "sign":
        all_bits = (1 << widths[:, None]) - 1
        numbers = [lowest + (lane - lowest & all_bits) for lane in numbers]
    values = [
        _values(number.to(scale.dtype), lane_dither, scale, dtype, mode)
        for number, lane_dither in zip(numbers, dithers, strict=True)
    ]
    return torch.stack(values, 1), ends[-1]


def mask_blocks(
    x: torch.Tensor, scale: torch.Tensor, mode: Mode
) -> tuple[torch.Tensor, torch.Tensor]:
    """Say which elements do not come back as 0.

    Args:
        x: Floating-point `[n, LANES, ROW]`.
        scale: What `scale_of` returned.
        mode: `zero` or `sign`.

    Returns:
        A bit for each, one lane after the other, uint8 `[n, ROW]`; and how many each column has,
        int32 `[n, ROW]`.
    """
    wide = x.to(scale.dtype)
    vanishes = wide.abs() <= scale[0] if mode == "zero" else wide == 0
    lanes = (~vanishes).to(torch.int32).unbind(1)
    bits = _folded(torch.bitwise_or, [lane << index for index, lane in enumerate(lanes)])
    return bits.to(torch.uint8), _ones(bits)


def count_blocks(bits: torch.Tensor) -> torch.Tensor:
    """Return how many elements each column of a mask has, int32 `[n, ROW]`."""
    return _ones(bits.to(torch.int32))


def starts_of(counts: torch.Tensor) -> torch.Tensor:
    """Return where each column's elements begin once sections are compacted, int32 `[n, ROW]`.

    Args:
        counts: How many elements each column has, int32 `[n, ROW]`; the first begins a section.
    """
    columns = counts.reshape(-1)
    sections = torch.nn.functional.pad(columns, (0, -len(columns) % (SECTION * ROW)))
    ends = sections.view(-1, SECTION * ROW).cumsum(1, dtype=torch.int32)
    first = torch.arange(len(ends), dtype=torch.int32, device=counts.device) * (SECTION * BLOCK)
    return (ends + first[:, None]).view(-1)[: len(columns)].view_as(counts) - counts


def compact_blocks(
    x: torch.Tensor, bits: torch.Tensor, starts: torch.Tensor, compact: torch.Tensor
) -> torch.Tensor:
    """Write the elements that a mask has to their places.

    Args:
        x: Elements, `[n, LANES, ROW]`.
        bits: What `mask_blocks` returned.
        starts: What `starts_of` returned.
        compact: Flat, of x's dtype, written; its last element is waste.

    Returns:
        Nothing of value.
    """
    place, is_there = _places_of(bits, starts)
    compact.index_put_((torch.where(is_there, place, compact.shape[0] - 1),), x)
    return compact.new_zeros(())


def expand_blocks(
    bits: torch.Tensor, starts: torch.Tensor, compact: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """Read what `compact_blocks` wrote, and zeros.

    Args:
        bits: As given to `compact_blocks`.
        starts: As given to it.
        compact: What it wrote.
        x: `[n, LANES, ROW]`, written.

    Returns:
        Nothing of value.
    """
    place, is_there = _places_of(bits, starts)
    x.copy_(torch.where(is_there, compact[place.clamp(max=compact.shape[0] - 1)], 0.0))
    return x.new_zeros(())


def _numbers(
    wide: torch.Tensor, dither: torch.Tensor, scale: torch.Tensor, mode: Mode
) -> torch.Tensor:
    """Return the number of steps of each element."""
    bound, _, inverse = scale.unbind()
    match mode:
        case "zero":
            return torch.where(wide.abs() <= bound, 0.0, (wide * inverse).round())
        case "sign":
            return (wide * inverse).ceil()
        case "dither":
            return (wide * inverse + dither).round()


def _values(
    numbers: torch.Tensor,
    dither: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    mode: Mode,
) -> torch.Tensor:
    """Return what numbers of steps come back as."""
    values = _middles(numbers, dither, scale, mode).to(dtype)
    return torch.where(numbers > 0, values, 0.0) if mode == "sign" else values


def _middles(
    numbers: torch.Tensor, dither: torch.Tensor, scale: torch.Tensor, mode: Mode
) -> torch.Tensor:
    """Return the middles of steps; in mode `sign` that of 0 is within the bound of 0, and below."""
    step = scale[1]
    match mode:
        case "zero":
            return numbers * step
        case "sign":
            return (numbers - 0.5) * step
        case "dither":
            return (numbers - dither) * step


def _dither(blocks: int, first: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Return a number from -0.5 to 0.5 for each element, by a hash of its place; else nothing."""
    if mode != "dither":
        return first
    block = torch.arange(blocks, dtype=torch.int32, device=first.device) + first
    block = _mixed(_mixed(block * _GOLDEN))
    # The first product is a sum of products, which a loop over memory makes once for all lanes.
    lane = torch.arange(LANES, dtype=torch.int32, device=first.device) * _signed(ROW * _GOLDEN)
    column = torch.arange(ROW, dtype=torch.int32, device=first.device) * _GOLDEN
    hashed = _mixed(block[:, None, None] + lane[:, None] + column)
    return hashed.to(torch.float32) * 2.0**-32


def _mixed(words: torch.Tensor) -> torch.Tensor:
    return (words ^ words >> 13 & 2**19 - 1) * _MIXER


def _signed(word: int) -> int:
    """Return the int32 of the lowest 32 bits."""
    return (word + 2**31) % 2**32 - 2**31


def _rows_of(
    heads: torch.Tensor, ends: torch.Tensor, pool: torch.Tensor, plane: int | torch.Tensor
) -> torch.Tensor:
    """Return the row of a plane of each block, the last one where it has none."""
    widths, last = widths_of(heads), pool.shape[0] - 1
    return torch.where(widths > plane, (ends - widths + plane).clamp(max=last), last)


def _folded(
    fold: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], lanes: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Fold lanes pairwise, so that a processor need not wait for one after the other."""
    while len(lanes) > 1:
        lanes = [fold(a, b) for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
    return lanes[0]


def _nibble_words(lanes: Sequence[torch.Tensor], bits: int) -> list[torch.Tensor]:
    """Return words of the lowest nibble of eight lanes, of the next one, and so on."""
    # Two lanes share a word first, so that there is half as much to shift.
    pairs = [lanes[a] & 2**PLANES - 1 | lanes[b] << 16 for a, b in _PAIRS]
    return [
        _folded(
            torch.bitwise_or,
            [
                _shifted(pair, NIBBLE * index - first) & (0x000F000F << NIBBLE * index)
                for index, pair in enumerate(pairs)
            ],
        )
        for first in range(0, bits, NIBBLE)
    ]


def _lanes_of(planes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the numbers of eight lanes, whose bits are planes."""
    numbers: list[torch.Tensor] = []
    for first in range(0, len(planes), LANES):
        group = list(planes[first : first + LANES])
        group += (LANES - len(group)) * [torch.zeros_like(group[0])]
        words = _nibble_words(group, LANES)
        bytes_ = [_gathered(word >> bit) & 255 for word in words for bit in range(NIBBLE)]
        if numbers:
            bytes_ = [n | byte << first for n, byte in zip(numbers, bytes_, strict=True)]
        numbers = bytes_
    return numbers


def _shifted(word: torch.Tensor, left: int) -> torch.Tensor:
    return word << left if left >= 0 else word >> -left


def _gathered(words: torch.Tensor) -> torch.Tensor:
    """Return the lowest bit of each nibble, as a signed byte."""
    return ((words & _NIBBLE_BITS) * _GATHER_BITS) >> 24


def _places_of(bits: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each element's place in what is compact, and whether it has one."""
    columns = bits.to(torch.int32)[:, None]
    lane = torch.arange(LANES, dtype=torch.int32, device=bits.device)[:, None]
    place = starts[:, None] + _ones(columns & (1 << lane) - 1)
    return place, (columns >> lane & 1) > 0


def _ones(bytes_: torch.Tensor) -> torch.Tensor:
    """Count the bits of bytes that are 1."""
    pairs = bytes_ - (bytes_ >> 1 & 0x55)
    nibbles = (pairs & 0x33) + (pairs >> 2 & 0x33)
    return nibbles + (nibbles >> 4) & 15

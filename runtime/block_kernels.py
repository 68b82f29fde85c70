"""Round blocks of elements to numbers of steps, and cut those into bit planes.

The arithmetic of `quantiser`, over static shapes but for how many blocks there are.  The functions
run as they stand, or compiled by Inductor (see `kernel_compiler`), which is to make one loop over
memory of `round_blocks` and of `load_blocks` each: that is why a block is `[LANES, ROW]` here, and
why nothing but `pool` is written in place.

A block's head is one int32: its lowest number times 16, plus its width in bits; or `MISFIT`.

Eight bytes, one of each lane, are a matrix of 8 x 8 bits, and their planes are its transpose.
Two words hold the matrix, a nibble of each lane in a word; a multiplication then gathers one bit
of every nibble into the highest byte.  Bytes are int8 here, as the vector unit turns an int32
into that in one instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from backhaul.records import Mode

__all__ = [
    "BLOCK",
    "LANES",
    "MISFIT",
    "ROW",
    "heads_of",
    "load_blocks",
    "round_blocks",
    "scale_of",
    "store_blocks",
    "widths_of",
]

LANES, ROW = 8, 32
BLOCK = LANES * ROW
MISFIT = 15

# Beyond this a number of steps is no longer exact as float32.
_MOST_STEPS = 2**22
_OUT_OF_RANGE = 2**30
# Leaves room for the rounding of x / step, where the step is no power of two.
_MARGIN = 1 - 2.0**-10
_NIBBLE_BITS, _HIGHEST_BITS, _GATHER_BITS = 0x11111111, -0x77777778, 0x01020408
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round elements to numbers of steps.

    Args:
        x: Floating-point `[n, LANES, ROW]`.
        first: int32 `[]`, which block of the tensor the first one is.
        scale: What `scale_of` returned.
        mode: How to round; see `quantiser`.

    Returns:
        The lowest byte of each number as two words of nibbles, int32 `[n, ROW]`; and the lowest
        and the highest number of each block, float32 `[n]`, out of range if an element does not
        come back within the bound.  In mode `sign` one below 0 never does.
    """
    wide, dither = x.to(scale.dtype), _dither(x.shape[0], first, mode)
    numbers = _numbers(wide, dither, scale, mode)
    # Near the bound this difference is exact: there the one is between half and twice the other.
    # An infinity differs from anything by no number, and no comparison is true of that.
    values = _values(numbers, dither, scale, x.dtype, mode).to(scale.dtype)
    is_within = (values - wide).abs() <= scale[0]
    if mode == "sign":
        is_within = is_within & ((values > 0) | (wide == 0))
    # What has no place in an int32 becomes one that is out of range.
    lanes = torch.where(is_within, numbers.to(torch.int32), _OUT_OF_RANGE).unbind(1)
    low, high = _nibble_words(lanes)
    lowest = _folded(torch.minimum, lanes).to(torch.float32).amin(1)
    highest = _folded(torch.maximum, lanes).to(torch.float32).amax(1)
    return low, high, lowest, highest


def heads_of(lowest: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
    """Return the heads of blocks whose numbers are between these, int32 `[n]`."""
    span = highest - lowest
    fits = (span < 2**LANES) & (lowest >= -_MOST_STEPS) & (highest <= _MOST_STEPS)
    width = torch.zeros_like(span, dtype=torch.int32)
    for bit in range(LANES):
        width = width + (span >= 2**bit).to(torch.int32)
    return torch.where(fits, lowest.to(torch.int32) * 16 + width, MISFIT)


def widths_of(heads: torch.Tensor) -> torch.Tensor:
    """Return how many planes blocks have, int32."""
    widths = heads & 15
    return torch.where(widths == MISFIT, 0, widths)


def store_blocks(
    low: torch.Tensor,
    high: torch.Tensor,
    lowest: torch.Tensor,
    highest: torch.Tensor,
    used: torch.Tensor,
    pool: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the planes of blocks to their rows; what finds no room goes to the last one.

    Args:
        low: int32 `[n, ROW]`, what `round_blocks` returned, like the three that follow.
        high: int32 `[n, ROW]`.
        lowest: float32 `[n]`.
        highest: float32 `[n]`.
        used: int32 `[]`, how many rows the blocks before take.
        pool: int8 `[rows + 1, ROW]`, written.

    Returns:
        Heads, int32 `[n]`, and how many rows the blocks up to the last take, int32 `[]`.
    """
    heads = heads_of(lowest, highest)
    ends = used + widths_of(heads).cumsum(0, dtype=torch.int32)
    distances = torch.stack(_less(low, high, (heads >> 4)[:, None]), 1)[:, :, None]
    bit = torch.arange(4, dtype=torch.int32, device=low.device)[:, None]
    planes = _gathered(distances >> bit).to(torch.int8)
    plane = torch.arange(LANES, dtype=torch.int32, device=low.device).view(2, 4)
    rows = _rows_of(heads[:, None, None], ends[:, None, None], pool, plane)
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
    planes = [
        torch.where(
            (widths > plane)[:, None],
            pool[_rows_of(heads, ends, pool, plane)].to(torch.int32),
            0,
        )
        for plane in range(LANES)
    ]
    lowest, dither = (heads >> 4)[:, None], _dither(heads.shape[0], first, mode)
    dithers = dither.unbind(1) if dither.dim() else LANES * (dither,)
    lanes = [_gathered(word >> bit) & 255 for word in _nibble_words(planes) for bit in range(4)]
    values = [
        _values((lane + lowest).to(scale.dtype), lane_dither, scale, dtype, mode)
        for lane, lane_dither in zip(lanes, dithers, strict=True)
    ]
    return torch.stack(values, 1), ends[-1]


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
    step = scale[1]
    match mode:
        case "zero":
            return (numbers * step).to(dtype)
        case "sign":
            return torch.where(numbers > 0, (numbers - 0.5) * step, 0.0).to(dtype)
        case "dither":
            return ((numbers - dither) * step).to(dtype)


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


def _nibble_words(lanes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return two words a byte position: of the low nibbles of all lanes, and of the high ones."""
    low, high = [], []
    for lane in range(4):
        a, b = lanes[lane], lanes[lane + 4]
        low.append(((a & 15) | (b & 15) << 4) << 8 * lane)
        high.append(((a >> 4) & 15 | (b & 240)) << 8 * lane)
    return [_folded(torch.bitwise_or, low), _folded(torch.bitwise_or, high)]


def _less(
    low: torch.Tensor, high: torch.Tensor, lowest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take a number from all bytes of words of nibbles, modulo 256."""
    low_part, high_part = _repeated(lowest & 15), _repeated(lowest >> 4 & 15)
    low_rest = _nibbles_less(low, low_part)
    borrow = (~low & low_part | ~(low ^ low_part) & low_rest) >> 3 & _NIBBLE_BITS
    return low_rest, _nibbles_less(_nibbles_less(high, high_part), borrow)


def _nibbles_less(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Subtract nibble by nibble, modulo 16: the highest bits are kept out of the borrowing."""
    return ((a | _HIGHEST_BITS) - (b & ~_HIGHEST_BITS)) ^ (a ^ ~b) & _HIGHEST_BITS


def _repeated(nibble: torch.Tensor) -> torch.Tensor:
    for shift in (4, 8, 16):
        nibble = nibble | nibble << shift
    return nibble


def _gathered(words: torch.Tensor) -> torch.Tensor:
    """Return the lowest bit of each nibble, as a signed byte."""
    return ((words & _NIBBLE_BITS) * _GATHER_BITS) >> 24

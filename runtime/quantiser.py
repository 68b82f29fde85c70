"""Pack floating-point tensors with an error that no element exceeds, in as few bits as each needs.

A tensor is cut, in memory order, into blocks of `BLOCK` elements.  Each element is rounded to a
number of steps, a step being twice the bound at most.  A block stores its numbers as their distance
from the least of them, in planes of one bit: as many planes as its largest distance needs, 0 to 8.
The packed form is one buffer of bytes, which a link moves as it moves any tensor:

    exact     as x     [exact_blocks, BLOCK]     blocks that do not fit, as they were
    pool      int8     [rows + 1, ROW]           the planes of the blocks; waste
    heads     int32    [blocks]                  the least number of each block, and its width
    where     int32    [exact_blocks]            which blocks are in `exact`, -1 for none
    needs     int32    [2]                       rows and exact blocks that there should be
    bound     float32  [1]                       the bound that it was packed with

A block fits if its distances do not exceed 8 bits, and each of its elements has been checked to
come back within the bound; one with a NaN or an infinity never does.  Every size is known
beforehand, and nothing waits for the device: where `needs` exceeds what there is, the packed form
is void.

There are three ways to round:

    zero      to the nearest number of steps: what is within the bound comes back as exactly 0
    sign      to the middle of a step, for ReLU outputs: 0 comes back as 0, and what is positive
              positive
    dither    to the nearest number after a pseudo-random part of a step was added, which is taken
              away again: errors are uniform and independent of the tensor, and so do not add
              up over elements that are alike

What comes back is the nearest value of the tensor's dtype, which may be farther from x than what it
is nearest to.  For dtypes of 16 bits in mode `zero` the step is therefore a power of two: then its
multiples either are values of the dtype, or lie closer to x than the next value does.  In the
other modes it is 1.5 times the bound there, which leaves room for the rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from backhaul.records import Mode
from backhaul.runtime.block_kernels import BLOCK, LANES, MISFIT, ROW, heads_of, scale_of, widths_of
from backhaul.runtime.dense import chunk_length, memory_ordered, temporary_bytes
from backhaul.runtime.kernel_compiler import EAGER, Kernels, kernels_for

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

# What kernels hold beside their input and output, for each element.
_EAGER_TEMPORARY_BYTES = 24.0
_COMPILED_TEMPORARY_BYTES = 1.25
# The threads of a CPU meet at the end of each kernel, so that small pieces are dear.
_COMPILED_PIECE_BYTES = {"cpu": 2 << 20}


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
    packed = _Packed.of(buffer, x.numel(), rows, exact_blocks, x.dtype)
    packed.bound.copy_(bound)
    scale, used = scale_of(packed.bound, x.dtype, mode), packed.needs.new_zeros(())
    for kernels, blocks, place in _pieces(x, mode):
        rounded = kernels.round(blocks, _first(place, x), scale, mode)
        packed.heads[place], used = kernels.store(*rounded, used, packed.pool)
    packed.needs[0], packed.needs[1] = used, (packed.heads == MISFIT).sum()
    _store_exact(packed, memory_ordered(x), mode)
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
    found = torch.zeros(2, dtype=torch.int32, device=x.device)
    scale = scale_of(bound, x.dtype, mode)
    for kernels, blocks, place in _pieces(x, mode):
        _, _, *extremes = kernels.round(blocks, _first(place, x), scale, mode)
        heads = heads_of(*extremes)
        found += torch.stack((widths_of(heads).sum(), (heads == MISFIT).sum()))
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
    parts = _Packed.of(packed, numel, rows, exact_blocks, dtype)
    scale, used = scale_of(parts.bound, dtype, mode), parts.needs.new_zeros(())
    kernels = kernels_for(len(parts.heads), dtype, mode, packed.device)
    if kernels.is_compiled and numel % BLOCK == 0:
        every = _first(slice(0, 0), packed)
        blocks, _ = kernels.load(parts.heads, every, used, parts.pool, scale, dtype, mode)
        x = blocks.as_strided(size, stride)
    else:
        x = fake_dequantise(packed, rows, exact_blocks, size, stride, dtype, mode)
        flat = memory_ordered(x)
        for place in _places(len(parts.heads), kernels, packed.device):
            blocks, used = kernels.load(
                parts.heads[place],
                _first(place, packed),
                used,
                parts.pool,
                scale,
                dtype,
                mode,
            )
            part = flat[place.start * BLOCK : place.stop * BLOCK]
            part.copy_(blocks.view(-1)[: part.numel()])
    _restore_exact(parts, memory_ordered(x))
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
    pool: torch.Tensor
    heads: torch.Tensor
    where: torch.Tensor
    needs: torch.Tensor
    bound: torch.Tensor

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
    """List dtype and shape of each part; each begins where its dtype may, the large at 32 bytes."""
    blocks = -(-numel // BLOCK)
    room = min(exact_blocks, blocks)
    return (
        (dtype, (room, BLOCK)),
        (torch.int8, (rows + 1, ROW)),
        (torch.int32, (blocks,)),
        (torch.int32, (room,)),
        (torch.int32, (2,)),
        (torch.float32, (1,)),
    )


def _pieces(x: torch.Tensor, mode: Mode) -> Iterator[tuple[Kernels, torch.Tensor, slice]]:
    """Cut a tensor's blocks into pieces; yield each with its kernels and its place.

    The last block of the tensor is filled up with zeros.
    """
    flat = memory_ordered(x)
    whole = flat.numel() // BLOCK
    kernels = kernels_for(whole, x.dtype, mode, x.device)
    blocks = flat[: whole * BLOCK].view(-1, LANES, ROW)
    for place in _places(whole, kernels, x.device):
        yield kernels, blocks[place], place
    rest = flat[whole * BLOCK :]
    if rest.numel():
        last = torch.nn.functional.pad(rest, (0, BLOCK - rest.numel()))
        yield EAGER, last.view(1, LANES, ROW), slice(whole, whole + 1)


def _places(blocks: int, kernels: Kernels, device: torch.device) -> Iterator[slice]:
    """Cut so many blocks into runs of about the same length, so that temporaries stay small."""
    if kernels.is_compiled:
        nbytes = _COMPILED_PIECE_BYTES.get(device.type, temporary_bytes(device))
        most = int(nbytes / (BLOCK * _COMPILED_TEMPORARY_BYTES))
    else:
        most = _blocks_at_once(device)
    length = -(-blocks // -(-blocks // most)) if blocks else 1
    for start in range(0, blocks, length):
        yield slice(start, min(start + length, blocks))


def _blocks_at_once(device: torch.device) -> int:
    return max(1, chunk_length(device, bytes_per_element=_EAGER_TEMPORARY_BYTES) // BLOCK)


def _first(place: slice, like: torch.Tensor) -> torch.Tensor:
    """Return where a run of blocks begins, as kernels take it."""
    return like.new_full((), place.start, dtype=torch.int32)


def _store_exact(packed: _Packed, flat: torch.Tensor, mode: Mode) -> None:
    """Copy the blocks that do not fit, as many as there is room for."""
    room = packed.where.numel()
    if not room:
        return
    misfits = torch.nonzero_static(packed.heads == MISFIT, size=room, fill_value=-1)
    packed.where.copy_(misfits.view(-1))
    wide = torch.promote_types(flat.dtype, torch.float32)
    for rows, where in _chunks_of_rows(packed.exact, packed.where):
        index, is_inside = _elements(where.clamp(min=0), flat.numel())
        original = flat[index]
        if mode == "zero":
            is_inside = is_inside & ~(original.to(wide).abs() <= packed.bound)
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

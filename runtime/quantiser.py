"""Pack floating-point tensors with an error that no element exceeds, in as few bits as each needs.

A tensor is cut, in memory order, into blocks of `BLOCK` elements.  Each element is rounded to a
number of steps, a step being twice the bound at most.  A block stores its least number, and of
each number the lowest bits, in planes of one bit: as many planes as the largest distance needs.
The packed form is one buffer of bytes, which a link moves as it moves any tensor:

    exact     as x     [exact_blocks + 1, BLOCK] blocks that do not fit, as they were; waste
    pool      int8     [rows + 1, ROW]           the planes of the blocks; waste
    mask      uint8    [blocks, ROW]             which elements are not zero, if it is sparse
    heads     int32    [blocks]                  the least number of each block, and its width
    where     int32    [exact_blocks + 1]        which blocks are in `exact`, -1 for none
    needs     int32    [2]                       rows and exact blocks that there should be
    bound     float32  [1]                       the bound that it was packed with

A block fits if its distances need no more than 12 bits, and each of its elements has been
checked to come back within the bound; one with a NaN or an infinity never does.  Every size is
known beforehand, and nothing waits for the device: where `needs` exceeds what there is, the packed
form is void.

A sparse form leaves out what comes back as 0: in each section of `SECTION` blocks all other
elements move to the front before they are rounded, and blocks at the end take no planes.

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

from backhaul.records import Mode, PackedForm
from backhaul.runtime.block_kernels import (
    BLOCK,
    LANES,
    MISFIT,
    ROW,
    SECTION,
    heads_of,
    scale_of,
    starts_of,
    widths_of,
)
from backhaul.runtime.dense import chunk_length, memory_ordered, temporary_bytes
from backhaul.runtime.kernel_compiler import FEWEST_BLOCKS, kernels_for, sparse_kernels_for

__all__ = [
    "BLOCK",
    "Needs",
    "dequantise",
    "fake_dequantise",
    "fake_quantise",
    "fitting_forms",
    "measure",
    "needed_in",
    "needs",
    "quantise",
    "quantised_nbytes",
]

# What kernels hold beside their input and output, for each element.
_EAGER_TEMPORARY_BYTES = 24.0
_COMPILED_TEMPORARY_BYTES = 1.55
_SPARSE_TEMPORARY_BYTES = 8.0
# The threads of a CPU meet at the end of each kernel, so that small pieces are dear.
_COMPILED_PIECE_BYTES = {"cpu": 8 << 20}

Needs = list[list[int]]
"""Rows and exact blocks, of the dense form and of the sparse one if there is one."""


def quantised_nbytes(numel: int, form: PackedForm, dtype: torch.dtype) -> int:
    """Return the packed size of `numel` elements in bytes."""
    return sum(
        part_dtype.itemsize * math.prod(shape) for part_dtype, shape in _layout(numel, form, dtype)
    )


def quantise(x: torch.Tensor, bound: torch.Tensor, form: PackedForm) -> torch.Tensor:
    """Pack a tensor so that each finite element comes back within the bound.

    NaN and infinities come back as they were; see the module for what small elements do.

    Args:
        x: Dense floating-point tensor of any shape.
        bound: Largest absolute error, a float32 scalar on the same device; not below 0.
        form: What there is room for, and how to round.  With more exact blocks than there are
            blocks there is room for all of those.  In mode `sign` a block with an element below
            0 does not fit.

    Returns:
        Flat uint8 tensor of `quantised_nbytes` bytes.  It holds x only if `needs` says that there
        was room.

    Raises:
        ValueError: x is not dense, or not floating-point, or the form is none.
    """
    buffer = fake_quantise(x, bound, form)
    packed = _Packed.of(buffer, x.numel(), form, x.dtype)
    packed.bound.copy_(bound)
    packed.where.fill_(-1)
    packed.heads.zero_()
    scale, used = scale_of(packed.bound, x.dtype, form.mode), packed.needs.new_zeros(())
    misfits = packed.needs.new_zeros(())
    for start, blocks in _pieces(x, form.mode, form.is_sparse):
        if form.is_sparse:
            mask = packed.mask[start : start + len(blocks)]
            blocks = _compacted(blocks, scale, form.mode, mask)
        kernels = kernels_for(len(blocks), x.dtype, form.mode, x.device)
        rounded = kernels.round(blocks, _scalar(start, x), scale, form.mode)
        heads, used = kernels.store(form.mode, used, packed.pool, *rounded)
        packed.heads[start : start + len(blocks)] = heads
        misfits = _store_exact(packed, blocks, start, misfits, form.mode)
    packed.needs[0], packed.needs[1] = used, misfits
    return buffer


def fake_quantise(x: torch.Tensor, bound: torch.Tensor, form: PackedForm) -> torch.Tensor:
    """Make the output of `quantise` without reading the input."""
    if not x.is_floating_point():
        raise ValueError(f"a tensor of {x.dtype} has no rounding error to bound")
    if form.is_sparse and form.mode == "dither":
        raise ValueError("a sparse form has zeros, which dithering does not keep")
    nbytes = quantised_nbytes(x.numel(), form, x.dtype)
    return x.new_empty((nbytes,), dtype=torch.uint8)


def needs(packed: torch.Tensor, numel: int, form: PackedForm, dtype: torch.dtype) -> torch.Tensor:
    """Return rows and exact blocks that a tensor needed, int32 of shape `[2]` on its device."""
    return _Packed.of(packed, numel, form, dtype).needs


def measure(x: torch.Tensor, bound: torch.Tensor, mode: Mode) -> torch.Tensor:
    """Return what a tensor would need in each form.

    Returns:
        int32 `[forms, 2]`, rows and exact blocks, of the dense form and, unless dithering, of the
        sparse one.
    """
    forms = 1 if mode == "dither" else 2
    found = torch.zeros((forms, 2), dtype=torch.int32, device=x.device)
    scale = scale_of(bound, x.dtype, mode)
    for start, blocks in _pieces(x, mode, is_sparse=forms > 1):
        for form in range(forms):
            tried = _compacted(blocks, scale, mode) if form else blocks
            kernels = kernels_for(len(tried), x.dtype, mode, x.device)
            lowest, highest, *_ = kernels.round(tried, _scalar(start, x), scale, mode)
            heads = heads_of(lowest, highest)
            found[form, 0] += widths_of(heads).sum()
            found[form, 1] += (heads == MISFIT).sum()
    return found


def fitting_forms(needed: Needs, mode: Mode) -> list[PackedForm]:
    """Return each form with room for just what `measure` found."""
    return [
        PackedForm(rows, exact_blocks, is_sparse, mode)
        for is_sparse, (rows, exact_blocks) in zip((False, True), needed, strict=False)
    ]


def needed_in(form: PackedForm, needed: Needs) -> PackedForm | None:
    """Return a form with room for just what `measure` found, None if it was not measured."""
    fitting = fitting_forms(needed, form.mode)
    return next((each for each in fitting if each.is_sparse == form.is_sparse), None)


def dequantise(
    packed: torch.Tensor,
    form: PackedForm,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Unpack to a tensor with this geometry.

    Args:
        packed: What `quantise` returned, with room for what it needed.
        form: As given to `quantise`.
        size: Size of the original.
        stride: Its strides, dense.
        dtype: Its dtype.

    Raises:
        ValueError: The geometry is not dense, or the packed form is not of that many bytes.
    """
    numel = math.prod(size)
    if packed.numel() != quantised_nbytes(numel, form, dtype):
        raise ValueError(
            f"{packed.numel():,} bytes are not what a {dtype} tensor of size {tuple(size)} is "
            f"packed to as {form}"
        )
    parts = _Packed.of(packed, numel, form, dtype)
    used, scale = parts.needs.new_zeros(()), scale_of(parts.bound, dtype, form.mode)
    how = scale, dtype, form.mode
    kernels = kernels_for(len(parts.heads), dtype, form.mode, packed.device)
    if kernels.is_compiled and numel % BLOCK == 0 and not form.is_sparse:
        blocks, _ = _loaded(parts, parts.heads, 0, used, *how)
        return blocks.as_strided(size, stride)
    x = fake_dequantise(packed, form, size, stride, dtype)
    flat = memory_ordered(x)
    for place in _places(numel, dtype, form.mode, form.is_sparse, packed.device):
        part = flat[place.start * BLOCK : place.stop * BLOCK]
        if form.is_sparse:
            used = _load_expanded(parts, place, used, scale, part, form.mode)
        else:
            blocks, used = _loaded(parts, parts.heads[place], place.start, used, *how)
            part.copy_(blocks.view(-1)[: part.numel()])
    return x


def fake_dequantise(
    packed: torch.Tensor,
    form: PackedForm,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Make the output of `dequantise` without reading the input."""
    return packed.new_empty_strided(size, stride, dtype=dtype)


class _Packed(NamedTuple):
    """Views of the parts of a packed form, in their order; see the module."""

    exact: torch.Tensor
    pool: torch.Tensor
    mask: torch.Tensor
    heads: torch.Tensor
    where: torch.Tensor
    needs: torch.Tensor
    bound: torch.Tensor

    @staticmethod
    def of(buffer: torch.Tensor, numel: int, form: PackedForm, dtype: torch.dtype) -> _Packed:
        """Cut a buffer into its parts."""
        parts, start = [], 0
        for part_dtype, shape in _layout(numel, form, dtype):
            stop = start + part_dtype.itemsize * math.prod(shape)
            parts.append(buffer[start:stop].view(part_dtype).view(shape))
            start = stop
        return _Packed(*parts)


def _layout(
    numel: int, form: PackedForm, dtype: torch.dtype
) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
    """List dtype and shape of each part; each begins where its dtype may, the large at 32 bytes."""
    blocks = -(-numel // BLOCK)
    room = min(form.exact_blocks, blocks)
    return (
        (dtype, (room + 1 if room else 0, BLOCK)),
        (torch.int8, (form.rows + 1, ROW)),
        (torch.uint8, (blocks if form.is_sparse else 0, ROW)),
        (torch.int32, (blocks,)),
        (torch.int32, (room + 1,)),
        (torch.int32, (2,)),
        (torch.float32, (1,)),
    )


def _pieces(x: torch.Tensor, mode: Mode, is_sparse: bool) -> Iterator[tuple[int, torch.Tensor]]:
    """Cut a tensor into pieces; yield each as blocks, with the place of the first.

    The last block of the tensor is filled up with zeros.
    """
    flat = memory_ordered(x)
    for place in _places(flat.numel(), x.dtype, mode, is_sparse, x.device):
        part = flat[place.start * BLOCK : place.stop * BLOCK]
        if part.numel() % BLOCK:
            part = torch.nn.functional.pad(part, (0, -part.numel() % BLOCK))
        yield place.start, part.view(-1, LANES, ROW)


def _places(
    numel: int, dtype: torch.dtype, mode: Mode, is_sparse: bool, device: torch.device
) -> Iterator[slice]:
    """Cut blocks into runs, so that temporaries stay small; one that is not full is alone.

    The runs of a dense form are of about the same length, those of a sparse one whole sections.
    """
    whole, nbytes, each = numel // BLOCK, temporary_bytes(device), _EAGER_TEMPORARY_BYTES
    if kernels_for(whole, dtype, mode, device).is_compiled:
        nbytes = _COMPILED_PIECE_BYTES.get(device.type, nbytes)
        each = _COMPILED_TEMPORARY_BYTES
    if is_sparse:
        most = int(nbytes / (BLOCK * (each + _SPARSE_TEMPORARY_BYTES)))
        length = max(most // SECTION, 1) * SECTION
    else:
        most = max(1, int(nbytes / (BLOCK * each)))
        length = -(-whole // -(-whole // most)) if whole else 1
    for start in range(0, whole, length):
        yield slice(start, min(start + length, whole))
    if numel % BLOCK:
        yield slice(whole, whole + 1)


def _blocks_at_once(device: torch.device) -> int:
    return max(1, chunk_length(device, bytes_per_element=_EAGER_TEMPORARY_BYTES) // BLOCK)


def _scalar(value: int, like: torch.Tensor) -> torch.Tensor:
    """Return an integer as kernels take it."""
    return like.new_full((), value, dtype=torch.int32)


def _loaded(
    packed: _Packed,
    heads: torch.Tensor,
    start: int,
    used: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    mode: Mode,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks from a place on, and how many rows those up to the last take."""
    kernels = kernels_for(len(heads), dtype, mode, heads.device)
    first = _scalar(start, heads)
    blocks, used = kernels.load(heads, first, used, packed.pool, scale, dtype, mode)
    _restore_exact(packed, blocks, start)
    return blocks, used


def _load_expanded(
    packed: _Packed,
    place: slice,
    used: torch.Tensor,
    scale: torch.Tensor,
    part: torch.Tensor,
    mode: Mode,
) -> torch.Tensor:
    """Write the elements of sections, and zeros, to a part of the tensor; return used rows."""
    mask, heads = packed.mask[place], packed.heads[place]
    kernels = sparse_kernels_for(len(heads), part.dtype, mode, part.device)
    counts = kernels.counts(mask)
    heads = heads[: _filled(counts)[1]]
    blocks, used = _loaded(packed, heads, place.start, used, scale, part.dtype, mode)
    is_whole = part.numel() % BLOCK == 0
    target = part if is_whole else part.new_empty(BLOCK)
    kernels.expand(mask, starts_of(counts), blocks.view(-1), target.view(-1, LANES, ROW))
    if not is_whole:
        part.copy_(target[: part.numel()])
    return used


def _compacted(
    blocks: torch.Tensor, scale: torch.Tensor, mode: Mode, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Move what does not come back as 0 to the front of each section, and write its mask."""
    kernels = sparse_kernels_for(len(blocks), blocks.dtype, mode, blocks.device)
    bits, counts = kernels.mask(blocks, scale, mode)
    if mask is not None:
        mask.copy_(bits)
    length, filled = _filled(counts)
    compact = blocks.new_empty(blocks.numel() + 1)
    compact[length : filled * BLOCK] = 0
    kernels.compact(blocks, bits, starts_of(counts), compact)
    return compact[: filled * BLOCK].view(-1, LANES, ROW)


def _filled(counts: torch.Tensor) -> tuple[int, int]:
    """Return how many elements are sure to be written, and how many blocks to go on with.

    A CPU knows where a section ends; of an accelerator nothing is asked.
    """
    blocks = len(counts)
    if counts.device.type != "cpu" or blocks > SECTION:
        return 0, blocks
    length = int(counts.sum())
    # Kernels are compiled for more than one block.
    return length, min(max(-(-length // BLOCK), FEWEST_BLOCKS), blocks)


def _store_exact(
    packed: _Packed, blocks: torch.Tensor, start: int, misfits: torch.Tensor, mode: Mode
) -> torch.Tensor:
    """Copy the blocks that do not fit, as many as there is room for.

    Args:
        packed: Where to copy them to.
        blocks: Blocks of the tensor.
        start: The place of the first.
        misfits: How many do not fit before, int32 `[]`.
        mode: How it is rounded.

    Returns:
        How many do not fit up to the last.
    """
    is_misfit = packed.heads[start : start + len(blocks)] == MISFIT
    room, count = len(packed.where) - 1, is_misfit.sum(dtype=torch.int32)
    if not room or (count.device.type == "cpu" and not count):
        return misfits + count
    wide = torch.promote_types(blocks.dtype, torch.float32)
    size = min(room, len(blocks))
    found = torch.nonzero_static(is_misfit, size=size, fill_value=-1).view(-1)
    rows = misfits + torch.arange(size, dtype=torch.int32, device=found.device)
    rows = torch.where((found >= 0) & (rows < room), rows, room)
    chunk = _blocks_at_once(blocks.device)
    for row, place in zip(torch.split(rows, chunk), torch.split(found, chunk), strict=True):
        original = blocks.view(-1, BLOCK)[place.clamp(min=0)]
        if mode == "zero":
            original = torch.where(original.to(wide).abs() <= packed.bound, 0.0, original)
        packed.exact[row.long()] = original
        packed.where[row.long()] = (place + start).to(torch.int32)
    packed.where[room] = -1
    return misfits + count


def _restore_exact(packed: _Packed, blocks: torch.Tensor, start: int) -> None:
    """Copy the blocks that did not fit to their places in a run that begins at `start`."""
    room = len(packed.where) - 1
    if not room:
        return
    flat, where = blocks.view(-1, BLOCK), packed.where
    first = ((where >= 0) & (where < start)).sum()
    if where.device.type == "cpu" and not start <= int(where[first]) < start + len(blocks):
        return
    window = first + torch.arange(min(room, len(blocks)), device=where.device)
    for rows in torch.split(window.clamp(max=room), _blocks_at_once(blocks.device)):
        place = where[rows] - start
        is_here = (place >= 0) & (place < len(blocks))
        # A row of another run repeats the first of this one, or leaves the first block as it is.
        any_here = is_here[0]
        spare_place = torch.where(any_here, place[0], 0)
        spare = torch.where(any_here, packed.exact[rows[0]], flat[0])
        place = torch.where(is_here, place, spare_place)
        flat[place] = torch.where(is_here[:, None], packed.exact[rows], spare)

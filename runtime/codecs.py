"""Pack saved tensors without loss, in plain torch ops.

Three codecs, each with a static packed size, no host synchronisation, and results that do
not depend on the device:

    bits           one bit an element: bool masks, and ReLU outputs read for their sign
    pool offsets   max-pool indices as the tap of the window that they point to, one byte
    narrow         integers with a known bound in the fewest bytes that hold it

Whether a codec keeps a backward exact is the caller's to decide.  A packed tensor is flat
and lists the elements in the memory order of the original, so that every dense layout
(`is_dense`), channels-last among them, comes back with exactly its strides.  Work is cut
into chunks: beside its input and its output a codec holds at most `TEMPORARY_BYTES` of
the device, and tables of a few windows.

Each codec op has a `fake_` twin that makes its output without reading its input.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from backhaul.runtime.dense import chunk_length, empty_dense, memory_order, memory_ordered

__all__ = [
    "can_pack_pool_offsets",
    "fake_narrow",
    "fake_pack_bits",
    "fake_pack_pool_offsets",
    "fake_unpack_bits",
    "fake_unpack_pool_offsets",
    "fake_widen",
    "narrow",
    "narrow_nbytes",
    "narrowest_dtype",
    "pack_bits",
    "pack_bits_nbytes",
    "pack_pool_offsets",
    "pack_pool_offsets_nbytes",
    "unpack_bits",
    "unpack_pool_offsets",
    "widen",
]

_GATHER_BITS = 0x0102040810204080
"""Times a word of eight bytes 0 or 1, byte i comes out as bit i of the highest byte."""


def pack_bits_nbytes(numel: int) -> int:
    """Return the packed size of `numel` elements in bytes."""
    return (numel + 7) // 8


def pack_bits(x: torch.Tensor) -> torch.Tensor:
    """Pack one bit an element: `not (x <= 0)`, for a bool its value.

    That is the test of `aten.threshold_backward` at threshold 0, which lets a NaN through.

    Args:
        x: Dense tensor of any real dtype and any shape.

    Returns:
        Flat uint8 tensor of `pack_bits_nbytes(x.numel())`; element i is bit i % 8 of byte
        i // 8, and bits past the end are 0.
    """
    flat = memory_ordered(x)
    numel = flat.numel()
    packed = x.new_empty(pack_bits_nbytes(numel), dtype=torch.uint8)
    chunk = min(chunk_length(x.device, bytes_per_element=1.0), 8 * packed.numel())
    is_zero = x.new_empty(chunk, dtype=torch.bool)
    for start in range(0, numel, chunk or 1):
        part = flat[start : start + chunk]
        nbytes = pack_bits_nbytes(part.numel())
        torch.le(part, 0, out=is_zero[: part.numel()])
        is_zero[part.numel() : 8 * nbytes].fill_(True)
        words = is_zero[: 8 * nbytes].view(torch.int64)
        words.mul_(_GATHER_BITS)
        highest_bytes = words.view(torch.uint8)[7::8]
        torch.bitwise_not(highest_bytes, out=packed[start // 8 : start // 8 + nbytes])
    return packed


def fake_pack_bits(x: torch.Tensor) -> torch.Tensor:
    """Make the output of `pack_bits` without reading the input."""
    return x.new_empty((pack_bits_nbytes(x.numel()),), dtype=torch.uint8)


def unpack_bits(
    packed: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Unpack bits to a tensor of 0 and 1 with this geometry.

    Args:
        packed: What `pack_bits` returned.
        size: Size of the original.
        stride: Its strides, dense.
        dtype: Its dtype.
    """
    unpacked = empty_dense(packed, size, stride, dtype, elements_per_packed=8)
    flat = memory_ordered(unpacked)
    numel = flat.numel()
    whole = numel // 8
    bits = torch.arange(8, device=packed.device)
    bytes_ = torch.arange(256, device=packed.device)
    table = ((bytes_[:, None] >> bits) & 1).to(dtype)
    chunk = chunk_length(packed.device, bytes_per_element=4.0)
    for start in range(0, whole, chunk):
        stop = min(start + chunk, whole)
        rows = flat[8 * start : 8 * stop].view(-1, 8)
        torch.index_select(table, 0, packed[start:stop].int(), out=rows)
    if whole < packed.numel():
        last = table.index_select(0, packed[whole:].int())
        flat[8 * whole :].copy_(last.view(-1)[: numel - 8 * whole])
    return unpacked


def fake_unpack_bits(
    packed: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Make the output of `unpack_bits` without reading the input."""
    return packed.new_empty_strided(size, stride, dtype=dtype)


def can_pack_pool_offsets(kernel: Sequence[int]) -> bool:
    """Say whether every tap of a pooling window has a number of one byte."""
    return math.prod(_pair(kernel)) <= 256


def pack_pool_offsets_nbytes(numel: int) -> int:
    """Return the packed size of `numel` indices in bytes."""
    return numel


def pack_pool_offsets(
    indices: torch.Tensor,
    input_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """Pack max-pool indices as the number of the window's tap that each points to.

    An index counts elements of the input plane, row by row.  Its distance from the first tap
    of its window depends on the tap alone.  Where two taps have the same distance, which only
    happens outside the plane, they also stand for the same index.

    Args:
        indices: The int64 indices of `aten.max_pool2d_with_indices`, dense, batched or not.
        input_size: Height and width of the pooled input.
        kernel: Window size; one or two numbers, as in the arguments that follow.
        stride: Distance of windows; empty means `kernel`.
        padding: Padding at each side.
        dilation: Distance of taps.

    Returns:
        Flat uint8 tensor with one element an index.  An index that no tap of its window could
        have given is packed as some tap.

    Raises:
        ValueError: The window has more than 256 taps.
    """
    packed = fake_pack_pool_offsets(indices, input_size, kernel, stride, padding, dilation)
    distances = _tap_distances(kernel, dilation, input_size[-1], indices.device)
    longest = _longest_distance(kernel, dilation, input_size[-1])
    tap_by_distance = packed.new_zeros(longest + 1)
    tap_by_distance[distances] = torch.arange(
        distances.numel(), dtype=torch.uint8, device=indices.device
    )
    order = memory_order(indices)
    origins = _window_origins(indices, input_size[-1], kernel, stride, padding).permute(order)
    ordered = indices.permute(order)
    chunk = chunk_length(indices.device, bytes_per_element=8.0)
    for box, start, stop in _boxes(ordered.shape, chunk):
        distance = torch.sub(ordered[box], origins[box])
        # Without the bounds a stray index would be a fault of the whole device.
        distance.clamp_(0, longest)
        torch.gather(tap_by_distance, 0, distance.view(-1), out=packed[start:stop])
        del distance  # before the next one is made: one chunk at a time
    return packed


def fake_pack_pool_offsets(
    indices: torch.Tensor,
    input_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """Make the output of `pack_pool_offsets` without reading the input."""
    if not can_pack_pool_offsets(kernel):
        raise ValueError(f"a pooling window of {tuple(kernel)} has more than 256 taps")
    return indices.new_empty((pack_pool_offsets_nbytes(indices.numel()),), dtype=torch.uint8)


def unpack_pool_offsets(
    packed: torch.Tensor,
    size: Sequence[int],
    tensor_stride: Sequence[int],
    input_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """Unpack window taps to the int64 plane indices that they came from.

    Args:
        packed: What `pack_pool_offsets` returned.
        size: Size of the original indices.
        tensor_stride: Their strides, dense.
        input_size: As given to `pack_pool_offsets`, like the arguments that follow.
        kernel: Window size.
        stride: Distance of windows.
        padding: Padding at each side.
        dilation: Distance of taps.
    """
    indices = empty_dense(packed, size, tensor_stride, torch.int64)
    distances = _tap_distances(kernel, dilation, input_size[-1], packed.device)
    order = memory_order(indices)
    origins = _window_origins(indices, input_size[-1], kernel, stride, padding).permute(order)
    ordered, taps = indices.permute(order), packed.view(-1)
    chunk = chunk_length(packed.device, bytes_per_element=4.0)
    for box, start, stop in _boxes(ordered.shape, chunk):
        part = ordered[box]
        torch.index_select(distances, 0, taps[start:stop].int(), out=part.view(-1))
        part.add_(origins[box])
    return indices


def fake_unpack_pool_offsets(
    packed: torch.Tensor,
    size: Sequence[int],
    tensor_stride: Sequence[int],
    input_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """Make the output of `unpack_pool_offsets` without reading the input."""
    return packed.new_empty_strided(size, tensor_stride, dtype=torch.int64)


def narrowest_dtype(bound: int) -> torch.dtype:
    """Return the smallest integer dtype that holds every value v with 0 <= v < `bound`."""
    for dtype in (torch.uint8, torch.int16, torch.int32):
        if bound - 1 <= torch.iinfo(dtype).max:
            return dtype
    return torch.int64


def narrow_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Return the packed size of `numel` integers in bytes."""
    return numel * dtype.itemsize


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pack integers into a smaller dtype; the caller knows that each of them fits.

    Args:
        x: Dense tensor of integers.
        dtype: A dtype that holds them, as `narrowest_dtype` gives it.

    Returns:
        Flat tensor of `dtype`.
    """
    return fake_narrow(x, dtype).copy_(memory_ordered(x))


def fake_narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Make the output of `narrow` without reading the input."""
    return x.new_empty((x.numel(),), dtype=dtype)


def widen(
    packed: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Unpack integers to their own dtype and geometry.

    Args:
        packed: What `narrow` returned.
        size: Size of the original.
        stride: Its strides, dense.
        dtype: Its dtype.
    """
    unpacked = empty_dense(packed, size, stride, dtype)
    memory_ordered(unpacked).copy_(packed.view(-1))
    return unpacked


def fake_widen(
    packed: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Make the output of `widen` without reading the input."""
    return packed.new_empty_strided(size, stride, dtype=dtype)


def _boxes(
    shape: Sequence[int], limit: int, start: int = 0
) -> Iterator[tuple[tuple[slice, ...], int, int]]:
    """Cut a contiguous shape into boxes of contiguous memory, each of at most `limit`.

    Yields:
        The box as an index, and the positions in memory where it starts and stops.
    """
    inner = math.prod(shape[1:])
    if inner > limit:
        for i in range(shape[0]):
            for box, first, last in _boxes(shape[1:], limit, start + i * inner):
                yield (slice(i, i + 1), *box), first, last
    elif inner > 0:
        step = max(limit // inner, 1)
        for i in range(0, shape[0], step):
            stop = min(i + step, shape[0])
            yield (slice(i, stop),), start + i * inner, start + stop * inner


def _pair(value: Sequence[int]) -> tuple[int, int]:
    return (value[0], value[-1])


def _tap_distances(
    kernel: Sequence[int], dilation: Sequence[int], width: int, device: torch.device
) -> torch.Tensor:
    """Return how far in the plane each tap is from the first, int64, row by row."""
    (kernel_h, kernel_w), (dilation_h, dilation_w) = _pair(kernel), _pair(dilation)
    rows = torch.arange(kernel_h, device=device) * (dilation_h * width)
    return (rows[:, None] + torch.arange(kernel_w, device=device) * dilation_w).view(-1)


def _longest_distance(kernel: Sequence[int], dilation: Sequence[int], width: int) -> int:
    (kernel_h, kernel_w), (dilation_h, dilation_w) = _pair(kernel), _pair(dilation)
    return (kernel_h - 1) * dilation_h * width + (kernel_w - 1) * dilation_w


def _window_origins(
    indices: torch.Tensor,
    width: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> torch.Tensor:
    """Return the plane index of each window's first tap, expanded to the indices' shape.

    In the padding it lies outside the plane and may be negative.
    """
    (stride_h, stride_w), (padding_h, padding_w) = _pair(stride or kernel), _pair(padding)
    out_h, out_w = indices.shape[-2:]
    rows = torch.arange(out_h, device=indices.device) * stride_h - padding_h
    columns = torch.arange(out_w, device=indices.device) * stride_w - padding_w
    return (rows[:, None] * width + columns).expand_as(indices)

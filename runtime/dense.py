"""Tensors that fill their memory exactly once, as the codecs see them: in memory order.

Work on them is cut into chunks, so that a codec's temporaries stay small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = [
    "TEMPORARY_BYTES",
    "chunk_length",
    "empty_dense",
    "is_dense",
    "memory_order",
    "memory_ordered",
    "temporary_bytes",
]

TEMPORARY_BYTES = {"cpu": 512 << 10}
_ACCELERATOR_TEMPORARY_BYTES = 64 << 20
"""A CPU chunk stays in cache; an accelerator's is worth the launch of its kernels."""


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Say whether a geometry fills its memory exactly once, in some order of dimensions.

    Example:
        >>> is_dense((2, 3, 4, 5), (60, 1, 15, 3))  # channels-last
        True
        >>> is_dense((2, 3), (6, 1))  # every second row of four
        False
    """
    if 0 in size:
        return True
    step = 1
    for length, length_stride in sorted(zip(size, stride, strict=True), key=lambda dim: dim[1]):
        if length == 1:
            continue
        if length_stride != step:
            return False
        step *= length
    return True


def empty_dense(
    packed: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    *,
    elements_per_packed: int = 1,
) -> torch.Tensor:
    """Make the tensor to unpack to.

    Args:
        packed: The packed form, for its device and its length.
        size: Size to unpack to.
        stride: Strides to unpack to.
        dtype: Dtype to unpack to.
        elements_per_packed: How many elements one of the packed form holds.

    Raises:
        ValueError: The geometry is not dense, or the packed form not as long as it must be.
    """
    _check_dense(size, stride)
    if packed.numel() != -(-math.prod(size) // elements_per_packed):
        raise ValueError(
            f"{packed.numel()} packed elements were not packed from a tensor of size {tuple(size)}"
        )
    return packed.new_empty_strided(size, stride, dtype=dtype)


def memory_ordered(x: torch.Tensor) -> torch.Tensor:
    """View a dense tensor as its elements in memory order.

    Raises:
        ValueError: It is not dense.
    """
    _check_dense(x.shape, x.stride())
    return x.as_strided((x.numel(),), (1,))


def memory_order(x: torch.Tensor) -> list[int]:
    """List a dense tensor's dimensions from the outermost in memory to the innermost.

    Raises:
        ValueError: It is not dense.
    """
    _check_dense(x.shape, x.stride())
    stride = x.stride()
    return sorted(range(x.dim()), key=lambda dim: -stride[dim])


def chunk_length(device: torch.device, *, bytes_per_element: float) -> int:
    """Return how many elements to work on at once, given what each takes in temporaries."""
    return int(temporary_bytes(device) / bytes_per_element)


def temporary_bytes(device: torch.device) -> int:
    """Return how many bytes temporaries may take at once."""
    return TEMPORARY_BYTES.get(device.type, _ACCELERATOR_TEMPORARY_BYTES)


def _check_dense(size: Sequence[int], stride: Sequence[int]) -> None:
    if not is_dense(size, stride):
        raise ValueError(
            f"size {tuple(size)} with strides {tuple(stride)} is not dense, which codecs need"
        )

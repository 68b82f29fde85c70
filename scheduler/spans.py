"""Bytes that are held from one op to another."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from backhaul.records import TensorRecord

__all__ = ["LIVE", "SAVED", "Spans", "kept_spans"]

LIVE, SAVED = 0, 1
"""Columns: everything but what the caller holds, and what is there for the backward alone.

What is live is counted during ops; what is saved, between them.
"""


class Spans:
    """Bytes that are held from one op to another, live and saved.

    Attributes:
        born: Bytes that are there from each op on, shape `[ops + 1, 2]`.
        dead: Bytes that are gone after each op.
    """

    def __init__(self, born: NDArray[np.int64], dead: NDArray[np.int64]) -> None:
        self.born = born
        self.dead = dead

    @staticmethod
    def over(op_count: int) -> Spans:
        """Return spans that hold nothing."""
        shape = (op_count + 1, 2)
        return Spans(np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64))

    def copy(self) -> Spans:
        """Return spans that can be changed on their own."""
        return Spans(self.born.copy(), self.dead.copy())

    def hold(self, first: int, last: int, nbytes: int, column: int) -> None:
        """Hold so much more, or less, from the first op to the last; nothing if they cross."""
        if 0 <= first <= last:
            self.born[first, column] += nbytes
            self.dead[min(last, len(self.dead) - 1), column] += nbytes

    def levels(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what is held during each op, and just before it; what is saved is the same."""
        after = np.cumsum(self.born - self.dead, axis=0)
        before = np.vstack([np.zeros((1, 2), dtype=np.int64), after[:-1]])
        during = before.copy()
        during[:, LIVE] += self.born[:, LIVE]
        return during, before


def kept_spans(op_count: int, tensors: Iterable[tuple[TensorRecord, int]]) -> Spans:
    """Return what is held if everything is kept.

    Args:
        op_count: How many ops the step has.
        tensors: What is not the caller's, with sizes as the allocator rounds them.
    """
    spans = Spans.over(op_count)
    for tensor, nbytes in tensors:
        spans.hold(max(tensor.born, 0), tensor.dies, nbytes, LIVE)
        if tensor.role == "saved":
            spans.hold(tensor.last_forward_use, tensor.first_backward_use, nbytes, SAVED)
    return spans

"""The ranks that optimize one model at the same time, each its own copy of it.

Every rank takes part in every exchange, or the others would wait for it in vain.  One that fails
says so in the exchange that comes next, and all of them raise.
"""

from __future__ import annotations

import socket
from types import TracebackType
from typing import TypeVar

import torch
from torch import distributed

from backhaul.errors import BackhaulError
from backhaul.runtime.measure_ops import untraced

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """What the ranks of a process group tell each other, from `with` until its end.

    Args:
        group: The group, which this rank belongs to.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        # Whether an exchange has failed, or is under way: no other may follow it.
        self._is_over = False

    @property
    def count(self) -> int:
        """Return how many there are."""
        return int(self._group.size())

    def count_on_this_host(self) -> int:
        """Return how many of them share this host, its link and its memory, this one included."""
        own = socket.gethostname()
        return self.gather(own).count(own)

    def gather(self, own: T) -> list[T]:
        """Return what each rank gives, when all have given it.

        Raises:
            BackhaulError: Another rank has failed; the error is that rank's.
        """
        told = self._told(own, None)
        self._is_over = True
        for rank, (_, error) in enumerate(told):
            if error is not None:
                error.add_note(f"raised by rank {rank} of the process group")
                raise error
        self._is_over = False
        return [value for value, _ in told]

    def first(self, own: T) -> T:
        """Return what the first rank gives."""
        given = [own]
        self._is_over = True
        with untraced(torch.device("cpu")):
            distributed.broadcast_object_list(given, group=self._group, group_src=0)
        self._is_over = False
        return given[0]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if self._is_over:
            return
        if error is None:
            self.gather(None)
        elif isinstance(error, Exception):
            text = f"{type(error).__name__}: {error}"
            self._told(None, error if isinstance(error, BackhaulError) else BackhaulError(text))

    def _told(self, value: T, error: BackhaulError | None) -> list[tuple[T, BackhaulError | None]]:
        told = [(value, error)] * self.count
        self._is_over = True
        with untraced(torch.device("cpu")):
            distributed.all_gather_object(told, (value, error), group=self._group)
        self._is_over = False
        return told

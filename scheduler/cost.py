"""What each op and each copy of one graph costs on one machine.

The numbers come from the machine profile; this module only looks them up, rounds sizes as
the allocator does, and interpolates copy times between the sizes that were measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from backhaul.errors import PlanError
from backhaul.records import (
    CodecRecord,
    GraphRecord,
    LinkProfile,
    MachineProfile,
    Recipe,
    TensorRecord,
)
from backhaul.scheduler.schedule import Layout

__all__ = ["CostModel", "Direction"]

Direction = Literal["d2h", "h2d"]


class CostModel:
    """Costs of one graph on one machine, by op position and by tensor name.

    Attributes:
        duration_s: Time of each op.
        starts_s: When each op starts if nothing but ops runs, and when the last ends.
        workspace_bytes: What each op holds beyond its inputs and outputs.
        forward_count: How many of the ops are forward.
        caller_bytes: What the caller holds all along.
        host_capacity_bytes: Most bytes that the host tier can hold.
        layout: When what is planned is needed.
        planned: Saved tensors and checkpoints by name, in order of birth.
        nbytes: Size of each of them as the allocator rounds it.
        recipe_s: Time of each recipe, by the tensor that it makes.
        recipe_peak_bytes: Most that each recipe holds at once, the tensor itself included.

    Args:
        graph: The step to be costed.
        machine: Measurements that cover every op of the graph.

    Raises:
        PlanError: The machine profile lacks an op of the graph.
    """

    def __init__(self, graph: GraphRecord, machine: MachineProfile) -> None:
        self._cost_by_key = {cost.key: cost for cost in machine.ops}
        self._link = machine.link
        self.host_capacity_bytes = machine.link.capacity_bytes
        self._alignment_bytes = machine.alignment_bytes
        missing = sorted({op.cost_key for op in graph.ops if op.cost_key} - set(self._cost_by_key))
        if missing:
            raise PlanError(
                f"the machine profile of {machine.device} has no timing for {len(missing)} ops of "
                f"this graph, the first is {missing[0]}; measure the graph on this machine first"
            )
        self.duration_s = tuple(self.key_s(op.cost_key) for op in graph.ops)
        self.starts_s = (0.0, *accumulate(self.duration_s))
        self.workspace_bytes = tuple(self.key_workspace_bytes(op.cost_key) for op in graph.ops)
        self.forward_count = graph.forward_count
        self.caller_bytes = sum(
            self.rounded(tensor.nbytes) for tensor in graph.tensors if tensor.role == "input"
        )
        own = [tensor for tensor in graph.tensors if tensor.role != "input"]
        self.layout = Layout.of(graph)
        self.planned = self.layout.planned
        self.nbytes = {name: self.rounded(tensor.nbytes) for name, tensor in self.planned.items()}
        recipes = {name: t.recipe for name, t in self.planned.items() if t.recipe is not None}
        self.recipe_s = {
            name: sum(self.duration_s[position] for position in recipe.ops)
            for name, recipe in recipes.items()
        }
        self.recipe_peak_bytes = {name: self._peak(recipe) for name, recipe in recipes.items()}
        self._born_bytes = self._by_position(graph, ((tensor.born, tensor) for tensor in own))
        self._dead_bytes = self._by_position(graph, ((tensor.dies, tensor) for tensor in own))

    def keep_changes(self, *, saved_only: bool) -> NDArray[np.int64]:
        """Return how many bytes more are live at each op than before it, if all is kept.

        Args:
            saved_only: Whether to count saved activations alone.
        """
        column = int(saved_only)
        changes = np.zeros(len(self.duration_s) + 2, dtype=np.int64)
        changes[:-2] = self._born_bytes[:, column]
        changes[1:-1] -= self._dead_bytes[:, column]
        return changes

    def born_and_dead(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what is allocated at each op, and freed after it, if everything is kept.

        Returns:
            Two arrays of shape `[ops, 2]`: bytes, and those of saved activations.
        """
        return self._born_bytes.copy(), self._dead_bytes.copy()

    def workspace_array(self) -> NDArray[np.int64]:
        """Return what each op holds beyond its inputs and outputs."""
        return np.array(self.workspace_bytes, dtype=np.int64)

    def _peak(self, recipe: Recipe) -> int:
        live = [self.workspace_bytes[position] for position in recipe.ops]
        for nbytes, first, last in recipe.made:
            for index in range(first, last + 1):
                live[index] += self.rounded(nbytes)
        return max(live)

    def _by_position(
        self, graph: GraphRecord, tensors: Iterable[tuple[int, TensorRecord]]
    ) -> NDArray[np.int64]:
        """Sum bytes, and those of saved tensors among them, by position in the graph."""
        sums = np.zeros((len(graph.ops), 2), dtype=np.int64)
        for position, tensor in tensors:
            if 0 <= position < len(sums):
                nbytes = self.rounded(tensor.nbytes)
                sums[position] += (nbytes, nbytes if tensor.role == "saved" else 0)
        return sums

    def key_s(self, key: str) -> float:
        """Return the time of the op with this key; an empty key is free."""
        return self._cost_by_key[key].duration_s if key else 0.0

    def key_workspace_bytes(self, key: str) -> int:
        """Return the workspace of the op with this key; an empty key needs none."""
        return self._cost_by_key[key].workspace_bytes if key else 0

    def gap_s(self, idle: int, use: int) -> float:
        """Return the compute time of the ops between two positions."""
        return max(0.0, self.starts_s[max(use, idle + 1)] - self.starts_s[idle + 1])

    def codec_s(self, codec: CodecRecord) -> float:
        """Return the time of packing and unpacking once."""
        return self.key_s(codec.encode_key) + self.key_s(codec.decode_key)

    def rounded(self, nbytes: int) -> int:
        """Round a size up as the allocator does."""
        return -(-nbytes // self._alignment_bytes) * self._alignment_bytes

    def copy_s(self, nbytes: int, direction: Direction, *, both_ways: bool = False) -> float:
        """Return the time of one copy, alone or while the other direction is busy."""
        link = self._link
        times_s = link.d2h_s if direction == "d2h" else link.h2d_s
        alone_s = _interpolated(link.sizes_bytes, times_s, nbytes)
        return alone_s / _duplex_fraction(link, direction) if both_ways else alone_s


def _duplex_fraction(link: LinkProfile, direction: Direction) -> float:
    return link.duplex_d2h_fraction if direction == "d2h" else link.duplex_h2d_fraction


def _interpolated(sizes_bytes: Sequence[int], times_s: Sequence[float], nbytes: int) -> float:
    """Interpolate linearly, and beyond the ends along the outermost segment."""
    right = min(max(bisect_left(sizes_bytes, nbytes), 1), len(sizes_bytes) - 1)
    x0, x1 = sizes_bytes[right - 1], sizes_bytes[right]
    y0, y1 = times_s[right - 1], times_s[right]
    return max(y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0), min(times_s))

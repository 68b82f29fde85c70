"""What each op and each copy of one graph costs on one machine.

The numbers come from the machine profile; this module only looks them up, rounds sizes as
the allocator does, and interpolates copy times between the sizes that were measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from backhaul.errors import PlanError
from backhaul.records import (
    CodecRecord,
    GraphRecord,
    LinkProfile,
    MachineProfile,
    Recipe,
)
from backhaul.scheduler.schedule import Layout
from backhaul.scheduler.spans import kept_spans

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
        kept: What is held if everything is kept.
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
        self.layout = Layout.of(graph)
        self.planned = self.layout.planned
        self.nbytes = {name: self.rounded(tensor.nbytes) for name, tensor in self.planned.items()}
        recipes = {name: t.recipe for name, t in self.planned.items() if t.recipe is not None}
        self.recipe_s = {
            name: sum(self.duration_s[position] for position in recipe.ops)
            for name, recipe in recipes.items()
        }
        self.recipe_peak_bytes = {name: self._peak(recipe) for name, recipe in recipes.items()}
        self.kept = kept_spans(
            len(graph.ops),
            ((t, self.rounded(t.nbytes)) for t in graph.tensors if t.role != "input"),
        )

    def _peak(self, recipe: Recipe) -> int:
        live = [self.workspace_bytes[position] for position in recipe.ops]
        for nbytes, first, last in recipe.made:
            for index in range(first, last + 1):
                live[index] += self.rounded(nbytes)
        return max(live)

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

    def drag_s(self, nbytes: int) -> float:
        """Return the time that compute loses to one copy beside it."""
        link = self._link
        return (
            max(0.0, _interpolated(link.sizes_bytes, link.drag_s, nbytes)) if link.drag_s else 0.0
        )


def _duplex_fraction(link: LinkProfile, direction: Direction) -> float:
    return link.duplex_d2h_fraction if direction == "d2h" else link.duplex_h2d_fraction


def _interpolated(sizes_bytes: Sequence[int], times_s: Sequence[float], nbytes: int) -> float:
    """Interpolate linearly, and beyond the ends along the outermost segment."""
    right = min(max(bisect_left(sizes_bytes, nbytes), 1), len(sizes_bytes) - 1)
    x0, x1 = sizes_bytes[right - 1], sizes_bytes[right]
    y0, y1 = times_s[right - 1], times_s[right]
    return max(y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0), min(times_s))

"""The ways to treat one tensor, and what each would cost if it were alone.

What a copy costs depends on what else crosses the link and on how much compute there is to
hide it behind; alone, it costs what does not fit between the two uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from backhaul.errors import PlanError
from backhaul.records import Asked, TensorRecord
from backhaul.scheduler.cost import CostModel

__all__ = [
    "ALL_WAYS",
    "Option",
    "Way",
    "asked_ways",
    "options_of",
    "recipes_find_values",
    "slot_bytes",
    "spoils_recipes",
]

SLOT_ALIGNMENT_BYTES = 4096

Way = Literal["keep", "pack", "move", "pack and move", "recompute"]
"""What happens to a tensor, before it is decided when."""

ALL_WAYS: frozenset[Way] = frozenset(("keep", "pack", "move", "pack and move", "recompute"))

_ASKED: Mapping[Asked, frozenset[Way]] = {
    "keep": frozenset(),
    "compress": frozenset(("pack",)),
    "offload": frozenset(("move", "pack and move")),
    "recompute": frozenset(("recompute",)),
}


@dataclass(frozen=True, slots=True)
class Option:
    """One way to treat a tensor.

    Attributes:
        way: The way.
        held_bytes: What it holds on the device between the last forward use and the next.
        compute_s: Packing, unpacking and recomputing, and what copies take from compute.
        d2h_s: Time of the copy out.
        h2d_s: Time of the copy back.
        exposed_s: The part of both copies that exceeds the compute between the two uses.
        moved_bytes: What crosses the link.
        host_bytes: What it takes in the host tier.
    """

    way: Way
    held_bytes: int
    compute_s: float = 0.0
    d2h_s: float = 0.0
    h2d_s: float = 0.0
    exposed_s: float = 0.0
    moved_bytes: int = 0
    host_bytes: int = 0

    @property
    def alone_s(self) -> float:
        """Return what it adds to the step if nothing else crosses the link."""
        return self.compute_s + self.exposed_s


def options_of(
    cost: CostModel, tensor: TensorRecord, allowed: frozenset[Way] = ALL_WAYS
) -> tuple[Option, ...]:
    """List the ways to treat a tensor; to keep it comes first, even where something is asked.

    Args:
        cost: The costs of its step.
        tensor: A saved tensor or a checkpoint.
        allowed: The ways to consider, where nothing is asked of the tensor.
    """
    name = tensor.name
    found = [Option("keep", cost.nbytes[name])]
    if not tensor.is_movable:
        return tuple(found)
    if tensor.asked is not None:
        allowed = _ASKED[tensor.asked.action]
    codec = tensor.codecs[0] if tensor.codecs else None
    if codec is not None:
        found.append(Option("pack", cost.rounded(codec.packed_bytes), cost.codec_s(codec)))
    if tensor.recipe is not None:
        state_bytes = cost.rounded(tensor.recipe.state_bytes)
        found.append(Option("recompute", state_bytes, cost.recipe_s[name]))
    found.append(_moved("move", cost, tensor, tensor.nbytes, 0.0))
    if codec is not None:
        packing_s = cost.codec_s(codec)
        found.append(_moved("pack and move", cost, tensor, codec.packed_bytes, packing_s))
    return tuple(option for option in found if option.way in allowed or option.way == "keep")


def asked_ways(
    planned: Mapping[str, TensorRecord], options: Mapping[str, tuple[Option, ...]]
) -> dict[str, Way]:
    """Return the first way of each tensor of which one is asked.

    Args:
        planned: Saved tensors and checkpoints by name.
        options: The ways to treat each, as `options_of` lists them.

    Raises:
        PlanError: What is asked of two tensors contradicts itself.
    """
    ways = {
        name: options[name][1].way
        for name, tensor in planned.items()
        if tensor.asked is not None and tensor.is_movable
    }
    for name, way in ways.items():
        recipe = planned[name].recipe
        for source in recipe.sources if way == "recompute" and recipe else ():
            if source in ways and spoils_recipes(ways[source], planned[source]):
                by, other = planned[name].asked, planned[source].asked
                assert by is not None and other is not None
                raise PlanError(
                    f"{by.by} asks to recompute {name} from {source}, of which {other.by} leaves "
                    f"only {planned[source].codecs[0].name}: ask for one of the two"
                )
    return ways


def spoils_recipes(way: Way, tensor: TensorRecord) -> bool:
    """Say whether what comes back of a tensor is too little for a recipe to read."""
    return "pack" in way and not tensor.codecs[0].is_exact


def recipes_find_values(planned: Mapping[str, TensorRecord], ways: Mapping[str, Way]) -> bool:
    """Say whether every recipe that is followed finds the values of its sources.

    Args:
        planned: Saved tensors and checkpoints by name.
        ways: What happens to each; one that is absent is kept.
    """
    return not any(
        spoils_recipes(ways.get(source, "keep"), planned[source])
        for name, way in ways.items()
        if way == "recompute" and (recipe := planned[name].recipe) is not None
        for source in recipe.sources
    )


def slot_bytes(nbytes: int) -> int:
    """Return what a tensor of this size takes in the host arena."""
    return -(-nbytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def _moved(
    way: Way, cost: CostModel, tensor: TensorRecord, nbytes: int, compute_s: float
) -> Option:
    d2h_s, h2d_s = cost.copy_s(nbytes, "d2h"), cost.copy_s(nbytes, "h2d")
    gap_s = cost.gap_s(tensor.last_forward_use, tensor.first_backward_use)
    return Option(
        way,
        0,
        compute_s + 2 * cost.drag_s(nbytes),
        d2h_s,
        h2d_s,
        exposed_s=max(0.0, d2h_s + h2d_s - gap_s),
        moved_bytes=cost.rounded(nbytes),
        host_bytes=slot_bytes(nbytes),
    )

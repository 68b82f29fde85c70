"""Lower a plan's actions to the order in which things happen in one step.

The simulator walks this order and the rewrite inserts nodes in it, so that what was
simulated is what runs.  Around the op at position `p`:

    forward:   run p · pack · offload · wait for copies out
    backward:  start copies back · wait for a copy back · unpack · recompute · run p

A tensor without a codec starts its copy out as soon as it is made; a packed one is packed
after its last forward use, when nothing else needs the original.  What is recomputed needs
the sources of its recipe at that moment, so that they come back sooner than their own use,
and stay at least until then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, assert_never

from backhaul.records import (
    Action,
    CodecRecord,
    Compress,
    GraphRecord,
    Keep,
    Offload,
    Recompute,
    TensorRecord,
)

__all__ = ["Event", "EventKind", "Life", "Schedule", "codec_of", "events", "lives", "offload_after"]

EventKind = Literal[
    "run", "pack", "offload", "offload_wait", "reload", "reload_wait", "unpack", "recompute"
]
Happening = tuple[EventKind, str]
"""What happens to which tensor, where the position is known."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens: an op runs, or a tensor is packed, moved or made again.

    Attributes:
        kind: What happens.
        position: The op that runs, or that this happens just after (forward) or before.
        tensor: The tensor that it happens to; empty for `run`.
    """

    kind: EventKind
    position: int
    tensor: str = ""


class Life(NamedTuple):
    """When the backward needs a tensor, recipes that read it included.

    Attributes:
        use: Position before which it must be there, or -1 if the backward never needs it.
        dies: Position of its last reader.
    """

    use: int
    dies: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What happens beside the ops.

    Attributes:
        before: What happens before each op, in order.
        after: What happens after each op, in order.
        lives: When the backward needs each saved tensor and checkpoint.
    """

    before: Mapping[int, list[Happening]]
    after: Mapping[int, list[Happening]]
    lives: Mapping[str, Life]

    @staticmethod
    def of(
        planned: Mapping[str, TensorRecord],
        ready: Mapping[str, int],
        action_by_tensor: Mapping[str, Action],
    ) -> Schedule:
        """Lay out one step.

        Args:
            planned: Saved tensors and checkpoints by name, in order of birth.
            ready: Position of the node that each is named after.
            action_by_tensor: Their actions; one that is absent is kept.
        """
        life_by_tensor = lives(planned, action_by_tensor)
        before: dict[int, list[Happening]] = {}
        after: dict[int, list[Happening]] = {}
        waits: dict[int, list[Happening]] = {}
        reloads: list[tuple[int, int, str]] = []
        for name, tensor in planned.items():
            action = action_by_tensor.get(name)
            if action is None or isinstance(action, Keep):
                continue
            use = life_by_tensor[name].use
            if use < 0:
                continue
            here = before.setdefault(use, [])
            match action:
                case Compress():
                    after.setdefault(tensor.last_forward_use, []).append(("pack", name))
                    here.append(("unpack", name))
                case Offload():
                    out = after.setdefault(offload_after(tensor, ready[name], action), [])
                    if action.codec is not None:
                        out.append(("pack", name))
                    out.append(("offload", name))
                    waits.setdefault(action.wait_after, []).append(("offload_wait", name))
                    reloads.append((action.reload_before, use, name))
                    here.append(("reload_wait", name))
                    if action.codec is not None:
                        here.append(("unpack", name))
                case Recompute():
                    here.append(("recompute", name))
                case _:
                    assert_never(action)
        for position, happenings in waits.items():
            after.setdefault(position, []).extend(happenings)
        starts: dict[int, list[Happening]] = {}
        for position, _, name in sorted(reloads, key=lambda reload: reload[:2]):
            starts.setdefault(position, []).append(("reload", name))
        for position, happenings in starts.items():
            before[position] = happenings + before.get(position, [])
        return Schedule(before, after, life_by_tensor)


def lives(
    planned: Mapping[str, TensorRecord], action_by_tensor: Mapping[str, Action]
) -> dict[str, Life]:
    """Say when the backward needs each tensor.

    Args:
        planned: Saved tensors and checkpoints by name, in order of birth.
        action_by_tensor: Their actions; one that is absent is kept.
    """
    found: dict[str, Life] = {}
    wanted: dict[str, Life] = {}
    for name in reversed(tuple(planned)):
        tensor = planned[name]
        life = Life(tensor.first_backward_use, tensor.dies)
        if name in wanted:
            life = _joined(life, wanted[name])
        found[name] = life
        if life.use >= 0 and isinstance(action_by_tensor.get(name), Recompute):
            assert tensor.recipe is not None, f"{name} is recomputed without a recipe"
            for source in tensor.recipe.sources:
                read = Life(life.use, life.use)
                wanted[source] = _joined(wanted[source], read) if source in wanted else read
    return found


def codec_of(action: Action) -> CodecRecord | None:
    """Return the codec of an action, or None if it packs nothing."""
    return action.codec if isinstance(action, (Compress, Offload)) else None


def offload_after(tensor: TensorRecord, ready: int, action: Offload) -> int:
    """Return the position after which the copy out may start.

    Args:
        tensor: The tensor to be moved.
        ready: Position of the node that the tensor is named after.
        action: How it is moved.
    """
    return ready if action.codec is None else tensor.last_forward_use


def events(graph: GraphRecord, action_by_tensor: Mapping[str, Action]) -> Iterator[Event]:
    """Yield everything that happens in one step, in order.

    Args:
        graph: The step.
        action_by_tensor: Action of each saved tensor and checkpoint; one that is absent is kept.
    """
    position_by_op = {op.name: position for position, op in enumerate(graph.ops)}
    planned = {tensor.name: tensor for tensor in graph.planned}
    ready = {name: position_by_op.get(name, -1) for name in planned}
    schedule = Schedule.of(planned, ready, action_by_tensor)
    for position in range(len(graph.ops)):
        for kind, name in schedule.before.get(position, ()):
            yield Event(kind, position, name)
        yield Event("run", position)
        for kind, name in schedule.after.get(position, ()):
            yield Event(kind, position, name)


def _joined(one: Life, other: Life) -> Life:
    use = other.use if one.use < 0 else one.use if other.use < 0 else min(one.use, other.use)
    return Life(use, max(one.dies, other.dies))

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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
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

__all__ = [
    "Event",
    "EventKind",
    "Layout",
    "Life",
    "Schedule",
    "codec_of",
    "events",
    "offload_after",
]

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
        until: Position of the last op or recipe that it is held for; an op that reads it after
            its first use finds it there anyway.
        dies: Position of its last reader.
    """

    use: int
    until: int
    dies: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What schedules of one graph have in common.

    Attributes:
        planned: Saved tensors and checkpoints by name, in order of birth.
        ready: Position of the node that each is named after.
        lives: When the backward needs each, if everything is kept.
    """

    planned: Mapping[str, TensorRecord]
    ready: Mapping[str, int]
    lives: Mapping[str, Life]
    _order: Mapping[str, int]

    @staticmethod
    def of(graph: GraphRecord) -> Layout:
        """Read a graph."""
        # The backward may use a name of the forward again, as for a region that is checkpointed.
        forward = graph.ops[: graph.forward_count]
        position_by_op = {op.name: position for position, op in enumerate(forward)}
        planned = {tensor.name: tensor for tensor in graph.planned}
        return Layout(
            planned,
            {name: position_by_op.get(name, -1) for name in planned},
            {
                name: Life(t.first_backward_use, t.first_backward_use, t.dies)
                for name, t in planned.items()
            },
            {name: index for index, name in enumerate(planned)},
        )

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Sort by birth."""
        return sorted(names, key=self._order.__getitem__)

    def lives_under(self, action_by_tensor: Mapping[str, Action]) -> dict[str, Life]:
        """Say when the backward needs each tensor, what is recomputed from it included.

        Args:
            action_by_tensor: Action of each tensor; one that is absent is kept.
        """
        found = dict(self.lives)
        recomputed = [n for n, a in action_by_tensor.items() if isinstance(a, Recompute)]
        # A source is born before what is made from it, so that its own use is known by then.
        for name in reversed(self.in_order(recomputed)):
            use, recipe = found[name].use, self.planned[name].recipe
            if use < 0:
                continue
            assert recipe is not None, f"{name} is recomputed without a recipe"
            for source in recipe.sources:
                own = found[source]
                found[source] = Life(
                    use if own.use < 0 else min(own.use, use),
                    max(own.until, use),
                    max(own.dies, use),
                )
        return found

    def schedule(self, action_by_tensor: Mapping[str, Action]) -> Schedule:
        """Lay out one step.

        Args:
            action_by_tensor: Action of each tensor; one that is absent is kept.
        """
        life_by_tensor = self.lives_under(action_by_tensor)
        before: dict[int, list[Happening]] = {}
        after: dict[int, list[Happening]] = {}
        waits: dict[int, list[Happening]] = {}
        reloads: list[tuple[int, int, str]] = []
        for name in self.in_order(action_by_tensor):
            action, tensor, use = (
                action_by_tensor[name],
                self.planned[name],
                life_by_tensor[name].use,
            )
            if use < 0 or isinstance(action, Keep):
                continue
            here = before.setdefault(use, [])
            match action:
                case Compress():
                    after.setdefault(tensor.last_forward_use, []).append(("pack", name))
                    here.append(("unpack", name))
                case Offload():
                    start = offload_after(tensor, self.ready[name], action)
                    out = after.setdefault(start, [])
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
        # Soonest needed first; of those that are needed at once, in order of birth.
        for position, _, name in sorted(reloads, key=itemgetter(0, 1)):
            starts.setdefault(position, []).append(("reload", name))
        for position, happenings in starts.items():
            before[position] = happenings + before.get(position, [])
        return Schedule(before, after, life_by_tensor)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What happens beside the ops of one step.

    Attributes:
        before: What happens before each op, in order.
        after: What happens after each op, in order.
        lives: When the backward needs each saved tensor and checkpoint.
    """

    before: Mapping[int, list[Happening]]
    after: Mapping[int, list[Happening]]
    lives: Mapping[str, Life]

    def walk(self, positions: Iterable[int]) -> Iterator[tuple[EventKind, int, str, int]]:
        """Yield what happens at these positions, the run of each op among it.

        Yields:
            The parts of an `Event`, and the op that follows it; for a run that is the op itself.
        """
        for position in positions:
            for kind, name in self.before.get(position, ()):
                yield kind, position, name, position
            yield "run", position, "", position
            for kind, name in self.after.get(position, ()):
                yield kind, position, name, position + 1

    @property
    def busy(self) -> list[int]:
        """List the positions at which more happens than the run of an op."""
        return sorted({*self.before, *self.after})


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
    schedule = Layout.of(graph).schedule(action_by_tensor)
    for kind, position, name, _ in schedule.walk(range(len(graph.ops))):
        yield Event(kind, position, name)

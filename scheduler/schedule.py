"""Lower a plan's actions to the order in which things happen in one step.

The simulator walks this order and the rewrite inserts nodes in it, so that what was
simulated is what runs.  Around the op at position `p`:

    forward:   run p · pack · offload · wait for copies out
    backward:  start copies back · wait for a copy back · unpack · run p

A tensor without a codec starts its copy out as soon as it is made; a packed one is packed
after its last forward use, when nothing else needs the original.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, assert_never

from backhaul.records import Action, CodecRecord, Compress, GraphRecord, Keep, Offload, TensorRecord

__all__ = ["Event", "EventKind", "codec_of", "events", "offload_after"]

EventKind = Literal["run", "pack", "offload", "offload_wait", "reload", "reload_wait", "unpack"]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens: an op runs, or a tensor is packed or moved.

    Attributes:
        kind: What happens.
        position: The op that runs, or that this happens just after (forward) or before.
        tensor: The tensor that it happens to; empty for `run`.
    """

    kind: EventKind
    position: int
    tensor: str = ""


def codec_of(action: Action) -> CodecRecord | None:
    """Return the codec of an action, or None if it packs nothing."""
    return None if isinstance(action, Keep) else action.codec


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
        action_by_tensor: Action of each saved tensor; one that is absent is kept.
    """
    position_by_op = {op.name: position for position, op in enumerate(graph.ops)}
    after: dict[int, list[Event]] = defaultdict(list)
    before: dict[int, list[Event]] = defaultdict(list)
    waits: dict[int, list[Event]] = defaultdict(list)
    for tensor in graph.saved:
        name, use = tensor.name, tensor.first_backward_use
        action = action_by_tensor.get(name, Keep())
        match action:
            case Keep():
                pass
            case Compress():
                packed = tensor.last_forward_use
                after[packed].append(Event("pack", packed, name))
                before[use].append(Event("unpack", use, name))
            case Offload():
                start = offload_after(tensor, position_by_op[name], action)
                if action.codec is not None:
                    after[start].append(Event("pack", start, name))
                after[start].append(Event("offload", start, name))
                waits[action.wait_after].append(Event("offload_wait", action.wait_after, name))
                before[use].append(Event("reload_wait", use, name))
                if action.codec is not None:
                    before[use].append(Event("unpack", use, name))
            case _:
                assert_never(action)
    reloads = _reloads(graph, action_by_tensor)
    for position in range(len(graph.ops)):
        yield from reloads.get(position, ())
        yield from before.get(position, ())
        yield Event("run", position)
        yield from after.get(position, ())
        yield from waits.get(position, ())


def _reloads(graph: GraphRecord, action_by_tensor: Mapping[str, Action]) -> dict[int, list[Event]]:
    """Group the copies back by where they start, soonest needed first."""
    started: dict[int, list[Event]] = defaultdict(list)
    for tensor in sorted(graph.saved, key=lambda tensor: tensor.first_backward_use):
        action = action_by_tensor.get(tensor.name)
        if isinstance(action, Offload):
            event = Event("reload", action.reload_before, tensor.name)
            started[action.reload_before].append(event)
    return started

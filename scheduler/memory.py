"""Count the bytes on the device through one step, by storage.

Two counts are kept side by side.  *Live* bytes are everything but what the caller holds.
*Saved* bytes are the part of them that is there for the backward alone: an activation counts
from its last use in the forward to its first use in the backward, in whatever form it is held.

What ops make, and what dies with its last reader, is known before anything happens; what
packing, copies and recomputing add or take away is summed as it happens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from backhaul.records import Action, Compress, Keep, Offload, Recompute
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.schedule import EventKind, Life, Schedule, codec_of
from backhaul.scheduler.spans import LIVE, SAVED, Spans

__all__ = ["Memory"]


class Memory:
    """The memory of one step under one plan, as it happens.

    Attributes:
        during: Bytes live during the last event or op that was asked for, and the saved ones.

    Args:
        cost: The costs of the step.
        action_by_tensor: The plan.
        schedule: What the plan makes happen.
    """

    def __init__(
        self, cost: CostModel, action_by_tensor: Mapping[str, Action], schedule: Schedule
    ) -> None:
        self._cost = cost
        self._action_by_tensor = action_by_tensor
        self.during = (0, 0)
        self._added = self._saved_added = 0
        self._lives = schedule.lives
        spans = cost.kept.copy()
        for name, life in schedule.lives.items():
            action = action_by_tensor.get(name)
            if life.use >= 0 and (action is not None or life != cost.layout.lives[name]):
                self._replan(spans, name, action or Keep(), life)
        during, before = spans.levels()
        during[:-1, LIVE] += cost.workspace_bytes
        self._during = during
        self._change = np.zeros_like(during)
        self._happened: list[tuple[int, int, int]] = []
        self._waited: list[tuple[int, int, int]] = []
        # Columns apart: lists of plain integers are nothing for the garbage collector to walk.
        self._live_before = before[:, LIVE].tolist()
        self._saved_before = before[:, SAVED].tolist()

    def _replan(self, spans: Spans, name: str, action: Action, life: Life) -> None:
        """Let a tensor be held as this plan has it, not as if everything were kept."""
        tensor, nbytes = self._cost.planned[name], self._cost.nbytes[name]
        idle = tensor.last_forward_use
        end = len(self._cost.duration_s)
        spans.hold(max(tensor.born, 0), tensor.dies, -nbytes, LIVE)
        if tensor.role == "saved":
            spans.hold(idle, tensor.first_backward_use, -nbytes, SAVED)
        match action:
            case Keep():
                spans.hold(max(tensor.born, 0), life.dies, nbytes, LIVE)
                spans.hold(idle, life.until, nbytes, SAVED)
                return
            case Recompute():
                state_bytes = self._state_bytes(name)
                for column in (LIVE, SAVED):
                    spans.hold(max(tensor.born, 0), end, state_bytes, column)
                spans.hold(max(tensor.born, 0), idle, nbytes, LIVE)
            case Offload(codec=None):
                # Events take it away when its copy has ended.
                spans.hold(max(tensor.born, 0), end, nbytes, LIVE)
                spans.hold(idle, end, nbytes, SAVED)
            case Compress() | Offload():
                # The event that packs it takes it away.
                spans.hold(max(tensor.born, 0), end, nbytes, LIVE)
        # Events bring it back; it dies with its last reader.
        spans.dead[life.dies, LIVE] += nbytes
        spans.dead[life.until, SAVED] += self._held_on(name)

    def _held_on(self, name: str) -> int:
        """Return what is held of a tensor that came back for a recipe, before its own use."""
        life = self._lives[name]
        return self._cost.nbytes[name] if life.until > life.use else 0

    def _state_bytes(self, name: str) -> int:
        recipe = self._cost.planned[name].recipe
        return 0 if recipe is None else self._cost.rounded(recipe.state_bytes)

    def run(self, position: int) -> None:
        """Say what is live while an op runs."""
        live, saved = self._during[position]
        self.during = int(live) + self._added, int(saved) + self._saved_added

    def happen(self, kind: EventKind, position: int, name: str) -> None:
        """Allocate, note the bytes during the event, free, just before the op at a position."""
        cost = self._cost
        whole = cost.nbytes[name]
        codec = codec_of(self._action_by_tensor[name])
        moved = whole if codec is None else cost.rounded(codec.packed_bytes)
        match kind:
            case "pack":
                assert codec is not None
                workspace = cost.key_workspace_bytes(codec.encode_key)
                self._hold(position, (moved, moved), workspace, (whole, 0))
            case "unpack":
                assert codec is not None
                workspace = cost.key_workspace_bytes(codec.decode_key)
                self._hold(position, (whole, self._held_on(name)), workspace, (moved, moved))
            case "recompute":
                workspace = cost.recipe_peak_bytes[name] - whole
                state_bytes = self._state_bytes(name)
                allocated = whole, self._held_on(name)
                self._hold(position, allocated, workspace, (state_bytes, state_bytes))
            case "offload_wait":
                self._hold(position, (0, 0), 0, (moved, moved))
                self._waited.append(self._happened.pop())
            case "offload":
                self._hold(position, (0, 0), 0, (0, 0))
                self._waited.append(self._happened.pop())
            case "reload":
                self._hold(position, (moved, moved), 0, (0, 0))
            case "reload_wait" if codec is None:
                self._hold(position, (0, 0), 0, (0, moved - self._held_on(name)))
            case _:
                self._hold(position, (0, 0), 0, (0, 0))

    def _hold(
        self, position: int, allocated: tuple[int, int], workspace: int, freed: tuple[int, int]
    ) -> None:
        live = self._live_before[position] + self._added + allocated[LIVE]
        saved = self._saved_before[position] + self._saved_added + allocated[SAVED]
        self.during = live, saved
        self._happened.append((position, live + workspace, saved))
        live_change, saved_change = allocated[LIVE] - freed[LIVE], allocated[SAVED] - freed[SAVED]
        self._added += live_change
        self._saved_added += saved_change
        self._change[position] += (live_change, saved_change)

    def by_position(self, *, with_waits: bool = True) -> NDArray[np.int64]:
        """Return the most bytes during each op and just before it, once all has happened.

        Args:
            with_waits: Whether to count what waits for the end of its copy out.

        Returns:
            An array of shape `[ops + 1, 2]`: live and saved; the last row is after the last op.
        """
        during: NDArray[np.int64] = self._during + np.cumsum(self._change, axis=0)
        during[-1] = 0
        noted = self._happened + (self._waited if with_waits else [])
        if noted:
            happened = np.array(noted, dtype=np.int64)
            np.maximum.at(during, happened[:, 0], happened[:, 1:])
        return during

    def peaks(self) -> tuple[int, int]:
        """Return the most bytes during any event or op, and the most saved ones."""
        live, saved = self.by_position().max(axis=0)
        return int(live), int(saved)

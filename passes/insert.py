"""Write a plan into the two graphs as nodes that compress and move.

    before   relu = relu(x)                          ->  saved: relu
             grad = threshold_backward(tangent, relu, 0)

    after    token = begin_step(session, 1)
             relu = relu(x)
             h = offload(relu, token, 0)
             h = offload_wait(h, relu)               ->  saved: h
             y = reload(h, size, stride, ...)
             y = reload_wait(y, h)
             grad = threshold_backward(tangent, y, 0)

Saved values are storages: the views that the backward read are replayed on what comes back,
just before their first use.  The order of nodes is the schedule that was simulated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from backhaul.errors import InternalError
from backhaul.passes.describe import module_of, view_chain
from backhaul.passes.step_graphs import StepGraphs, Storages
from backhaul.passes.torch_compat import fake_mode_of, storage_id
from backhaul.records import CodecRecord, Decision, Keep, Offload, Plan
from backhaul.runtime import codec_ops, ops  # noqa: F401  # registers the ops that nodes call
from backhaul.scheduler.schedule import Event, events

__all__ = ["insert_plan"]

Emit = Callable[..., fx.Node]


def insert_plan(step: StepGraphs, plan: Plan, session_id: int) -> StepGraphs:
    """Return the step with the plan's nodes in it.

    Args:
        step: The step that was planned; left as it is.
        plan: Its plan.
        session_id: The session that will own the host slots.

    Raises:
        InternalError: The plan names a tensor that the step does not have.
    """
    if all(isinstance(decision.action, Keep) for decision in plan.decisions):
        return step
    writer = _Writer(step, plan, session_id)
    for event in events(plan.graph, {d.tensor: d.action for d in plan.decisions}):
        writer.write(event)
    return writer.finished()


class _Writer:
    """Copies of the two graphs, and the handle of every tensor that left its place."""

    def __init__(self, step: StepGraphs, plan: Plan, session_id: int) -> None:
        self._step = StepGraphs(_copied(step.forward), _copied(step.backward), step.output_count)
        self._decision = {decision.tensor: decision for decision in plan.decisions}
        self._slot = {slot.tensor: index for index, slot in enumerate(plan.slots)}
        self._ops = self._step.ops()
        self._forward_count = self._step.forward_count
        self._forward = Storages.of(self._step.forward)
        self._fake_mode = fake_mode_of(self._step.forward)
        self._base = {node.name: node for node in self._ops[: self._forward_count]}
        self._saved = self._step.saved
        self._received = self._step.received
        self._carried: dict[str, fx.Node] = {}
        self._reloaded: dict[str, fx.Node] = {}
        self._cursor: fx.Node | None = None
        self._token = self._begin_step(session_id, len(plan.slots)) if plan.slots else None

    def write(self, event: Event) -> None:
        if event.kind == "run":
            self._cursor = self._ops[event.position]
            return
        emit = self._after if event.kind in _FORWARD_KINDS else self._before(event.position)
        decision = self._decision[event.tensor]
        base = self._base.get(event.tensor)
        if base is None:
            raise InternalError(f"the plan moves {event.tensor}, which the forward does not make")
        codec = None if isinstance(decision.action, Keep) else decision.action.codec
        carried = self._carried.get(event.tensor, base)
        target = torch.ops.backhaul
        match event.kind:
            case "pack":
                assert codec is not None
                self._carried[event.tensor] = emit(*_packing(codec, base), decision=decision)
            case "offload":
                slot = self._slot[event.tensor]
                args = (carried, self._token, slot)
                handle = emit(target.offload.default, args, decision=decision)
                handle.meta["offloads"] = carried
                self._carried[event.tensor] = handle
            case "offload_wait":
                args = (carried, carried.meta["offloads"])
                handle = emit(target.offload_wait.default, args, decision=decision)
                self._carried[event.tensor] = handle
            case "reload":
                source = self._moved(decision, base)
                args = (self._placeholder(event.tensor), *_geometry(source))
                self._reloaded[event.tensor] = emit(
                    target.reload.default, args, decision=decision
                )
            case "reload_wait":
                args = (self._reloaded[event.tensor], self._placeholder(event.tensor))
                node = emit(target.reload_wait.default, args, decision=decision)
                self._reloaded[event.tensor] = node
                if codec is None:
                    self._replay_views(base, node, emit, decision)
            case "unpack":
                assert codec is not None
                packed = self._reloaded.get(event.tensor) or self._placeholder(event.tensor)
                node = emit(*_unpacking(codec, base, packed), decision=decision)
                self._replay_views(base, node, emit, decision)

    def finished(self) -> StepGraphs:
        """Hand over what was moved in place of what was saved, and drop what is left over."""
        output = self._step.forward.graph.output_node()
        results = list(output.args[0])
        results = results[: self._step.output_count]
        for node in self._saved:
            name = self._moved_name(node)
            if name is None:
                results.append(node)
            elif self._carried.get(name) is not None:
                results.append(self._carried.pop(name))
        return self._finish(output, results)


_FORWARD_KINDS = ("pack", "offload", "offload_wait")

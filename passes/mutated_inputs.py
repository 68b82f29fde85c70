"""Keep what a step reads of an input before the step changes it.

The changes to inputs, as to BatchNorm's statistics, are written back after the forward; for
Inductor by a `copy_` at its end.  What the backward reads of such an input, as a checkpointed
region that is computed again does, is the input as it was, so that it must be saved as a copy.
"""

from __future__ import annotations

import torch
from torch import fx

from backhaul.passes.op_calls import written_by
from backhaul.passes.step_graphs import StepGraphs, Storages, results_of
from backhaul.passes.torch_compat import fake_mode_of, is_mutation_of

__all__ = ["mutated_inputs", "save_mutated_inputs_as_copies"]


def mutated_inputs(step: StepGraphs) -> set[fx.Node]:
    """Return the forward's nodes that hold an input which the step changes."""
    described = step.forward.graph.output_node().meta.get("desc", [])[: step.output_count]
    written = {written for node in step.forward.graph.nodes for written in written_by(node)}
    storages = Storages.of(step.forward)
    return {
        holder
        for node in step.forward.graph.find_nodes(op="placeholder")
        for key in storages.ids[node]
        if any(is_mutation_of(result, node.meta.get("desc")) for result in described)
        or written.intersection(storages.holders[key])
        for holder in storages.holders[key]
    }


def save_mutated_inputs_as_copies(step: StepGraphs) -> None:
    """Copy, in the forward, each saved input that the step changes; the graphs are changed."""
    output = step.forward.graph.output_node()
    mutated = mutated_inputs(step)
    results = results_of(step.forward)
    first_op = next(node for node in step.forward.graph.nodes if node.op != "placeholder")
    for index, (saved, received) in enumerate(zip(step.saved, step.received, strict=True)):
        if saved in mutated:
            before = first_op if saved.op == "placeholder" else saved.next
            with step.forward.graph.inserting_before(before):
                copied = step.forward.graph.call_function(torch.ops.aten.clone.default, (saved,))
            with fake_mode_of(step.forward):
                value = saved.meta["val"].detach().clone()
            copied.meta["val"] = received.meta["val"] = value
            results[step.output_count + index] = copied
    output.args = (tuple(results),)
    step.forward.recompile()

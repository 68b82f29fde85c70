"""Keep what a step reads of an input before the step changes it.

The changes to inputs, as to BatchNorm's statistics, are written back after the forward.  A
checkpointed region that is computed again in the backward reads its inputs as they were, so
that an input which the step changes must be saved as a copy.
"""

from __future__ import annotations

import torch
from torch import fx

from backhaul.passes.step_graphs import StepGraphs, results_of
from backhaul.passes.torch_compat import fake_mode_of, is_mutation_of

__all__ = ["mutated_inputs", "save_mutated_inputs_as_copies"]


def mutated_inputs(step: StepGraphs) -> set[fx.Node]:
    """Return the forward's inputs that the step changes."""
    described = step.forward.graph.output_node().meta.get("desc", [])[: step.output_count]
    return {
        node
        for node in step.forward.graph.find_nodes(op="placeholder")
        if any(is_mutation_of(result, node.meta.get("desc")) for result in described)
    }


def save_mutated_inputs_as_copies(step: StepGraphs) -> None:
    """Copy, in the forward, each saved input that the step changes; the graphs are changed."""
    output = step.forward.graph.output_node()
    mutated = mutated_inputs(step)
    results = results_of(step.forward)
    first_op = next(node for node in step.forward.graph.nodes if node.op != "placeholder")
    for index, (saved, received) in enumerate(zip(step.saved, step.received, strict=True)):
        if saved in mutated:
            with step.forward.graph.inserting_before(first_op):
                copied = step.forward.graph.call_function(torch.ops.aten.clone.default, (saved,))
            with fake_mode_of(step.forward):
                value = saved.meta["val"].detach().clone()
            copied.meta["val"] = received.meta["val"] = value
            results[step.output_count + index] = copied
    output.args = (tuple(results),)
    step.forward.recompile()

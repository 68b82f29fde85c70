"""Keep what a step reads of an input before the step changes it.

The changes to inputs, as to BatchNorm's statistics, are written back after the forward.  A
checkpointed region that is computed again in the backward reads its inputs as they were, so
that an input which the step changes must be saved as a copy.
"""

from __future__ import annotations

import torch

from backhaul.passes.step_graphs import StepGraphs, results_of
from backhaul.passes.torch_compat import fake_mode_of, is_mutation_of

__all__ = ["save_mutated_inputs_as_copies"]


def save_mutated_inputs_as_copies(step: StepGraphs) -> None:
    """Copy, in the forward, each saved input that the step changes; the graphs are changed."""
    placeholders = step.forward.graph.find_nodes(op="placeholder")
    output = step.forward.graph.output_node()
    described = output.meta.get("desc", [])[: step.output_count]
    mutated = {
        node
        for node in placeholders
        if any(is_mutation_of(result, node.meta.get("desc")) for result in described)
    }
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

"""Give a parameter that no used output depends on a gradient of None, as eager does.

Autograd hands a compiled backward zeros for the outputs that the loss did not use, and a
compiled backward turns them into zero gradients; an optimizer with weight decay or momentum
would then move parameters that eager leaves alone.  Which outputs were used is known just
before the backward runs, and which gradients depend on which outputs is known from the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from backhaul.passes.step_graphs import StepGraphs, results_of

__all__ = ["UnusedGradients", "compiled_node"]

COMPILED_NODE = "CompiledFunctionBackward"


class UnusedGradients:
    """Which gradients of one step depend on which tangents.

    Args:
        step: The step, as captured.
    """

    def __init__(self, step: StepGraphs) -> None:
        self._output_of_tangent = _outputs_of_tangents(step)
        self._tangents_of_gradient = _tangents_of_gradients(step)
        self._unused = threading.local()

    def watch(self, node: Any) -> None:
        """Note, when the backward of a call comes, which of its results were not used.

        Args:
            node: The call's `compiled_node`.
        """
        if len(self._output_of_tangent) > 1:
            node.register_prehook(self._note)

    def drop(self, gradients: list[Any]) -> list[Any]:
        """Replace the gradients that depend on unused outputs alone by None."""
        unused: frozenset[int] = getattr(self._unused, "tangents", frozenset())
        self._unused.tangents = frozenset()
        if not unused:
            return gradients
        return [
            None if tangents and tangents <= unused else gradient
            for gradient, tangents in zip(gradients, self._tangents_of_gradient, strict=True)
        ]

    def _note(self, output_gradients: tuple[torch.Tensor | None, ...]) -> None:
        self._unused.tangents = frozenset(
            tangent
            for tangent, output in enumerate(self._output_of_tangent)
            if output < len(output_gradients) and output_gradients[output] is None
        )


def _outputs_of_tangents(step: StepGraphs) -> list[int]:
    described = step.forward.graph.output_node().meta.get("desc", [])[: step.output_count]
    index = {description: i for i, description in enumerate(described)}
    found = [
        index.get(getattr(node.meta.get("desc"), "output", None), -1) for node in step.tangents
    ]
    return [] if -1 in found else found


def _tangents_of_gradients(step: StepGraphs) -> list[frozenset[int]]:
    reached: dict[fx.Node, frozenset[int]] = {
        node: frozenset((i,)) for i, node in enumerate(step.tangents)
    }
    for node in step.backward.graph.nodes:
        if node not in reached:
            reached[node] = frozenset().union(*(reached[arg] for arg in node.all_input_nodes))
    return [
        reached[gradient] if isinstance(gradient, fx.Node) else frozenset()
        for gradient in results_of(step.backward)
    ]


def compiled_node(results: Iterable[Any], since: int) -> Any:
    """Find the autograd node of the compiled step behind its results, through views of them.

    Args:
        results: What a call of the step returned.
        since: `autograd_time()` before that call.

    Hazard: behind a view of an input stands the node of whatever made the input, which may be
    another compiled step.  It is older than the call.
    """
    waiting = [result.grad_fn for result in results if isinstance(result, torch.Tensor)]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop(0)
        if node is None or node in seen or node._sequence_nr() < since:
            continue
        if type(node).__name__ == COMPILED_NODE:
            return node
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return None

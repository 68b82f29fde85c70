"""Read what the user asks of single tensors: by the module that makes them, or in the forward.

`keep` marks what is computed in its block; Dynamo and AOTAutograd carry the mark along to the
nodes.  A `ModulePolicy` speaks of modules by their paths.  A mark wins over a policy.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import fx

from backhaul.passes.step_graphs import module_of
from backhaul.passes.torch_compat import (
    annotate,
    annotation_of,
    is_made_by_backward,
    is_recomputed_by_region,
    must_be_saved,
)
from backhaul.records import Ask, CodecRecord, Executor, ModulePolicy, Recipe

__all__ = ["asked_of", "keep", "save_what_is_asked_for", "why_it_cannot_be"]

_MARK = "backhaul"


def keep() -> AbstractContextManager[None]:
    """Keep on the device what is computed in this block of a forward and saved for the backward.

    It wins over a policy, and over a region of `torch.utils.checkpoint` around it.  Outside of an
    optimized forward it does nothing.

    Example:
        >>> def forward(self, x):
        ...     with backhaul.keep():
        ...         x = self.stem(x)
        ...     return self.blocks(x)
    """
    return annotate({_MARK: "keep"})


def asked_of(node: fx.Node, policy: ModulePolicy) -> Ask | None:
    """Return what is asked of the tensor that a node of the forward makes, if anything is."""
    if annotation_of(node, _MARK) == "keep":
        return Ask(action="keep", by="backhaul.keep()")
    return policy.ask_for(module_of(node))


def why_it_cannot_be(ask: Ask, codec: CodecRecord | None, recipe: Recipe | None) -> str:
    """Say why a tensor stays on the device under what is asked of it; "" if it need not."""
    match ask.action:
        case "keep":
            return f"kept, as {ask.by} asks"
        case "compress" if codec is None:
            return f"{ask.by} asks to compress it, and no codec fits it"
        case "recompute" if recipe is None:
            return f"{ask.by} asks to recompute it, and nothing can make it again exactly"
        case _:
            return ""


def save_what_is_asked_for(joint: fx.GraphModule, policy: ModulePolicy, executor: Executor) -> None:
    """Tell the partitioner to save what is asked to be kept, compressed or offloaded.

    Inductor's partitioner would make some of it again in the backward, and that of a checkpointed
    region all of it.
    """
    for node in joint.graph.nodes:
        if node.op != "call_function" or is_made_by_backward(node):
            continue
        ask = asked_of(node, policy)
        if ask is None or ask.action == "recompute":
            continue
        if executor == "inductor" or is_recomputed_by_region(node):
            must_be_saved(node)

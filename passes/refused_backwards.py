"""Refuse the kinds of backward that a step of two graphs has not.

A backward that is differentiated again would need the second derivative's graph.  One of many
gradients at once runs other kernels than were captured, which round otherwise than eager's.
"""

from __future__ import annotations

from typing import Any

import torch

from backhaul.errors import CaptureError
from backhaul.passes.torch_compat import is_batched, running_node

__all__ = ["refuse_other_backwards"]


def refuse_other_backwards(node: Any) -> None:
    """Have a compiled step's autograd node raise in a backward that it cannot do.

    Args:
        node: The `compiled_node` of a call.
    """
    node.register_prehook(_check)


def _check(output_gradients: tuple[torch.Tensor | None, ...]) -> None:
    if any(gradient is not None and is_batched(gradient) for gradient in output_gradients):
        raise CaptureError(
            "the backward of an optimized module takes one gradient at a time, not many that are "
            "batched by `is_grads_batched=True` or `vectorize=True`: leave the option out"
        )
    # Hazard: a hook that runs after a node keeps the gradients that came in alive until then.
    if torch.is_grad_enabled():
        running_node().register_hook(_refuse_second_backward)


def _refuse_second_backward(
    input_gradients: tuple[torch.Tensor | None, ...], _: tuple[torch.Tensor | None, ...]
) -> None:
    for gradient in input_gradients:
        if gradient is not None and gradient.grad_fn is not None:
            gradient.grad_fn.register_prehook(_raise_second_backward)
            return


def _raise_second_backward(_: tuple[torch.Tensor | None, ...]) -> None:
    raise CaptureError(
        "gradients of an optimized module cannot be differentiated again (double backward): call "
        "the model itself where a gradient is part of the loss, as in a gradient penalty"
    )

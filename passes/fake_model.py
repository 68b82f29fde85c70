"""Stand-ins for a model whose weights nobody has: parameters with shapes and without memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from backhaul.passes.torch_compat import FakeTensorMode

__all__ = ["as_fake", "is_meta"]


def is_meta(model: nn.Module) -> bool:
    """Say whether any parameter or buffer of a model lies on the meta device."""
    return any(value.is_meta for value in (*model.parameters(), *model.buffers()))


def as_fake(model: nn.Module, arguments: Any) -> tuple[nn.Module, Any]:
    """Copy a model and its arguments as fake tensors of the CPU.

    Ops are chosen as for a CPU: the meta device would take attention apart, which no device
    does that one trains on.

    Args:
        model: On the meta device; left as it is.
        arguments: What it is called with, in any nest of tuples and dictionaries.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faked: dict[int, torch.Tensor] = {}

    def fake(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in faked:
            with mode:
                made = torch.empty_like(value, device="cpu")
            if isinstance(value, nn.Parameter):
                made = nn.Parameter(made, requires_grad=value.requires_grad)
            faked[id(value)] = made.requires_grad_(value.requires_grad)
        return faked[id(value)]

    model = copy.deepcopy(model)
    for module in model.modules():
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in holders:
            for name, value in held.items():
                if value is not None:
                    held[name] = fake(value)
    return model, pytree.tree_map_only(torch.Tensor, fake, arguments)

"""Train models that do not fit: plan, offload and compress saved activations, exactly.

The public names are loaded when they are first used, so that records and planners can be
used without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backhaul.api import apply, optimize, plan
    from backhaul.module import OptimizedModule
    from backhaul.records import Plan

__version__ = "0.1.0"

__all__ = ["OptimizedModule", "Plan", "apply", "optimize", "plan"]

_HOME = {
    "OptimizedModule": "backhaul.module",
    "Plan": "backhaul.records",
    "apply": "backhaul.api",
    "optimize": "backhaul.api",
    "plan": "backhaul.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'backhaul' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)

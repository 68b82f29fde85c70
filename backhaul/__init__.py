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
    from backhaul.module_policy import policy
    from backhaul.passes.policy import keep
    from backhaul.records import Compress, Keep, Offload, Plan, Recompute

__version__ = "0.1.0"

__all__ = [
    "Compress",
    "Keep",
    "Offload",
    "OptimizedModule",
    "Plan",
    "Recompute",
    "apply",
    "keep",
    "optimize",
    "plan",
    "policy",
]

_HOME = {
    "Compress": "backhaul.records",
    "Keep": "backhaul.records",
    "Offload": "backhaul.records",
    "OptimizedModule": "backhaul.module",
    "Plan": "backhaul.records",
    "Recompute": "backhaul.records",
    "apply": "backhaul.api",
    "keep": "backhaul.passes.policy",
    "optimize": "backhaul.api",
    "plan": "backhaul.api",
    "policy": "backhaul.module_policy",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'backhaul' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)

"""What the user asks of single modules: patterns of paths, read and checked."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, get_args

import torch

from backhaul.records import Asked, ModulePolicy, Rule

__all__ = ["check_policy_matches", "policy"]


def policy(action_by_pattern: Mapping[str, Any]) -> ModulePolicy:
    """Ask for what is to happen to the activations that single modules save.

    Args:
        action_by_pattern: For each shell-style pattern of module paths, as `named_modules` has
            them, one of `Keep`, `Compress`, `Offload` and `Recompute`, or its name in lower case.
            A pattern holds for the modules inside of a module, too, and a later one wins.  What
            no pattern matches is left to the planner; so is whether what is offloaded is packed.

    Returns:
        The policy, for `optimize(policy=...)`, `plan(policy=...)`, or the backend.

    Raises:
        ValueError: A pattern or an action has no meaning.

    Example:
        >>> policy = backhaul.policy({"layers.0.*": backhaul.Keep, "*.attn": "recompute"})
    """
    if not isinstance(action_by_pattern, Mapping):
        raise ValueError(f"policy={action_by_pattern!r}: give a mapping of patterns to actions")
    rules = []
    for pattern, action in action_by_pattern.items():
        name: Any = action.__name__.lower() if isinstance(action, type) else action
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"policy has the pattern {pattern!r}: give a path of modules")
        if name not in get_args(Asked):
            raise ValueError(
                f"policy asks {pattern!r} for {action!r}: give one of {', '.join(get_args(Asked))}"
            )
        rules.append(Rule(pattern, name))
    return ModulePolicy(tuple(rules))


def check_policy_matches(policy: ModulePolicy, model: torch.nn.Module) -> None:
    """Refuse a pattern that no module of a model matches.

    Raises:
        ValueError: There is one.
    """
    names = [name for name, _ in model.named_modules() if name]
    for rule in policy.rules:
        if not any(map(rule.applies_to, names)):
            near = difflib.get_close_matches(rule.pattern, names)
            raise ValueError(
                f"policy has the pattern {rule.pattern!r}, which matches no module of "
                f"{type(model).__name__}"
                + (f": near it is {', '.join(near)}" if near else "; see model.named_modules()")
            )

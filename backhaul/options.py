"""What the user may say: budgets, planners and sample inputs, read and checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_args

import torch

from backhaul.compression import DEFAULT_ERROR_BUDGET, AdaptiveCompression, Policy
from backhaul.errors import CaptureError
from backhaul.module_policy import policy as policy_of
from backhaul.passes.pipeline import Request
from backhaul.records import Executor, ModulePolicy
from backhaul.runtime.casts import CAST_DTYPES
from backhaul.scheduler.planner import PLANNERS, Planner, planner_of
from backhaul.scheduler.ways import ALL_WAYS, Way

__all__ = [
    "ACTIONS",
    "Bytes",
    "SampleInput",
    "arguments_of",
    "check_bounds_are_known",
    "compression_of",
    "request_of",
]

SampleInput = torch.Tensor | tuple[Any, ...] | Mapping[str, Any] | Callable[[], Any]
Bytes = int | float | str | None

ACTIONS: Mapping[str, Way] = {"compress": "pack", "offload": "move", "recompute": "recompute"}
"""What the user may allow, beside keeping."""

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def arguments_of(sample_input: SampleInput) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that a sample input stands for.

    Raises:
        CaptureError: It is nothing that a sample can be.
    """
    if callable(sample_input) and not isinstance(sample_input, torch.Tensor):
        return arguments_of(sample_input())
    if isinstance(sample_input, torch.Tensor):
        return (sample_input,), {}
    if isinstance(sample_input, tuple):
        return sample_input, {}
    if isinstance(sample_input, Mapping):
        return (), dict(sample_input)
    raise CaptureError(
        f"sample_input is a {type(sample_input).__name__}: give a tensor, a tuple of positional "
        "arguments, a mapping of keyword arguments, or a callable that makes one of these"
    )


def check_bounds_are_known(lossless: bool, activation_dtype: torch.dtype | None) -> None:
    """Refuse to plan with errors that only training can bound."""
    if not lossless and activation_dtype is None:
        raise ValueError(
            "lossless=False: error bounds come from training; call optimize, and read the plan "
            "after its first refresh, or give an activation_dtype"
        )


def compression_of(
    lossless: bool,
    error_budget: float | None,
    error_policy: Policy,
    warmup_steps: int,
    refresh_steps: int,
    activation_dtype: torch.dtype | None,
    executor: Executor,
) -> AdaptiveCompression | None:
    """Read the options of `optimize` that allow errors.

    Raises:
        ValueError: One has no meaning, or errors are bounded but not allowed.
    """
    compression = AdaptiveCompression(
        DEFAULT_ERROR_BUDGET if error_budget is None else error_budget,
        policy=error_policy,
        warmup_steps=warmup_steps,
        refresh_steps=refresh_steps,
    )
    if lossless:
        if error_budget is not None:
            raise ValueError(
                f"error_budget={error_budget!r}: a lossless module makes no errors; give "
                "lossless=False, too"
            )
        return None
    if activation_dtype is not None:
        if error_budget is not None:
            raise ValueError(
                f"error_budget={error_budget!r} and activation_dtype={activation_dtype} are "
                "different ways to round: give one of them"
            )
        return None
    if executor == "inductor":
        raise ValueError(
            'executor="inductor" has no error_budget yet: what its controller watches is '
            'fused away; give executor="eager", or an activation_dtype'
        )
    return compression


def request_of(
    memory_budget: Bytes = None,
    activation_budget: Bytes = None,
    max_slowdown: float | None = None,
    planner: str | Planner = "frontier",
    actions: Collection[str] = tuple(ACTIONS),
    held_bytes: int = 0,
    lossless: bool = True,
    activation_dtype: torch.dtype | None = None,
    executor: Executor = "eager",
    policy: ModulePolicy | Mapping[str, Any] | None = None,
) -> Request:
    """Read the options of `optimize`.

    Raises:
        ValueError: One has no meaning, or two contradict each other.
    """
    given = [
        name
        for name, value in (
            ("memory_budget", memory_budget),
            ("activation_budget", activation_budget),
            ("max_slowdown", max_slowdown),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are different questions: give one of them")
    if isinstance(planner, str):
        if planner not in PLANNERS:
            raise ValueError(f"planner={planner!r}: give one of {', '.join(PLANNERS)}")
        if planner != "frontier" and given:
            raise ValueError(
                f"planner={planner!r} treats every tensor alike and asks for no {given[0]}: give "
                "one of the two"
            )
        if planner != "frontier" and policy:
            raise ValueError(
                f"planner={planner!r} treats every tensor alike: do not give a policy, too"
            )
        ways = _ways_of(actions)
        if planner == "frontier":
            planner = planner_of(ways)
        elif ways != ALL_WAYS:
            raise ValueError(f"planner={planner!r} has its own actions: do not give actions")
        else:
            planner = PLANNERS[planner]
    if not isinstance(held_bytes, int) or isinstance(held_bytes, bool) or held_bytes < 0:
        raise ValueError(f"held_bytes={held_bytes!r}: give a number of bytes, 0 or more")
    if executor not in get_args(Executor):
        raise ValueError(f"executor={executor!r}: give one of {', '.join(get_args(Executor))}")
    if not callable(planner):
        raise ValueError(
            f"planner={planner!r}: give one of {', '.join(PLANNERS)}, or a function of graph, "
            "machine and budget"
        )
    if activation_dtype is not None:
        _check_cast(activation_dtype, lossless)
    kind, value, is_fraction = _question(memory_budget, activation_budget, max_slowdown)
    return Request(
        kind=kind,
        value=value,
        is_fraction=is_fraction,
        planner=planner,
        held_bytes=held_bytes,
        cast_dtype=activation_dtype,
        executor=executor,
        policy=policy if isinstance(policy, ModulePolicy) else policy_of(policy or {}),
    )


def _check_cast(dtype: torch.dtype, lossless: bool) -> None:
    if dtype not in CAST_DTYPES:
        raise ValueError(
            f"activation_dtype={dtype!r}: give one of {', '.join(map(str, CAST_DTYPES))}"
        )
    if lossless:
        raise ValueError(
            f"activation_dtype={dtype}: a lossless module makes no errors; give lossless=False, too"
        )


def _question(
    memory_budget: Bytes, activation_budget: Bytes, max_slowdown: float | None
) -> tuple[str, float | None, bool]:
    """Return what is asked for, how much of it, and whether that is a fraction."""
    if max_slowdown is not None:
        if not isinstance(max_slowdown, (int, float)) or not max_slowdown >= 1.0:
            raise ValueError(f"max_slowdown={max_slowdown!r}: give a factor of 1.0 or more")
        return "slowdown", max_slowdown, False
    if activation_budget is not None:
        return "activations", *_parsed_bytes("activation_budget", activation_budget)
    return "memory", *_parsed_bytes("memory_budget", memory_budget)


def _ways_of(actions: Collection[str]) -> frozenset[Way]:
    """Return the ways that actions allow."""
    unknown = sorted(set(actions) - set(ACTIONS))
    if isinstance(actions, str) or unknown:
        raise ValueError(f"actions={actions!r}: give some of {', '.join(ACTIONS)}, in a tuple")
    ways = {"keep", *(ACTIONS[action] for action in actions)}
    return frozenset(ways | ({"pack and move"} if {"pack", "move"} <= ways else set()))


def _parsed_bytes(name: str, given: Bytes) -> tuple[float | None, bool]:
    """Read bytes, a text with a unit, or a fraction; say whether it is a fraction."""
    if given is None:
        return None, False
    if isinstance(given, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z]+)\s*", given)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f'{name}={given!r}: write a number and a unit, as "6 GiB"')
        return int(float(match[1]) * _UNITS[match[2].upper()]), False
    if isinstance(given, float):
        if not 0.0 < given <= 1.0:
            raise ValueError(f"{name}={given}: a fraction lies in (0, 1]; give bytes as an int")
        return given, True
    if not isinstance(given, int) or isinstance(given, bool) or given <= 0:
        raise ValueError(f"{name}={given!r}: give a positive number of bytes")
    return given, False

"""The three calls: `optimize` a model, `plan` its memory, `apply` a plan that was saved."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import distributed, nn

from backhaul.compression import AdaptiveCompression, Policy
from backhaul.errors import CaptureError
from backhaul.module import OptimizedModule
from backhaul.module_policy import check_policy_matches
from backhaul.options import (
    Bytes,
    SampleInput,
    arguments_of,
    check_bounds_are_known,
    compression_of,
    request_of,
)
from backhaul.passes.fake_model import as_fake, is_meta
from backhaul.passes.parallel import why_it_exchanges
from backhaul.passes.pipeline import Request
from backhaul.records import Executor, ModulePolicy, Plan
from backhaul.runtime.default_link import default_link
from backhaul.runtime.links import Link
from backhaul.runtime.ranks import Ranks
from backhaul.scheduler.hardware import load_hardware
from backhaul.scheduler.planner import PLANNERS, Planner

__all__ = ["apply", "optimize", "plan"]


def optimize(
    model: nn.Module,
    sample_input: SampleInput,
    *,
    memory_budget: Bytes = None,
    activation_budget: Bytes = None,
    max_slowdown: float | None = None,
    lossless: bool = True,
    error_budget: float | None = None,
    error_policy: Policy = "bytes",
    warmup_steps: int = 100,
    refresh_steps: int = 1000,
    activation_dtype: torch.dtype | None = None,
    actions: Collection[str] = ("compress", "offload", "recompute"),
    held_bytes: int = 0,
    executor: Executor = "eager",
    policy: ModulePolicy | Mapping[str, Any] | None = None,
    planner: str | Planner = "frontier",
    link: Link | None = None,
    spill_folder: str | os.PathLike[str] | None = None,
    process_group: distributed.ProcessGroup | None = None,
) -> OptimizedModule:
    """Return a module that trains as the model does, in less device memory.

    The model itself is left as it was: parameters, buffers, gradients, hooks, modes and the
    random state.  The returned module shares them all, under the same names.

    Args:
        model: The model to train.  Its training step must be one graph: see `CaptureError`.
        sample_input: What the model will be called with: a tensor, a tuple of positional
            arguments, a mapping of keyword arguments, or a callable that makes one of these.
        memory_budget: Most bytes on the device during forward and backward, parameters
            included: an int, a text as `"6 GiB"`, or a float in (0, 1] as a fraction of what
            keeping everything needs.  None means all that the device has.
        activation_budget: Most bytes of saved activations on the device, in the same forms.
        max_slowdown: Instead of a budget: use the least memory with which the step takes at
            most this many times the time of keeping everything.
        lossless: Whether gradients must be exact.  If not, activations that weights' gradients
            are computed from may be rounded, within bounds that follow training; the module's
            `compression` controls them, and steps are exact until its first refresh.
        error_budget: Norm that rounding may add to the weights' gradients, as a share of the
            momentum's (give `compression.optimizer` an optimizer; without one it is a share of
            the gradient's); 0.01 if errors are allowed.  With 0 their zeros are left out, and
            nothing is rounded.
        error_policy: `bytes` spends the budget where it saves most bytes; `comet` follows the
            rule of COMET (Jin et al. 2021).
        warmup_steps: Exact steps before the first refresh.
        refresh_steps: Steps between refreshes.
        activation_dtype: With errors allowed, what activations may be cast to instead of being
            rounded within bounds that follow training: bfloat16, float16 or float8_e5m2, with
            relative errors of 2**-8, 2**-11 and 2**-3 (see `runtime.casts`).  The first step
            has them already, and nothing is watched.
        actions: What may be done with saved activations.
        held_bytes: Bytes that lie on the device all along and are no argument of the model, as
            an optimizer's state; a `memory_budget` includes them.
        executor: `eager` runs torch's own kernels, as the model does without us, and gradients are
            bit-equal to the model's; `inductor` runs what Inductor compiles, and gradients are as
            close to the model's as those of `torch.compile`.
        policy: What to do with the activations that single modules save, whatever it costs, as
            `{"layers.0.*": backhaul.Keep, "*.attn": backhaul.Recompute}`; see `backhaul.policy`.
        planner: Name in `PLANNERS`, or a function of graph, machine and budget.
        link: Moves what is offloaded; by default pinned host memory for an accelerator, and a
            spill file for a CPU.
        spill_folder: Where the spill file lies, if the link is the default one.
        process_group: Ranks that all call `optimize` now, each with its copy of the model, as
            `torch.distributed.group.WORLD`.  They measure at the same time, so that each sees
            its share of the link, and train by the plan of the first if their graphs are the
            same; an error of one is raised by all.  New shapes are planned by each rank alone.
            None plans for this rank alone.

    Returns:
        A module that is called and trained as the original.

    Raises:
        CaptureError: The model or its input cannot be captured.
        BudgetError: No plan fits the budget; the error holds the smallest that does.
        TransferError: The host tier cannot be used.
        ValueError: An option has no meaning.
    """
    compression = compression_of(
        lossless,
        error_budget,
        error_policy,
        warmup_steps,
        refresh_steps,
        activation_dtype,
        executor,
    )
    request = request_of(
        memory_budget,
        activation_budget,
        max_slowdown,
        planner,
        actions,
        held_bytes,
        lossless,
        activation_dtype,
        executor,
        policy,
    )
    ranks = _ranks(process_group)
    if ranks is None:
        found = _link(model, link, spill_folder)
        return _prepared(model, sample_input, request, found, compression)
    with ranks:
        request = dataclasses.replace(request, ranks_here_count=ranks.count_on_this_host())
        found = _link(model, link, spill_folder)
        return _prepared(model, sample_input, request, found, compression, ranks)


def plan(
    model: nn.Module,
    sample_input: SampleInput,
    *,
    hardware: str | os.PathLike[str] | None = None,
    memory_budget: Bytes = None,
    activation_budget: Bytes = None,
    max_slowdown: float | None = None,
    lossless: bool = True,
    activation_dtype: torch.dtype | None = None,
    actions: Collection[str] = ("compress", "offload", "recompute"),
    held_bytes: int = 0,
    executor: Executor = "eager",
    policy: ModulePolicy | Mapping[str, Any] | None = None,
    planner: str | Planner = "frontier",
    link: Link | None = None,
    spill_folder: str | os.PathLike[str] | None = None,
) -> Plan:
    """Plan a model's memory without rewriting it, for this machine or for another.

    For other hardware nothing is measured: op times come from rooflines over a named profile,
    and the plan says that they are modelled.  The model may then lie on the meta device, so
    that its weights are never allocated.

    Args:
        model: The model, left as it was.
        sample_input: As for `optimize`; tensors may lie on the meta device with the model.
        hardware: A name in `scheduler.hardware.hardware_names()`, as `"h200"`, or the path of
            a JSON file of the same form; None for this machine.
        memory_budget: As for `optimize`; for other hardware None means all of its memory.
        activation_budget: As for `optimize`.
        max_slowdown: As for `optimize`.
        lossless: As for `optimize`; errors can be planned beforehand with an `activation_dtype`.
        activation_dtype: As for `optimize`.
        actions: As for `optimize`.
        held_bytes: As for `optimize`.
        executor: As for `optimize`.
        policy: As for `optimize`.
        planner: As for `optimize`.
        link: As for `optimize`; not used for other hardware.
        spill_folder: As for `optimize`; not used for other hardware.

    Raises:
        PlanError: There is no such hardware, or it cannot compute in the model's dtype.
        As `optimize`.
    """
    check_bounds_are_known(lossless, activation_dtype)
    request = request_of(
        memory_budget,
        activation_budget,
        max_slowdown,
        planner,
        actions,
        held_bytes,
        lossless,
        activation_dtype,
        executor,
        policy,
    )
    if hardware is not None:
        request = dataclasses.replace(request, hardware=load_hardware(hardware))
    return _prepared(model, sample_input, request, _link(model, link, spill_folder)).plan


def apply(
    model: nn.Module,
    sample_input: SampleInput,
    plan: Plan,
    *,
    link: Link | None = None,
    spill_folder: str | os.PathLike[str] | None = None,
) -> OptimizedModule:
    """Apply a plan that was made before, without measuring or planning.

    Args:
        model: The model that was planned.
        sample_input: As for `optimize`, of the shapes that were planned.
        plan: The plan.
        link: As for `optimize`.
        spill_folder: As for `optimize`.

    Raises:
        PlanError: The plan belongs to another graph; the error says what differs.
        CaptureError: The model or its input cannot be captured.
        TransferError: The host tier has no room for the plan's slots.
        TypeError: The plan is none.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is a {type(plan).__name__}: give a Plan, as Plan.load makes it")
    request = Request(
        kind=plan.budget.kind,
        value=plan.budget.value,
        is_fraction=False,
        planner=PLANNERS.get(plan.planner, PLANNERS["frontier"]),
        plan=plan,
        executor=plan.graph.executor,
    )
    link = _link(model, link, spill_folder)
    module = _prepared(model, sample_input, request, link)
    if plan.host_bytes:
        link.reserve(plan.host_bytes).release()
    return module


def _prepared(
    model: nn.Module,
    sample_input: SampleInput,
    request: Request,
    link: Link,
    compression: AdaptiveCompression | None = None,
    ranks: Ranks | None = None,
) -> OptimizedModule:
    """Make the module and capture its step for the sample, leaving no trace in the model."""
    _check_model(model)
    check_policy_matches(request.policy, model)
    module = OptimizedModule(model, request, link, compression)
    with _same_random_state(model), _training_mode(model), torch.enable_grad():
        args, kwargs = arguments_of(sample_input)
        captured = model
        if is_meta(model):
            _check_only_planned(model, request)
            captured, (args, kwargs) = as_fake(model, (args, kwargs))
        module.__dict__["_ranks"] = ranks
        module.__dict__["_capture"].prepare(captured, args, kwargs)
    if not module.__dict__["_capture"].works:
        raise CaptureError(
            f"no gradient flows through {type(model).__name__}: nothing in it or in its sample "
            "input requires grad"
        )
    return module


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, OptimizedModule):
            where = f"its module {name}" if name else "it"
            raise CaptureError(
                f"{type(model).__name__} cannot be optimized: {where} already is; optimize the "
                "whole model once"
            )
    if exchanges := why_it_exchanges(model):
        raise CaptureError(exchanges)


def _check_only_planned(model: nn.Module, request: Request) -> None:
    if request.hardware is None:
        raise CaptureError(
            f"{type(model).__name__} lies on the meta device, where nothing can be measured or "
            "trained: give it weights with `to_empty`, or plan it for other hardware with "
            'backhaul.plan(..., hardware="h200")'
        )


def _ranks(group: distributed.ProcessGroup | None) -> Ranks | None:
    """Return the ranks of a group, None if there is but one."""
    if group is not None and not isinstance(group, distributed.ProcessGroup):
        raise TypeError(
            f"process_group is a {type(group).__name__}: give a ProcessGroup that this rank "
            "belongs to, as torch.distributed.group.WORLD"
        )
    return Ranks(group) if group is not None and group.size() > 1 else None


def _link(model: nn.Module, link: Link | None, spill_folder: str | os.PathLike[str] | None) -> Link:
    """Return the link that was given, or the default one of the model's device."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    if link is None:
        return default_link(model, spill_folder)
    if not isinstance(link, Link):
        raise TypeError(f"link is a {type(link).__name__}: give a Link, or leave it out")
    return link


@contextlib.contextmanager
def _same_random_state(model: nn.Module) -> Iterator[None]:
    """Leave the generators of the CPU and of the model's devices as they are."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    by_type: dict[str, list[torch.device]] = {}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            by_type.setdefault(device.type, []).append(device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for device_type, found in by_type.items():
            stack.enter_context(torch.random.fork_rng(found, device_type=device_type))
        yield


@contextlib.contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """Train a model that is in eval mode, and put every flag back."""
    flags = [(module, module.training) for module in model.modules()]
    if not model.training:
        model.train()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag

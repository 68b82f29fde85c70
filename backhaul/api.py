"""The three calls: `optimize` a model, `plan` its memory, `apply` a plan that was saved."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from backhaul.errors import CaptureError
from backhaul.passes.capture import Capture
from backhaul.passes.fake_model import as_fake, is_meta
from backhaul.passes.pipeline import Request, Work, run_pipeline
from backhaul.passes.step_graphs import StepGraphs
from backhaul.passes.torch_compat import saved_tensor_hooks_are_on
from backhaul.records import Plan
from backhaul.report import print_report
from backhaul.runtime.default_link import default_link
from backhaul.runtime.disk import DiskLink
from backhaul.runtime.links import Link
from backhaul.scheduler.hardware import load_hardware
from backhaul.scheduler.planner import PLANNERS, Planner

__all__ = ["OptimizedModule", "apply", "optimize", "plan"]

_logger = logging.getLogger(__name__)

# What `nn.Module` keeps on a module, and the wrapper has in common with the model.  Hooks of
# calls are the wrapper's own, as the wrapper is what is called.
_SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

SampleInput = torch.Tensor | tuple[Any, ...] | Mapping[str, Any] | Callable[[], Any]
Bytes = int | float | str | None

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def optimize(
    model: nn.Module,
    sample_input: SampleInput,
    *,
    memory_budget: Bytes = None,
    activation_budget: Bytes = None,
    max_slowdown: float | None = None,
    lossless: bool = True,
    planner: str | Planner = "greedy",
    link: Link | None = None,
    spill_folder: str | os.PathLike[str] | None = None,
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
        lossless: Only exact plans exist in this release; False is refused.
        planner: Name in `PLANNERS`, or a function of graph, machine and budget.
        link: Moves what is offloaded; by default pinned host memory for an accelerator, and a
            spill file for a CPU.
        spill_folder: Where the spill file lies, if the link is the default one.

    Returns:
        A module that is called and trained as the original.

    Raises:
        CaptureError: The model or its input cannot be captured.
        BudgetError: No plan fits the budget; the error holds the smallest that does.
        TransferError: The host tier cannot be used.
        ValueError: An option has no meaning.
    """
    _check_lossless(lossless)
    request = _request(memory_budget, activation_budget, max_slowdown, planner)
    return _prepared(model, sample_input, request, _link(model, link, spill_folder))


def plan(
    model: nn.Module,
    sample_input: SampleInput,
    *,
    hardware: str | os.PathLike[str] | None = None,
    memory_budget: Bytes = None,
    activation_budget: Bytes = None,
    max_slowdown: float | None = None,
    lossless: bool = True,
    planner: str | Planner = "greedy",
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
        lossless: As for `optimize`.
        planner: As for `optimize`.
        link: As for `optimize`; not used for other hardware.
        spill_folder: As for `optimize`; not used for other hardware.

    Raises:
        PlanError: There is no such hardware, or it cannot compute in the model's dtype.
        As `optimize`.
    """
    _check_lossless(lossless)
    request = _request(memory_budget, activation_budget, max_slowdown, planner)
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
        planner=PLANNERS.get(plan.planner, PLANNERS["greedy"]),
        plan=plan,
    )
    link = _link(model, link, spill_folder)
    module = _prepared(model, sample_input, request, link)
    if plan.host_bytes:
        link.reserve(plan.host_bytes).release()
    return module


class OptimizedModule(nn.Module):
    """A model whose training step runs as planned.

    It shares everything with the model: parameters, buffers and submodules under the same
    names, attributes, and the training flag.  In `eval()` or under `no_grad` the model itself
    runs.  An input of a new shape is planned once, when it first comes, and logged.
    """

    def __init__(self, model: nn.Module, request: Request, link: Link) -> None:
        super().__init__()
        own = self.__dict__
        for name in _SHARED:
            own[name] = model.__dict__[name]
        own.pop("training", None)
        own["_model"] = model
        own["_request"] = request
        own["_link"] = link
        own["_capture"] = Capture(self._rewrite)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model: as planned if it trains, plainly if it does not."""
        model: nn.Module = self.__dict__["_model"]
        if not (model.training and torch.is_grad_enabled()):
            return model(*args, **kwargs)
        self._check_no_saved_tensor_hooks()
        return self._run(self.__dict__["_capture"], args, kwargs)

    @property
    def plan(self) -> Plan:
        """The plan for the sample input."""
        return self.plans[0]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of every shape that came so far, the sample's first.

        A copy knows the plans of the module that it was copied from.
        """
        made = [work.plan for work in self.__dict__["_capture"].works if work.plan]
        plans = (*self.__dict__["_request"].known, *made)
        return tuple({plan.graph.fingerprint: plan for plan in plans}.values())

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The rewritten forward for the sample input."""
        return self._first_work().step.forward

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The rewritten backward for the sample input."""
        return self._first_work().step.backward

    def report(self) -> None:
        """Print what the plan does, and why, to the terminal."""
        print_report(self.plan)

    @property
    def training(self) -> bool:
        """The model's own flag."""
        return bool(self.__dict__["_model"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "_model" in self.__dict__:
            self.__dict__["_model"].training = mode

    def train(self, mode: bool = True) -> OptimizedModule:
        """Set the model's mode, as the model itself does it."""
        self.__dict__["_model"].train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state, under the model's names."""
        return self.__dict__["_model"].state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model's state."""
        return self.__dict__["_model"].load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Look up on the model what the wrapper does not have."""
        if name in ("_model", "_capture") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set on the model what the wrapper has neither as its own nor as a property."""
        is_own = name in self.__dict__ or isinstance(getattr(type(self), name, None), property)
        if "_model" not in self.__dict__ or is_own:
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["_model"], name, value)

    def __delattr__(self, name: str) -> None:
        """Delete from the model."""
        delattr(self.__dict__["_model"], name)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load as a child of another module, by the model's own way of loading."""
        self.__dict__["_model"]._load_from_state_dict(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        """Return what the model, a container, has under this key."""
        return self.__dict__["_model"][key]

    def __len__(self) -> int:
        """Return the length of the model, if it is a container."""
        return len(self.__dict__["_model"])

    def __bool__(self) -> bool:
        """Be true, also of an empty container."""
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizedModule:
        """Copy the model; the copy knows the plans, and captures when it is first called."""
        model = copy.deepcopy(self.__dict__["_model"], memo)
        return OptimizedModule(model, self._known_request(), self.__dict__["_link"])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the model, its plans, and where its spill file lies; see `__deepcopy__`.

        A link that the user made stays behind: the other process gets the default one.
        """
        link = self.__dict__["_link"]
        folder = str(link.folder) if isinstance(link, DiskLink) else None
        return _rebuilt, (self.__dict__["_model"], self._known_request(), folder)

    def _known_request(self) -> Request:
        request: Request = self.__dict__["_request"]
        return dataclasses.replace(request, plan=None, known=self.plans)

    def _check_no_saved_tensor_hooks(self) -> None:
        """Refuse hooks that would copy what stands for an offloaded tensor, and lose its slot."""
        if saved_tensor_hooks_are_on() and any(plan.slots for plan in self.plans):
            raise CaptureError(
                "saved-tensor hooks are on (as those of `save_on_cpu`), and would see handles in "
                "place of the activations that the plan offloads: use one of the two, not both"
            )

    def _first_work(self) -> Work:
        works: list[Work] = self.__dict__["_capture"].works
        if not works:
            raise CaptureError("there is no graph yet: call the module once in training mode")
        return works[0]

    def _run(self, capture: Capture, args: Any, kwargs: Any) -> Any:
        return capture(self.__dict__["_model"], args, kwargs)

    def _rewrite(self, step: StepGraphs) -> Work:
        capture: Capture = self.__dict__["_capture"]
        request: Request = self.__dict__["_request"]
        is_first = not capture.works
        if not is_first:
            request = _without_plan(request)
        work = run_pipeline(Work(request=request, link=self.__dict__["_link"], step=step))
        if not is_first and work.plan is not None:
            _logger.warning(
                "a new shape or mode of %s was planned: %s",
                type(self.__dict__["_model"]).__name__,
                work.plan.summary,
            )
        return work


def _prepared(
    model: nn.Module, sample_input: SampleInput, request: Request, link: Link
) -> OptimizedModule:
    """Make the module and capture its step for the sample, leaving no trace in the model."""
    _check_model(model)
    module = OptimizedModule(model, request, link)
    with _same_random_state(model), _training_mode(model), torch.enable_grad():
        args, kwargs = _arguments(sample_input)
        captured = model
        if is_meta(model):
            _check_only_planned(model, request)
            captured, (args, kwargs) = as_fake(model, (args, kwargs))
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


def _check_only_planned(model: nn.Module, request: Request) -> None:
    if request.hardware is None:
        raise CaptureError(
            f"{type(model).__name__} lies on the meta device, where nothing can be measured or "
            "trained: give it weights with `to_empty`, or plan it for other hardware with "
            'backhaul.plan(..., hardware="h200")'
        )


def _rebuilt(model: nn.Module, request: Request, folder: str | None) -> OptimizedModule:
    return OptimizedModule(model, request, default_link(model, folder))


def _without_plan(request: Request) -> Request:
    return dataclasses.replace(request, plan=None)


def _arguments(sample_input: SampleInput) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if callable(sample_input) and not isinstance(sample_input, torch.Tensor):
        return _arguments(sample_input())
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


def _link(model: nn.Module, link: Link | None, spill_folder: str | os.PathLike[str] | None) -> Link:
    """Return the link that was given, or the default one of the model's device."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    if link is None:
        return default_link(model, spill_folder)
    if not isinstance(link, Link):
        raise TypeError(f"link is a {type(link).__name__}: give a Link, or leave it out")
    return link


def _check_lossless(lossless: bool) -> None:
    if not lossless:
        raise ValueError("lossless=False: this release has no lossy codec; leave it True")


def _request(
    memory_budget: Bytes,
    activation_budget: Bytes,
    max_slowdown: float | None,
    planner: str | Planner,
) -> Request:
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
        if planner != "greedy" and given:
            raise ValueError(
                f"planner={planner!r} treats every tensor alike and asks for no {given[0]}: give "
                "one of the two"
            )
        planner = PLANNERS[planner]
    if not callable(planner):
        raise ValueError(
            f"planner={planner!r}: give one of {', '.join(PLANNERS)}, or a function of graph, "
            "machine and budget"
        )
    if max_slowdown is not None:
        if not isinstance(max_slowdown, (int, float)) or not max_slowdown >= 1.0:
            raise ValueError(f"max_slowdown={max_slowdown!r}: give a factor of 1.0 or more")
        return Request(kind="slowdown", value=max_slowdown, is_fraction=False, planner=planner)
    if activation_budget is not None:
        value, is_fraction = _parsed_bytes("activation_budget", activation_budget)
        return Request(kind="activations", value=value, is_fraction=is_fraction, planner=planner)
    value, is_fraction = _parsed_bytes("memory_budget", memory_budget)
    return Request(kind="memory", value=value, is_fraction=is_fraction, planner=planner)


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

"""The module that `optimize` returns: the model, with a training step that runs as planned."""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

import torch
from torch import fx, nn

from backhaul.compression import AdaptiveCompression
from backhaul.errors import CaptureError
from backhaul.passes.capture import Capture
from backhaul.passes.pipeline import Request, Work, run_pipeline
from backhaul.passes.step_graphs import StepGraphs
from backhaul.passes.torch_compat import (
    forward_mode_is_on,
    functional_transform_is_on,
)
from backhaul.records import Plan
from backhaul.report import print_report
from backhaul.runtime.default_link import default_link
from backhaul.runtime.dials import Dials
from backhaul.runtime.disk import DiskLink
from backhaul.runtime.links import Link

__all__ = ["OptimizedModule"]

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


class OptimizedModule(nn.Module):
    """A model whose training step runs as planned.

    It shares everything with the model: parameters, buffers and submodules under the same
    names, attributes, and the training flag.  In `eval()` or under `no_grad` the model itself
    runs.  An input of a new shape is planned once, when it first comes, and logged.
    """

    def __init__(
        self,
        model: nn.Module,
        request: Request,
        link: Link,
        compression: AdaptiveCompression | None = None,
    ) -> None:
        super().__init__()
        own = self.__dict__
        for name in _SHARED:
            own[name] = model.__dict__[name]
        own.pop("training", None)
        own["_model"] = model
        own["_request"] = request
        own["_link"] = link
        own["_compression"] = compression
        own["_capture"] = Capture(self._rewrite, request)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model: as planned if it trains, plainly if it does not."""
        model: nn.Module = self.__dict__["_model"]
        if not (model.training and torch.is_grad_enabled()):
            return model(*args, **kwargs)
        _check_no_transform(model)
        self._adapt()
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

    @property
    def compression(self) -> AdaptiveCompression | None:
        """The controller of error bounds, None if the module is lossless."""
        compression: AdaptiveCompression | None = self.__dict__["_compression"]
        return compression

    @property
    def overflow_counts(self) -> dict[str, int]:
        """How often each activation that is rounded found no room, and was kept as it was."""
        found: dict[str, int] = {}
        for dials in self._dials():
            for name, count in zip(dials.names, dials.overflow_counts, strict=True):
                found[name] = found.get(name, 0) + count
        return found

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
        is_own = (
            name in self.__dict__
            or name == "__class__"  # as `fully_shard` sets it
            or isinstance(getattr(type(self), name, None), property)
        )
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
        return OptimizedModule(
            model, self._known_request(), self.__dict__["_link"], self._copied_compression()
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the model, its plans, and where its spill file lies; see `__deepcopy__`.

        A link that the user made stays behind: the other process gets the default one.
        """
        link = self.__dict__["_link"]
        folder = str(link.folder) if isinstance(link, DiskLink) else None
        compression = self._copied_compression()
        return _rebuilt, (self.__dict__["_model"], self._known_request(), folder, compression)

    def _known_request(self) -> Request:
        request: Request = self.__dict__["_request"]
        return dataclasses.replace(request, plan=None, known=self.plans)

    def _copied_compression(self) -> AdaptiveCompression | None:
        return self.compression and self.compression.copied()

    def _adapt(self) -> None:
        """Let the controller, if there is one, change bounds or have the plan made anew."""
        own, compression = self.__dict__, self.compression
        if compression is None:
            return
        change = compression.begin_step(sum(self.overflow_counts.values()))
        if not change:
            return
        own["_request"] = dataclasses.replace(
            own["_request"], error_bounds=compression.error_bounds
        )
        if change == "turn":
            bound_by_tensor = {given.tensor: given.bound for given in compression.error_bounds}
            for dials in self._dials():
                dials.turn([bound_by_tensor[name] for name in dials.names])
        else:
            own["_request"] = dataclasses.replace(own["_request"], plan=None, known=())
            own["_capture"] = Capture(self._rewrite, own["_request"])

    def _dials(self) -> list[Dials]:
        works: list[Work] = self.__dict__["_capture"].works
        return [work.session.dials for work in works if work.session]

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
        compression = self.compression
        work = run_pipeline(
            Work(
                request=request,
                link=self.__dict__["_link"],
                step=step,
                observer=compression.observer if compression else None,
                # Other ranks take part in the first capture alone, inside of `optimize`.
                ranks=self.__dict__.pop("_ranks", None),
            )
        )
        if compression is not None and work.description is not None:
            compression.learn(work.description.roundable)
        if not is_first and work.plan is not None:
            _logger.warning(
                "a new shape or mode of %s was planned: %s",
                type(self.__dict__["_model"]).__name__,
                work.plan.summary,
            )
        return work


def _rebuilt(
    model: nn.Module,
    request: Request,
    folder: str | None,
    compression: AdaptiveCompression | None,
) -> OptimizedModule:
    return OptimizedModule(model, request, default_link(model, folder), compression)


def _check_no_transform(model: nn.Module) -> None:
    """Refuse what differentiates or maps the call from outside, not by `backward`."""
    if functional_transform_is_on() or forward_mode_is_on():
        raise CaptureError(
            f"an optimized {type(model).__name__} trains by `backward`, and cannot be called in "
            "`torch.func.grad`, `vmap` or `jvp`, nor in forward mode: give these the model itself"
        )


def _without_plan(request: Request) -> Request:
    return dataclasses.replace(request, plan=None)

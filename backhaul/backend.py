"""The `torch.compile` backend named `backhaul`: the same passes, for trainers that compile.

    torch.compile(model, backend="backhaul", options={"activation_budget": 0.5})

Every graph that Dynamo makes of the model is a *region* with a plan of its own.  A graph whose
shapes are symbolic is specialised: each set of shapes that comes is planned once, and the plans
that were used last are kept.
"""

from __future__ import annotations

import json
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from backhaul.options import check_bounds_are_known, request_of
from backhaul.passes.capture import CapturedGraph, Graphs
from backhaul.passes.pipeline import Request, Work, run_pipeline
from backhaul.passes.specialise import SymbolicGraph, has_symbols
from backhaul.passes.step_graphs import StepGraphs
from backhaul.records import Plan
from backhaul.runtime.default_link import link_of
from backhaul.runtime.links import Link

__all__ = ["OPTIONS_VARIABLE", "SHAPES_KEPT", "backend"]

_logger = logging.getLogger(__name__)

OPTIONS_VARIABLE = "BACKHAUL_OPTIONS"
"""Environment variable with options as JSON, for trainers that pass none."""

SHAPES_KEPT = 16
"""Sets of shapes that a region with symbolic shapes keeps plans of."""

_REQUESTED = (
    "memory_budget",
    "activation_budget",
    "max_slowdown",
    "actions",
    "planner",
    "lossless",
    "activation_dtype",
    "executor",
    "policy",
)


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo's; `torch.compile` calls this.

    Args:
        gm: The graph.
        example_inputs: Its inputs, parameters included.
        mode: Has no meaning here.
        options: `memory_budget`, `activation_budget`, `max_slowdown`, `actions`, `planner`,
            `lossless` with an `activation_dtype`, and `executor`, as for `backhaul.optimize`, where
            `executor` is `inductor` unless it is given; a `policy`, of which a pattern that matches
            nothing in a region does nothing there; `spill_folder`; and `on_plan`, which is
            called with the `Plan` of each region and shape.  Those in the environment variable
            `BACKHAUL_OPTIONS`, as JSON, hold where none are given.

    Raises:
        CaptureError: The graph cannot be trained as one.
        BudgetError: No plan of this region fits the budget.
        ValueError: An option has no meaning.
    """
    if mode is not None:
        raise ValueError(f"mode={mode!r}: the backend has no modes; give options")
    region = _Region(options if options else _options_of_environment(), example_inputs)
    if has_symbols(example_inputs):
        return _Specialised(region, gm)
    return region.compiled(gm, example_inputs)


class _Region:
    """What the graphs of one region have in common: options, and a link."""

    def __init__(self, options: Mapping[str, Any], inputs: Sequence[Any]) -> None:
        given = dict(options)
        self._on_plan: Callable[[Plan], None] | None = given.pop("on_plan", None)
        folder = given.pop("spill_folder", None)
        unknown = sorted(set(given) - set(_REQUESTED))
        if unknown:
            raise ValueError(
                f"options has {', '.join(unknown)}: give some of "
                f"{', '.join([*_REQUESTED, 'spill_folder', 'on_plan'])}"
            )
        check_bounds_are_known(given.get("lossless", True), given.get("activation_dtype"))
        self._request: Request = request_of(**{"executor": "inductor"} | given)
        self._link: Link = link_of((v for v in inputs if isinstance(v, torch.Tensor)), folder)

    def compiled(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph for the shapes of these inputs."""
        return CapturedGraph(Graphs(self._rewrite, self._request)).compile(gm, inputs)

    def _rewrite(self, step: StepGraphs) -> Work:
        work = run_pipeline(Work(request=self._request, link=self._link, step=step))
        assert work.plan is not None
        _logger.info("a region of %d ops was planned: %s", len(step.ops()), work.plan.summary)
        if self._on_plan is not None:
            self._on_plan(work.plan)
        return work


class _Specialised:
    """A region whose shapes are symbolic: one graph and plan for each set of shapes."""

    def __init__(self, region: _Region, gm: fx.GraphModule) -> None:
        self._region = region
        self._graph = SymbolicGraph(gm)
        self._compiled_by_shapes: OrderedDict[tuple[Any, ...], Callable[..., Any]] = OrderedDict()

    def __call__(self, *args: Any) -> Any:
        key = self._graph.key(args)
        compiled = self._compiled_by_shapes.pop(key, None)
        if compiled is None:
            if self._compiled_by_shapes:
                sizes = [list(value.shape) for value in args if isinstance(value, torch.Tensor)]
                _logger.warning("a region is planned for new shapes: %s", sizes)
            compiled = self._region.compiled(self._graph.specialised(args), args)
        self._compiled_by_shapes[key] = compiled
        while len(self._compiled_by_shapes) > SHAPES_KEPT:
            self._compiled_by_shapes.popitem(last=False)
        return compiled(*args)


def _options_of_environment() -> Mapping[str, Any]:
    text = os.environ.get(OPTIONS_VARIABLE, "{}")
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{OPTIONS_VARIABLE}={text!r} is no JSON: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f"{OPTIONS_VARIABLE}={text!r}: give an object of options")
    return options

"""Capture a module's training step through `torch.compile`, and run what the passes make of it.

Dynamo handles Python: guards, hooks, mutation, aliasing.  AOTAutograd gives the joint graph, a
stock partition the forward and backward that eager would run, or that Inductor would, and the
pipeline rewrites the pair.  One capture serves every shape and mode that the module is called
with; each has a graph and a plan of its own.

A graph can be captured without being run: the first op that would run raises instead, so
that parameters, buffers, random state and Python state stay as they were.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, assert_never

import torch
from torch import fx

from backhaul.errors import BackhaulError, CaptureError
from backhaul.passes.mutated_inputs import save_mutated_inputs_as_copies
from backhaul.passes.parallel import why_it_exchanges
from backhaul.passes.pipeline import Request, Work
from backhaul.passes.policy import save_what_is_asked_for
from backhaul.passes.refused_backwards import refuse_other_backwards
from backhaul.passes.step_graphs import StepGraphs
from backhaul.passes.torch_compat import (
    BackendCompilerFailed,
    TorchDynamoException,
    autograd_time,
    boxed,
    capture_settings,
    compile_whole,
    default_partition,
    describe_outputs,
    describe_replayed_random_ops,
    make_backend,
    make_inductor_backend,
    min_cut_rematerialization_partition,
    parameter_gradients,
    saved_tensor_hooks_are_on,
    tracing_settings,
)
from backhaul.passes.unused_gradients import UnusedGradients, compiled_node

__all__ = ["Capture", "CapturedGraph", "Graphs"]

Rewrite = Callable[[StepGraphs], Work]


class Capture:
    """One module's compiled step.

    Args:
        rewrite: Turns a captured step into the one that runs; a bound method, held weakly.
        request: What the user asked for.
    """

    def __init__(self, rewrite: Rewrite, request: Request) -> None:
        self._graphs = Graphs(rewrite, request)
        self._compiled = compile_whole(_own_copy_of(_call_module), _Backend(self._graphs))
        # Dynamo keeps what it compiled; the sessions and their link go with the module.
        weakref.finalize(self, self._graphs.works.clear).atexit = False

    def __call__(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Any) -> Any:
        """Run the step on these arguments, capturing it first if it is new.

        Raises:
            CaptureError: The module or its input cannot be captured as one graph.
            BackhaulError: Whatever the passes raise for a new graph.
        """
        try:
            with capture_settings():
                return self._compiled(module, args, kwargs)
        except BackendCompilerFailed as error:
            fault = error.inner_exception
            if isinstance(fault, BackhaulError):
                raise fault from None
            raise CaptureError(
                f"the training graph of {type(module).__name__} cannot be compiled: {fault}"
            ) from error
        except TorchDynamoException as error:
            raise CaptureError(
                why_it_exchanges(module)
                or f"{type(module).__name__} cannot be captured as one graph: {error}"
            ) from error

    def prepare(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Any) -> None:
        """Capture the step for these arguments without running it; see `__call__`."""
        self._graphs.are_dry = True
        try:
            self(module, args, kwargs)
        except _DryRun:
            pass
        finally:
            self._graphs.are_dry = False

    @property
    def works(self) -> list[Work]:
        """List what the passes made of each graph, in order of capture."""
        return self._graphs.works


class _Backend:
    """What Dynamo calls with a new graph.

    Hazard: Dynamo keeps every backend for ever, and graphs at a code object, where the garbage
    collector does not look.  Neither may lead back to the module or to its host memory.
    """

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = weakref.ref(graphs)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Any:
        graphs = self._graphs()
        assert graphs is not None, "a module that is called is alive"
        return CapturedGraph(graphs).compile(gm, example_inputs)


class Graphs:
    """The graphs of one module or region, and whether they are captured without being run.

    Args:
        rewrite: See `Capture`.
        request: What the user asked for.
    """

    def __init__(self, rewrite: Rewrite, request: Request) -> None:
        self._rewrite = weakref.WeakMethod(rewrite)
        self.executor = request.executor
        self.policy = request.policy
        self.are_dry = False
        self.works: list[Work] = []

    def rewritten(self, step: StepGraphs) -> Work:
        """Pass a captured step on, and keep what became of it."""
        rewrite = self._rewrite()
        assert rewrite is not None, "a module that is called is alive"
        work = rewrite(step)
        self.works.append(work)
        return work


class CapturedGraph:
    """One graph of the module: for one set of shapes, dtypes, flags and hooks."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._unused: UnusedGradients | None = None
        self._parameters: set[int] = set()
        self._identity = ""
        self._moves = False

    def compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[torch.Tensor]
    ) -> Callable[..., Any]:
        """Return what runs a graph of Dynamo's."""
        if any(isinstance(value, torch.Tensor) and value.is_nested for value in example_inputs):
            raise CaptureError(
                "a nested tensor cannot be planned, as its lengths differ in every batch: pad it, "
                "and give the model a mask"
            )
        self._parameters = {
            index
            for index, value in enumerate(example_inputs)
            if isinstance(value, torch.nn.Parameter)
        }
        with tracing_settings():
            compiled = self._backend()(gm, example_inputs)

        def run(*args: Any) -> Any:
            if self._graphs.are_dry:
                raise _DryRun
            self._check_no_saved_tensor_hooks()
            since = autograd_time()
            results = compiled(*args)
            node = compiled_node(results, since)
            if node is not None:
                refuse_other_backwards(node)
                if self._unused is not None:
                    self._unused.watch(node)
            return results

        return run

    def _check_no_saved_tensor_hooks(self) -> None:
        """Refuse hooks that would copy what stands for an offloaded tensor, and lose its slot."""
        if self._moves and saved_tensor_hooks_are_on():
            raise CaptureError(
                "saved-tensor hooks are on (as those of `save_on_cpu`, or of a checkpointed region "
                "around this graph), and would see handles in place of the activations that the "
                "plan offloads: use one of the two, or actions without offload"
            )

    def _backend(self) -> Callable[..., Any]:
        match self._graphs.executor:
            case "eager":
                return make_backend(self._partition, boxed, self._boxed_backward, boxed)
            case "inductor":
                return make_inductor_backend(
                    self._partition,
                    lambda: self._identity,
                    lambda: self._moves,
                    self._finished,
                )
            case _ as never:
                assert_never(never)

    def _partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        is_eager = self._graphs.executor == "eager"
        save_what_is_asked_for(joint, self._graphs.policy, self._graphs.executor)
        partition = default_partition if is_eager else min_cut_rematerialization_partition
        forward, backward = partition(joint, joint_inputs, **kwargs)
        describe_outputs(forward, joint, kwargs["num_fwd_outputs"])
        results = parameter_gradients(backward, self._parameters)
        output_count = kwargs["num_fwd_outputs"]
        step = StepGraphs(forward, backward, output_count, results, self._graphs.executor)
        save_mutated_inputs_as_copies(step)
        describe_replayed_random_ops(forward, dict(zip(step.saved, step.received, strict=True)))
        _check_static(step)
        self._unused = UnusedGradients(step)
        work = self._graphs.rewritten(step)
        self._identity = work.identity
        self._moves = bool(work.plan and work.plan.slots)
        return work.step.forward, work.step.backward

    def _boxed_backward(self, gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
        call = boxed(gm)

        def run(args: list[Any]) -> Any:
            return self._finished(call(args))

        run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd looks for it
        return run

    def _finished(self, gradients: Any) -> Any:
        return gradients if self._unused is None else self._unused.drop(list(gradients))


class _DryRun(BaseException):
    """A captured graph was about to run; no `except Exception` may swallow it."""


def _call_module(module: torch.nn.Module, args: Sequence[Any], kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _own_copy_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function with its code and its globals: Dynamo keeps graphs at one, names in both."""
    return type(function)(function.__code__.replace(), dict(function.__globals__))  # type: ignore


def _check_static(step: StepGraphs) -> None:
    for node in (*step.received, *step.tangents):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not all(
            isinstance(length, int) for length in value.shape
        ):
            raise CaptureError(
                f"the backward needs {node.name}, whose shape depends on data or is symbolic "
                f"({value}); mark no dimension dynamic, or keep data-dependent shapes out of the "
                "module"
            )

"""Every private torch API that the passes use, and nothing else.

Tried on torch 2.11 to 2.14.  A name that moves between versions is looked up here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import default_partition
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.graph import _BoxedCodeGen

__all__ = [
    "BackendCompilerFailed",
    "Compiled",
    "FakeTensor",
    "TorchDynamoException",
    "boxed",
    "capture_settings",
    "compile_whole",
    "default_partition",
    "fake_mode_of",
    "make_backend",
    "storage_id",
]

Compiled = Callable[..., Any]
GRAPH_LIMIT = 1024
"""Graphs kept for one module, one for each shape and mode, before a call is an error."""


def make_backend(
    partition: Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]],
    forward: Callable[[torch.fx.GraphModule], Compiled],
    backward: Callable[[torch.fx.GraphModule], Compiled],
    inference: Callable[[torch.fx.GraphModule], Compiled],
) -> Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Compiled]:
    """Make a Dynamo backend of a partition function and one executor for each kind of graph."""

    def compiler(executor: Callable[[torch.fx.GraphModule], Compiled]) -> Compiled:
        return lambda gm, _example_inputs: executor(gm)

    backend: Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Compiled] = aot_autograd(
        fw_compiler=compiler(forward),
        bw_compiler=compiler(backward),
        inference_compiler=compiler(inference),
        partition_fn=partition,
    )
    return backend


def compile_whole(function: Compiled, backend: Compiled) -> Compiled:
    """Compile a function as one graph with static shapes, or raise."""
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


@contextlib.contextmanager
def capture_settings() -> Iterator[None]:
    """Set what capture depends on, for the calls inside.

    RNNs are traced.  A hook that is added later is guarded on, so that it is seen.  Running
    out of cached graphs is an error where torch would quietly run eager.  No saved buffer is
    donated, so that `retain_graph=True` works.
    """
    with (
        torch._dynamo.config.patch(
            allow_rnn=True,
            skip_nnmodule_hook_guards=False,
            recompile_limit=GRAPH_LIMIT,
            accumulated_recompile_limit=GRAPH_LIMIT,
            fail_on_recompile_limit_hit=True,
        ),
        functorch_config.patch(donated_buffer=False),
    ):
        yield


def boxed(gm: torch.fx.GraphModule) -> Compiled:
    """Make a graph take its arguments as one list that it empties.

    An activation then dies at its last use, not when the call returns.
    """
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()

    def call(args: list[Any]) -> Any:
        return gm.forward(args)

    call._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd looks for it
    return call


def storage_id(value: torch.Tensor) -> int:
    """Identify the storage of a tensor, fake ones included."""
    return int(value.untyped_storage()._cdata)


def fake_mode_of(gm: torch.fx.GraphModule) -> FakeTensorMode:
    """Return the fake mode that a captured graph was traced under."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise AssertionError("a captured graph holds no fake tensor")

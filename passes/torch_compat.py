"""Every private torch API that the passes use, and nothing else.

Tried on torch 2.11 to 2.14.  A name that moves between versions is looked up here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch._decomp import decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
)
from torch._functorch.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.graph import _BoxedCodeGen
from torch.fx.traceback import annotate
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "BackendCompilerFailed",
    "Compiled",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDynamoException",
    "annotate",
    "annotation_of",
    "autograd_time",
    "boxed",
    "capture_settings",
    "compile_whole",
    "default_partition",
    "describe_outputs",
    "describe_replayed_random_ops",
    "fake_mode_of",
    "forward_mode_is_on",
    "functional_transform_is_on",
    "is_batched",
    "is_fusible",
    "is_made_by_backward",
    "is_mutation_of",
    "is_random_state",
    "is_recomputed_by_region",
    "make_backend",
    "make_inductor_backend",
    "min_cut_rematerialization_partition",
    "must_be_saved",
    "op_of",
    "parameter_gradients",
    "running_node",
    "saved_tensor_hooks_are_on",
    "storage_id",
    "storage_nbytes",
    "tracing_settings",
]

Compiled = Callable[..., Any]
Partition = Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]
GRAPH_LIMIT = 1024
"""Graphs kept for one module, one for each shape and mode, before a call is an error."""


def make_backend(
    partition: Partition,
    forward: Callable[[torch.fx.GraphModule], Compiled],
    backward: Callable[[torch.fx.GraphModule], Compiled],
    inference: Callable[[torch.fx.GraphModule], Compiled],
) -> Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Compiled]:
    """Make a Dynamo backend of a partition function and one executor for each kind of graph.

    Hazard: the backward of an op of many parts is traced with the random op of its forward, which
    nothing reads; `fallback_random` would keep it there, where eager draws nothing.
    """

    def compiler(executor: Callable[[torch.fx.GraphModule], Compiled]) -> Compiled:
        return lambda gm, _example_inputs: executor(gm)

    backend: Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Compiled] = aot_autograd(
        fw_compiler=compiler(forward),
        bw_compiler=compiler(backward),
        inference_compiler=compiler(inference),
        partition_fn=partition,
    )

    def make(gm: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Compiled:
        with inductor_config.patch(fallback_random=False):
            return backend(gm, inputs)

    return make


class _Partitioner(CustomPartitionerFn):
    """A partition function, as Inductor takes it, and what its caches know it by."""

    def __init__(self, partition: Partition, identity: Callable[[], str]) -> None:
        self._partition = partition
        self._identity = identity

    def __call__(
        self, gm: torch.fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        return self._partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return self._identity()

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave an identity in place of the function, for whoever hashes Inductor's settings."""
        return str, (self.uuid(),)


def make_inductor_backend(
    partition: Partition,
    identity: Callable[[], str],
    keeps_order: Callable[[], bool],
    finish_backward: Callable[[Any], Any],
) -> Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Compiled]:
    """Make a Dynamo backend of a partition function, whose graphs Inductor compiles.

    Args:
        partition: Called with the joint graph; its results are compiled.
        identity: Names what came of the partition, for Inductor's cache of graphs.
        keeps_order: Says whether nodes must run in the order that the partition gave them.
        finish_backward: Called with what a compiled backward returned.
    """

    def compile_one(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        # The order of copies is when they were planned to begin and to end.
        with inductor_config.patch(reorder_for_peak_memory=not keeps_order()):
            compiled = _inductor("compile_fx").compile_fx_inner(gm, inputs, **kwargs)
        if kwargs.get("is_backward"):
            call = compiled.current_callable
            compiled.current_callable = lambda args: finish_backward(call(args))
        return compiled

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Compiled:
        patches: dict[str, Any] = {"custom_partitioner_fn": _Partitioner(partition, identity)}
        if all(value.device.type == "cpu" for value in _tensors(example_inputs)):
            # Channels-last weights are copies, which are in no plan, and here they cost time, too.
            patches["layout_optimization"] = False
        # Hazard: a hit in the cache of AOTAutograd would skip the partition, and with it the plan.
        # That of Inductor's own graphs, which have the plan in them, stays on.
        with functorch_config.patch(enable_autograd_cache=False):
            compiled: Compiled = _inductor("compile_fx").compile_fx(
                gm, example_inputs, inner_compile=compile_one, config_patches=patches
            )
        return compiled

    return backend


def _inductor(name: str) -> Any:
    """Return a module of Inductor's, which takes a second to load and is not always needed."""
    return importlib.import_module(f"torch._inductor.{name}")


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def is_fusible(target: Any) -> bool:
    """Say whether Inductor makes part of a kernel of its own of an op, rather than a call."""
    lowering = _inductor("lowering")
    return (
        isinstance(target, torch._ops.OpOverload)
        and target in lowering.lowerings
        and target not in lowering.fallbacks
        and target.overloadpacket not in _CALLED
    )


_CALLED = {
    getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "sort")
}


def compile_whole(function: Compiled, backend: Compiled) -> Compiled:
    """Compile a function as one graph with static shapes, or raise."""
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


@contextlib.contextmanager
def capture_settings() -> Iterator[None]:
    """Set what capture depends on, for the calls inside.

    RNNs are traced.  A hook that is added later is guarded on, so that it is seen.  Inside of
    `DistributedDataParallel` the step stays one graph, which torch would split at each bucket of
    gradients.  Running out of cached graphs is an error where torch would quietly run eager.
    """
    with torch._dynamo.config.patch(
        allow_rnn=True,
        skip_nnmodule_hook_guards=False,
        optimize_ddp=False,
        recompile_limit=GRAPH_LIMIT,
        accumulated_recompile_limit=GRAPH_LIMIT,
        fail_on_recompile_limit_hit=True,
    ):
        yield


@contextlib.contextmanager
def tracing_settings() -> Iterator[None]:
    """Set what the traced graph depends on, while it is traced.

    No saved buffer is donated, so that `retain_graph=True` works.  A checkpointed region
    replays the random state of its forward on every device, as eager does, where torch would
    draw other numbers from generators of its own on CUDA.
    """
    with (
        # Not by `donated_buffer=False`: that the backward reads as well, when it runs, and then
        # refuses `retain_graph=True`.
        mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", lambda *_: []),
        functorch_config.patch(graphsafe_rng_functionalization=False),
        _recurrent_layers_as_eager(),
        _whole_ops_as_eager(),
    ):
        yield


@contextlib.contextmanager
def _whole_ops_as_eager() -> Iterator[None]:
    """Trace ops with kernels of their own as one op, which torch takes apart into many.

    The parts round otherwise than the kernel, and save far more for the backward.
    """
    taken: list[tuple[Any, dict[Any, Any]]] = []
    try:
        for op in _ops_taken_apart():
            keys = [key for key in op.py_kernels if key in _TRACING_KEYS]
            taken.append((op, {key: op.py_kernels.pop(key) for key in keys}))
            op._dispatch_cache.clear()
        yield
    finally:
        for op, kernels in taken:
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


_TRACING_KEYS = (
    torch._C.DispatchKey.Autograd,
    torch._C.DispatchKey.CompositeImplicitAutograd,
)
_TAKEN_APART = (
    "softshrink",
    "hardshrink",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
)


@functools.cache
def _ops_taken_apart() -> tuple[Any, ...]:
    names = [name for name in dir(torch.ops.aten) if "upsample_" in name]
    packets = [getattr(torch.ops.aten, name) for name in (*names, *_TAKEN_APART)]
    return tuple(
        getattr(packet, overload)
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for overload in packet.overloads()  # type: ignore[no-untyped-call]  # torch gives no types
    )


@contextlib.contextmanager
def _recurrent_layers_as_eager() -> Iterator[None]:
    """Trace LSTM, GRU and RNN layers as the single ops that eager takes without oneDNN.

    Hazard: torch's own decomposition never applies `dropout` between layers (it tests
    `num_layers < i - 1`), and takes a fused layer that saves nothing for the backward when the
    input requires no gradient, though the weights do.
    """
    one_layer: Compiled = decompositions._rnn_helper
    one_lstm_layer: Compiled = decompositions.one_layer_lstm

    def every_layer(
        value: torch.Tensor,
        hidden: Sequence[Any],
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        layer: Compiled,
    ) -> tuple[torch.Tensor, list[Any]]:
        directions = 2 if bidirectional else 1
        value = value.transpose(0, 1) if batch_first else value
        final: list[Any] = []
        for i in range(num_layers):
            if i > 0 and dropout != 0 and train:
                value = torch.dropout(value, dropout, train=True)
            own = slice(i * directions, (i + 1) * directions)
            value, last = one_layer(
                value, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False,
                layer,
            )  # fmt: skip
            final += last
        return (value.transpose(0, 1) if batch_first else value), final

    with (
        mock.patch.object(decompositions, "_rnn_helper", every_layer),
        mock.patch.object(
            decompositions,
            "select_one_layer_lstm_function",
            lambda *_: one_lstm_layer,
        ),
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


def autograd_time() -> int:
    """Return what the next autograd node of this thread is numbered; numbers rise."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # not in the stubs


def running_node() -> Any:
    """Return the autograd node whose backward, or hook of it, this thread runs."""
    return torch._C._current_autograd_node()


def saved_tensor_hooks_are_on() -> bool:
    """Say whether `torch.autograd.graph.saved_tensors_hooks` would see what is saved now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def functional_transform_is_on() -> bool:
    """Say whether a transform of `torch.func`, as `grad` or `vmap`, is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def forward_mode_is_on() -> bool:
    """Say whether `torch.autograd.forward_ad.dual_level` was entered."""
    return torch.autograd.forward_ad._current_level >= 0


def is_batched(value: torch.Tensor) -> bool:
    """Say whether a tensor stands for many, as `vmap` makes it, new or old."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(value) or functorch.is_legacy_batchedtensor(value)


def storage_id(value: torch.Tensor) -> int:
    """Identify the storage of a tensor, fake ones included; a sparse one is its own."""
    if value.layout is not torch.strided:
        return id(value)
    return int(value.untyped_storage()._cdata)


def storage_nbytes(value: torch.Tensor) -> int:
    """Return the size of a tensor's storage; 0 for a sparse one, whose size is not known."""
    return int(value.untyped_storage().nbytes()) if value.layout is torch.strided else 0


def parameter_gradients(
    backward: torch.fx.GraphModule, parameters: Collection[int]
) -> frozenset[int]:
    """Say which results of a backward are gradients of parameters.

    Args:
        backward: As the partitioner made it.
        parameters: Which arguments of the captured graph are parameters.
    """
    described = backward.graph.output_node().meta["desc"]
    return frozenset(
        index
        for index, result in enumerate(described)
        if isinstance(result, GradAOTOutput)
        and isinstance(result.grad_of, PlainAOTInput)
        and result.grad_of.idx in parameters
    )


def fake_mode_of(gm: torch.fx.GraphModule) -> FakeTensorMode:
    """Return the fake mode that a captured graph was traced under."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise AssertionError("a captured graph holds no fake tensor")


def is_mutation_of(output_description: Any, input_description: Any) -> bool:
    """Say whether a graph's output is what its input, by AOTAutograd's names, is changed to."""
    return (
        isinstance(output_description, InputMutationAOTOutput)
        and output_description.mutated_input == input_description
    )


def op_of(node: torch.fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the op that a node runs and its arguments, also where a random state goes along."""
    if node.target is run_and_save_rng_state:
        return node.args[0], node.args[1:]
    if node.target is run_with_rng_state:
        return node.args[1], node.args[2:]
    return node.target, node.args


def is_random_state(node: torch.fx.Node) -> bool:
    """Say whether a node is the random state that torch saves for a checkpointed region."""
    if node.target is not operator.getitem:
        return False
    draw, index = node.args
    return not index and isinstance(draw, torch.fx.Node) and draw.target is run_and_save_rng_state


def replayed(
    state: torch.fx.Node, target: Any, args: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """Return the call that runs a random op from a saved state of its generator."""
    return run_with_rng_state, (state, target, *args)


def fake_result(node: torch.fx.Node, fake_mode: FakeTensorMode) -> Any:
    """Return the fake value of a call whose arguments have theirs."""
    target, args = op_of(node)
    fake_args, fake_kwargs = torch.fx.map_arg((args, node.kwargs), _fake_value)
    with fake_mode:
        return target(*fake_args, **fake_kwargs)


def describe_outputs(
    forward: torch.fx.GraphModule, joint: torch.fx.GraphModule, output_count: int
) -> None:
    """Say of a forward's outputs what they are, where the partitioner lost it.

    It makes a new output node for a checkpointed region with random ops.
    """
    output = forward.graph.output_node()
    if "desc" not in output.meta:
        described = torch.utils._pytree.arg_tree_leaves(joint.graph.output_node().meta["desc"])
        saved_count = len(output.args[0]) - output_count  # type: ignore[arg-type]  # a tuple
        output.meta["desc"] = [*described[:output_count], *[None] * saved_count]


def describe_replayed_random_ops(
    forward: torch.fx.GraphModule, received_by_saved: dict[torch.fx.Node, torch.fx.Node]
) -> None:
    """Give fake values to the random ops of checkpointed regions, which torch leaves without.

    The length of a saved random state, which never changes, is traced as a symbol.
    """
    fake_mode = fake_mode_of(forward)
    for node in forward.graph.find_nodes(op="call_function", target=run_and_save_rng_state):
        state, result = (_picked(node, 0), _picked(node, 1))
        length = int(state.meta["val"].shape[0])
        received = received_by_saved[state]
        with fake_mode:
            sized = torch.empty(length, dtype=torch.uint8)
        state.meta["val"] = received.meta["val"] = sized
        node.meta["val"] = (sized, result.meta["val"])
        for replay in received.users:
            items = {int(user.args[1]): user.meta["val"] for user in _picks(replay)}  # type: ignore[arg-type]
            if isinstance(result.meta["val"], (tuple, list)):
                replay.meta["val"] = tuple(map(items.get, range(len(result.meta["val"]))))
            else:
                replay.meta["val"] = fake_result(replay, fake_mode)


def _picks(node: torch.fx.Node) -> list[torch.fx.Node]:
    return [user for user in node.users if user.target is operator.getitem]


def _picked(node: torch.fx.Node, index: int) -> torch.fx.Node:
    return next(user for user in _picks(node) if user.args[1] == index)


def _fake_value(node: torch.fx.Node) -> Any:
    return node.meta["val"]


def annotation_of(node: torch.fx.Node, name: str) -> Any:
    """Return what `annotate` wrote at a node under a name, None if nothing."""
    return (node.meta.get("custom") or {}).get(name)


def is_made_by_backward(node: torch.fx.Node) -> bool:
    """Say whether a node of a joint graph belongs to the backward."""
    return str(node.meta.get("partitioner_tag", "")).endswith("backward")


def is_recomputed_by_region(node: torch.fx.Node) -> bool:
    """Say whether a checkpointed region would make a node of a joint graph again."""
    policy = node.meta.get("recompute")
    return policy in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def must_be_saved(node: torch.fx.Node) -> None:
    """Keep the partitioner of a joint graph from making a node again in the backward."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

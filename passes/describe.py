"""Describe a step as a `GraphRecord`: its ops, its storages, and their live ranges.

A storage that the caller holds (a parameter, an input, an output) is counted but never
offered to the planner, and says why.  So does a saved storage that cannot be moved and
rebuilt exactly.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from backhaul.passes.checkpoints import find_checkpoints
from backhaul.passes.codec_choice import Readers, can_be_rounded, codec_for
from backhaul.passes.fusion import Fusion
from backhaul.passes.linear_reads import LinearRead, linear_reads_of
from backhaul.passes.op_calls import call_of
from backhaul.passes.policy import asked_of, why_it_cannot_be
from backhaul.passes.recipes import Recipes
from backhaul.passes.step_graphs import (
    StepGraphs,
    Storages,
    is_alias_op,
    module_of,
    nbytes_of,
    results_of,
    tensors_of,
)
from backhaul.passes.torch_compat import is_random_state, op_of, storage_nbytes
from backhaul.records import (
    CodecRecord,
    ErrorBound,
    GraphRecord,
    ModulePolicy,
    OpCost,
    OpRecord,
    Role,
    TensorRecord,
)
from backhaul.runtime.measure_ops import OpCall, describe_results

__all__ = [
    "Description",
    "Roundable",
    "describe",
    "keep_what_breaks_its_promise",
    "step_device",
    "view_chain",
]


@dataclass(frozen=True, slots=True)
class Description:
    """A step's record, and the calls whose costs a planner will ask for.

    Attributes:
        record: The step.
        calls: Each call to be costed.
        promised: What torch's fake kernels promise of each saved tensor: the key of the op that
            makes it, which of its results it is, and `OpCost.made` of that result.
        roundable: The saved tensors whose errors would reach weights' gradients alone, each with
            the ops of the backward that read it.
    """

    record: GraphRecord
    calls: tuple[OpCall, ...]
    promised: dict[str, tuple[str, int, str]]
    roundable: tuple[Roundable, ...]


@dataclass(frozen=True, slots=True)
class Roundable:
    """A saved tensor whose errors would reach weights' gradients alone.

    Attributes:
        tensor: Its name.
        batch: Length of its first dimension.
        numel: Its elements.
        nbytes: Its bytes.
        dtype: Its dtype.
        keeps_sign: Whether its signs are read, too, and must stay exact.
        reads: The ops that read it linearly.
    """

    tensor: str
    batch: int
    numel: int
    nbytes: int
    dtype: torch.dtype
    keeps_sign: bool
    reads: tuple[LinearRead, ...]


def describe(
    step: StepGraphs,
    held_bytes: int = 0,
    error_bounds: Iterable[ErrorBound] | None = None,
    cast_dtype: torch.dtype | None = None,
    policy: ModulePolicy | None = None,
) -> Description:
    """Describe the step that keeps everything.

    Args:
        step: The step.
        held_bytes: What the caller holds on the device besides the step's inputs.
        error_bounds: How tensors may be rounded; those that cannot be are left exact.  None if
            no error is allowed, and it is of no interest what could be.
        cast_dtype: What tensors that may be rounded may be cast to instead.
        policy: What is asked of single modules.
    """
    survey = _Survey(step, error_bounds, cast_dtype, policy or ModulePolicy())
    calls = [survey.call_of(node) for node in survey.ops]
    tensors, codec_calls = survey.tensors()
    record = GraphRecord(
        fingerprint=_fingerprint(step),
        ops=tuple(
            OpRecord(
                name=node.name,
                target=_target_name(node),
                module=module_of(node),
                cost_key=call.key if call else "",
            )
            for node, call in zip(survey.ops, calls, strict=True)
        ),
        forward_count=step.forward_count,
        tensors=(_held(held_bytes), *tensors) if held_bytes else tensors,
        executor=step.executor,
    )
    key_by_op = {
        node: call.key
        for node, call in zip(survey.ops, calls, strict=True)
        if call and call.target is op_of(node)[0]
    }
    return Description(
        record,
        tuple(call for call in calls if call) + codec_calls,
        survey.promised(key_by_op),
        survey.roundable(),
    )


def _held(nbytes: int) -> TensorRecord:
    """Describe what lies on the device beside the step."""
    return TensorRecord(
        name="(held by the caller)",
        module="",
        target="input",
        shape=(nbytes,),
        dtype="uint8",
        nbytes=nbytes,
        role="input",
        born=-1,
        dies=-1,
        last_forward_use=-1,
        first_backward_use=-1,
    )


def keep_what_breaks_its_promise(
    record: GraphRecord, promised: Mapping[str, tuple[str, int, str]], costs: Iterable[OpCost]
) -> GraphRecord:
    """Pin each tensor whose op, when it was measured, made another one than its fake kernel.

    Torch's fake kernels are wrong about some results, as the statistics of norms in mixed
    precision; a copy back would have the wrong dtype or size.
    """
    made_by_key = {cost.key: cost.made for cost in costs}

    def checked(tensor: TensorRecord) -> TensorRecord:
        key, index, promise = promised.get(tensor.name, ("", 0, ""))
        made = made_by_key.get(key, ())
        if tensor.pinned_because or not made or made[index] == promise:
            return tensor
        reason = f"{key.partition('(')[0]} makes {made[index]} bytes of it, not {promise} as traced"
        return replace(tensor, codecs=(), recipe=None, pinned_because=reason)

    return replace(record, tensors=tuple(map(checked, record.tensors)))


def view_chain(view: fx.Node, base: fx.Node, storages: Storages, key: int) -> list[fx.Node] | None:
    """List the nodes that make a view from its base, or None if they need more than the base."""
    chain: list[fx.Node] = []
    node = view
    while node is not base:
        sources = node.all_input_nodes
        if len(sources) != 1 or key not in storages.ids.get(sources[0], ()):
            return None
        chain.append(node)
        node = sources[0]
    return chain[::-1]


class _Survey:
    """Positions and holders of everything in the two graphs."""

    def __init__(
        self,
        step: StepGraphs,
        error_bounds: Iterable[ErrorBound] | None,
        cast_dtype: torch.dtype | None,
        policy: ModulePolicy,
    ) -> None:
        self._step = step
        self._policy = policy
        self._error_bounds = {given.tensor: given for given in error_bounds or ()}
        self._cast_dtype = cast_dtype
        self._is_watched = error_bounds is not None
        is_lossless = not self._is_watched and cast_dtype is None
        self._reads = {} if is_lossless else linear_reads_of(step)
        self._forward = Storages.of(step.forward)
        self._backward = Storages.of(step.backward)
        self._fusions = (
            {
                gm.graph: Fusion(gm, storages)
                for gm, storages in (
                    (step.forward, self._forward),
                    (step.backward, self._backward),
                )
            }
            if step.executor == "inductor"
            else {}
        )
        self.ops = step.ops()
        self._position = {node: position for position, node in enumerate(self.ops)}
        self._backward_start = step.forward_count
        self._device = step_device(step)
        self._inputs = self._held_by(_nodes(step.forward, "placeholder", "get_attr"))
        self._outputs = self._held_by(step.outputs)
        self._saved = self._held_by(step.saved)
        self._tangents = self._held_by(step.tangents)
        self._gradients = self._held_by(results_of(step.backward))
        self._constants = self._held_by(_nodes(step.backward, "get_attr"))
        self._recipes = Recipes(step, self._forward, self._device)
        free = self._saved - self._inputs - self._outputs
        found = find_checkpoints(self._forward, free, self._recipes.can_run_again)
        self._checkpoints = found - self._outputs
        self._recipes.begin_with(
            {key: self._forward.base(key).name for key in free | self._checkpoints}
        )

    def storages_of(self, node: fx.Node) -> Storages:
        return self._forward if node.graph is self._step.forward.graph else self._backward

    def call_of(self, node: fx.Node) -> OpCall | None:
        """Describe the call whose time a node takes, or None if it takes none."""
        if self._fusions:
            return self._fusions[node.graph].call_of(node)
        return call_of(node, self.storages_of(node))

    def promised(self, key_by_op: Mapping[fx.Node, str]) -> dict[str, tuple[str, int, str]]:
        """See `Description.promised`."""
        found = {}
        for key in self._saved:
            base = self._forward.base(key)
            source, index = base, 0
            if base.target is operator.getitem:
                source, index = base.args  # type: ignore[assignment]  # a node and a number
            (promise,) = describe_results(base.meta["val"])[:1] or ("",)
            if source in key_by_op:
                found[base.name] = (key_by_op[source], int(index), promise)
        return found

    def roundable(self) -> tuple[Roundable, ...]:
        """See `Description.roundable`."""
        found: list[Roundable] = []
        for key in self._forward.holders if self._is_watched else ():
            base = self._forward.base(key)
            readers = self._readings(key)
            if self._role(key) != "saved" or self._pinned_because(base, key, "saved", True):
                continue
            if not can_be_rounded(base, readers, self._reads):
                continue
            value = base.meta["val"]
            reads = tuple(self._reads[reader] for reader, _ in readers if reader in self._reads)
            found.append(
                Roundable(
                    base.name,
                    value.shape[0] if value.dim() else 1,
                    value.numel(),
                    nbytes_of(base, key),
                    value.dtype,
                    len(reads) < len(readers),
                    reads,
                )
            )
        return tuple(found)

    def tensors(self) -> tuple[tuple[TensorRecord, ...], tuple[OpCall, ...]]:
        """Describe every storage, in order of birth, and the codec calls of the saved ones."""
        records: list[TensorRecord] = []
        codec_calls: list[OpCall] = []
        for key in dict.fromkeys((*self._forward.holders, *self._backward.holders)):
            record, calls = self._tensor(key)
            records.append(record)
            codec_calls += calls
        records = _without_unread_checkpoints(records)
        return tuple(sorted(records, key=lambda record: record.born)), tuple(codec_calls)

    def _tensor(self, key: int) -> tuple[TensorRecord, tuple[OpCall, ...]]:
        forward_holders = self._forward.holders.get(key, [])
        backward_holders = self._backward.holders.get(key, [])
        storages = self._forward if forward_holders else self._backward
        base = storages.base(key)
        role = self._role(key)
        backward_uses = [self._position[node] for node in self._readers(backward_holders)]
        codec, calls = self._codec(base, key) if role == "saved" else (None, ())
        pinned_because = self._pinned_because(base, key, role, bool(backward_uses))
        is_free = role in ("saved", "checkpoint") and not pinned_because
        recipe = self._recipes.recipe_for(base) if is_free else None
        asked = asked_of(base, self._policy) if is_free and role == "saved" else None
        if asked is not None:
            pinned_because = why_it_cannot_be(asked, codec, recipe)
        record = TensorRecord(
            name=base.name,
            module=module_of(base),
            target=_target_name(base),
            shape=tuple(next(tensors_of(base)).shape),
            dtype=str(next(tensors_of(base)).dtype).removeprefix("torch."),
            nbytes=nbytes_of(base, key) if self._exists(base, key, role) else 0,
            role=role,
            born=self._born(storages.holders[key][0], role),
            dies=self._dies(role, forward_holders, backward_holders),
            last_forward_use=max(self._touched(forward_holders), default=-1),
            first_backward_use=min(backward_uses, default=-1),
            codecs=(codec,) if codec else (),
            recipe=recipe,
            pinned_because=pinned_because,
            asked=asked,
        )
        return record, calls

    def _exists(self, base: fx.Node, key: int, role: Role) -> bool:
        """Say whether a storage takes memory, which a temporary inside of a kernel does not."""
        if not self._fusions or role != "temporary":
            return True
        return self._fusions[base.graph].exists(key)

    def _role(self, key: int) -> Role:
        roles: tuple[tuple[set[int], Role], ...] = (
            (self._inputs | self._constants, "input"),
            (self._outputs, "output"),
            (self._saved, "saved"),
            (self._checkpoints, "checkpoint"),
            (self._tangents, "tangent"),
            (self._gradients, "gradient"),
        )
        return next((role for keys, role in roles if key in keys), "temporary")

    def _born(self, first_holder: fx.Node, role: Role) -> int:
        if role == "tangent":
            return self._backward_start
        return self._position.get(first_holder, -1)

    def _dies(
        self, role: Role, forward_holders: list[fx.Node], backward_holders: list[fx.Node]
    ) -> int:
        if role in ("input", "output", "gradient"):
            return len(self.ops)
        touched = [*self._touched(forward_holders), *self._touched(backward_holders)]
        return max(touched, default=self._backward_start)

    def _touched(self, holders: list[fx.Node]) -> Iterator[int]:
        """Yield the positions of the ops that make, view or read a storage."""
        for node in (*holders, *self._readers(holders)):
            if node in self._position:
                yield self._position[node]

    def _readers(self, holders: list[fx.Node]) -> list[fx.Node]:
        return [user for node in holders for user in node.users if user.op != "output"]

    def _codec(self, base: fx.Node, key: int) -> tuple[CodecRecord | None, tuple[OpCall, ...]]:
        value = base.meta["val"]
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None, ()
        readers = self._readings(key)
        given = self._error_bounds.get(base.name), self._cast_dtype
        if any(given) and not can_be_rounded(base, readers, self._reads):
            given = None, None
        found = codec_for(base, readers, *given)
        return (None, ()) if found is None else (found[0], found[1:])

    def _readings(self, key: int) -> Readers:
        """List each op of the backward that reads a storage, with the view that it reads."""
        return [
            (user, holder)
            for holder in self._backward.holders.get(key, [])
            for user in holder.users
            if user.op != "output" and not is_alias_op(user, self._backward)
        ]

    def _pinned_because(self, base: fx.Node, key: int, role: Role, is_read: bool) -> str:
        if role == "input" and is_read:
            return "the caller holds it: a parameter, buffer or input"
        if role == "output" and is_read:
            return "the caller holds it: an output of the model"
        if role not in ("saved", "checkpoint"):
            return ""
        value = base.meta["val"]
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return f"{_target_name(base)} makes no plain strided tensor"
        if role == "saved" and not is_read:
            return "the backward never reads it"
        if is_random_state(base):
            return "it is the random state of a checkpointed region"
        if base not in self._position:
            return "no op of the forward makes it"
        if value.device != self._device:
            return f"it lies on {value.device}, not on {self._device}"
        for view in self._step.saved:
            if key in self._forward.ids.get(view, ()):
                if view_chain(view, base, self._forward, key) is None:
                    return f"its view {view.name} is made from more than the storage itself"
        return ""

    def _held_by(self, nodes: Iterable[fx.Node]) -> set[int]:
        keys: set[int] = set()
        for node in nodes:
            if isinstance(node, fx.Node):
                keys.update(self.storages_of(node).ids.get(node, ()))
        return keys


def _without_unread_checkpoints(records: list[TensorRecord]) -> list[TensorRecord]:
    """Make temporaries of the checkpoints that no recipe of a saved tensor begins with."""
    sources_of = {record.name: record.recipe.sources for record in records if record.recipe}
    waiting = [record.name for record in records if record.role == "saved"]
    read: set[str] = set()
    while waiting:
        for source in sources_of.get(waiting.pop(), ()):
            if source not in read:
                read.add(source)
                waiting.append(source)
    return [
        replace(record, role="temporary", recipe=None, pinned_because="")
        if record.role == "checkpoint" and record.name not in read
        else record
        for record in records
    ]


def step_device(step: StepGraphs) -> torch.device:
    """Return the device that most saved bytes lie on, the CPU if nothing is saved."""
    bytes_by_device: dict[torch.device, int] = {}
    for node in step.saved:
        for value in tensors_of(node):
            nbytes = storage_nbytes(value)
            bytes_by_device[value.device] = bytes_by_device.get(value.device, 0) + nbytes
    return max(bytes_by_device, key=bytes_by_device.__getitem__, default=torch.device("cpu"))


def _nodes(gm: fx.GraphModule, *ops: str) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op in ops]


def _target_name(node: fx.Node) -> str:
    target = node.target
    return str(target) if isinstance(target, (str, torch._ops.OpOverload)) else target.__name__


def _fingerprint(step: StepGraphs) -> str:
    digest = hashlib.sha256()
    for gm in (step.forward, step.backward):
        index = {node: i for i, node in enumerate(gm.graph.nodes)}
        for node in gm.graph.nodes:
            args = map_aggregate((node.args, node.kwargs), _numbered(index))
            geometry = [
                (tuple(value.size()), _strides(value), str(value.dtype), value.device.type)
                for value in tensors_of(node)
            ]
            digest.update(repr((node.op, _target_name(node), args, geometry)).encode())
    return digest.hexdigest()


def _strides(value: torch.Tensor) -> tuple[int, ...] | str:
    return tuple(value.stride()) if value.layout is torch.strided else str(value.layout)


def _numbered(index: dict[fx.Node, int]) -> Callable[[Any], Any]:
    """Name nodes by where they stand, as their own names may differ between captures.

    Which of its devices a rank computes on is not said, either.
    """

    def numbered(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return f"%{index[value]}"
        return torch.device(value.type) if isinstance(value, torch.device) else value

    return numbered

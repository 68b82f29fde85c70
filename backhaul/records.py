"""What passes between the layers: frozen records of the graph, the machine and the plan.

A record names a tensor by the graph node that makes it and an op by its own node, so that
neither a planner nor a plan file ever holds a graph.  A *tensor* here is one storage: every
view of it shares its record.  Sizes are bytes, times are seconds, and op positions are
indices into `GraphRecord.ops`, forward first.
"""

from __future__ import annotations

import fnmatch
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from backhaul.errors import PlanError
from backhaul.serial import SerialError, from_json, to_json

__all__ = [
    "Action",
    "Ask",
    "Asked",
    "Budget",
    "CodecRecord",
    "Compress",
    "Decision",
    "ErrorBound",
    "Executor",
    "GraphRecord",
    "Keep",
    "LinkProfile",
    "MachineProfile",
    "Measured",
    "Mode",
    "ModulePolicy",
    "Offload",
    "OpCost",
    "OpRecord",
    "PackedForm",
    "Plan",
    "Prediction",
    "Recipe",
    "Recompute",
    "Role",
    "Rule",
    "SlotRecord",
    "Source",
    "TensorRecord",
]

Source = Literal["measured", "modelled", "assumed"]
Mode = Literal["zero", "sign", "dither"]
"""How a tensor is rounded; see `runtime.quantiser`."""

Executor = Literal["eager", "inductor"]
"""What runs a step: torch's own kernels, one after the other, or what Inductor compiles."""

Role = Literal["input", "saved", "checkpoint", "temporary", "output", "tangent", "gradient"]
Asked = Literal["keep", "compress", "offload", "recompute"]
"""What a policy may ask of a tensor; to offload it may pack it first."""

SCHEMA_VERSION = "1.6"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRecord:
    """A codec that fits one saved tensor.

    Attributes:
        name: `bits`, `pool_offsets` or `narrow`, see `runtime.codecs`; or `quantise` or `cast`,
            which round, see `runtime.quantiser` and `runtime.casts`.
        arguments: The codec's own integers and names, as the rewritten graph passes them.
        packed_bytes: Size of the packed form; static, known before anything runs.
        encode_key: `OpCost.key` of the packing op.
        decode_key: `OpCost.key` of the unpacking op.
        is_exact: Whether the very values come back, so that a recipe may read them; otherwise
            they serve the backward alone, as signs do.
        bound: Largest absolute error of an element, if it is quantised.
        relative_bound: Largest relative error of an element, if it is cast.
    """

    name: Literal["bits", "pool_offsets", "narrow", "quantise", "cast"]
    arguments: tuple[str | bool | int | tuple[int, ...], ...]
    packed_bytes: int
    encode_key: str
    decode_key: str
    is_exact: bool = False
    bound: float | None = None
    relative_bound: float | None = None


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How a tensor is rounded, and what its packed form has room for; see `runtime.quantiser`.

    Attributes:
        rows: Room for planes of bits.
        exact_blocks: Room for blocks that are kept as they are.
        is_sparse: Whether zeros are left out.
        mode: How it is rounded.
    """

    rows: int
    exact_blocks: int
    is_sparse: bool
    mode: Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBound:
    """How far one saved tensor may be rounded, and its packed form.

    Attributes:
        tensor: Its name.
        bound: Largest absolute error of an element.
        form: How it is packed.
    """

    tensor: str
    bound: float
    form: PackedForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a tensor is computed again in the backward: the forward ops that lead to it.

    Attributes:
        ops: Positions of those ops, in order, views included.
        sources: Saved and checkpoint tensors that they read; inputs of the step are always there.
        made: Bytes of each storage that they make, with the first and last of `ops` (by index)
            between which it is live; the tensor itself is live to the end.
        state_bytes: Random state that is held from the forward until they have run.
    """

    ops: tuple[int, ...]
    sources: tuple[str, ...]
    made: tuple[tuple[int, int, int], ...]
    state_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What the user asks of one tensor, and where.

    Attributes:
        action: What is to happen to it.
        by: Who asks, as it stands in a reason.
    """

    action: Asked
    by: str


@dataclass(frozen=True, slots=True)
class Rule:
    """What the user asks of the tensors that some modules make.

    Attributes:
        pattern: Shell-style pattern of paths of modules, as `named_modules` has them; a module's
            own modules belong to it.
        action: What is to happen to what they save.
    """

    pattern: str
    action: Asked

    @property
    def name(self) -> str:
        """Name the rule, as it stands in a reason."""
        return f"the policy for {self.pattern!r}"

    def applies_to(self, module: str) -> bool:
        """Say whether the pattern matches the path of a module, or of one that it lies in."""
        parts = module.split(".")
        paths = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return any(fnmatch.fnmatchcase(path, self.pattern) for path in paths)


@dataclass(frozen=True, slots=True)
class ModulePolicy:
    """What the user asks of the tensors that single modules make; of two rules, the later one.

    Attributes:
        rules: The rules.
    """

    rules: tuple[Rule, ...] = ()

    def ask_for(self, module: str) -> Ask | None:
        """Return what is asked of a tensor that a module makes, by its path."""
        for rule in reversed(self.rules):
            if rule.applies_to(module):
                return Ask(action=rule.action, by=rule.name)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One storage of the step, with its live range when everything is kept.

    Attributes:
        name: Graph node that first holds the storage alone; an op of the graph if saved.
        module: Path of the module it belongs to, empty for the root.
        target: Operator that makes it.
        shape: Shape of the node, which a view of the storage may differ from.
        dtype: Element type of the node, as torch prints it without its `torch.` prefix.
        nbytes: Size of the whole storage.
        role: `input` is owned by the caller for the whole step, as parameters are; `checkpoint`
            is a temporary of the forward that a recipe may read, and is held only if one does.
        born: Position of the op that makes it, or -1 before the forward begins.
        dies: Position of its last reader; `len(ops)` when it outlives the step.
        last_forward_use: Last forward position that reads it, or that names or views it.
        first_backward_use: First backward position that reads it, or -1.
        codecs: The codecs that keep every backward use of it exact.
        recipe: How the backward can compute it again, if it can.
        pinned_because: Why it may not leave the device; empty when it may.
        asked: What the user asks of it; None leaves it to the planner.
    """

    name: str
    module: str
    target: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    role: Role
    born: int
    dies: int
    last_forward_use: int
    first_backward_use: int
    codecs: tuple[CodecRecord, ...] = ()
    recipe: Recipe | None = None
    pinned_because: str = ""
    asked: Ask | None = None

    @property
    def is_movable(self) -> bool:
        """Say whether a plan may do anything but keep it."""
        return self.role in ("saved", "checkpoint") and not self.pinned_because


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRecord:
    """One operator of the step.

    Attributes:
        name: Its graph node.
        target: The operator, as `aten.relu.default`.
        module: Path of the module that it comes from.
        cost_key: `OpCost.key` of its measurement; empty for one that takes no time.
    """

    name: str
    target: str
    module: str
    cost_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRecord:
    """The forward and backward of one training step.

    Attributes:
        fingerprint: Hash of every op, argument, shape, stride, dtype and device.
        ops: Forward ops, then backward ops, in execution order.
        forward_count: How many of `ops` are forward.
        tensors: Every storage, in order of birth.
        executor: What runs it.
    """

    fingerprint: str
    ops: tuple[OpRecord, ...]
    forward_count: int
    tensors: tuple[TensorRecord, ...]
    executor: Executor = "eager"

    @property
    def saved(self) -> tuple[TensorRecord, ...]:
        """List the storages that the forward keeps for the backward."""
        return tuple(tensor for tensor in self.tensors if tensor.role == "saved")

    @property
    def planned(self) -> tuple[TensorRecord, ...]:
        """List the storages that a plan decides on: saved ones and checkpoints."""
        return tuple(tensor for tensor in self.tensors if tensor.role in ("saved", "checkpoint"))

    @property
    def saved_bytes(self) -> int:
        """Sum the saved activations, keeping everything."""
        return sum(tensor.nbytes for tensor in self.saved)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """What one distinct op costs on one machine.

    Attributes:
        key: Operator, shapes, strides, dtypes and arguments.
        duration_s: Median time of one call.
        workspace_bytes: Most memory it holds beyond its inputs and outputs.
        source: Where the numbers come from.
        made: Dtype and storage bytes of each result, as `float32:1024`; empty for what is no
            tensor.  No results at all if they are not known.
    """

    key: str
    duration_s: float
    workspace_bytes: int
    source: Source
    made: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """How fast one link moves bytes, each way alone and both at once.

    Attributes:
        tier: The host tier, as `pinned host memory` or `spill file`.
        sizes_bytes: Copy sizes that were measured, rising.
        d2h_s: Time of one offload of each size, latency included.
        h2d_s: Time of one reload of each size, latency included.
        duplex_d2h_fraction: Offload bandwidth while reloading, over bandwidth alone.
        duplex_h2d_fraction: Reload bandwidth while offloading, over bandwidth alone.
        capacity_bytes: Most bytes that the tier can hold.
        drag_s: Time that compute loses to a copy of each size beside it, either way; a tier that
            is served by the cores that compute takes some, a copy engine none.  Empty for none.
        source: Where the numbers come from.
    """

    tier: str
    sizes_bytes: tuple[int, ...]
    d2h_s: tuple[float, ...]
    h2d_s: tuple[float, ...]
    duplex_d2h_fraction: float
    duplex_h2d_fraction: float
    capacity_bytes: int
    source: Source
    drag_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a profile that cannot be interpolated."""
        if not len(self.sizes_bytes) == len(self.d2h_s) == len(self.h2d_s) >= 2:
            raise ValueError(f"a link profile needs two or more sizes, got {self.sizes_bytes}")
        if len(self.drag_s) not in (0, len(self.sizes_bytes)):
            raise ValueError(f"a link profile needs a drag for each size or none: {self.drag_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """What the planner knows of the machine.

    Attributes:
        device: Device type and name, as `cpu: Intel(R) Xeon(R)`.
        torch_version: The torch that the ops were timed with.
        alignment_bytes: The allocator rounds every size up to a multiple of this.
        link: The link to the host tier.
        ops: Cost of every distinct op of the graph, codecs included.
        codec_kernels: What runs the kernels that round tensors of any size worth it, `inductor` or
            `eager` with the reason; empty if nothing is rounded, or nothing was measured.
    """

    device: str
    torch_version: str
    alignment_bytes: int
    link: LinkProfile
    ops: tuple[OpCost, ...]
    codec_kernels: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What the user asked for.

    Attributes:
        kind: `memory` bounds everything on the device during the step, parameters included;
            `activations` bounds the saved activations alone; `slowdown` asks for the least
            memory within a factor of the time of keeping everything.
        value: Bytes for the first two kinds, the factor (at least 1) for the last.
    """

    kind: Literal["memory", "activations", "slowdown"]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Leave the tensor on the device; a checkpoint that no recipe reads is freed as ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compress:
    """Hold the packed form on the device from its last forward use to its first backward use."""

    codec: CodecRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Move the tensor, packed first if a codec is given, to the host tier and back.

    Attributes:
        codec: Packs before the copy out and unpacks after the copy back, or None.
        wait_after: Forward position after which the copy out is waited for, and the device
            memory freed.
        reload_before: Backward position before which the copy back is started.
    """

    codec: CodecRecord | None
    wait_after: int
    reload_before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Free the tensor after its last forward use, and follow its recipe before its next use."""


Action = Keep | Compress | Offload | Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens to one saved tensor or checkpoint, and why."""

    tensor: str
    action: Action
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """Where one offloaded tensor lies in the host arena."""

    tensor: str
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one step costs, as the simulator says.

    Attributes:
        peak_bytes: Most bytes on the device at once, the caller's own tensors included.
        step_peak_bytes: The same without what the caller holds before the step begins.
        saved_peak_bytes: Most bytes of saved activations on the device at once.
        step_s: Time of forward and backward.
        exposed_s: The part of it that waits for a copy.
        dragged_s: The part of it by which copies slow the ops beside them.
        codec_s: The part of it that packs and unpacks.
        recompute_s: The part of it that computes again.
        offloaded_bytes: Bytes that cross the link, each way.
    """

    peak_bytes: int
    step_peak_bytes: int
    saved_peak_bytes: int
    step_s: float
    exposed_s: float
    codec_s: float
    offloaded_bytes: int
    recompute_s: float = 0.0
    dragged_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a real run showed, to be laid beside the prediction."""

    step_peak_bytes: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What happens to every saved activation of one graph on one machine.

    Attributes:
        graph: The graph that was planned.
        machine: The measurements that it was planned with.
        budget: What was asked for.
        planner: The planner that answered.
        summary: The answer in a sentence.
        decisions: One for each saved tensor, in order of birth.
        slots: Layout of the host arena.
        host_bytes: Size of the host arena of one step.
        baseline: The cost of keeping everything.
        predicted: The cost of this plan.
        measured: What a run of this plan showed, if one was measured.
        schema_version: Version of this record's form.
    """

    graph: GraphRecord
    machine: MachineProfile
    budget: Budget
    planner: str
    summary: str
    decisions: tuple[Decision, ...]
    slots: tuple[SlotRecord, ...]
    host_bytes: int
    baseline: Prediction
    predicted: Prediction
    measured: Measured | None = None
    schema_version: str = SCHEMA_VERSION

    @property
    def rounded(self) -> tuple[tuple[str, CodecRecord], ...]:
        """List the tensors that are quantised, with their codecs; each has a dial in this order."""
        return tuple(
            (decision.tensor, codec)
            for decision in self.decisions
            if (codec := getattr(decision.action, "codec", None)) is not None
            and codec.bound is not None
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; the same plan gives the same bytes.

        Args:
            path: The file to write, replaced if it exists.
        """
        text = json.dumps(to_json(self), indent=1, sort_keys=True, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Args:
            path: The file to read.

        Raises:
            PlanError: The file is no plan, is damaged, or has a newer major schema version.
            OSError: The file cannot be read.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            version = data["schema_version"]
            major = int(version.split(".")[0])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PlanError(f"{os.fspath(path)} is no plan file: {error!r}") from error
        if major != int(SCHEMA_VERSION.split(".")[0]):
            raise PlanError(
                f"{os.fspath(path)} has schema version {version}, this release reads "
                f"{SCHEMA_VERSION}; use the release that wrote it, or plan again"
            )
        try:
            return from_json(Plan, data)
        except SerialError as error:
            raise PlanError(f"{os.fspath(path)} is a damaged plan file: {error}") from error

"""From a captured step to the step that runs: one list of passes, each with one job.

    describe   what the step is made of, as records
    meet       until all ranks are here, if there are many
    measure    what each op, codec and copy costs on this machine
    choose     what happens to every saved activation
    agree      on the plan of the first rank, if all have the same step
    insert     the choice, as nodes
    verify     the rules that keep gradients exact

The pipeline alone times passes and logs them.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from backhaul.errors import PlanError
from backhaul.passes.describe import (
    Description,
    describe,
    keep_what_breaks_its_promise,
    step_device,
)
from backhaul.passes.insert import insert_plan
from backhaul.passes.op_work import works_of
from backhaul.passes.step_graphs import StepGraphs
from backhaul.passes.verify import verify
from backhaul.records import (
    Budget,
    ErrorBound,
    Executor,
    GraphRecord,
    MachineProfile,
    ModulePolicy,
    Plan,
)
from backhaul.runtime.block_kernels import BLOCK
from backhaul.runtime.device import allocator_alignment_bytes, capacity_bytes
from backhaul.runtime.dials import Dials
from backhaul.runtime.kernel_compiler import FEWEST_BLOCKS, executor
from backhaul.runtime.links import Link
from backhaul.runtime.measure_link import measure_link
from backhaul.runtime.measure_ops import OpCache, device_name, measure_ops
from backhaul.runtime.observer import Observer, Read
from backhaul.runtime.ranks import Ranks
from backhaul.runtime.session import Session
from backhaul.scheduler.hardware import HardwareProfile, modelled_machine
from backhaul.scheduler.planner import Planner
from backhaul.scheduler.simulator import simulate

__all__ = ["PIPELINE", "Request", "Work", "run_pipeline"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asked for, before the graph is known.

    Attributes:
        kind: The kind of the budget, see `Budget`.
        value: Bytes or a slowdown; a fraction of what keeping everything needs if
            `is_fraction`; None for all the memory of the device.
        is_fraction: Whether `value` is such a fraction.
        planner: Answers the budget.
        held_bytes: What lies on the device all along and is no argument of the model.
        hardware: The machine to plan for instead of this one, on which nothing is measured.
        plan: A plan to apply instead of planning, to the graph that it was made for.
        known: Plans to take for the graphs that they were made for, as from an earlier process.
        error_bounds: How tensors may be rounded.
        cast_dtype: What tensors may be cast to.
        executor: What runs the graphs.
        policy: What is asked of single modules.
        ranks_here_count: How many ranks train on this host, and share its link and its memory.
    """

    kind: str
    value: float | None
    is_fraction: bool
    planner: Planner
    held_bytes: int = 0
    hardware: HardwareProfile | None = None
    plan: Plan | None = None
    known: tuple[Plan, ...] = ()
    error_bounds: tuple[ErrorBound, ...] = ()
    cast_dtype: torch.dtype | None = None
    executor: Executor = "eager"
    policy: ModulePolicy = field(default_factory=ModulePolicy)
    ranks_here_count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One step on its way through the pipeline.

    Attributes:
        request: What was asked for.
        link: Moves what is offloaded.
        step: The step so far: as captured, then rewritten.
        description: Its records, once described.
        machine: The measurements, once measured.
        plan: The choice, once made.
        session: The owner of the host slots, once nodes are inserted.
        observer: Watches how errors of activations would reach gradients, if errors are allowed.
        ranks: All that send a step through the pipeline now; None if this rank does so alone.
    """

    request: Request
    link: Link
    step: StepGraphs
    description: Description | None = None
    machine: MachineProfile | None = None
    plan: Plan | None = None
    session: Session | None = None
    observer: Observer | None = None
    ranks: Ranks | None = None

    @property
    def identity(self) -> str:
        """Name the plan, its graph and its machine, for the caches of compilers."""
        return hashlib.sha256(repr(self.plan).encode()).hexdigest()


def describe_step(work: Work) -> Work:
    """Describe the captured step."""
    request = work.request
    error_bounds = request.error_bounds if work.observer else None
    return replace(
        work,
        description=describe(
            work.step, request.held_bytes, error_bounds, request.cast_dtype, request.policy
        ),
    )


def meet_ranks(work: Work) -> Work:
    """Wait for all ranks: those of one host share its memory and its link, and measure their share.

    A link that one rank measured alone would be promised to each of them.
    """
    if work.ranks is not None:
        work.ranks.gather(None)
    return work


def measure_machine(work: Work) -> Work:
    """Measure every distinct op, every codec, and the link, or model them for other hardware.

    A plan that is already there has brought its measurements along.
    """
    assert work.description is not None
    given = _given_plan(work.request, work.description.record)
    if given is not None:
        return replace(work, machine=given.machine)
    if work.request.hardware is not None:
        works = works_of(work.description.calls)
        modelled = modelled_machine(work.request.hardware, works, torch.__version__)
        return replace(work, machine=modelled)
    device = step_device(work.step)
    cache = OpCache(device, rank_count=work.request.ranks_here_count)
    link = measure_link(work.link, device, cache=cache)
    machine = MachineProfile(
        device=device_name(device),
        torch_version=torch.__version__,
        alignment_bytes=allocator_alignment_bytes(device),
        link=replace(link, capacity_bytes=link.capacity_bytes // work.request.ranks_here_count),
        ops=measure_ops(work.description.calls, device, cache=cache),
        codec_kernels=_codec_kernels(work.description.record, work.request.error_bounds, device),
    )
    record = keep_what_breaks_its_promise(
        work.description.record, work.description.promised, machine.ops
    )
    return replace(work, machine=machine, description=replace(work.description, record=record))


def _codec_kernels(
    graph: GraphRecord, error_bounds: Iterable[ErrorBound], device: torch.device
) -> str:
    """Say what runs the kernels of all tensors that may be rounded and are worth compiling for."""
    forms, told = {given.tensor: given.form for given in error_bounds}, set()
    for tensor in graph.tensors:
        is_rounded = any(codec.name == "quantise" for codec in tensor.codecs)
        if is_rounded and math.prod(tensor.shape) >= FEWEST_BLOCKS * BLOCK:
            dtype: torch.dtype = getattr(torch, tensor.dtype)
            told.add(executor(device, dtype, forms[tensor.name].mode))
    texts = {e.name if e.name == "inductor" else f"{e.name} ({e.reason})" for e in told}
    return ", ".join(sorted(texts))


def choose_plan(work: Work) -> Work:
    """Ask the planner, or take the plan that was given if it belongs to this graph."""
    assert work.description is not None and work.machine is not None
    graph = work.description.record
    given = _given_plan(work.request, graph)
    if given is not None:
        return replace(work, plan=given)
    budget = _budget(work.request, graph, work.machine, step_device(work.step))
    plan = work.request.planner(graph, work.machine, budget)
    return replace(
        work, plan=replace(plan, summary=plan.summary + _idle_rules(work.request, graph))
    )


def _idle_rules(request: Request, graph: GraphRecord) -> str:
    """Say which rules of the policy found nothing to ask for."""
    asking = {tensor.asked.by for tensor in graph.tensors if tensor.asked is not None}
    idle = [rule.name for rule in request.policy.rules if rule.name not in asking]
    return f" Nothing that is saved is left for {', '.join(idle)}." if idle else ""


def agree_on_plan(work: Work) -> Work:
    """Take the plan of the first rank, so that no rank waits for one that planned otherwise."""
    assert work.plan is not None
    if work.ranks is None:
        return work
    graph_count = len(set(work.ranks.gather(work.plan.graph.fingerprint)))
    if graph_count > 1:
        _logger.warning("each rank has a plan of its own, as they have %d graphs", graph_count)
        return work
    return replace(work, plan=work.ranks.first(work.plan))


def insert_nodes(work: Work) -> Work:
    """Write the plan into the graphs and open the session that owns its slots."""
    assert work.plan is not None and work.description is not None
    roundable = work.description.roundable
    watched = [(each.tensor, read) for each in roundable for read in each.reads]
    session = Session(
        work.link,
        work.plan.slots,
        work.plan.host_bytes,
        Dials(work.plan.rounded),
        work.observer,
        [Read(name, read.op, read.channels, read.taps, read.rows) for name, read in watched],
    )
    step = insert_plan(work.step, work.plan, session.session_id, [read for _, read in watched])
    return replace(work, step=step, session=session)


def verify_step(work: Work) -> Work:
    """Check the rewritten graphs."""
    verify(work.step)
    return work


PIPELINE: tuple[tuple[str, Callable[[Work], Work]], ...] = (
    ("describe", describe_step),
    ("meet", meet_ranks),
    ("measure", measure_machine),
    ("choose", choose_plan),
    ("agree", agree_on_plan),
    ("insert", insert_nodes),
    ("verify", verify_step),
)


def run_pipeline(work: Work) -> Work:
    """Run every pass in order."""
    for name, run in PIPELINE:
        start_s = time.perf_counter()
        work = run(work)
        _logger.info("%s took %.3f s", name, time.perf_counter() - start_s)
    return work


def _budget(
    request: Request, graph: GraphRecord, machine: MachineProfile, device: torch.device
) -> Budget:
    match request.kind:
        case "slowdown":
            assert request.value is not None
            return Budget(kind="slowdown", value=request.value)
        case "activations":
            assert request.value is not None
            scale = simulate(graph, machine, {}).prediction.saved_peak_bytes
            value = request.value * scale if request.is_fraction else request.value
            return Budget(kind="activations", value=int(value))
        case _:
            if request.value is None and request.hardware is not None:
                return Budget(kind="memory", value=int(request.hardware.memory_bytes.value))
            if request.value is None:
                return Budget(kind="memory", value=capacity_bytes(device))
            scale = simulate(graph, machine, {}).prediction.peak_bytes
            value = request.value * scale if request.is_fraction else request.value
            return Budget(kind="memory", value=int(value))


def _given_plan(request: Request, graph: GraphRecord) -> Plan | None:
    if request.plan is not None:
        _check_same_graph(request.plan.graph, graph)
        return request.plan
    return next((p for p in request.known if p.graph.fingerprint == graph.fingerprint), None)


def _check_same_graph(planned: GraphRecord, captured: GraphRecord) -> None:
    if planned.fingerprint == captured.fingerprint:
        return
    differences = [
        f"{name}: planned {before}, captured {after}"
        for name, before, after in (
            ("ops", len(planned.ops), len(captured.ops)),
            ("saved activations", len(planned.saved), len(captured.saved)),
            ("saved bytes", f"{planned.saved_bytes:,}", f"{captured.saved_bytes:,}"),
        )
        if before != after
    ]
    for before, after in zip(planned.ops, captured.ops, strict=False):
        if before.target != after.target or before.cost_key != after.cost_key:
            differences.append(
                f"first differing op: planned {before.name} = "
                f"{before.cost_key or before.target}, captured {after.name} = "
                f"{after.cost_key or after.target}"
            )
            break
    raise PlanError(
        "this plan was made for another graph; "
        + ("; ".join(differences) or "arguments of its views differ")
        + "; plan again for this model and input"
    )

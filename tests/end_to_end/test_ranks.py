"""Two ranks train as they would without us, with DDP and with FSDP2, and by one plan.

This file is also the program of a rank.  Each topic is one pair of processes: a rank writes what
it found in each scenario, and a test compares that of both with what the scenario expects.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import backhaul
from backhaul.errors import BudgetError, CaptureError, TransferError
from backhaul.passes import pipeline
from backhaul.runtime.op_cache import OpCache

Facts = dict[str, Any]
Batches = Callable[[nn.Module, int], Iterator[Tensor]]

RANK_COUNT = 2
LIMIT_S = 300
STEP_COUNT = 3
WIDTH = 16


@dataclass(frozen=True)
class Scenario:
    """What a rank does, and what it must find."""

    topic: str
    run: Callable[[], Facts]
    expected: Facts


SCENARIOS: dict[str, Scenario] = {}


def scenario(topic: str, **expected: Any) -> Callable[[Callable[..., Facts]], Any]:
    """Note a scenario; `cases` makes one of each of some arguments."""
    cases: dict[str, tuple[Any, ...]] = expected.pop("cases", {"": ()})

    def noted(run: Callable[..., Facts]) -> Callable[..., Facts]:
        for case, args in cases.items():
            name = f"{run.__name__}-{case}" if case else run.__name__
            SCENARIOS[name] = Scenario(topic, functools.partial(run, *args), expected)
        return run

    return noted


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_ranks_find(name: str) -> None:
    for found in found_by_ranks(SCENARIOS[name].topic):
        assert found.get(name, found) == SCENARIOS[name].expected


@functools.cache
def found_by_ranks(topic: str) -> list[dict[str, Facts]]:
    """Run a pair of processes, and return what each rank found in each scenario."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "BACKHAUL_CACHE_DIR": folder}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, topic, str(rank), folder],
                env=variables,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANK_COUNT)
        ]
        try:
            told = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
        except subprocess.TimeoutExpired as error:
            told = [str(error)]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.wait() for rank in ranks):
            return [{"failed": {"told": text}} for text in told]
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(RANK_COUNT)]


# What a rank does.


def rank() -> int:
    return distributed.get_rank()


def images_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 4),
    )


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8)


class Heads(nn.Module):
    """One of two heads is used, and one parameter never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(8, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2))
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, head: int = 0) -> Tensor:
        return self.heads[head](self.trunk(x).tanh())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def trained(model: nn.Module, batches: Batches) -> list[Tensor | None]:
    """Take steps of SGD with each rank's own data, and return the gradients of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients: list[Tensor | None] = []
    for step in range(STEP_COUNT):
        torch.manual_seed(10 * step + rank())
        optimizer.zero_grad()
        for output in batches(model, step):
            output.square().mean().backward()
        gradients += [None if p.grad is None else local(p.grad) for p in model.parameters()]
        optimizer.step()
    return [*gradients, *(buffer.clone() for buffer in model.buffers())]


def local(value: Any) -> Tensor:
    return (value.to_local() if hasattr(value, "to_local") else value).clone()


def same(expected: Sequence[Tensor | None], actual: Sequence[Tensor | None]) -> bool:
    return len(expected) == len(actual) and all(
        (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))
        for a, b in zip(expected, actual, strict=True)
    )


def graph_count(module: nn.Module) -> int:
    return len(module.__dict__["_capture"].works)


def one_batch(model: nn.Module, step: int) -> Iterator[Tensor]:
    yield model(images())


def accumulated(model: nn.Module, step: int) -> Iterator[Tensor]:
    with model.no_sync():  # type: ignore[operator]  # DDP's
        yield model(images())
    yield model(images())


def one_head(model: nn.Module, step: int) -> Iterator[Tensor]:
    yield model(torch.randn(4, 8), step % 2)


def a_head_each(model: nn.Module, step: int) -> Iterator[Tensor]:
    yield model(torch.randn(4, 8), (step + rank()) % 2)


def ddp(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wrap a module, with many buckets."""
    return DistributedDataParallel(module, bucket_cap_mb=0.002, **options)  # type: ignore[arg-type]


PLANS: dict[str, Facts] = {
    "offload": {"planner": "offload_all"},
    "recompute": {"planner": "recompute_all"},
    "half": {"activation_budget": 0.5},
}


@scenario(
    "ddp",
    same=True,
    graphs=1,
    cases={
        "offload": ("offload", one_batch, {}),
        "recompute": ("recompute", one_batch, {}),
        "half": ("half", one_batch, {}),
        "accumulated": ("offload", accumulated, {}),
        "views": ("offload", accumulated, {"gradient_as_bucket_view": True}),
        "static": ("offload", one_batch, {"static_graph": True}),
    },
)
def ddp_trains(plan: str, batches: Batches, options: Facts) -> Facts:
    expected = trained(ddp(images_net(), **options), batches)
    module = backhaul.optimize(images_net(), images(), **PLANS[plan])
    actual = trained(ddp(module, **options), batches)
    return {"same": same(expected, actual), "graphs": graph_count(module)}


@scenario("ddp", same=True, graphs=2, cases={"one": (one_head,), "each": (a_head_each,)})
def ddp_finds_unused_parameters(batches: Batches) -> Facts:
    """A graph that comes inside of DDP is not split, and planned when one rank alone has it."""
    expected = trained(ddp(Heads(), find_unused_parameters=True), batches)
    module = backhaul.optimize(
        Heads(),
        (torch.randn(4, 8), 0),
        planner="offload_all",
        process_group=distributed.group.WORLD,
    )
    actual = trained(ddp(module, find_unused_parameters=True), batches)
    return {"same": same(expected, actual), "graphs": graph_count(module)}


@scenario("ddp", same=True, refused=True)
def the_module_of_a_ddp_is_optimized() -> Facts:
    expected = trained(ddp(images_net()), one_batch)
    wrapped = ddp(images_net())
    try:
        backhaul.optimize(wrapped, images())
        refused = ""
    except CaptureError as error:
        refused = str(error)
    wrapped.module = backhaul.optimize(wrapped.module, images(), planner="offload_all")
    actual = trained(wrapped, one_batch)
    return {
        "same": same(expected, actual),
        "refused": "it is a DistributedDataParallel" in refused,
    }


def rows() -> Tensor:
    """Return what a block is called with."""
    return torch.randn(4, WIDTH).requires_grad_()


def sharded(model: nn.Module, **options: Any) -> Any:
    for block in model.blocks:  # type: ignore[union-attr]  # it is a list of modules
        fully_shard(block, **options)
    return fully_shard(model, **options)


def with_blocks_optimized(model: Blocks, **options: Any) -> list[nn.Module]:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = backhaul.optimize(block, rows(), **options)
    return list(model.blocks)


def one_row_batch(model: nn.Module, step: int) -> Iterator[Tensor]:
    yield model(torch.randn(4, 8))


def accumulated_rows(model: nn.Module, step: int) -> Iterator[Tensor]:
    assert isinstance(model, FSDPModule)
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        yield model(torch.randn(4, 8))


@scenario(
    "fsdp",
    same=True,
    graphs=[1, 1],
    cases={
        "offload": ("offload", one_row_batch, True),
        "recompute": ("recompute", one_row_batch, True),
        "recompute-unsharded": ("recompute", one_row_batch, False),
        "accumulated": ("recompute", accumulated_rows, True),
    },
)
def blocks_are_sharded(plan: str, batches: Batches, reshards: bool) -> Facts:
    expected = trained(sharded(Blocks(), reshard_after_forward=reshards), batches)
    model = Blocks()
    blocks = with_blocks_optimized(model, **PLANS[plan])
    actual = trained(sharded(model, reshard_after_forward=reshards), batches)
    return {"same": same(expected, actual), "graphs": list(map(graph_count, blocks))}


@scenario("fsdp", same=True, graphs=1, cases={name: (name,) for name in PLANS})
def a_whole_model_is_sharded(plan: str) -> Facts:
    expected = trained(fully_shard(Blocks()), one_row_batch)
    module = backhaul.optimize(Blocks(), torch.randn(4, 8), **PLANS[plan])
    actual = trained(fully_shard(module), one_row_batch)
    return {"same": same(expected, actual), "graphs": graph_count(module)}


@scenario("fsdp", freed=True, read_again=True, sharded_state=True)
def parameters_of_sharded_blocks_are_not_held() -> Facts:
    """Between forward and backward no unsharded parameter is left, and recipes read them again."""
    model = Blocks()
    first = with_blocks_optimized(model, planner="recompute_all")[0]
    sharded(model, reshard_after_forward=True)
    block: Any = model.blocks[0]
    block.unshard()
    unsharded = list(block.parameters())
    block.reshard()
    output = model(torch.randn(4, 8))
    freed = all(parameter.untyped_storage().nbytes() == 0 for parameter in unsharded)
    names = [str(node.target) for node in first.backward_graph.graph.nodes]  # type: ignore[union-attr]
    output.sum().backward()
    model.set_reshard_after_forward(False)  # type: ignore[operator]  # FSDP2's
    model(torch.randn(4, 8))
    return {
        "freed": freed,
        "read_again": "aten.addmm.default" in names and "aten.native_layer_norm.default" in names,
        "sharded_state": all(hasattr(value, "to_local") for value in model.state_dict().values()),
    }


@scenario("fsdp", same=True, graphs=[2, 2])
def mixed_precision_is_planned_when_it_comes() -> Facts:
    """The sample's block computes in float32, the sharded one in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected = trained(sharded(Blocks(), mp_policy=policy), one_row_batch)
    model = Blocks()
    blocks = with_blocks_optimized(model, planner="recompute_all")
    actual = trained(sharded(model, mp_policy=policy), one_row_batch)
    return {"same": same(expected, actual), "graphs": list(map(graph_count, blocks))}


@scenario("fsdp", at_once=True, later=True)
def hooks_inside_of_a_graph_are_refused() -> Facts:
    told = []
    model = sharded(Blocks())
    with contextlib.suppress(CaptureError):
        backhaul.optimize(model.blocks[0], rows())
        told.append("")
    try:
        backhaul.optimize(model, torch.randn(4, 8))
    except CaptureError as error:
        told.append(str(error))
    module = backhaul.optimize(Blocks(), torch.randn(4, 8), planner="keep_all")
    sharded(module)
    try:
        module(torch.randn(4, 8))
    except CaptureError as error:
        told.append(str(error))
    return {"at_once": "FSDPBlocks" in told[0], "later": "blocks.0 is a FSDPBlock" in told[1]}


@scenario("fsdp", same=True, plans=1)
def sharded_blocks_are_compiled() -> Facts:
    expected = trained(sharded(Blocks()), one_row_batch)
    model = sharded(Blocks())
    plans: list[backhaul.Plan] = []
    options = {"executor": "eager", "planner": "offload_all", "on_plan": plans.append}
    for block in model.blocks:
        block.compile(backend="backhaul", options=options)
    return {"same": same(expected, trained(model, one_row_batch)), "plans": len(plans)}


def plans_of_all(module: Any) -> list[Any]:
    plans: list[Any] = [None] * RANK_COUNT
    distributed.all_gather_object(plans, module.plan)
    return plans


@contextlib.contextmanager
def slower(factor: float) -> Iterator[None]:
    """Let the link of this rank be so many times slower than it is said to be."""
    measure: Any = pipeline.measure_link

    def measured(*args: Any, **kwargs: Any) -> Any:
        link = measure(*args, **kwargs)
        times = {
            way: tuple(factor * time_s for time_s in getattr(link, way))
            for way in ("d2h_s", "h2d_s")
        }
        return replace(link, **times)

    pipeline.measure_link = measured
    try:
        yield
    finally:
        pipeline.measure_link = measure


@scenario("plan", alone=2, together=1, by_the_first=True)
def ranks_with_other_links_agree() -> Facts:
    found = []
    for group in (None, distributed.group.WORLD):
        with slower(1 + 999 * rank()):
            module = backhaul.optimize(
                images_net(), images(), activation_budget=0.5, process_group=group
            )
        found.append(plans_of_all(module))
    return {
        "alone": len({plan.machine for plan in found[0]}),
        "together": len(set(found[1])),
        # Free space, which is in the profile, changes meanwhile.
        "by_the_first": found[1][1].machine.link.d2h_s == found[0][0].machine.link.d2h_s,
    }


@scenario("plan", share=[0.5])
def ranks_of_one_host_share_its_tier() -> Facts:
    plans = []
    for group in (None, distributed.group.WORLD):
        module = backhaul.optimize(images_net(), images(), process_group=group)
        plans += [plans_of_all(module)]
    pairs = [
        [plan.machine.link.capacity_bytes for plan in each] for each in zip(*plans, strict=True)
    ]
    # Free space changes meanwhile.
    return {"share": sorted({round(shared / alone, 1) for alone, shared in pairs})}


@scenario("plan", same=True)
def a_plan_is_sent_by_hand() -> Facts:
    plans = [None if rank() else backhaul.plan(images_net(), images(), activation_budget=0.5)]
    distributed.broadcast_object_list(plans)
    assert plans[0] is not None
    module = backhaul.apply(images_net(), images(), plans[0])
    return {"same": len(set(plans_of_all(module))) == 1}


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@scenario("plan", plans=2, said=True)
def ranks_with_other_graphs_plan_alone() -> Facts:
    heard = Heard()
    logging.getLogger(pipeline.__name__).addHandler(heard)
    sample = torch.randn(4 + rank(), 3, 8, 8)
    module = backhaul.optimize(
        images_net(), sample, planner="offload_all", process_group=distributed.group.WORLD
    )
    return {
        "plans": len(set(plans_of_all(module))),
        "said": any("plan of its own, as they have 2 graphs" in text for text in heard.texts),
    }


@scenario("plan", same=True, graphs=True)
def one_rank_alone_meets_a_new_shape() -> Facts:
    def batches(model: nn.Module, step: int) -> Iterator[Tensor]:
        yield model(torch.randn(4 + rank() * step, 3, 8, 8))

    expected = trained(ddp(images_net()), batches)
    module = backhaul.optimize(
        images_net(), images(), planner="offload_all", process_group=distributed.group.WORLD
    )
    actual = trained(ddp(module), batches)
    return {
        "same": same(expected, actual),
        "graphs": graph_count(module) == (STEP_COUNT if rank() else 1),
    }


@scenario("plan", late=True, files=2)
def all_ranks_measure_at_the_same_time() -> Facts:
    """The first rank waits for the second, and shared costs are not those of a lone process."""
    store = distributed.distributed_c10d._get_default_store()
    measure, late = pipeline.measure_link, []

    def measured(*args: Any, **kwargs: Any) -> Any:
        late.append(store.check(["second rank"]))
        return measure(*args, **kwargs)

    if rank():
        time.sleep(1)
        store.set("second rank", "is here")
    pipeline.measure_link = measured
    try:
        backhaul.optimize(images_net(), images(), process_group=distributed.group.WORLD)
    finally:
        pipeline.measure_link = measure
    cpu = torch.device("cpu")
    return {"late": late == [True], "files": len({OpCache(cpu, rank_count=n).path for n in (1, 2)})}


def planner_without_a_plan(*_: Any) -> Any:
    raise BudgetError("too small", budget_bytes=1, smallest_bytes=5)


@scenario("plan", budget=5, tier="disk", note=True)
def all_ranks_raise_the_error_of_one() -> Facts:
    world = distributed.group.WORLD
    planner = "keep_all" if rank() else planner_without_a_plan
    measure = pipeline.measure_link

    def unmeasured(*_: Any, **__: Any) -> Any:
        raise TransferError("it is full", tier="disk", nbytes=1)

    found: Facts = {}
    try:
        backhaul.optimize(images_net(), images(), planner=planner, process_group=world)
    except BudgetError as error:
        found["budget"] = error.smallest_bytes
    pipeline.measure_link = unmeasured if rank() else measure
    try:
        backhaul.optimize(images_net(), images(), process_group=world)
    except TransferError as error:
        notes = getattr(error, "__notes__", [])
        found["tier"] = error.tier
        found["note"] = bool(rank()) or notes == ["raised by rank 1 of the process group"]
    finally:
        pipeline.measure_link = measure
    return found


class Gathering(nn.Module):
    """Computes on what all ranks have, as tensor parallelism does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        partial = self.first(x).tanh()
        whole = collectives.all_reduce(partial, "sum", distributed.group.WORLD)
        return self.second(whole.sin()).tanh()


@scenario("plan", same=True, sources=["assumed"], again=0, cases={name: (name,) for name in PLANS})
def a_collective_is_neither_measured_nor_run_again(plan: str) -> Facts:
    """Other ranks may not call it then: each rank measures as often as its clock says."""
    model = Gathering()
    reference = copy.deepcopy(model)
    assumed, pipeline.measure_ops = pipeline.measure_ops, MEASURE_OPS
    try:
        module = backhaul.optimize(model, torch.randn(4, 8), **PLANS[plan])
    finally:
        pipeline.measure_ops = assumed
    expected, actual = trained(reference, one_row_batch), trained(module, one_row_batch)
    backward = [str(node.target) for node in module.backward_graph.graph.nodes]
    return {
        "same": same(expected, actual),
        "sources": sorted({op.source for op in module.plan.machine.ops if "c10d" in op.key}),
        # The gradient of the sum is a sum.
        "again": sum("all_reduce" in name for name in backward) - 1,
    }


MEASURE_OPS = pipeline.measure_ops


def main(topic: str, number: str, folder: str) -> None:
    conftest = importlib.import_module("conftest")
    pipeline.measure_ops, pipeline.measure_link = conftest.assumed_ops, conftest.assumed_link
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(number),
        world_size=RANK_COUNT,
        timeout=timedelta(seconds=LIMIT_S / 2),
    )
    found: dict[str, Facts] = {}
    for name, each in SCENARIOS.items():
        if each.topic == topic:
            torch._dynamo.reset()
            torch.manual_seed(int(number))
            try:
                found[name] = each.run()
            except Exception:
                found[name] = {"raised": traceback.format_exc()}
            distributed.barrier()
    (Path(folder) / number).write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""How far plans are from the best, on random small graphs and on real ones.

    python benchmarks/optimality.py [--graphs 500] [--real]

Small graphs: every way of every tensor is tried, with copies placed at every legal moment where
those are few, and for several limits otherwise; the simulator judges.
Real graphs: the gap to a linear program that no plan can beat (`scheduler.bound`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torchvision
import transformers

import backhaul
from backhaul.errors import BudgetError
from backhaul.records import (
    Action,
    Budget,
    CodecRecord,
    GraphRecord,
    LinkProfile,
    MachineProfile,
    Offload,
    OpCost,
    OpRecord,
    Plan,
    Recipe,
    TensorRecord,
)
from backhaul.scheduler.bound import least_step_s
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.placement import Limit, place, sketched
from backhaul.scheduler.planner import frontier
from backhaul.scheduler.simulator import predict
from backhaul.scheduler.ways import Way, options_of, recipes_find_values

SHARES = (0.9, 0.75, 0.6, 0.45, 0.3)
MOMENTS_MOST = 300
KEEP_ALL = {"hardware": "a100-pcie4", "planner": "keep_all"}


def random_case(seed: int) -> tuple[GraphRecord, MachineProfile]:
    """Make a chain of forward ops and the chain of backward ops that read what they saved."""
    rng = random.Random(seed)
    count = rng.randint(3, 5)
    end = 2 * count
    names = [f"f{i}" for i in range(count)] + [f"b{i}" for i in range(count)]
    tensors = []
    for i in range(count):
        use = end - 1 - i
        nbytes = rng.choice([40, 100, 100, 200])
        codec = CodecRecord(
            name="bits",
            arguments=(),
            packed_bytes=nbytes // rng.choice([2, 8]),
            encode_key="pack",
            decode_key="pack",
            is_exact=rng.random() < 0.5,
        )
        recipe = Recipe(ops=(i,), sources=(f"f{i - 1}",) if i else (), made=((nbytes, 0, 0),))
        tensors.append(
            TensorRecord(
                name=names[i],
                module="",
                target="random",
                shape=(nbytes,),
                dtype="uint8",
                nbytes=nbytes,
                role="saved",
                born=i,
                dies=use,
                last_forward_use=min(i + rng.choice([0, 1, 1, 2]), count - 1),
                first_backward_use=use,
                codecs=(codec,) if rng.random() < 0.4 else (),
                recipe=recipe if rng.random() < 0.7 else None,
            )
        )
    graph = GraphRecord(
        fingerprint=f"random {seed}",
        ops=tuple(OpRecord(name=n, target="random", module="", cost_key=n) for n in names),
        forward_count=count,
        tensors=tuple(tensors),
    )
    costs = [
        OpCost(key=n, duration_s=rng.uniform(0.2, 2.0), workspace_bytes=0, source="assumed")
        for n in names
    ]
    costs.append(
        OpCost(key="pack", duration_s=rng.uniform(0.02, 0.3), workspace_bytes=0, source="assumed")
    )
    bytes_per_s = rng.choice([30.0, 100.0, 300.0])
    copy_s = (0.01, 0.01 + 1000 / bytes_per_s)
    link = LinkProfile(
        tier="random",
        sizes_bytes=(0, 1000),
        d2h_s=copy_s,
        h2d_s=copy_s,
        duplex_d2h_fraction=0.8,
        duplex_h2d_fraction=0.8,
        capacity_bytes=2**40,
        source="assumed",
    )
    machine = MachineProfile(
        device="random", torch_version="", alignment_bytes=1, link=link, ops=tuple(costs)
    )
    return graph, machine


def best_points(graph: GraphRecord, machine: MachineProfile) -> list[tuple[int, float]]:
    """Return memory and time of every plan that is worth a try."""
    cost = CostModel(graph, machine)
    offered = {n: [o.way for o in options_of(cost, t)] for n, t in cost.planned.items()}
    points = []
    for chosen in itertools.product(*offered.values()):
        ways = {name: way for name, way in zip(offered, chosen, strict=True) if way != "keep"}
        if not recipes_find_values(cost.planned, ways):
            continue
        for actions in _placed_anyhow(cost, ways):
            prediction = predict(cost, actions)
            points.append((prediction.saved_peak_bytes, prediction.step_s))
    return points


def _placed_anyhow(cost: CostModel, ways: Mapping[str, Way]) -> Iterator[dict[str, Action]]:
    actions = sketched(cost, ways)
    lives = cost.layout.lives_under(actions)
    moved = {name: each for name, each in actions.items() if isinstance(each, Offload)}
    moments = [
        list(
            itertools.product(
                range(cost.planned[name].last_forward_use, cost.forward_count),
                range(cost.forward_count, lives[name].use + 1),
            )
        )
        for name in moved
    ]
    total = 1
    for each in moments:
        total *= len(each)
    if total <= MOMENTS_MOST:
        for chosen in itertools.product(*moments):
            placed = dict(actions)
            for (name, action), (wait, reload) in zip(moved.items(), chosen, strict=True):
                placed[name] = replace(action, wait_after=wait, reload_before=reload)
            yield placed
    for nbytes in (0, 60, 120, 180, 240, 300, 400, float("inf")):
        yield place(cost, ways, Limit(nbytes, saved_only=True))


def small_gaps(seed: int) -> list[float]:
    """Return how much longer the planner's steps are than the best, for several budgets."""
    graph, machine = random_case(seed)
    points = best_points(graph, machine)
    whole = predict(CostModel(graph, machine), {}).saved_peak_bytes
    gaps = []
    for share in SHARES:
        nbytes = int(whole * share)
        best_s = min((step_s for used, step_s in points if used <= nbytes), default=None)
        try:
            budget = Budget(kind="activations", value=nbytes)
            planned_s = frontier(graph, machine, budget).predicted.step_s
        except BudgetError:
            planned_s = None
        if best_s is not None:
            gaps.append(planned_s / best_s - 1 if planned_s is not None else float("inf"))
    return gaps


def real_plans() -> Iterator[tuple[str, Plan]]:
    """Capture real models for `a100-pcie4`."""
    transformers.logging.set_verbosity_error()
    for name in ("resnet50", "vgg19"):
        model = getattr(torchvision.models, name)()
        images = torch.randn(32, 3, 224, 224, device="meta")
        yield (
            name,
            backhaul.plan(model.to("meta"), images, hardware="a100-pcie4", planner="keep_all"),
        )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))
        tokens = torch.zeros((8, 1024), dtype=torch.long)
    yield "gpt2", backhaul.plan(model.train(), {"input_ids": tokens}, **KEEP_ALL)


def main() -> None:
    """Print the gaps as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=500)
    parser.add_argument("--real", action="store_true", help="real models only")
    arguments = parser.parse_args()
    if not arguments.real:
        found = [(gap, seed) for seed in range(arguments.graphs) for gap in small_gaps(seed)]
        gaps = [gap for gap, _ in found]
        worst, seed = max(found)
        line = {"graphs": arguments.graphs, "plans": len(gaps), "mean": statistics.fmean(gaps)}
        line |= {"worst": worst, "of_seed": seed, "over_5_percent": sum(g > 0.05 for g in gaps)}
        print(json.dumps(line), flush=True)
    for name, kept in real_plans():
        for share in (0.8, 0.6, 0.5, 0.4, 0.3, 0.25):
            nbytes = int(kept.baseline.saved_peak_bytes * share)
            budget = Budget(kind="activations", value=nbytes)
            try:
                plan = frontier(kept.graph, kept.machine, budget)
            except BudgetError as error:
                print(json.dumps({"model": name, "share": share, "error": str(error)}))
                continue
            bound_s = least_step_s(kept.graph, kept.machine, "activations", nbytes)
            line = {
                "model": name,
                "share": share,
                "slowdown": round(plan.predicted.step_s / plan.baseline.step_s, 4),
                "bound": round(bound_s / plan.baseline.step_s, 4),
                "gap": round(plan.predicted.step_s / bound_s - 1, 4),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

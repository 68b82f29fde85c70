"""Overhead against memory, on six machines, with some actions and with all.

    python benchmarks/curves.py [--batch 64] [--output docs/curves]

VGG19 and ResNet-50 in fp32 at 224 pixels are captured on the meta device and planned by the
rooflines of each named profile, once with copies alone, once with recomputing alone, and once
with everything.  Nothing is measured or run: every number is modelled.  Training memory is the
peak of the whole step: parameters, gradients, and SGD's momentum.  Writes one picture a model
and the table of docs/measured.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import matplotlib
import torch
import torchvision

import backhaul
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.frontier import Frontier
from backhaul.scheduler.hardware import hardware_names
from backhaul.scheduler.ways import ALL_WAYS, Way

matplotlib.use("Agg")
from matplotlib import pyplot  # after the choice of a backend without a screen

MODELS = ("vgg19", "resnet50")
KINDS: Mapping[str, frozenset[Way]] = {
    "offload only": frozenset(("keep", "move")),
    "recompute only": frozenset(("keep", "recompute")),
    "all actions": ALL_WAYS,
}
STYLES = {"offload only": "--", "recompute only": ":", "all actions": "-"}
PAPER_REDUCTION = 0.35

Curve = list[tuple[float, float]]
"""Share of the training memory that is saved, and share of the step time that it costs."""


def curves_of(model_name: str, hardware: str, batch: int) -> dict[str, Curve]:
    """Return the trade-off of one model on one machine, by kind of action."""
    model = torchvision.models.get_model(model_name, weights=None).to("meta")
    images = torch.empty(batch, 3, 224, 224, device="meta")
    momentum_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    kept = backhaul.plan(
        model.train(), images, hardware=hardware, planner="keep_all", held_bytes=momentum_bytes
    )
    cost = CostModel(kept.graph, kept.machine)
    whole_bytes, whole_s = kept.baseline.peak_bytes, kept.baseline.step_s
    return {
        kind: [
            (1 - found.used_bytes / whole_bytes, found.prediction.step_s / whole_s - 1)
            for found in Frontier(cost, "memory", ways).candidates
        ]
        for kind, ways in KINDS.items()
    }


def overhead_at(curve: Curve, reduction: float) -> float | None:
    """Return the least overhead that saves so much, or None if nothing does."""
    return min((cost for saved, cost in curve if saved >= reduction), default=None)


def draw(model_name: str, curves: Mapping[str, dict[str, Curve]], path: Path) -> None:
    """Draw one panel for each machine."""
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 7), sharex=True, layout="constrained")
    for axis, (hardware, by_kind) in zip(axes.flat, curves.items(), strict=True):
        for kind, curve in by_kind.items():
            saved, cost = zip(*sorted(curve), strict=True)
            axis.step(
                [100 * each for each in saved],
                [100 * each for each in cost],
                STYLES[kind],
                where="pre",
                label=kind,
            )
        axis.set_title(hardware)
        axis.set_ylim(-1, 60)
        axis.axvline(100 * PAPER_REDUCTION, color="lightgrey", zorder=0)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("training memory saved, %")
    for axis in axes[:, 0]:
        axis.set_ylabel("step time added, %")
    axes[0, 0].legend()
    figure.suptitle(f"{model_name}: overhead against memory, modelled")
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Draw the pictures and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("docs/curves"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    print("| model | machine | actions | overhead at -35 % | most saved | at overhead |")
    print("|---|---|---|---:|---:|---:|")
    for model_name in MODELS:
        curves = {}
        for hardware in hardware_names():
            curves[hardware] = curves_of(model_name, hardware, arguments.batch)
            for kind, curve in curves[hardware].items():
                at = overhead_at(curve, PAPER_REDUCTION)
                saved, cost = max(curve)
                print(
                    f"| {model_name} | {hardware} | {kind} "
                    f"| {'-' if at is None else f'{at:.1%}'} | {saved:.1%} | {cost:.1%} |",
                    flush=True,
                )
        draw(model_name, curves, arguments.output / f"{model_name}.svg")


if __name__ == "__main__":
    main()

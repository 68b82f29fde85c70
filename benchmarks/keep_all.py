"""Time keep-all against eager: the graph that moves nothing should cost nothing.

Runs eager and keep-all steps alternately in one process, after warm-up, and prints the median
of the ratios of neighbouring steps, with the peak of each by the allocator.

    python benchmarks/keep_all.py --device cpu --pairs 9
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time

import torch
import torchvision
from allocator import keep_freed_memory

import backhaul
from backhaul.runtime.memory import measure_peak_bytes

MODELS = ("resnet50", "vgg19")


def main() -> None:
    """Run every model and print one JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    keep_freed_memory()
    for name in MODELS:
        result = compare(name, torch.device(options.device), options.batch, options.pairs)
        print(json.dumps(result))


def compare(name: str, device: torch.device, batch: int, pairs: int) -> dict[str, object]:
    """Compare one model's step, eager and keep-all."""
    model = getattr(torchvision.models, name)(weights=None).to(device)
    images = torch.randn(batch, 3, 224, 224, device=device)
    labels = torch.randint(0, 1000, (batch,), device=device)
    eager = copy.deepcopy(model)
    kept = backhaul.optimize(model, images, planner="keep_all")

    def step(module: torch.nn.Module) -> None:
        module.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(module(images), labels).backward()

    def timed(module: torch.nn.Module) -> float:
        _synchronize(device)
        start_s = time.perf_counter()
        step(module)
        _synchronize(device)
        return time.perf_counter() - start_s

    for module in (eager, kept):
        step(module)
    # Each pair starts with the other one of the two, so that neither always comes second.
    pairs_s = [
        (timed(eager), timed(kept)) if i % 2 else (timed(kept), timed(eager))[::-1]
        for i in range(pairs)
    ]
    peaks = []
    for module in (eager, kept):
        module.zero_grad(set_to_none=True)
        peaks.append(measure_peak_bytes(lambda module=module: step(module), device).peak_bytes)
    return {
        "model": name,
        "batch": batch,
        "device": str(device),
        "processor": platform.processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "eager_s": statistics.median(pair[0] for pair in pairs_s),
        "keep_all_s": statistics.median(pair[1] for pair in pairs_s),
        "median_ratio": statistics.median(pair[1] / pair[0] for pair in pairs_s),
        "eager_peak_bytes": peaks[0],
        "keep_all_peak_bytes": peaks[1],
    }


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


if __name__ == "__main__":
    main()

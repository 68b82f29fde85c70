"""Time to plan, against the number of ops.

    python benchmarks/planning.py [--budget 0.5]

GPT-2 with ever more layers, captured on the meta device and planned for `h200` by its rooflines,
so that nothing is measured or run.  Prints a JSON line for each depth and the exponent of a
power law through them.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch
import transformers

import backhaul
from backhaul.records import Budget, Plan
from backhaul.scheduler.planner import frontier

LAYERS = (4, 8, 16, 32, 64, 96)


def captured(layer_count: int) -> Plan:
    """Capture a narrow GPT-2 of so many layers."""
    config = transformers.GPT2Config(
        vocab_size=512, n_layer=layer_count, n_embd=256, n_head=4, n_positions=256, use_cache=False
    )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).train()
        tokens = torch.zeros((8, 256), dtype=torch.long)
    sample = {"input_ids": tokens, "labels": tokens}
    model.loss_type = "ForCausalLM"
    return backhaul.plan(model, sample, hardware="h200", planner="keep_all")


def main() -> None:
    """Plan each depth once and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=0.5, help="share of saved activations")
    share = parser.parse_args().budget
    counts, times_s = [], []
    for layer_count in LAYERS:
        kept = captured(layer_count)
        budget = Budget(kind="activations", value=int(share * kept.baseline.saved_peak_bytes))
        start_s = time.perf_counter()
        plan = frontier(kept.graph, kept.machine, budget)
        times_s.append(time.perf_counter() - start_s)
        counts.append(len(kept.graph.ops))
        slowdown = plan.predicted.step_s / plan.baseline.step_s
        line = {
            "layers": layer_count,
            "ops": counts[-1],
            "planning_s": round(times_s[-1], 3),
            "slowdown": round(slowdown, 4),
        }
        print(json.dumps(line), flush=True)
    exponent = float(np.polyfit(np.log(counts), np.log(times_s), 1)[0])
    print(json.dumps({"exponent": round(exponent, 3)}))


if __name__ == "__main__":
    main()

"""Plan a model that this machine could not hold: time and memory of planning.

    python benchmarks/large_model.py [--budget 0.3]

A Llama of 8 billion parameters in bfloat16, one sequence of 8,192 tokens, captured on the meta
device and planned for `h200`.  Nothing is measured or run.  Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import Counter

import torch
import transformers

import backhaul


def main() -> None:
    """Capture, plan, and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=0.3, help="share of saved activations")
    share = parser.parse_args().budget
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    )
    start_s = time.perf_counter()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
        model.loss_type = "ForCausalLM"
        tokens = torch.zeros((1, 8192), dtype=torch.long)
    sample = {"input_ids": tokens, "labels": tokens}
    plan = backhaul.plan(model, sample, hardware="h200", activation_budget=share)
    taken = Counter(type(decision.action).__name__ for decision in plan.decisions)
    line = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "ops": len(plan.graph.ops),
        "seconds": round(time.perf_counter() - start_s, 1),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "saved_bytes": [plan.baseline.saved_peak_bytes, plan.predicted.saved_peak_bytes],
        "peak_bytes": [plan.baseline.peak_bytes, plan.predicted.peak_bytes],
        "slowdown": round(plan.predicted.step_s / plan.baseline.step_s, 4),
        "actions": dict(taken),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()

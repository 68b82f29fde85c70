"""Noise that rounding adds to each weight's gradient: as foretold, and as measured.

    python benchmarks/gradient_noise.py [--budget 0.01]

Each model is run on photographs or text without being updated: exactly, then with activations
rounded within the bounds that the controller has chosen.  What the two gradients of a weight differ
by is its noise; its square is averaged over several batches.  Blocks of an activation that
rounding does not fit are kept as they are, and make none.  Prints a JSON line a layer and one a
model: standard deviations of the noise, foretold and measured, and their ratio, and how many
packed forms found no room.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torchvision
import transformers
from torch import nn

import backhaul
from backhaul.demo import photographs

WARMUP_STEPS = 10
BATCHES = 8


def vision(name: str, size: int, batch: int) -> tuple[nn.Module, dict[str, Any]]:
    """Make a torchvision model and real photographs."""
    torch.manual_seed(0)
    images, labels = photographs(size, batch)
    return torchvision.models.get_model(name, weights=None), {"x": images, "labels": labels}


def text(_name: str, _size: int, batch: int) -> tuple[nn.Module, dict[str, Any]]:
    """Make a tiny GPT-2 and shipped text, as bytes."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=128, n_embd=64, n_layer=4, n_head=4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    written = (transformers.__doc__ or "") + (argparse.__doc__ or "") + (torch.__doc__ or "")
    written += str(torch.nn.Module.__doc__) + str(torch.optim.Optimizer.__doc__) + str(__doc__)
    data = torch.tensor(list(written.encode()[: batch * 128])).view(-1, 128)
    return transformers.GPT2LMHeadModel(config), {"input_ids": data}


CASES: Mapping[str, tuple[Callable[..., tuple[nn.Module, dict[str, Any]]], int, int]] = {
    "resnet18": (vision, 96, 16),
    "vgg16": (vision, 96, 8),
    "mnasnet0_5": (vision, 96, 16),
    "gpt2-tiny": (text, 0, 8),
}


def loss_of(model: nn.Module, sample: Mapping[str, Any]) -> torch.Tensor:
    """Run a model on a sample."""
    if "labels" in sample:
        return nn.functional.cross_entropy(model(sample["x"]), sample["labels"])
    logits = model(**sample).logits
    target = sample["input_ids"][:, 1:].reshape(-1)
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), target)


def train_a_little(model: nn.Module, sample: Mapping[str, Any], steps: int = 10) -> None:
    """Move a model away from its initial weights, and make it repeatable."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, sample).backward()
        optimizer.step()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def gradients_of(
    model: nn.Module, sample: Mapping[str, Any], *, is_watched: bool = False
) -> dict[str, torch.Tensor]:
    """Return the gradients of one step."""
    model.zero_grad()
    loss = loss_of(model, sample)
    if is_watched:
        model.compression.observer.mode = "norms"
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def noises(
    model: nn.Module, sample: Mapping[str, Any], budget: float
) -> Iterator[tuple[str, float, float]]:
    """Yield each layer's weight with the noise that was foretold, and that was measured."""
    inputs = sample["x"] if "labels" in sample else dict(sample)
    module = backhaul.optimize(
        model,
        inputs,
        planner="compress_all",
        lossless=False,
        error_budget=budget,
        warmup_steps=WARMUP_STEPS,
    )
    while not module.compression.history:
        for batch in batches_of(sample):
            gradients_of(module, batch)
    last = module.compression.history[-1]
    backward = module.plan.graph.ops[module.plan.graph.forward_count :]
    module_by_op = {op.name: op.module for op in backward}
    measured: Counter[str] = Counter()
    foretold: Counter[str] = Counter()
    for batch in batches_of(sample):
        exact, noisy = gradients_of(model, batch), gradients_of(module, batch, is_watched=True)
        for read, sums in module.compression.observer.sums().items():
            weight = module_by_op[read.op] + ".weight"
            if read.tensor in last.bounds and weight in exact:
                rounded = 1 - last.exact_fractions[read.tensor]
                foretold[weight] += rounded * last.bounds[read.tensor] ** 2 * sums.spread / 3
                measured[weight] += float((noisy[weight] - exact[weight]).double().norm()) ** 2
        module.compression.observer.forget()
    overflows = sum(module.overflow_counts.values())
    if overflows:
        print(json.dumps({"packed forms without room": overflows}))
    for weight, squares in foretold.items():
        yield weight, math.sqrt(squares / BATCHES), math.sqrt(measured[weight] / BATCHES)


def batches_of(sample: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield other batches of the same kind: photographs moved sideways, text moved on."""
    for number in range(BATCHES):
        yield {
            name: values if name == "labels" else values.roll(7 * number, dims=-1)
            for name, values in sample.items()
        }


def main() -> None:
    """Print the noises as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=0.01)
    parser.add_argument("--models", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    for name in arguments.models:
        make, size, batch = CASES[name]
        model, sample = make(name, size, batch)
        train_a_little(model, sample)
        ratios = []
        for weight, foretold, measured in noises(model, sample, arguments.budget):
            count = model.get_parameter(weight).numel()
            line = {"model": name, "weight": weight, "foretold": foretold / count**0.5}
            line |= {"measured": measured / count**0.5, "ratio": measured / foretold}
            print(json.dumps(line), flush=True)
            ratios.append(measured / foretold)
        summary = {"model": name, "layers": len(ratios), "median": statistics.median(ratios)}
        summary |= {"least": min(ratios), "most": max(ratios)}
        print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()

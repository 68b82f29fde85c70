"""Time at equal peaks: backhaul's Inductor executor beside torch's own means.

    python benchmarks/compiled.py [--models resnet50 vgg19 gpt2 vit_b_16] [--rounds 7] [--scale 1]

Peers: `torch.compile` with `activation_memory_budget` of 1.0, 0.7, 0.5 and 0.3, eager,
`torch.utils.checkpoint` around every block, and saved-tensor hooks that write to disk.  For the
peak that each peer reaches, backhaul plans for that peak and is measured, too.  All steps of a
model alternate in one run.  Prints a JSON line a pair, then a table; a ratio is ours over theirs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision
import transformers
from allocator import keep_freed_memory
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

import backhaul
from backhaul.errors import BudgetError
from backhaul.runtime.memory import measure_peak_bytes

BUDGETS = (1.0, 0.7, 0.5, 0.3)
CPU = torch.device("cpu")

Step = Callable[[], None]


def vision(name: str, size: int, batch: int) -> tuple[nn.Module, Tensor]:
    """Make a torchvision model and images."""
    return torchvision.models.get_model(name), torch.randn(batch, 3, size, size)


def gpt2(batch: int, length: int) -> tuple[nn.Module, Tensor]:
    """Make GPT-2-small without dropout, which differs between executors, and tokens."""
    config = transformers.GPT2Config(
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config), torch.randint(0, 50257, (batch, length))


def made(name: str, scale: float) -> tuple[nn.Module, Tensor]:
    """Make a model and its input; `scale` changes the batch."""
    torch.manual_seed(0)
    batch = {"resnet50": 8, "vgg19": 8, "gpt2": 2, "vit_b_16": 4}[name]
    batch = max(1, round(batch * scale))
    if name == "gpt2":
        return gpt2(batch, 256)
    return vision(name, {"resnet50": 128, "vgg19": 96, "vit_b_16": 224}[name], batch)


def loss_of(output: Any) -> Tensor:
    """Return a scalar that every output element has a part in."""
    return getattr(output, "logits", output).float().square().mean()


def step_of(model: nn.Module, run: Callable[[Tensor], Any], sample: Tensor) -> Step:
    """Make a training step without an optimizer."""

    def step() -> None:
        loss_of(run(sample)).backward()

    step.model = model  # type: ignore[attr-defined]  # for its gradients
    return step


def compiled_step(name: str, scale: float, budget: float) -> Step:
    """Make a step of `torch.compile` under an activation budget."""
    model, sample = made(name, scale)

    def run(sample: Tensor) -> Any:
        return model(sample)

    # Dynamo keeps graphs at a code object: each budget has its own.
    function = type(run)(run.__code__.replace(co_name=f"run_{budget}"), run.__globals__,
                         closure=run.__closure__)  # fmt: skip
    torch._dynamo.reset()
    step = step_of(model, torch.compile(function, dynamic=False), sample)
    with functorch_config.patch(activation_memory_budget=budget):
        step()
    return step


def checkpointed_step(name: str, scale: float) -> Step:
    """Make an eager step with every block checkpointed."""
    model, sample = made(name, scale)
    for block in blocks_of(model):
        plain = block.forward
        block.forward = (  # type: ignore[method-assign]
            lambda *args, plain=plain, **kwargs: checkpoint(
                plain, *args, use_reentrant=False, **kwargs
            )
        )
    return step_of(model, model, sample)


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield what people checkpoint: residual blocks, transformer layers, stages of VGG."""
    names = ("Bottleneck", "GPT2Block", "EncoderBlock")
    found = [module for module in model.modules() if type(module).__name__ in names]
    yield from found or [module for module in model.modules() if isinstance(module, nn.Conv2d)]


def spilled_step(name: str, scale: float, folder: Path) -> Step:
    """Make an eager step whose saved tensors are written to files and read back."""
    model, sample = made(name, scale)
    count = 0

    def pack(value: Tensor) -> Any:
        nonlocal count
        if isinstance(value, nn.Parameter) or value.nbytes < 1 << 16:
            return value
        count += 1
        path = folder / f"{name}-{count % 10000}"
        torch.save(value, path)
        return path

    def unpack(packed: Any) -> Tensor:
        loaded: Tensor = packed if isinstance(packed, Tensor) else torch.load(packed)
        return loaded

    def run(sample: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return model(sample)

    return step_of(model, run, sample)


def our_step(name: str, scale: float, peak_bytes: int) -> tuple[Step | None, str]:
    """Make our step for a peak, measured as `peak_of` does, or say why there is none."""
    model, sample = made(name, scale)
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), sample))
    try:
        optimized = backhaul.optimize(
            model, sample, executor="inductor", memory_budget=peak_bytes + held
        )
    except BudgetError as error:
        return None, str(error)
    step = step_of(model, optimized, sample)
    step.plan = optimized.plan  # type: ignore[attr-defined]
    return step, optimized.plan.summary


def peak_of(step: Any) -> int:
    """Measure the peak of a step above what lies there before it."""
    step.model.zero_grad()
    gc.collect()
    return measure_peak_bytes(step, CPU).peak_bytes


def seconds(step: Any) -> float:
    """Time a step."""
    step.model.zero_grad()
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s


def pairs_of(name: str, scale: float, rounds: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure a model under every peer, and under us at every peer's peak."""
    steps: dict[str, Any] = {
        f"torch.compile, budget {budget}": compiled_step(name, scale, budget) for budget in BUDGETS
    }
    model, sample = made(name, scale)
    steps["eager"] = step_of(model, model, sample)
    steps["checkpoint per block"] = checkpointed_step(name, scale)
    steps["hooks to disk"] = spilled_step(name, scale, folder)
    ours: dict[str, Any] = {}
    for peer, step in steps.items():
        step()
        step.peak = peak_of(step)
        known = [each for each in ours.values() if each.budget == step.peak]
        ours[peer], told = (known[0], known[0].told) if known else our_step(name, scale, step.peak)
        if ours[peer] is None:
            print(json.dumps({"model": name, "peer": peer, "ours": told}), flush=True)
            del ours[peer]
            continue
        ours[peer].budget, ours[peer].told = step.peak, told
        ours[peer]()
        ours[peer]()
        ours[peer].peak = peak_of(ours[peer])
    times: dict[Any, list[float]] = {step: [] for step in (*steps.values(), *ours.values())}
    for _ in range(rounds):
        for step, found in times.items():
            found.append(seconds(step))
    for peer, step in steps.items():
        theirs_s = statistics.median(times[step])
        line = {"model": name, "peer": peer, "peak": step.peak, "s": theirs_s}
        if peer in ours:
            ours_s = statistics.median(times[ours[peer]])
            line |= {"our peak": ours[peer].peak, "our s": ours_s, "ratio": ours_s / theirs_s}
            line |= {"our plan": ours[peer].told}
        yield line


def main() -> None:
    """Print every pair as a JSON line, and a table of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet50", "vgg19", "gpt2", "vit_b_16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0)
    arguments = parser.parse_args()
    keep_freed_memory()
    torch._dynamo.config.recompile_limit = 64
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            for line in pairs_of(name, arguments.scale, arguments.rounds, Path(folder)):
                print(json.dumps(line), flush=True)
                lines.append(line)
    print("\n| model | peer | its peak | its step | our peak | our step | ratio |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for line in lines:
        ours = ("not reached", "", "")
        if "ratio" in line:
            ours = (
                f"{line['our peak'] / 2**20:.0f} MiB",
                f"{line['our s'] * 1e3:.0f} ms",
                f"{line['ratio']:.2f}",
            )
        print(
            f"| {line['model']} | {line['peer']} | {line['peak'] / 2**20:.0f} MiB "
            f"| {line['s'] * 1e3:.0f} ms | {' | '.join(ours)} |"
        )


if __name__ == "__main__":
    main()

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
from dataclasses import dataclass, field
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


@dataclass(eq=False, slots=True)
class Step:
    """A training step without an optimizer.

    Attributes:
        model: Whose gradients it makes.
        run: Calls the model.
        sample: What with.
        plan: What our plan does, or why there is none.
        peak_bytes: Its peak above what lies there before it, once measured.
        times_s: How long it took, each time.
    """

    model: nn.Module
    run: Callable[[Tensor], Any]
    sample: Tensor
    plan: str = ""
    peak_bytes: int = 0
    times_s: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        """Take the step."""
        loss_of(self.run(self.sample)).backward()

    def measure_peak(self) -> None:
        """Find the peak, after steps that compile and warm up."""
        self()
        self()
        self.model.zero_grad()
        gc.collect()
        self.peak_bytes = measure_peak_bytes(self, CPU).peak_bytes

    def measure_time(self) -> None:
        """Time one more step."""
        self.model.zero_grad()
        start_s = time.perf_counter()
        self()
        self.times_s.append(time.perf_counter() - start_s)


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


def compiled_step(name: str, scale: float, budget: float) -> Step:
    """Make a step of `torch.compile` under an activation budget."""
    model, sample = made(name, scale)

    def run(sample: Tensor) -> Any:
        return model(sample)

    # Dynamo keeps graphs at a code object: each budget has its own.
    function = type(run)(run.__code__.replace(co_name=f"run_{budget}"), run.__globals__,
                         closure=run.__closure__)  # fmt: skip
    torch._dynamo.reset()
    step = Step(model, torch.compile(function, dynamic=False), sample)
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
    return Step(model, model, sample)


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

    return Step(model, run, sample)


def our_step(name: str, scale: float, peak_bytes: int) -> Step:
    """Make our step for a peak of these bytes; where there is none it has no peak, and says why."""
    model, sample = made(name, scale)
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), sample))
    try:
        optimized = backhaul.optimize(
            model, sample, executor="inductor", memory_budget=peak_bytes + held
        )
    except BudgetError as error:
        return Step(model, model, sample, str(error))
    step = Step(model, optimized, sample, optimized.plan.summary)
    step.measure_peak()
    return step


def pairs_of(name: str, scale: float, rounds: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure a model under every peer, and under us at every peer's peak."""
    peers = {
        f"torch.compile, budget {budget}": compiled_step(name, scale, budget) for budget in BUDGETS
    }
    model, sample = made(name, scale)
    peers["eager"] = Step(model, model, sample)
    peers["checkpoint per block"] = checkpointed_step(name, scale)
    peers["hooks to disk"] = spilled_step(name, scale, folder)
    ours: dict[int, Step] = {}
    for peer in peers.values():
        peer.measure_peak()
        if peer.peak_bytes not in ours:
            ours[peer.peak_bytes] = our_step(name, scale, peer.peak_bytes)
    timed = [*peers.values(), *(step for step in ours.values() if step.peak_bytes)]
    for _ in range(rounds):
        for step in timed:
            step.measure_time()
    for told, peer in peers.items():
        theirs_s = statistics.median(peer.times_s)
        line = {"model": name, "peer": told, "peak": peer.peak_bytes, "s": theirs_s}
        our = ours[peer.peak_bytes]
        if our.times_s:
            ours_s = statistics.median(our.times_s)
            line |= {"our peak": our.peak_bytes, "our s": ours_s, "ratio": ours_s / theirs_s}
        yield {**line, "our plan": our.plan}


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

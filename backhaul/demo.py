"""Train on real photographs, eager and with backhaul, and lay every figure side by side.

Each model trains twice from the same weights, buffers and seed on one batch of photographs
that ship inside the scikit-image wheel.  Memory is what the allocator counts; resident memory
is what the kernel counts, of a fresh process for each variant; time is the median of steps
that alternate.  Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn
from torch.nn import functional

from backhaul.api import apply, optimize
from backhaul.records import Plan
from backhaul.runtime.memory import measure_peak_bytes
from backhaul.runtime.op_cache import device_name

__all__ = [
    "DemoError",
    "Figures",
    "Settings",
    "VariantFigures",
    "measure_model",
    "photographs",
    "run_demo",
]

_SEED = 20
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_PREDICTION_TOLERANCE = 0.02
_RSS_STEP_COUNT = 2

# Photograph in the wheel of scikit-image, and the category of ImageNet that shows in it.
# The astronaut stands before a model of the space shuttle.  ImageNet has neither a rocket
# nor a motorcycle: a missile and a moped are the nearest that it has.
_PHOTOS: tuple[tuple[str, str], ...] = (
    ("chelsea.png", "tabby"),
    ("coffee.png", "espresso"),
    ("astronaut.png", "space shuttle"),
    ("rocket.jpg", "missile"),
    ("clock_motion.png", "analog clock"),
    ("motorcycle_left.png", "moped"),
)
# They return a tuple in training, which a plain cross-entropy does not take.
_MODELS_WITH_AUXILIARY_OUTPUTS = frozenset({"googlenet", "inception_v3"})

Step = Callable[[], "Outcome"]


class DemoError(ValueError):
    """The demo cannot run as asked: something is not installed, or has another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to train, and how.

    Attributes:
        models: Names of torchvision classifiers.
        batch_size: Photographs in a step.
        step_count: Timed steps of each variant.
        budget_fraction: Part of the saved activations that may stay on the device.
        device: Where to train.
        image_size: Height and width of a photograph, in pixels.
    """

    models: tuple[str, ...] = ("resnet50", "vgg19")
    batch_size: int = 8
    step_count: int = 5
    budget_fraction: float = 0.5
    device: Literal["cpu", "cuda"] = "cpu"
    image_size: int = 224


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentMemory:
    """What the kernel says of a process that only builds a model and trains it.

    Attributes:
        before_bytes: Resident before the first step.
        peak_bytes: Most that was resident during the steps.
        total_peak_bytes: Most that was ever resident, preparation included.
    """

    before_bytes: int
    peak_bytes: int
    total_peak_bytes: int

    @property
    def step_bytes(self) -> int:
        """Subtract what was there before the first step from the peak."""
        return self.peak_bytes - self.before_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantFigures:
    """What one variant of a model's step needs.

    Attributes:
        saved_peak_bytes: Most saved activations on the device at once, as simulated.
        step_peak_bytes: Most bytes of the step beyond what was held before, as measured.
        predicted_step_peak_bytes: The same as simulated.
        resident: What the kernel says of a process of its own.
        step_s: Median time of a step.
    """

    saved_peak_bytes: int
    step_peak_bytes: int
    predicted_step_peak_bytes: int
    resident: ResidentMemory
    step_s: float

    @property
    def difference_fraction(self) -> float:
        """Say how far the measured peak lies above the predicted one."""
        return self.step_peak_bytes / self.predicted_step_peak_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One model, eager and with backhaul.

    Attributes:
        model: Its name.
        loss: The loss of the compared step.
        budget_bytes: What the saved activations may take.
        prepare_s: Time to capture, measure and plan.
        unequal: Names of results that are not bit for bit those of eager.
        eager: Eager's figures.
        backhaul: This package's figures.
        plan_summary: The plan in a sentence.
    """

    model: str
    loss: float
    budget_bytes: int
    prepare_s: float
    unequal: tuple[str, ...]
    eager: VariantFigures
    backhaul: VariantFigures
    plan_summary: str

    @property
    def faults(self) -> tuple[str, ...]:
        """List what breaks a promise of this package."""
        found = []
        if self.unequal:
            found.append(f"not bit-equal to eager: {', '.join(self.unequal[:5])}")
        if self.backhaul.saved_peak_bytes > self.budget_bytes:
            found.append("the plan does not fit its budget")
        if abs(self.backhaul.difference_fraction) > _PREDICTION_TOLERANCE:
            found.append(
                f"the measured peak is {self.backhaul.difference_fraction:+.1%} off the predicted"
            )
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step computed, by name."""

    tensor_by_name: dict[str, torch.Tensor]


def run_demo(settings: Settings, console: Console, json_path: Path | None = None) -> bool:
    """Measure every model, print the table, and say whether every promise held.

    Args:
        settings: What to train.
        console: Where to print.
        json_path: Where to write all figures, if anywhere.

    Raises:
        DemoError: Something is not installed, or a model or device does not exist.
        BackhaulError: A model cannot be captured or planned.
        OSError: The file cannot be written.
    """
    figures = []
    for name in settings.models:
        console.print(Text(f"{name}: planning and training on {settings.device} ..."))
        figures.append(measure_model(name, settings))
    console.print(_table(figures, settings))
    faults = [f"{each.model}: {fault}" for each in figures for fault in each.faults]
    for fault in faults:
        console.print(Text(fault, style="bold red"))
    if json_path is not None:
        _write_json(json_path, settings, figures)
    return not faults


def measure_model(name: str, settings: Settings) -> Figures:
    """Train one model both ways and measure everything.

    Args:
        name: A classifier of torchvision.
        settings: How to train it.

    Raises:
        DemoError: Something is not installed, or the model or device does not exist.
        BackhaulError: The model cannot be captured or planned.
    """
    device = _device(settings)
    model, images, labels = _model(name, device), *_photo_batch(settings, device)
    start_s = time.perf_counter()
    optimized = optimize(model, images, activation_budget=settings.budget_fraction)
    prepare_s = time.perf_counter() - start_s
    plan = optimized.plan
    buffers = {key: value.clone() for key, value in model.named_buffers()}

    def step_of(module: nn.Module) -> Step:
        def step() -> Outcome:
            return _train_step(module, images, labels)

        return step

    def reset() -> None:
        _reset(model, buffers)

    with _deterministic(device):
        eager, ours = step_of(model), step_of(optimized)
        expected, found = _outcome_of(eager, reset, model), _outcome_of(ours, reset, model)
        loss, unequal = float(expected.tensor_by_name["loss"]), _unequal(expected, found)
        del expected, found
        step_s = _alternating_medians((eager, ours), reset, device, settings.step_count)
        peak_bytes = [_step_peak_bytes(step, reset, device) for step in (eager, ours)]
    # Its own processes have the memory to themselves.
    del optimized, eager, ours
    resident = [_in_own_process(name, settings, used) for used in (None, plan)]
    eager_figures, our_figures = (
        VariantFigures(
            saved_peak_bytes=predicted.saved_peak_bytes,
            step_peak_bytes=peak_bytes[index],
            predicted_step_peak_bytes=predicted.step_peak_bytes,
            resident=resident[index],
            step_s=step_s[index],
        )
        for index, predicted in enumerate((plan.baseline, plan.predicted))
    )
    return Figures(
        model=name,
        loss=loss,
        budget_bytes=int(plan.budget.value),
        prepare_s=prepare_s,
        unequal=unequal,
        eager=eager_figures,
        backhaul=our_figures,
        plan_summary=plan.summary,
    )


def _device(settings: Settings) -> torch.device:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise DemoError("--device cuda: torch sees no CUDA device; use --device cpu")
    return torch.device(settings.device)


@contextlib.contextmanager
def _needs_extra() -> Iterator[None]:
    """Say how to install what the demo imports and the package does not need."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise DemoError(
            f"the demo needs {error.name}, which is not installed: pip install 'backhaul[demo]'"
        ) from error


def _model(name: str, device: torch.device) -> nn.Module:
    """Build a classifier with random weights, always the same."""
    with _needs_extra():
        from torchvision import models
    known = sorted(set(models.list_models(models)) - _MODELS_WITH_AUXILIARY_OUTPUTS)
    if name not in known:
        raise DemoError(f"--model {name}: no such classifier; give one of {', '.join(known)}")
    torch.manual_seed(_SEED)
    model: nn.Module = models.get_model(name, weights=None)
    return model.to(device).train()


def _photo_batch(settings: Settings, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = photographs(settings.image_size, settings.batch_size)
    return images.to(device), labels.to(device)


def photographs(image_size: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images, normalised as for ImageNet, and labels.

    Sample `i` is view `i // len(_PHOTOS)` of photograph `i % len(_PHOTOS)`.

    Args:
        image_size: Height and width, pixels.
        count: How many.
    """
    with _needs_extra():
        from torchvision.models._meta import _IMAGENET_CATEGORIES as CATEGORIES
    images, labels = [], []
    for index in range(count):
        view, photo = divmod(index, len(_PHOTOS))
        file_name, category = _PHOTOS[photo]
        images.append(_view_of(_photo(file_name), view, image_size))
        labels.append(CATEGORIES.index(category))
    return torch.stack(images), torch.tensor(labels)


def _photo(file_name: str) -> torch.Tensor:
    """Read a photograph as floats in 0..1, of shape (3, height, width).

    The file is opened where it is installed: `skimage.data` would download one that is not.
    """
    with _needs_extra():
        import numpy
        import skimage.data
        from PIL import Image
    with resources.as_file(resources.files(skimage.data) / file_name) as path:
        pixels = numpy.array(Image.open(path).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def _view_of(photo: torch.Tensor, view: int, image_size: int) -> torch.Tensor:
    """Cut a square, mirror it in every odd view, resize and normalise it.

    View 0 and 1 are the largest square; each later pair is a smaller one.
    """
    height, width = photo.shape[1:]
    side = max(int(min(height, width) * 0.875 ** (view // 2)), 1)
    top, left = (height - side) // 2, (width - side) // 2
    square = photo[:, top : top + side, left : left + side]
    if view % 2:
        square = square.flip(2)
    size = (image_size, image_size)
    resized = functional.interpolate(square[None], size, mode="bilinear", antialias=True)[0]
    mean, std = (torch.tensor(values)[:, None, None] for values in (_MEAN, _STD))
    return (resized - mean) / std


@contextlib.contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Ask cuDNN for algorithms that give the same bits twice, in eager as well."""
    if device.type != "cuda":
        yield
        return
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield


def _train_step(module: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Outcome:
    output = module(images)
    loss = functional.cross_entropy(output, labels)
    torch.autograd.backward(loss)
    return Outcome({"output": output.detach(), "loss": loss.detach()})


def _reset(model: nn.Module, buffers: dict[str, torch.Tensor]) -> None:
    """Start the next step where every step starts: seed, buffers, no gradients."""
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    torch.manual_seed(_SEED)


def _outcome_of(step: Step, reset: Callable[[], None], model: nn.Module) -> Outcome:
    """Run one step from the start and copy all that it computed."""
    reset()
    tensors = dict(step().tensor_by_name)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            tensors[f"gradient of {name}"] = parameter.grad.clone()
    tensors |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return Outcome(tensors)


def _unequal(expected: Outcome, found: Outcome) -> tuple[str, ...]:
    """Name what is missing on one side or differs in any bit."""
    left, right = expected.tensor_by_name, found.tensor_by_name
    return tuple(
        name
        for name in sorted(left.keys() | right.keys())
        if name not in left or name not in right or not torch.equal(left[name], right[name])
    )


def _alternating_medians(
    steps: tuple[Step, Step], reset: Callable[[], None], device: torch.device, count: int
) -> list[float]:
    """Time both variants in turn, and return the median of each."""
    times_s: list[list[float]] = [[], []]
    for _ in range(count):
        for index, step in enumerate(steps):
            reset()
            _synchronize(device)
            start_s = time.perf_counter()
            step()
            _synchronize(device)
            times_s[index].append(time.perf_counter() - start_s)
    return [statistics.median(each) for each in times_s]


def _step_peak_bytes(step: Step, reset: Callable[[], None], device: torch.device) -> int:
    reset()
    return measure_peak_bytes(step, device).peak_bytes


def _in_own_process(name: str, settings: Settings, plan: Plan | None) -> ResidentMemory:
    """Measure resident memory where nothing else was ever resident."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        return executor.submit(_resident, name, settings, plan).result()


def _resident(name: str, settings: Settings, plan: Plan | None) -> ResidentMemory:
    """Build a model, prepare it, and train two steps."""
    device = _device(settings)
    model, images, labels = _model(name, device), *_photo_batch(settings, device)
    module = model if plan is None else apply(model, images, plan)
    total_before_bytes = _status_bytes("VmHWM")
    _forget_peak()
    before_bytes = _status_bytes("VmRSS")
    for _ in range(_RSS_STEP_COUNT):
        model.zero_grad(set_to_none=True)
        _train_step(module, images, labels)
    peak_bytes = _status_bytes("VmHWM")
    return ResidentMemory(
        before_bytes=before_bytes,
        peak_bytes=peak_bytes,
        total_peak_bytes=max(peak_bytes, total_before_bytes),
    )


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise DemoError(f"/proc/self/status has no {field}: resident memory needs Linux")


def _forget_peak() -> None:
    """Let the kernel count the peak anew from here."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _table(figures: list[Figures], settings: Settings) -> Table:
    title = f"{settings.batch_size} photographs of {settings.image_size} pixels on "
    table = Table(title=Text(f"{title}{device_name(torch.device(settings.device))}"))
    table.add_column("", no_wrap=True)
    for each in figures:
        table.add_column(Text(f"{each.model}\neager"), justify="right")
        table.add_column(Text(f"{each.model}\nbackhaul"), justify="right")
    for label, cell in _ROWS:
        variants = [(each, used) for each in figures for used in (each.eager, each.backhaul)]
        table.add_row(label, *(cell(each, used) for each, used in variants))
    return table


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


_ROWS: tuple[tuple[str, Callable[[Figures, VariantFigures], str]], ...] = (
    ("peak saved bytes", lambda _, used: _mebibytes(used.saved_peak_bytes)),
    ("peak live bytes", lambda _, used: _mebibytes(used.step_peak_bytes)),
    ("  as predicted", lambda _, used: _mebibytes(used.predicted_step_peak_bytes)),
    ("  off by", lambda _, used: f"{used.difference_fraction:+.2%}"),
    ("peak RSS of steps", lambda _, used: _mebibytes(used.resident.step_bytes)),
    ("peak RSS in all", lambda _, used: _mebibytes(used.resident.total_peak_bytes)),
    ("median step time", lambda _, used: f"{used.step_s * 1e3:,.0f} ms"),
    ("  against eager", lambda each, used: f"{used.step_s / each.eager.step_s:.3f}"),
    (
        "gradients bit-equal",
        lambda each, used: "" if used is each.eager else "no" if each.unequal else "yes",
    ),
)


def _write_json(path: Path, settings: Settings, figures: list[Figures]) -> None:
    record = {
        "device": device_name(torch.device(settings.device)),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "settings": asdict(settings),
        "figures": [asdict(each) for each in figures],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

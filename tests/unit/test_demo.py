"""The demo measures what it says, and refuses what it cannot do."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from backhaul import demo
from backhaul.cli import app
from backhaul.demo import Figures, Settings

SMALL = Settings(models=("resnet18",), batch_size=3, image_size=64)


@pytest.fixture(autouse=True)
def _own_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BACKHAUL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return demo.measure_model("resnet18", SMALL)


def test_a_small_model_keeps_every_promise(figures: Figures) -> None:
    assert figures.unequal == () and figures.faults == ()
    assert figures.backhaul.saved_peak_bytes <= figures.budget_bytes
    assert figures.backhaul.step_peak_bytes < figures.eager.step_peak_bytes
    assert 0 < figures.backhaul.resident.step_bytes <= figures.backhaul.resident.total_peak_bytes


def test_faults_are_found(figures: Figures) -> None:
    ours = figures.backhaul
    high = dataclasses.replace(ours, step_peak_bytes=int(ours.predicted_step_peak_bytes * 1.03))
    unequal = dataclasses.replace(figures, unequal=("loss",))
    assert unequal.faults == ("not bit-equal to eager: loss",)
    assert "+3.0% off" in dataclasses.replace(figures, backhaul=high).faults[0]
    assert "fit its budget" in dataclasses.replace(figures, budget_bytes=1).faults[0]


def test_any_bit_that_differs_is_named() -> None:
    one = demo.Outcome({"same": torch.ones(3), "other": torch.ones(3), "left": torch.ones(1)})
    two = demo.Outcome({"same": torch.ones(3), "other": torch.ones(3) + 1e-7})
    assert demo._unequal(one, two) == ("left", "other")


def test_the_table_fits_a_terminal_and_the_file_holds_every_figure(
    figures: Figures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "measure_model", lambda name, settings: figures)
    buffer = io.StringIO()
    settings = dataclasses.replace(SMALL, models=("resnet18", "resnet18"))
    good = demo.run_demo(settings, Console(file=buffer, width=80), tmp_path / "figures.json")
    printed = buffer.getvalue()
    assert good and "gradients bit-equal" in printed and "yes" in printed
    assert max(map(len, printed.splitlines())) <= 80 and "…" not in printed
    record = json.loads((tmp_path / "figures.json").read_text())
    assert record["figures"][0]["eager"]["step_s"] == figures.eager.step_s
    assert record["torch"] == torch.__version__


def test_photographs_are_real_and_differ() -> None:
    images, labels = demo._photo_batch(
        dataclasses.replace(SMALL, batch_size=13), torch.device("cpu")
    )
    assert images.shape == (13, 3, 64, 64) and images.std() > 0.5
    assert len(set(labels.tolist())) == 6
    assert torch.equal(labels[:6], labels[6:12]) and not torch.equal(images[0], images[6])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["demo", "--model", "resnet17"], "resnet17"),
        (["demo", "--steps", "4"], "steps"),
        (["show", "absent.json"], "absent.json"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and named in result.output + result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_is_refused_where_there_is_none() -> None:
    result = CliRunner().invoke(app, ["demo", "--device", "cuda"])
    assert result.exit_code == 2 and "no CUDA device" in result.stderr

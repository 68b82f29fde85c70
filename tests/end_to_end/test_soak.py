"""Many steps leave nothing behind: no bytes, host slots, files, descriptors or threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backhaul
from backhaul.runtime.disk import DiskLink
from backhaul.runtime.memory import measure_peak_bytes

WARM_UP = 10


class Trainer:
    """Trains as a user does who now and then drops a loss, evaluates, or fails in a step."""

    def __init__(self, folder: Path, net: nn.Module, images: torch.Tensor) -> None:
        self.images = images
        self.link = DiskLink(folder)
        self.module = backhaul.optimize(net, self.images, planner="offload_all", link=self.link)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

    def run(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            if step % 5 == 1:
                self.module(self.images)
            if step % 5 == 2:
                self.module.eval()(self.images)
                self.module.train()
            if step % 5 == 3:
                with pytest.raises(ZeroDivisionError):
                    self.fail(self.module(self.images).sum())
            loss = self.module(self.images).square().mean()
            if step % 5 == 4:
                loss.backward(retain_graph=True)
            loss.backward()
            self.optimizer.step()
        self.optimizer.zero_grad()

    def fail(self, loss: torch.Tensor) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_steps_leave_nothing_behind(
    steps: int, tmp_path: Path, small_net: Callable[[], tuple[nn.Module, torch.Tensor]]
) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    trainer = Trainer(folder, *small_net())
    trainer.run(range(WARM_UP))
    before = counts(trainer, folder)
    memory = measure_peak_bytes(lambda: trainer.run(range(WARM_UP, steps)), torch.device("cpu"))
    assert counts(trainer, folder) == before
    assert memory.end_bytes == 0
    assert trainer.link.open_arena_count == 0


def counts(trainer: Trainer, folder: Path) -> dict[str, Any]:
    return {
        "open arenas": trainer.link.open_arena_count,
        "idle arenas": trainer.link.idle_arena_count,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "files": sorted(folder.iterdir()),
        "threads": threading.active_count(),
        "plans": len(trainer.module.plans),
    }

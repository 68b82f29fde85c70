"""Two processes with `DistributedDataParallel`: the gradients are those of the plain run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RANK = """
import contextlib, copy, json, sys, torch, backhaul
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, store, options, way = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
    nn.Linear(8 * 16, 4),
)
reference = copy.deepcopy(model)
module = backhaul.optimize(model, torch.randn(4, 3, 8, 8), **options)
small = {"bucket_cap_mb": 0.002}  # several buckets
ours, plain = DistributedDataParallel(module, **small), DistributedDataParallel(reference, **small)
same = True
for step in range(3):
    for each, net in ((ours, model), (plain, reference)):
        net.zero_grad()
        torch.manual_seed(10 * step + rank)
        for batch in range(2 if way == "accumulate" else 1):
            waits = way == "accumulate" and batch == 0
            with each.no_sync() if waits else contextlib.nullcontext():
                images = torch.randn(4 if step < 2 else 3, 3, 8, 8)
                each(images).square().mean().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    same &= all(torch.equal(a, b) and torch.equal(a.grad, b.grad) for a, b in pairs)
    same &= all(map(torch.equal, model.buffers(), reference.buffers()))
print(json.dumps({"same": same, "plans": len(module.plans), "moves": bool(module.plan.slots)}))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("options", "way"),
    [({"planner": "offload_all"}, "each"), ({"activation_budget": 0.5}, "accumulate")],
    ids=["all", "half"],
)
def test_ranks_train_as_they_would_without_us(
    options: dict[str, Any], way: str, tmp_path: Path
) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), str(tmp_path / "store"),
             json.dumps(options), way],
            env={**os.environ, "OMP_NUM_THREADS": "1", "BACKHAUL_CACHE_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        told, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0
        found = json.loads(told.splitlines()[-1])
        # The last batch is smaller, and is captured inside of the wrapper.
        assert found["same"] and found["plans"] == 2
        assert found["moves"] or "planner" not in options

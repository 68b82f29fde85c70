"""Plans for machines that are not here, of models whose weights are nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backhaul
from backhaul.errors import BudgetError, CaptureError, PlanError
from backhaul.passes import pipeline
from backhaul.passes.fake_model import as_fake
from backhaul.passes.op_calls import spec_of
from backhaul.passes.op_work import works_of
from backhaul.runtime.measure_ops import OpCall

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.view(*x.shape[:2], 4, -1).transpose(1, 2) for part in self.mix(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(F.gelu(mixed.transpose(1, 2).reshape(x.shape)))


def blocks(count: int, width: int) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(count)))


@pytest.fixture(autouse=True)
def _nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("this machine was measured")

    monkeypatch.setattr(pipeline, "measure_ops", refuse)
    monkeypatch.setattr(pipeline, "measure_link", refuse)


def test_a_real_model_is_planned_without_a_measurement() -> None:
    x = torch.randn(2, 16, 32)
    plan = backhaul.plan(blocks(3, 32), x, hardware="titan-x", activation_budget=0.6)
    assert plan.machine.device == "NVIDIA TITAN X (Pascal), modelled"
    assert {cost.source for cost in plan.machine.ops} == {"modelled"}
    assert plan.slots and plan.predicted.saved_peak_bytes <= plan.budget.value
    whole = backhaul.plan(blocks(3, 32), x, hardware="titan-x")
    assert whole.budget.value == 12 * 2**30 and "nothing to do" in whole.summary


def test_a_model_without_memory_has_the_plan_of_a_real_one() -> None:
    def planned(device: str) -> backhaul.Plan:
        torch._dynamo.reset()
        with torch.device(device):
            model, x = blocks(3, 32), torch.empty(2, 16, 32)
        return backhaul.plan(model, x, hardware="h200", activation_budget=0.7)

    assert planned("meta") == planned("cpu")


def test_a_model_that_no_machine_here_holds_is_planned() -> None:
    with torch.device("meta"):
        model = blocks(2, 2**16).to(torch.bfloat16)
        x = torch.empty(4, 128, 2**16, dtype=torch.bfloat16)
    plan = backhaul.plan(model, x, hardware="h200")
    weights = sum(p.numel() * 2 for p in model.parameters())
    assert weights > 60e9 and plan.baseline.peak_bytes > 2 * weights
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(BudgetError, match="4,294,967,296"):
        backhaul.plan(model, x, hardware="h200", memory_budget="4 GiB")


def test_ties_and_flags_are_kept() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    fake, (x,) = as_fake(model, (torch.empty(2, 4, device="meta"),))
    assert fake[1].weight is fake[0].weight and not fake[0].bias.requires_grad
    assert list(fake.state_dict()) == list(model.state_dict())
    assert x.device.type == fake[2].running_mean.device.type == "cpu"


def test_a_model_without_memory_is_not_trained() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(4, 4), torch.empty(2, 4)
    with pytest.raises(CaptureError, match=r"lies on the meta device.*hardware="):
        backhaul.optimize(model, x)


def test_hardware_that_nobody_knows_is_refused() -> None:
    with pytest.raises(PlanError, match="abacus"):
        backhaul.plan(nn.Linear(4, 4), torch.randn(2, 4), hardware="abacus")


def call(target: Any, *args: Any) -> OpCall:
    specs = [spec_of(arg) if isinstance(arg, Tensor) else arg for arg in args]
    return OpCall(key=str(target), target=target, args=tuple(specs))


def test_work_is_counted_by_hand() -> None:
    x, weight = torch.empty(2, 3, 8, 8), torch.empty(5, 3, 3, 3)
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    head = torch.empty(2, 4, 6, 8)
    product, convolution, attention, copied = works_of(
        [
            call(aten.mm.default, torch.empty(4, 5), torch.empty(5, 6)),
            call(aten.convolution.default, x, weight, *rest),
            call(aten._scaled_dot_product_flash_attention_for_cpu.default, head, head, head),
            call(aten.relu.default, torch.empty(7, dtype=torch.float64)),
        ]
    )
    assert (product.op_class, product.flops) == ("matmul", 2 * 4 * 5 * 6)
    assert product.nbytes == 4 * (20 + 30 + 24)
    assert (convolution.op_class, convolution.flops) == ("convolution", 2 * 2 * 5 * 64 * 27)
    assert (attention.op_class, attention.flops) == ("attention", 2 * (2 * 2 * 4 * 6 * 6 * 8))
    assert (copied.op_class, copied.dtype, copied.flops) == ("memory", "float64", 0)
    assert copied.nbytes == 2 * 7 * 8

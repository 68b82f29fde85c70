"""What testers broke once: each fault in its smallest form."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul.errors import CaptureError, TransferError
from backhaul.passes import pipeline
from backhaul.runtime.adversary import AdversaryLink
from backhaul.runtime.disk import DiskLink
from backhaul.runtime.measure_ops import measure_ops

Check = Callable[..., Any]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x).sin(), self.second(x).cos()


class AliasesItsInput(TwoHeads):
    def forward(self, x: Tensor) -> Any:
        h, g = super().forward(x)
        return x.view(-1), h[0], h[1], g[0], g[1]


def test_a_view_of_another_modules_output_keeps_every_gradient(optimized: Check) -> None:
    models = TwoHeads(), AliasesItsInput()
    eager = copy.deepcopy(models)
    x = torch.randn(4, 8)
    first = optimized(models[0], x)
    second = optimized(models[1], torch.randn(4, 8).requires_grad_())
    for _ in range(3):
        for body, tail in (eager, (first, second)):
            body.zero_grad(), tail.zero_grad()
            tail(body(x)[0])[1].sum().backward()
        for plain, ours in zip(eager, models, strict=True):
            for name, parameter in plain.named_parameters():
                grad = dict(ours.named_parameters())[name].grad
                assert (grad is None) == (parameter.grad is None), name
                assert grad is None or torch.equal(grad, parameter.grad), name


def test_backward_and_state_hooks_of_the_wrapper_run(optimized: Check) -> None:
    model = TwoHeads()
    x = torch.randn(4, 8, requires_grad=True)
    module = optimized(model, x)
    seen: list[str] = []
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    module.register_state_dict_pre_hook(lambda *_: seen.append("state"))
    module.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    module(x)[0].sum().backward()
    module.load_state_dict(module.state_dict())
    assert seen == ["backward", "state", "loaded"]
    assert not model._backward_hooks and model._is_full_backward_hook is None


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(6, 8)),
        (lambda: nn.EmbeddingBag(10, 4, mode="mean"), torch.arange(35).view(5, 7) % 10),
    ],
    ids=["LayerNorm", "EmbeddingBag"],
)
def test_a_tensor_that_is_not_as_traced_is_kept_with_its_reason(
    make: Check, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only what is really measured can be seen to differ.
    monkeypatch.setattr(pipeline, "measure_ops", measure_ops)
    model = make()
    eager = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        module = backhaul.optimize(model, x, planner="offload_all", link=AdversaryLink("last"))
        for each in (eager, module):
            each(x).float().square().sum().backward()
    for plain, ours in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(plain.grad, ours.grad)
    reasons = [each.pinned_because for each in module.plan.graph.saved]
    assert any("as traced" in reason for reason in reasons)


def test_a_sparse_gradient_stays_sparse(optimized: Check) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4), nn.Tanh())
    eager = copy.deepcopy(model)
    x = torch.tensor([1, 3, 3])
    module = optimized(model, x)
    for each in (eager, module):
        each(x).square().sum().backward()
    ours, plain = model[0].weight.grad, eager[0].weight.grad
    assert ours.is_sparse and torch.equal(ours.to_dense(), plain.to_dense())


def test_saved_tensor_hooks_are_refused_where_handles_are_saved(optimized: Check) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    module, kept = optimized(model, x), optimized(model, x, "keep_all")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        with pytest.raises(CaptureError, match="saved-tensor hooks are on"):
            module(x)
        kept(x).sum().backward()
    module(x).sum().backward()


def test_a_module_that_is_dropped_is_freed(tmp_path: Path) -> None:
    def counts() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = None
    for _ in range(3):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        x = torch.randn(4, 8)
        module = backhaul.optimize(model, x, planner="offload_all", link=DiskLink(tmp_path))
        module(x).sum().backward()
        alive = weakref.ref(model)
        del model, module
        before = before or counts()
        gc.collect()
        assert alive() is None
    assert counts() == before


def test_a_copy_spills_where_its_original_does(tmp_path: Path) -> None:
    import pickle

    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    module = backhaul.optimize(model, x, spill_folder=tmp_path)
    assert copy.deepcopy(module)._link is module._link
    assert pickle.loads(pickle.dumps(module))._link.folder == tmp_path


def test_a_parent_loads_an_optimized_child_by_the_childs_own_way(optimized: Check) -> None:
    class Extra(nn.Linear):
        extra = 0

        def get_extra_state(self) -> int:
            return self.extra

        def set_extra_state(self, state: int) -> None:
            self.extra = state

    child = Extra(8, 8)
    parent = nn.Sequential(optimized(child, torch.randn(2, 8)))
    child.extra = 3
    state = parent.state_dict()
    child.extra = 4
    parent.load_state_dict(state)
    assert child.extra == 3


def test_a_plan_that_the_tier_cannot_hold_is_refused_when_it_is_applied(
    optimized: Check, tmp_path: Path
) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    plan = optimized(model, x).plan
    assert plan.host_bytes
    with pytest.raises(TransferError, match="absent"):
        backhaul.apply(model, x, plan, spill_folder=tmp_path / "absent")


def test_what_is_optimized_already_is_refused_by_name(optimized: Check) -> None:
    x = torch.randn(2, 8)
    module = optimized(nn.Linear(8, 8), x)
    with pytest.raises(CaptureError, match="it already is"):
        backhaul.optimize(module, x)
    with pytest.raises(CaptureError, match="its module 0 already is"):
        backhaul.optimize(nn.Sequential(module), x)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"planner": None}, ValueError),
        ({"link": "disk"}, TypeError),
        ({"memory_budget": torch.ones(1)}, ValueError),
        ({"memory_budget": [1]}, ValueError),
        ({"max_slowdown": "2"}, ValueError),
        ({"planner": "keep_all", "activation_budget": 100}, ValueError),
    ],
    ids=str,
)
def test_options_of_the_wrong_kind_are_refused(options: dict[str, Any], error: Any) -> None:
    with pytest.raises(error, match="give"):
        backhaul.optimize(nn.Linear(8, 8), torch.randn(2, 8), **options)


def test_no_model_and_no_plan_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="model is a NoneType"):
        backhaul.optimize(None, torch.randn(2, 8))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="plan is a str"):
        backhaul.apply(nn.Linear(8, 8), torch.randn(2, 8), "plan.json")  # type: ignore[arg-type]

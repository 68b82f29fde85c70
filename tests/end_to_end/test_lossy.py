"""Rounded activations change weights' gradients by what was allowed, and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import backhaul
from backhaul.module import OptimizedModule
from backhaul.passes import pipeline
from backhaul.records import Budget, ErrorBound, GraphRecord, MachineProfile, PackedForm, Plan
from backhaul.report import report_text
from backhaul.runtime.kernel_compiler import Executor
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.placement import Limit, place
from backhaul.scheduler.planner import plan_of_actions
from backhaul.scheduler.ways import Way

WARMUP = 10
BUDGET = 0.01


class Block(nn.Module):
    """Two convolutions, one of them depthwise, and a shortcut."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, groups=out)
        self.shortcut = nn.Conv2d(channels, out, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.norm(self.first(x)))
        return torch.relu(self.second(inner) + self.shortcut(x))


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        Block(3, 16), Block(16, 32), nn.BatchNorm2d(32), nn.Conv2d(32, 32, 1), nn.GELU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    images = torch.randn(16, 3, 32, 32, generator=random)
    return images, torch.randint(0, 10, (16,), generator=random)


def without_room(module: OptimizedModule) -> tuple[ErrorBound, ...]:
    return tuple(
        dataclasses.replace(given, form=dataclasses.replace(given.form, rows=1))
        for given in module.compression.error_bounds
    )


def lossy(model: nn.Module, **options: object) -> OptimizedModule:
    given = {"lossless": False, "error_budget": BUDGET, "warmup_steps": WARMUP, **options}
    return backhaul.optimize(model, batch()[0], planner="compress_all", **given)  # type: ignore


def step(module: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a step without changing weights; return the loss and all gradients."""
    module.zero_grad()
    images, labels = batch()
    images.requires_grad_()
    loss = functional.cross_entropy(module(images), labels)
    loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return loss.detach(), {**gradients, "input": images.grad}  # type: ignore[dict-item]


def refreshed(module: OptimizedModule) -> OptimizedModule:
    for _ in range(WARMUP + 10):
        step(module)
    assert len(module.compression.history) == 1
    return module


def test_warm_up_is_exact_and_then_only_weights_get_the_noise_that_is_allowed() -> None:
    model = small_model()
    module = lossy(copy.deepcopy(model))
    exact_loss, exact = step(model)
    for _ in range(WARMUP):
        loss, gradients = step(module)
        assert loss == exact_loss
        assert all(torch.equal(gradients[name], exact[name]) for name in exact)
    refreshed_loss, noisy = step(refreshed(module))
    assert refreshed_loss == exact_loss
    differing = {name for name in exact if not torch.equal(noisy[name], exact[name])}
    assert differing == {
        "0.second.weight", "1.first.weight", "1.second.weight", "1.shortcut.weight", "3.weight",
    }  # fmt: skip
    noise = math.hypot(*(float((noisy[name] - exact[name]).norm()) for name in differing))
    watched = math.hypot(*(float(exact[name].norm()) for name in (*differing, "7.weight")))
    refresh = module.compression.history[0]
    assert refresh.reference_norm == pytest.approx(watched, rel=1e-4)
    assert noise / watched == pytest.approx(refresh.noise_share, rel=0.1)
    assert 0.9 * BUDGET < refresh.noise_share <= BUDGET * (1 + 1e-9)
    assert module.overflow_counts.keys() == module.compression.history[0].bounds.keys()
    assert not any(module.overflow_counts.values())


def test_every_kind_of_activation_is_rounded_in_its_way() -> None:
    module = refreshed(lossy(small_model()))
    modes = [given.form.mode for given in module.compression.error_bounds]
    assert sorted(modes) == ["dither", "sign", "sign", "sign"]
    assert module.plan.predicted.saved_peak_bytes < 0.6 * module.plan.baseline.saved_peak_bytes
    packed = [codec for _, codec in module.plan.rounded]
    assert [codec.name for codec in packed] == ["quantise"] * 4
    assert all(codec.bound is not None and not codec.is_exact for codec in packed)


def test_with_no_error_allowed_zeros_are_left_out() -> None:
    model = small_model()
    module = refreshed(lossy(copy.deepcopy(model), error_budget=0))
    rounded = module.compression.error_bounds
    assert {(given.bound, given.form.is_sparse, given.form.mode) for given in rounded} == {
        (0.0, True, "sign")
    }
    nbytes = {tensor.name: tensor.nbytes for tensor in module.plan.graph.saved}
    for name, codec in module.plan.rounded:
        assert 0.5 < codec.packed_bytes / nbytes[name] < 0.8
    _, exact = step(model)
    _, gradients = step(module)
    assert all(torch.equal(gradients[name], exact[name]) for name in exact)
    assert not any(module.overflow_counts.values())


def test_what_finds_no_room_is_kept_and_counted() -> None:
    model = small_model()
    module = refreshed(lossy(copy.deepcopy(model)))
    tight = without_room(module)
    module.compression.error_bounds = tight
    module.compression.load_state_dict(module.compression.state_dict())
    _, exact = step(model)
    _, gradients = step(module)
    assert all(torch.equal(gradients[name], exact[name]) for name in exact)
    assert list(module.overflow_counts.values()) == [1] * 4
    dials = module.__dict__["_capture"].works[0].session.dials
    assert not dials._original_by_step


def test_originals_stay_as_long_as_a_backward_may_come() -> None:
    module = refreshed(lossy(small_model()))
    tight = [dataclasses.asdict(given) for given in without_room(module)]
    module.compression.load_state_dict(module.compression.state_dict() | {"error_bounds": tight})
    images, labels = batch()
    first = functional.cross_entropy(module(images), labels)
    second = functional.cross_entropy(module(images), labels)
    dials = module.__dict__["_capture"].works[0].session.dials
    assert len(dials._original_by_step) == 2
    first.backward(retain_graph=True)
    first.backward()
    assert len(dials._original_by_step) == 1
    del second
    assert not dials._original_by_step


def test_room_that_ran_out_is_given_at_the_next_look() -> None:
    module = refreshed(lossy(small_model(), refresh_steps=100))
    tight = [dataclasses.asdict(given) for given in without_room(module)]
    module.compression.load_state_dict(module.compression.state_dict() | {"error_bounds": tight})
    for _ in range(20):
        step(module)
    assert len(module.compression.history) == 2
    before = sum(module.overflow_counts.values())
    step(module)
    assert sum(module.overflow_counts.values()) == before == 0


def test_bounds_follow_the_gradient_without_a_new_plan() -> None:
    model = small_model()
    module = refreshed(lossy(model, refresh_steps=30))
    capture, before = module.__dict__["_capture"], module.compression.error_bounds
    for _ in range(50):
        step(module)
    assert len(module.compression.history) == 2
    assert module.__dict__["_capture"] is capture
    after = module.compression.error_bounds
    assert [g.form for g in after] == [g.form for g in before]


def test_the_state_goes_on_in_another_process_and_in_copies() -> None:
    module = refreshed(lossy(small_model()))
    bounds = module.compression.error_bounds
    state = pickle.loads(pickle.dumps(module.compression.state_dict()))
    other = lossy(small_model())
    other.compression.load_state_dict(state)
    _, expected = step(module)
    for twin in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.compression.error_bounds == bounds
        twin.load_state_dict(module.state_dict())
        _, found = step(twin)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert twin.plan.rounded
    assert "error" not in str(list(module.state_dict()))


@pytest.mark.parametrize("scale", (0.0, math.inf, math.nan))
def test_gradients_that_say_nothing_leave_steps_exact_until_the_next_look(scale: float) -> None:
    module = lossy(small_model(), refresh_steps=50)
    images, labels = batch()
    for _ in range(WARMUP + 5):
        (functional.cross_entropy(module(images), labels) * scale).backward()
    assert not module.compression.history
    for _ in range(30):
        step(module)
    assert len(module.compression.history) == 1


def test_momentum_is_the_reference_if_there_is_one() -> None:
    module = lossy(small_model())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0, momentum=0.5)
    module.compression.optimizer = optimizer
    for _ in range(WARMUP + 10):
        step(module)
        optimizer.step()
    weights = [p for p in module.parameters() if p.dim() > 1]
    momentum = math.hypot(*(float(optimizer.state[p]["momentum_buffer"].norm()) for p in weights))
    assert module.compression.history[0].reference_norm == pytest.approx(momentum, rel=0.01)


def test_comets_rule_gives_each_layer_a_bound_of_its_own() -> None:
    module = refreshed(lossy(small_model(), error_policy="comet"))
    refresh = module.compression.history[0]
    assert len(refresh.bounds) >= 4
    assert refresh.noise_share != pytest.approx(BUDGET, rel=0.01)


def pack_and_move(graph: GraphRecord, machine: MachineProfile, budget: Budget) -> Plan:
    """Treat everything that has a codec alike."""
    cost = CostModel(graph, machine)
    ways: dict[str, Way] = {n: "pack and move" for n, t in cost.planned.items() if t.codecs}
    actions = place(cost, ways, Limit(nbytes=float("inf"), saved_only=False))
    return plan_of_actions(graph, machine, budget, "pack and move", actions, "", cost)


def test_rounded_activations_can_be_moved_too() -> None:
    packed = refreshed(lossy(small_model()))
    state = packed.compression.state_dict()
    moved = backhaul.optimize(
        small_model(), batch()[0], planner=pack_and_move, lossless=False, error_budget=BUDGET
    )
    moved.compression.load_state_dict(state)
    moved.load_state_dict(packed.state_dict())
    _, expected = step(packed)
    _, found = step(moved)
    rounded = {name for name, _ in moved.plan.rounded}
    assert len(rounded) == 4 and rounded <= {slot.tensor for slot in moved.plan.slots}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("options", "fault"),
    (
        ({"error_budget": 1.5}, "error_budget=1.5"),
        ({"error_budget": -0.1}, "error_budget=-0.1"),
        ({"error_policy": "sz"}, "policy='sz'"),
        ({"warmup_steps": 0}, "warmup_steps=0"),
        ({"warmup_steps": "3"}, "warmup_steps='3'"),
        ({"lossless": True, "error_budget": None, "refresh_steps": 0}, "refresh_steps=0"),
        ({"refresh_steps": 0}, "refresh_steps=0"),
        ({"lossless": True}, "lossless module makes no errors"),
    ),
)
def test_options_without_a_meaning_are_refused(options: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        lossy(nn.Linear(3, 3), **options)


def test_a_lossless_module_has_no_controller() -> None:
    module = backhaul.optimize(nn.Linear(3, 3), torch.randn(2, 3), planner="keep_all")
    assert module.compression is None


def test_an_offline_plan_is_lossless() -> None:
    with pytest.raises(ValueError, match="come from training"):
        backhaul.plan(nn.Linear(3, 3), torch.randn(2, 3), lossless=False)


def test_a_bound_for_what_cannot_be_rounded_leaves_it_exact() -> None:
    model = small_model()
    module = refreshed(lossy(copy.deepcopy(model)))
    names = {tensor.name for tensor in module.plan.graph.saved}
    roundable = {each.tensor for each in module._first_work().description.roundable}
    form = PackedForm(rows=0, exact_blocks=0, is_sparse=False, mode="dither")
    everything = [
        dataclasses.asdict(ErrorBound(tensor=n, bound=1e3, form=form))
        for n in sorted(names - roundable)
    ]
    state = module.compression.state_dict() | {"error_bounds": everything}
    module.compression.load_state_dict(state)
    _, exact = step(model)
    _, gradients = step(module)
    assert all(torch.equal(gradients[name], exact[name]) for name in exact)
    assert not module.plan.rounded


def test_the_report_says_what_runs_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> str:
        module = refreshed(lossy(small_model()))
        return report_text(module.plan)

    monkeypatch.setattr(pipeline, "executor", lambda *_: Executor("eager", "no compiler here"))
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "FEWEST_BLOCKS", 10**6)
        assert "Rounding:" not in told()
    assert "Rounding: eager (no compiler here)" in told()
    monkeypatch.setattr(pipeline, "executor", lambda *_: Executor("inductor", "compiled"))
    assert "Rounding: inductor\n" in told()

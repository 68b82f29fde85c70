"""What is asked of single modules is done, is in the plan with its reason, and changes no bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import backhaul
from backhaul.errors import BudgetError, PlanError
from backhaul.records import Compress, Keep, Offload, Plan, Recompute
from backhaul.runtime.adversary import AdversaryLink


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.attn(self.norm(x)))
        return x + self.act(self.mlp(x))


def net() -> nn.Module:
    torch.manual_seed(0)
    stack = nn.Sequential()
    stack.layers = nn.Sequential(*(Block() for _ in range(3)))
    return stack


def rows() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(64, 16, requires_grad=True)


def optimized(model: nn.Module, sample: Tensor, **options: Any) -> Any:
    return backhaul.optimize(model, sample, link=AdversaryLink("random", seed=1), **options)


def actions_in(plan: Plan, module: str) -> set[type]:
    """Return what happens to the saved activations that may be moved, of a module and its own."""
    inside = {
        tensor.name
        for tensor in plan.graph.saved
        if f"{tensor.module}.".startswith(f"{module}.") and not tensor.pinned_because
    }
    return {type(decision.action) for decision in plan.decisions if decision.tensor in inside}


def reasons_in(plan: Plan, module: str) -> list[str]:
    inside = {tensor.name for tensor in plan.graph.saved if tensor.module == module}
    return [decision.reason for decision in plan.decisions if decision.tensor in inside]


POLICIES: dict[str, dict[str, Any]] = {
    "offload": {"layers.0": backhaul.Offload},
    "recompute": {"layers.0": backhaul.Recompute, "layers.2.mlp": "offload"},
    "keep": {"layers": "offload", "layers.0": "keep"},
}


@pytest.mark.parametrize("budget", [None, 0.9])
@pytest.mark.parametrize("name", POLICIES)
def test_what_is_asked_is_done_bit_for_bit(
    name: str,
    budget: float | None,
    train: Callable[..., Any],
    assert_same_facts: Callable[..., None],
) -> None:
    model = net()
    expected = train(copy.deepcopy(model), rows())
    module = optimized(model, rows(), policy=POLICIES[name], activation_budget=budget)
    assert_same_facts(expected, train(module, rows()))
    plan = module.plan
    match name:
        case "offload":
            assert actions_in(plan, "layers.0") == {Offload}
        case "recompute":
            assert actions_in(plan, "layers.0") == {Recompute}
            assert actions_in(plan, "layers.2.mlp") == {Offload}
        case "keep":
            assert actions_in(plan, "layers.0") == set()
            assert all("'layers.0' asks" in reason for reason in reasons_in(plan, "layers.0"))
            assert actions_in(plan, "layers.1") == {Offload}


def test_a_relu_is_compressed_if_it_is_asked_for() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Tanh())
    assert actions_in(optimized(model, rows(), policy={"1": "compress"}).plan, "1") == {Compress}
    assert actions_in(optimized(model, rows()).plan, "1") == {Keep}


def test_a_rule_that_finds_nothing_is_in_the_summary() -> None:
    told = optimized(net(), rows(), policy={"*.act": "offload", "*.mlp": "offload"}).plan.summary
    assert told == (
        "The step does with what is asked of 3 saved activations. "
        "Nothing that is saved is left for the policy for '*.act'."
    )


def test_what_cannot_be_done_is_in_the_plan() -> None:
    module = optimized(net(), rows(), policy={"*.mlp": "compress", "*.attn": "recompute"})
    plan = module.plan
    assert set(reasons_in(plan, "layers.0.mlp")) == {
        "the policy for '*.mlp' asks to compress it, and no codec fits it"
    }
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
    plan = optimized(model, rows(), policy={"1": "compress"}).plan
    assert all("'1' asks" in reason for reason in reasons_in(plan, "1"))


class Marked(Block):
    def forward(self, x: Tensor) -> Tensor:
        with backhaul.keep():
            x = x + torch.tanh(self.attn(self.norm(x)))
        return x + self.act(self.mlp(x))


def test_a_marked_part_of_a_forward_is_kept() -> None:
    plans = [
        optimized(nn.Sequential(block), rows(), policy={"0": "offload"}).plan
        for block in (Block(), Marked())
    ]
    kept = [kept_by_mark(plan) for plan in plans]
    assert kept[0] == [] and "aten.tanh.default" in kept[1]
    assert [actions_in(plan, "0") for plan in plans] == [{Offload}, {Offload}]


def test_inductor_does_not_make_again_what_is_marked() -> None:
    options = {"policy": {"0": "recompute"}, "executor": "inductor"}
    plans = [
        optimized(nn.Sequential(block), rows(), **options).plan for block in (Block(), Marked())
    ]
    assert plans[1].graph.saved_bytes > plans[0].graph.saved_bytes
    assert kept_by_mark(plans[1])


def kept_by_mark(plan: Plan) -> list[str]:
    return [
        tensor.target
        for tensor in plan.graph.saved
        if tensor.pinned_because == "kept, as backhaul.keep() asks"
    ]


def test_a_mark_changes_nothing_where_nothing_is_captured() -> None:
    torch.manual_seed(0)
    marked = Marked()
    plain = Block()
    plain.load_state_dict(marked.state_dict())
    assert torch.equal(marked(rows()), plain(rows()))


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_mark_wins_over_a_region_that_is_checkpointed(is_marked: bool) -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Marked() if is_marked else Block()

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.block, x, use_reentrant=False)

    model, reference = Region(), None
    reference = copy.deepcopy(model)
    module = optimized(model, rows(), planner="keep_all")
    for each in (module, reference):
        each(rows()).square().sum().backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    targets = {tensor.target for tensor in module.plan.graph.saved}
    assert ("aten.tanh.default" in targets) == is_marked


def test_the_policy_of_a_saved_plan_is_in_it(tmp_path: Path) -> None:
    plan = backhaul.plan(net(), rows(), policy={"*.mlp": backhaul.Recompute})
    assert actions_in(plan, "layers.1.mlp") == {Recompute}
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    module = backhaul.apply(net(), rows(), loaded)
    assert module.plan == plan


def test_a_budget_counts_what_is_asked() -> None:
    with pytest.raises(BudgetError):
        optimized(net(), rows(), activation_budget=0.3, policy={"layers": backhaul.Keep})
    with pytest.raises(PlanError, match="what the policy asks for takes"):
        optimized(net(), rows(), max_slowdown=1.0, policy={"layers.0": backhaul.Recompute})
    free = optimized(net(), rows(), activation_budget=0.5).plan
    asked = optimized(net(), rows(), activation_budget=0.5, policy={"layers.1": backhaul.Keep}).plan
    assert asked.predicted.saved_peak_bytes <= free.budget.value
    assert asked.predicted.step_s >= free.predicted.step_s


def test_a_request_that_contradicts_itself_is_refused() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Tanh(), nn.Linear(16, 16))
    plan = optimized(copy.deepcopy(model), rows(), policy={"1": "compress"}).plan
    assert actions_in(plan, "1") == {Compress}
    with pytest.raises(PlanError, match=r"for '2' asks to recompute .* for '1' leaves only"):
        optimized(model, rows(), policy={"1": "compress", "2": "recompute"})


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ({"layer.0": "keep"}, "near it is layers.0"),
        ({"layers.0": "swap"}, "asks 'layers.0' for 'swap': give one of keep, compress"),
        ({"": "keep"}, "the pattern ''"),
        ({3: "keep"}, "the pattern 3"),
        (["layers.0"], "give a mapping"),
    ],
)
def test_a_policy_without_a_meaning_is_refused(policy: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        optimized(net(), rows(), policy=policy)


def test_planners_that_treat_all_alike_take_no_policy() -> None:
    with pytest.raises(ValueError, match="do not give a policy, too"):
        optimized(net(), rows(), planner="offload_all", policy={"layers": "keep"})


def test_the_backend_takes_a_policy() -> None:
    plans: list[Plan] = []
    options = {"policy": {"layers.1": "recompute"}, "on_plan": plans.append, "executor": "eager"}
    torch.compile(net(), backend="backhaul", options=options)(rows()).sum().backward()
    assert actions_in(plans[0], "layers.1") == {Recompute}
    assert actions_in(plans[0], "layers.0") == {Keep}

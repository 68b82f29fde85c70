"""Whatever order copies happen in, a step is exact; and without any one wait it is not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchvision
from torch import fx, nn

import backhaul
from backhaul.errors import VerifyError
from backhaul.passes import capture
from backhaul.passes.step_graphs import StepGraphs
from backhaul.passes.verify import verify
from backhaul.runtime.adversary import AdversaryLink

Check = Callable[..., Any]

WAITS = torch.ops.backhaul.offload_wait.default, torch.ops.backhaul.reload_wait.default


def resnet18() -> tuple[nn.Module, Any]:
    return torchvision.models.resnet18(num_classes=10), torch.randn(2, 3, 32, 32)


def gpt2_tiny() -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=4, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(0, 61, (2, 12))
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def assert_interleavings_are_exact(
    make: Check,
    train: Check,
    assert_same_facts: Check,
    random_planner: Check,
    plan_count: int,
    order_count: int,
) -> None:
    """Train under random plans, and each under random orders of its copies."""
    model, sample = make()
    state = copy.deepcopy(model.state_dict())
    expected = train(copy.deepcopy(model), sample, input_grad=False)
    for plan_seed in range(plan_count):
        torch._dynamo.reset()
        link = AdversaryLink("random", poison_byte=0)
        module = backhaul.optimize(model, sample, planner=random_planner(plan_seed), link=link)
        for order_seed in range(order_count):
            link._random.seed(order_seed)
            module.load_state_dict(state)
            actual = train(module, sample, input_grad=False)
            assert_same_facts(expected, actual, f"plan {plan_seed}, order {order_seed}")
        assert len(module.plans) == 1 and module.plan.slots
        model.load_state_dict(state)


def test_random_interleavings(
    small_net: Check, train: Check, assert_same_facts: Check, random_planner: Check
) -> None:
    assert_interleavings_are_exact(
        small_net, train, assert_same_facts, random_planner, plan_count=5, order_count=10
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [resnet18, gpt2_tiny])
def test_two_hundred_interleavings(
    make: Check, train: Check, assert_same_facts: Check, random_planner: Check
) -> None:
    assert_interleavings_are_exact(
        make, train, assert_same_facts, random_planner, plan_count=10, order_count=20
    )


@pytest.mark.parametrize("make", [resnet18, gpt2_tiny])
def test_every_single_wait_is_needed(
    make: Check, train: Check, optimized: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = record_what_runs(monkeypatch)
    # Copies happen at the last moment, so that only a wait makes them happen in time.  Poison
    # of 0 keeps what is an index in range.
    model, sample = make()
    state = copy.deepcopy(model.state_dict())
    expected = train(copy.deepcopy(model), sample, input_grad=False, step_count=1)
    module = optimized(model, sample, "offload_all", link=AdversaryLink("last", poison_byte=0))

    def is_exact() -> bool:
        module.load_state_dict(state)
        actual = train(module, sample, input_grad=False, step_count=1)
        return all(same(expected[key], actual[key]) for key in expected)

    assert is_exact()
    forward, backward = running
    step = StepGraphs(forward, backward, module._capture.works[0].step.output_count)
    verify(step)
    count = 0
    for gm, wait in waits_of(step):
        user_args = without(wait)
        gm.recompile()
        with pytest.raises(VerifyError):
            verify(step)
        assert not is_exact(), f"nothing changed without {wait.format_node()}"
        put_back(wait, user_args)
        gm.recompile()
        count += 1
    assert count == 2 * len(module.plan.slots) > 0
    verify(step)
    assert is_exact()


def record_what_runs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Note each graph that is made to run: AOTAutograd copies the backward."""
    graphs: list[fx.GraphModule] = []
    boxed = capture.boxed

    def recorded(gm: fx.GraphModule) -> Any:
        graphs.append(gm)
        return boxed(gm)

    monkeypatch.setattr(capture, "boxed", recorded)
    return graphs


def waits_of(step: StepGraphs) -> Iterator[tuple[fx.GraphModule, fx.Node]]:
    for gm in (step.forward, step.backward):
        for node in list(gm.graph.nodes):
            if node.target in WAITS:
                yield gm, node


def without(wait: fx.Node) -> list[fx.Node]:
    """Let every user of a wait read what the wait waited for, and skip the wait."""
    users = list(wait.users)
    wait.replace_all_uses_with(wait.args[0])
    wait.target, wait.meta["target"] = torch.ops.aten.alias.default, wait.target
    wait.meta["args"], wait.args = wait.args, wait.args[:1]
    return users


def put_back(wait: fx.Node, users: list[fx.Node]) -> None:
    wait.target, wait.args = wait.meta.pop("target"), wait.meta.pop("args")
    for user in users:
        user.replace_input_with(wait.args[0], wait)


def same(expected: Any, actual: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        return bool(expected == actual)
    return torch.equal(expected, actual)

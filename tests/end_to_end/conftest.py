"""The oracle of every end-to-end test: two training steps, bit for bit as eager does them."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul.errors import BudgetError
from backhaul.passes import pipeline
from backhaul.records import Budget, GraphRecord, LinkProfile, MachineProfile, Offload, OpCost, Plan
from backhaul.runtime.adversary import AdversaryLink
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.placement import sketched
from backhaul.scheduler.planner import plan_of_actions
from backhaul.scheduler.ways import Way, options_of


class RandomPlanner:
    """Treats each tensor in any way, at any moments, that the rules of plans allow."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, graph: GraphRecord, machine: MachineProfile, budget: Budget) -> Plan:
        rng = random.Random(self.seed)
        cost = CostModel(graph, machine)
        ways: dict[str, Way] = {}
        for name, tensor in cost.planned.items():
            ways[name] = rng.choice([option.way for option in options_of(cost, tensor)])
        for name, way in list(ways.items()):
            recipe = cost.planned[name].recipe
            for source in recipe.sources if way == "recompute" and recipe else ():
                if "pack" in ways[source] and not cost.planned[source].codecs[0].is_exact:
                    ways[source] = "move"
        actions = sketched(cost, ways)
        for name, life in cost.layout.lives_under(actions).items():
            action = actions.get(name)
            if isinstance(action, Offload) and life.use >= 0:
                idle = cost.planned[name].last_forward_use
                actions[name] = dataclasses.replace(
                    action,
                    wait_after=rng.randint(idle, graph.forward_count - 1),
                    reload_before=rng.randint(graph.forward_count, life.use),
                )
        return plan_of_actions(graph, machine, budget, "random", actions, "Anything goes.")


PLANS: dict[str, dict[str, Any]] = {
    "keep_all": {"planner": "keep_all"},
    "offload_all": {"planner": "offload_all"},
    "compress_all": {"planner": "compress_all"},
    "recompute_all": {"planner": "recompute_all"},
    "random": {"planner": RandomPlanner(0)},
    "frontier": {"planner": "frontier", "activation_budget": 0.5},
}
ORDERS: dict[str, Any] = {
    "keep_all": "first",
    "offload_all": "last",
    "compress_all": "first",
    "recompute_all": "first",
    "random": "random",
    "frontier": "random",
}
STEP_COUNT = 2
OP_S = 1e-4
LINK_BYTES_PER_S = 1e9

Loss = Callable[[Any], Tensor]
Facts = dict[str, Any]


@pytest.fixture(autouse=True, scope="session")
def _own_measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep what is measured here out of the user's cache."""
    folder = tmp_path_factory.mktemp("backhaul-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BACKHAUL_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _assumed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every op one cost, and every link one speed, instead of measuring them."""
    monkeypatch.setattr(pipeline, "measure_ops", assumed_ops)
    monkeypatch.setattr(pipeline, "measure_link", assumed_link)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> Iterator[None]:
    """Drop what Dynamo compiled, so that tests do not depend on their order."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(name="assert_bit_equal")
def _assert_bit_equal() -> Callable[..., None]:
    return assert_bit_equal


@pytest.fixture(name="optimized")
def _optimized() -> Callable[..., Any]:
    return optimized


@pytest.fixture(name="random_planner")
def _random_planner() -> type[RandomPlanner]:
    return RandomPlanner


@pytest.fixture(name="train")
def _train() -> Callable[..., Facts]:
    return train


@pytest.fixture(name="assert_same_facts")
def _assert_same_facts() -> Callable[..., None]:
    return assert_same_facts


@pytest.fixture(name="small_net")
def _small_net() -> Callable[[], tuple[nn.Module, Tensor]]:
    return small_net


def small_net() -> tuple[nn.Module, Tensor]:
    """Make a net with everything that lossless codecs pack, and images for it."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 64, 4),
    )
    return net, torch.randn(4, 3, 16, 16)


def assert_bit_equal(
    make_model: Callable[[], nn.Module],
    make_input: Callable[[], Any],
    *,
    loss: Loss | None = None,
    make_reference: Callable[[], nn.Module] | None = None,
    plans: Sequence[str] = tuple(PLANS),
    expect_moved: bool = True,
    input_grad: bool = True,
) -> dict[str, Any]:
    """Train a copy by eager and one by each plan, and compare every bit.

    Compared after each of two steps: the outputs and their types, the loss, the gradients of
    parameters (None stays None) and of inputs, all buffers, the parameters, and the random
    state.  Between the steps the parameters are updated, so that buffers change twice, slots
    are used again and nothing old may be read.

    No op and no link is really measured: each op is said to take the same time, and the link
    to move a gigabyte a second.  Costs decide which plan is made, and whether it is exact
    does not depend on them.  For the same reason the link is an `AdversaryLink`, which copies
    at the last moment, or at random ones, and poisons what may not be read: that finds a
    missing wait that a disk would hide.

    Args:
        make_model: Makes the model, in training mode; called once.
        make_input: Makes a tensor, a tuple or a mapping, as `optimize` takes it.
        loss: Makes a scalar of the model's output; by default, of every float in it.
        make_reference: Makes what eager trains, where that is not the same model; it is given
            the model's parameters and buffers.
        plans: Names in `PLANS`.
        expect_moved: Whether the plan that offloads all must offload something.
        input_grad: Whether floating-point inputs require grad.

    Returns:
        The plan that each name led to.
    """
    torch.manual_seed(0)
    original = make_model()
    sample = make_input()
    reference = copy.deepcopy(original)
    if make_reference is not None:
        reference = make_reference()
        reference.load_state_dict(original.state_dict())
    expected = train(reference, sample, loss=loss, input_grad=input_grad)
    made = {}
    for name in plans:
        model = copy.deepcopy(original)
        with torch.random.fork_rng(devices=[]):
            module = optimized(model, _leaf(sample, input_grad), name)
        actual = train(module, sample, loss=loss, input_grad=input_grad)
        assert_same_facts(expected, actual, name)
        assert len(module.plans) == 1, f"{name}: planned {len(module.plans)} times"
        made[name] = module.plan
        if expect_moved and name == "offload_all":
            assert module.plan.slots
    return made


def optimized(model: nn.Module, sample: Any, name: str = "offload_all", **options: Any) -> Any:
    """Optimize by a plan of `PLANS`; `frontier` gets the least it can do with if that is more."""
    options = {"link": AdversaryLink(ORDERS[name], seed=1), **PLANS[name], **options}
    try:
        return backhaul.optimize(model, sample, **options)
    except BudgetError as error:
        torch._dynamo.reset()
        options["activation_budget"] = max(error.smallest_bytes, 1)
        return backhaul.optimize(model, sample, **options)


def train(
    model: nn.Module,
    sample: Any,
    *,
    loss: Loss | None = None,
    input_grad: bool = True,
    step_count: int = STEP_COUNT,
) -> Facts:
    """Take training steps and note everything that may not change."""
    facts: Facts = {}
    for step in range(step_count):
        torch.manual_seed(step + 1)
        model.zero_grad(set_to_none=True)
        leaf = _leaf(sample, input_grad)
        output = _called(model, leaf)
        total = (loss or sum_of_squares)(output)
        total.backward()
        facts |= {f"{step}.{key}": value for key, value in leaves("output", output)}
        facts[f"{step}.loss"] = total.detach().clone()
        for key, value in leaves("input", leaf):
            if isinstance(value, Tensor):
                facts[f"{step}.{key}"] = value.detach().clone()
                facts[f"{step}.{key}.grad"] = _copied(value.grad)
        facts[f"{step}.random state"] = torch.get_rng_state()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                facts[f"{step}.{key}.grad"] = _copied(parameter.grad)
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
                facts[f"{step}.{key}"] = parameter.detach().clone()
        for key, buffer in model.named_buffers():
            facts[f"{step}.buffer {key}"] = buffer.detach().clone()
    return facts


def assert_same_facts(expected: Facts, actual: Facts, name: str = "") -> None:
    """Name every fact that differs, the earliest first."""
    assert list(expected) == list(actual), name
    faults = [
        f"{name}: {key}: {fault}"
        for key in expected
        if (fault := _difference(expected[key], actual[key]))
    ]
    assert not faults, f"{len(faults)} of {len(expected)} differ\n" + "\n".join(faults[:12])


def sum_of_squares(output: Any) -> Tensor:
    """Use every floating-point output, each element with its own weight."""
    total = torch.zeros(())
    for _, value in leaves("", output):
        if isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad:
            weight = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view(value.shape)
            total = total + (value.square() * weight).mean()
    return total


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield everything in an output, and the types on the way to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        yield f"type of {path}", type(value)
        for key, item in value.items():
            yield from leaves(f"{path}.{key}", item)
    elif isinstance(value, (tuple, list)):
        yield f"type of {path}", type(value)
        for index, item in enumerate(value):
            yield from leaves(f"{path}[{index}]", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield f"type of {path}", type(value)
        for field in dataclasses.fields(value):
            yield from leaves(f"{path}.{field.name}", getattr(value, field.name))
    else:
        yield path, value


def assumed_ops(calls: Any, device: torch.device, *, cache: Any) -> tuple[OpCost, ...]:
    """Give each distinct op one cost."""
    return tuple(
        OpCost(key=key, duration_s=OP_S, workspace_bytes=0, source="assumed")
        for key in dict.fromkeys(call.key for call in calls)
    )


def assumed_link(link: Any, device: torch.device, *, cache: Any) -> LinkProfile:
    """Give every link one speed."""
    sizes = (2**16, 2**20, 2**24)
    times_s = tuple(1e-5 + size / LINK_BYTES_PER_S for size in sizes)
    return LinkProfile(
        tier=link.tier,
        sizes_bytes=sizes,
        d2h_s=times_s,
        h2d_s=times_s,
        duplex_d2h_fraction=0.5,
        duplex_h2d_fraction=0.5,
        capacity_bytes=link.capacity_bytes,
        source="assumed",
    )


def _called(model: nn.Module, sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return model(**sample)
    return model(*sample) if isinstance(sample, tuple) else model(sample)


def _leaf(value: Any, requires_grad: bool) -> Any:
    """Copy a sample so that its floating-point tensors are leaves with a gradient of their own."""
    if isinstance(value, Tensor):
        leaf = value.detach().clone()
        return leaf.requires_grad_(requires_grad and leaf.is_floating_point())
    if isinstance(value, Mapping):
        return {key: _leaf(item, requires_grad) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_leaf(item, requires_grad) for item in value)
    return value


def _copied(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


def _difference(expected: Any, actual: Any) -> str:
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        same = expected is actual or expected == actual
        return "" if same else f"{_shown(expected)} became {_shown(actual)}"
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return f"{_shown(expected)} became {_shown(actual)}"
    before, after = _bits(expected), _bits(actual)
    if torch.equal(before, after):
        return ""
    count = int((before != after).sum())
    most = (expected.detach().double() - actual.detach().double()).abs().max().item()
    return f"{count} of {before.numel()} bytes differ, by {most:.3g} at most"


def _bits(value: Tensor) -> Tensor:
    flat = value.detach().contiguous().view(-1)
    return flat if flat.dtype is torch.bool else flat.view(torch.uint8)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)

"""What modules do in practice, each in the smallest model that does it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import backhaul
from backhaul.errors import BudgetError, CaptureError, PlanError
from backhaul.records import Plan

Check = Callable[..., Any]


class Custom(nn.Module):
    """A module of named parts and a forward given as a function."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def mlp(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 16), nn.ReLU()
    )


def rows(count: int = 4, width: int = 8) -> Tensor:
    return torch.randn(count, width)


def images(side: int = 12) -> Tensor:
    return torch.randn(2, 3, side, side)


# Equal to eager, bit for bit, by every plan.


class LstmClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True, dropout=0.3)
        self.head = nn.Linear(12, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(tokens))
        return self.head(hidden[:, -1])


# Leaving the flags warns of an option for other machines.
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_an_lstm_classifier(assert_bit_equal: Check) -> None:
    # Eager has a fused oneDNN kernel for a whole layer; captured, the layer is the same single
    # ops that eager takes without oneDNN.
    with torch.backends.mkldnn.flags(enabled=False):
        assert_bit_equal(LstmClassifier, lambda: torch.randint(0, 11, (4, 7)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self.block(3, 4), self.block(4, 8)
        self.middle = self.block(8, 8)
        self.up2, self.up1 = nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(4, 4, 2, 2)
        self.join2, self.join1 = self.block(16, 4), self.block(8, 4)
        self.head = nn.Conv2d(4, 2, 1)

    @staticmethod
    def block(before: int, after: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        deep = self.middle(F.max_pool2d(second, 2))
        deep = self.join2(torch.cat([self.up2(deep), second], 1))
        return self.head(self.join1(torch.cat([self.up1(deep), first], 1)))


def test_a_unet_with_skips(assert_bit_equal: Check) -> None:
    assert_bit_equal(UNet, lambda: images(16))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def test_tied_weights(assert_bit_equal: Check) -> None:
    assert_bit_equal(Tied, lambda: torch.randint(0, 11, (3, 5)))


@pytest.mark.parametrize("frozen", [(0,), (3,), (0, 3)])
def test_frozen_layers(assert_bit_equal: Check, frozen: tuple[int, ...]) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(*mlp(), nn.Linear(16, 2))
        for index in frozen:
            model[index].requires_grad_(False)
        return model

    assert_bit_equal(make, rows, input_grad=False)


def two_heads() -> nn.Module:
    def run(self: Any, x: Tensor) -> dict[str, Tensor]:
        body = self.body(x)
        return {"main": self.main(body), "aux": torch.sigmoid(self.aux(body))}

    return Custom(run, body=mlp(), main=nn.Linear(16, 2), aux=nn.Linear(16, 2))


def test_a_head_that_the_loss_leaves_out_gets_no_gradient(
    assert_bit_equal: Check, optimized: Check
) -> None:
    assert_bit_equal(two_heads, rows, loss=lambda output: output["main"].square().sum())
    module = optimized(two_heads(), rows())
    module(rows())["main"].sum().backward()
    assert module.aux.weight.grad is None and module.main.weight.grad is not None


def test_a_parameter_that_nothing_reads_gets_no_gradient(assert_bit_equal: Check) -> None:
    assert_bit_equal(
        lambda: Custom(lambda self, x: self.body(x), body=mlp(), idle=nn.Linear(2, 2)), rows
    )


@pytest.mark.parametrize("count", [1, 3, 10])
def test_chains_of_dropouts(assert_bit_equal: Check, count: int) -> None:
    def make() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(count)]
        return nn.Sequential(*layers)

    assert_bit_equal(make, rows)


def test_random_leaky_relu(assert_bit_equal: Check) -> None:
    assert_bit_equal(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 8), nn.RReLU()), rows
    )


def test_an_in_place_relu_and_a_residual_add(assert_bit_equal: Check) -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        first = F.relu_(self.bn1(self.conv1(x)))
        second = self.bn2(self.conv2(first))
        second += first
        return F.relu_(second)

    assert_bit_equal(
        lambda: Custom(
            run,
            conv1=nn.Conv2d(3, 4, 3, padding=1),
            bn1=nn.BatchNorm2d(4),
            conv2=nn.Conv2d(4, 4, 3, padding=1),
            bn2=nn.BatchNorm2d(4),
        ),
        images,
    )


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Dropout2d(0.3),
    )


def test_channels_last(assert_bit_equal: Check) -> None:
    assert_bit_equal(
        lambda: conv_net().to(memory_format=torch.channels_last),
        lambda: images().to(memory_format=torch.channels_last),
    )


class Centred(nn.Module):
    """Reads a buffer for the backward, then writes to it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) * self.mean.clone()
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        self.count += 1
        return y


def test_a_buffer_that_is_read_and_then_written(assert_bit_equal: Check) -> None:
    assert_bit_equal(Centred, rows)


def test_a_checkpointed_region_with_dropout(assert_bit_equal: Check) -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        return self.tail(checkpoint(self.body, self.head(x), use_reentrant=False))

    assert_bit_equal(
        lambda: Custom(run, head=nn.Linear(8, 8), body=mlp(), tail=nn.Linear(16, 2)),
        rows,
        expect_moved=False,
    )


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_interpolation_is_one_op(assert_bit_equal: Check, mode: str) -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        return self.tail(F.interpolate(self.head(x), scale_factor=1.7, mode=mode)).tanh()

    assert_bit_equal(lambda: Custom(run, head=nn.Conv2d(3, 4, 3), tail=nn.Conv2d(4, 2, 3)), images)


def test_losses_and_shrinks_are_one_op(assert_bit_equal: Check) -> None:
    def run(self: Any, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        y = self.body(x)
        return F.multi_margin_loss(y, labels), F.softshrink(y), F.hardshrink(y)

    assert_bit_equal(lambda: Custom(run, body=mlp()), lambda: (rows(), torch.tensor([0, 3, 5, 15])))


class MaybeCheckpointed(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return (
            checkpoint(self.tail, y, use_reentrant=False) if self.is_checkpointed else self.tail(y)
        )

    def tail(self, y: Tensor) -> Tensor:
        return self.second(F.relu_(self.norm(y)))


def test_a_checkpointed_batch_norm_updates_its_statistics_once(assert_bit_equal: Check) -> None:
    # Eager updates them again when it computes the region again, and so twice a step.
    assert_bit_equal(
        lambda: MaybeCheckpointed(True),
        images,
        make_reference=lambda: MaybeCheckpointed(False),
        expect_moved=False,
    )


def test_split_chunk_unbind_sort_topk_and_max(assert_bit_equal: Check) -> None:
    def run(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x).exp()
        first, second = y.split([3, 5], 1)
        left, right = second[:, :4].chunk(2, 1)
        a, *_ = first.unbind(1)
        ordered, order = y.sort(1, descending=True)
        best, at = y.topk(3)
        most, where = y.max(dim=0)
        least, _ = y.min(1)
        return (
            (left * right).exp(),
            a.exp() + least,
            ordered.sin(),
            best.cos(),
            most,
            order,
            at,
            where,
        )

    assert_bit_equal(lambda: Custom(run, linear=nn.Linear(8, 8)), rows)


def test_index_outputs_are_narrowed(assert_bit_equal: Check) -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        ordered, _ = y.sort(1)
        best, _ = y.topk(3)
        most, _ = y.max(dim=0)
        return (ordered.sum() + best.square().sum() + most.exp().sum()).view(1)

    plans = assert_bit_equal(lambda: Custom(run, linear=nn.Linear(8, 300)), rows)
    assert codecs_of(plans["compress_all"]) == ["narrow"] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "stride": 2, "ceil_mode": True},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2},
        {"kernel_size": (2, 3), "stride": (1, 2), "padding": (1, 0), "ceil_mode": True},
    ],
    ids=str,
)
def test_max_pools_are_packed(assert_bit_equal: Check, options: dict[str, Any]) -> None:
    plans = assert_bit_equal(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(**options)), images
    )
    assert "pool_offsets" in codecs_of(plans["compress_all"])


def test_views_are_saved(assert_bit_equal: Check) -> None:
    def run(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        y = torch.tanh(self.linear(x))
        wide = y[:, None].expand(-1, 3, -1)
        turned = torch.sigmoid(y).t()
        every_other = torch.exp(y)[::2, 1::2]
        return wide * wide.sin(), turned @ turned.t(), every_other.square() * every_other

    assert_bit_equal(lambda: Custom(run, linear=nn.Linear(8, 8)), rows)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Result:
    value: Tensor
    name: str


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda y: {"b": y, "a": {"inner": [y.exp(), None]}},
        lambda y: Pair(y, y.exp()),
        lambda y: Result(y.exp(), "result"),
        lambda y: [y, (y.sin(), 3)],
    ],
    ids=["dict", "namedtuple", "dataclass", "list"],
)
def test_outputs_keep_their_types(assert_bit_equal: Check, wrapped: Check) -> None:
    assert_bit_equal(
        lambda: Custom(lambda self, x: wrapped(self.body(x)), body=mlp()),
        rows,
        plans=("offload_all",),
    )


def test_an_empty_batch(assert_bit_equal: Check) -> None:
    assert_bit_equal(mlp, lambda: rows(0), loss=lambda output: output.sum(), expect_moved=False)


# Steps in unusual order.


def reference_and(module: Any, model: nn.Module, step: Check, assert_same: Check) -> None:
    """Do the same with a plain copy and with the module, and compare all that came of it."""
    plain = copy.deepcopy(model)
    found = []
    for each in (plain, module):
        torch.manual_seed(5)
        each.zero_grad()
        results = step(each)
        grads = {name: parameter.grad for name, parameter in each.named_parameters()}
        found.append({**grads, **{str(i): value for i, value in enumerate(results)}})
    assert_same(*found)


@pytest.mark.parametrize("is_first", [True, False])
def test_two_backwards_through_one_graph(
    optimized: Check, assert_same_facts: Check, is_first: bool
) -> None:
    x = rows()

    def step(model: Any) -> tuple[Tensor, ...]:
        if not is_first:
            model(x).square().sum().backward()
        output = model(x)
        output.square().sum().backward(retain_graph=True)
        output.square().sum().backward()
        return (output,)

    model = mlp()
    for name in ("keep_all", "offload_all", "compress_all"):
        reference_and(optimized(copy.deepcopy(model), x, name), model, step, assert_same_facts)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_their_backwards(
    optimized: Check, assert_same_facts: Check, order: tuple[int, int]
) -> None:
    inputs = rows(), rows()

    def step(model: Any) -> tuple[Tensor, ...]:
        outputs = [model(x) for x in inputs]
        for index in order:
            outputs[index].square().sum().backward()
        return tuple(outputs)

    model = mlp()
    module = optimized(copy.deepcopy(model), rows())
    reference_and(module, model, step, assert_same_facts)


def test_a_dropped_loss_gives_its_slots_back(optimized: Check, assert_same_facts: Check) -> None:
    x = rows()

    def step(model: Any) -> tuple[Tensor, ...]:
        for _ in range(3):
            model(x).sum()
        output = model(x)
        output.square().sum().backward()
        return (output.detach(),)

    model = mlp()
    module = optimized(copy.deepcopy(model), x)
    reference_and(module, model, step, assert_same_facts)
    assert module._link.open_arena_count == 0


def test_a_mean_over_the_batch_is_not_stale(optimized: Check, assert_same_facts: Check) -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return (y - y.mean(0)).square()

    model = Custom(run, linear=nn.Linear(8, 8))
    module = optimized(copy.deepcopy(model), rows())
    for _ in range(3):
        x = rows()
        reference_and(
            module,
            model,
            lambda each, x=x: (backward(each(x)),),
            assert_same_facts,
        )
    assert len(module.plans) == 1


def backward(output: Tensor) -> Tensor:
    output.sum().backward()
    return output.detach()


# Modes, shapes, flags and hooks.


def test_eval_and_no_grad_run_plainly_and_nothing_is_captured_again(
    optimized: Check, assert_same_facts: Check, train: Check
) -> None:
    model = conv_net()
    module, x = optimized(copy.deepcopy(model), images()), images()
    assert_same_facts(train(model, x, input_grad=False), train(module, x, input_grad=False))
    for _ in range(10):
        module.eval(), model.eval()
        assert torch.equal(module(x), model(x))
        module.train(), model.train()
        state = torch.get_rng_state()
        with torch.no_grad():
            y = module(x)
            torch.set_rng_state(state)
            assert torch.equal(y, model(x)) and not y.requires_grad
    assert_same_facts(train(model, x, input_grad=False), train(module, x, input_grad=False))
    assert len(module.plans) == 1


def test_a_new_batch_size_is_planned_once(
    optimized: Check, assert_same_facts: Check, train: Check
) -> None:
    model = mlp()
    module = optimized(copy.deepcopy(model), rows())
    for count in (4, 7, 4, 7, 1, 7):
        x = rows(count)
        assert_same_facts(train(model, x, input_grad=False), train(module, x, input_grad=False))
    assert len(module.plans) == 3


def test_a_changed_flag_is_honoured(optimized: Check) -> None:
    def run(self: Any, x: Tensor, twice: bool = False) -> Tensor:
        y = torch.tanh(self.linear(x)) * self.scale
        return torch.tanh(self.linear(y)) if twice else y

    model = Custom(run, linear=nn.Linear(8, 8))
    model.scale = 2
    module, x = optimized(model, rows()), rows()
    for twice in (False, True, False):
        assert torch.equal(module(x, twice=twice), model(x, twice=twice))
    module.scale = 3
    assert model.scale == 3 and torch.equal(module(x), model(x))


def test_a_hook_that_is_added_later_runs(optimized: Check) -> None:
    model = mlp()
    model[2].p = 0.0
    module, x = optimized(model, rows()), rows()
    before = module(x)
    hook = module[0].register_forward_hook(lambda _module, _args, output: output * 2)
    assert torch.equal(module(x), model(x)) and not torch.equal(module(x), before)
    hook.remove()
    assert torch.equal(module(x), before)


# State.


def test_state_dict_has_the_models_keys(optimized: Check) -> None:
    model = conv_net()
    module = optimized(model, images())
    assert list(module.state_dict()) == list(model.state_dict())
    assert [name for name, _ in module.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    assert [name for name, _ in module.named_modules()] == [
        name for name, _ in model.named_modules()
    ]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_a_copy_trains_alone(
    optimized: Check, assert_same_facts: Check, train: Check, copied: Check
) -> None:
    model = conv_net()
    module = optimized(model, images())
    twin = copied(module)
    plain, x = copy.deepcopy(model), images()
    assert_same_facts(train(plain, x, input_grad=False), train(twin, x, input_grad=False))
    assert twin.plans == module.plans
    assert_same_facts(train(plain, x), train(twin, x))
    assert len(twin.plans) == 2 and len(module.plans) == 1
    assert not torch.equal(twin.state_dict()["0.weight"], model[0].weight)


def test_assigned_parameters_are_used(
    optimized: Check, assert_same_facts: Check, train: Check
) -> None:
    model, other = mlp(), mlp()
    module, x = optimized(model, rows()), rows()
    train(module, x)
    module.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    for parameter in module.parameters():
        parameter.requires_grad_()
    assert_same_facts(train(other, x), train(module, x))


def test_optimize_leaves_no_trace() -> None:
    model = nn.Sequential(conv_net(), nn.BatchNorm2d(8))
    model[1].eval()
    model(images()).sum().backward()
    model.eval()
    model[0][6].train()
    x = images().requires_grad_()
    before = trace(model, x)
    random_state = torch.get_rng_state()
    backhaul.optimize(model, x, planner="offload_all")
    assert torch.equal(random_state, torch.get_rng_state())
    after = trace(model, x)
    assert list(before) == list(after)
    for key, value in before.items():
        same = torch.equal(value, after[key]) if isinstance(value, Tensor) else value == after[key]
        assert same, key


def trace(model: nn.Module, x: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"x": x.detach().clone(), "x.grad": x.grad}
    for key, value in model.state_dict().items():
        found[key] = value.clone()
    for key, parameter in model.named_parameters():
        found[f"{key}.grad"] = None if parameter.grad is None else parameter.grad.clone()
        found[f"{key}.id"] = id(parameter)
        found[f"{key}.version"] = parameter._version
    for key, module in model.named_modules():
        found[f"{key}.training"] = module.training
        found[f"{key}.hooks"] = len(module._forward_hooks), len(module._forward_pre_hooks)
        found[f"{key}.attributes"] = sorted(vars(module))
    return found


# Plans.


def test_a_plan_that_was_saved_is_applied(
    optimized: Check, assert_same_facts: Check, train: Check, tmp_path: Path
) -> None:
    model, x = conv_net(), images()
    made = optimized(copy.deepcopy(model), x.clone().requires_grad_())
    made.plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == made.plan
    module = backhaul.apply(copy.deepcopy(model), x.clone().requires_grad_(), loaded)
    assert module.plan == made.plan
    assert_same_facts(train(model, x), train(module, x))


def test_a_plan_of_another_model_is_refused(optimized: Check) -> None:
    made = optimized(conv_net(), images())
    other = nn.Sequential(*conv_net(), nn.Sigmoid())
    with pytest.raises(PlanError, match="made for another graph; ops: planned"):
        backhaul.apply(other, images(), made.plan)
    with pytest.raises(PlanError, match="first differing op"):
        backhaul.apply(conv_net(), images(16), made.plan)


def test_a_plan_is_made_without_a_module() -> None:
    made = backhaul.plan(mlp(), rows(), planner="offload_all")
    assert isinstance(made, Plan) and made.planner == "offload_all"


# Errors.


def test_a_model_without_gradients_is_refused() -> None:
    with pytest.raises(CaptureError, match="no gradient flows through Sequential"):
        backhaul.optimize(mlp().requires_grad_(False), rows())


def test_a_graph_break_is_refused_with_its_reason() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        y = self.body(x)
        torch._dynamo.graph_break()
        return y * 2

    with pytest.raises(CaptureError, match=r"(?s)Custom cannot be captured as one graph.*break"):
        backhaul.optimize(Custom(run, body=mlp()), rows())


def test_a_branch_on_data_is_refused_with_its_reason() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        y = self.body(x)
        return y * 2 if y.sum() > 0 else y

    with pytest.raises(CaptureError, match=r"(?si)data-dependent"):
        backhaul.optimize(Custom(run, body=mlp()), rows())


def test_an_unknown_sample_is_refused() -> None:
    with pytest.raises(CaptureError, match="sample_input is a int"):
        backhaul.optimize(mlp(), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"memory_budget": "6 parsecs"}, "memory_budget='6 parsecs'"),
        ({"memory_budget": "GiB"}, "memory_budget='GiB'"),
        ({"memory_budget": "1.2.3 GB"}, "1.2.3"),
        ({"memory_budget": ". GB"}, ". GB"),
        ({"memory_budget": "12"}, "memory_budget='12'"),
        ({"activation_budget": 1.5}, "activation_budget=1.5"),
        ({"activation_budget": 0}, "activation_budget=0"),
        ({"activation_budget": float("nan")}, "nan"),
        ({"activation_budget": True}, "True"),
        ({"max_slowdown": 0.5}, "max_slowdown=0.5"),
        ({"max_slowdown": float("nan")}, "nan"),
        ({"planner": "best"}, "planner='best'"),
        ({"error_budget": 0.01}, "lossless"),
        ({"memory_budget": 1, "max_slowdown": 2.0}, "different questions"),
    ],
    ids=str,
)
def test_an_option_without_meaning_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError) as caught:
        backhaul.optimize(mlp(), rows(), **options)
    assert named in str(caught.value) and "give" in str(caught.value) + " give write leave"


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="buget"):
        backhaul.optimize(mlp(), rows(), memory_buget=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="buget"):
        backhaul.plan(mlp(), rows(), memory_buget=1)


def test_a_budget_that_nothing_meets_says_the_smallest_that_is() -> None:
    with pytest.raises(BudgetError) as caught:
        backhaul.optimize(conv_net(), images(), memory_budget="1 KB")
    smallest = caught.value.smallest_bytes
    assert caught.value.budget_bytes == 1000 and f"{smallest:,}" in str(caught.value)
    torch._dynamo.reset()
    module = backhaul.optimize(conv_net(), images(), memory_budget=smallest)
    assert module.plan.predicted.peak_bytes <= smallest


def codecs_of(plan: Plan) -> list[str]:
    codecs = (getattr(decision.action, "codec", None) for decision in plan.decisions)
    return [codec.name for codec in codecs if codec is not None]

"""Training loops as users write them, each as it runs without backhaul.

Bit for bit by the eager executor.  By the Inductor executor close, which is judged in float64, so
that the order of sums is no excuse, and with eager's random numbers.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.nested import nested_tensor
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from backhaul.errors import CaptureError
from backhaul.passes import pipeline
from backhaul.runtime.disk import DiskLink
from backhaul.runtime.measure_ops import measure_ops

pytestmark = [
    # Dynamo looks at `.grad` of what another model made, and autograd warns.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex"),
]

Check = Callable[..., Any]
Steps = Iterator[tuple[Any, ...]]
PLANS = ("offload_all", "recompute_all", "frontier")
CLOSE = {torch.float64: 1e-8, torch.float32: 2e-2}
SMALLEST = 1e-3


@pytest.fixture(params=["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def executor(request: pytest.FixtureRequest) -> Iterator[Any]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if request.param == "eager" else torch.float64)
    with inductor_config.patch(fallback_random=True):
        yield request.param
    torch.set_default_dtype(default)


@pytest.fixture(name="optimized")
def _optimized(optimized: Check, executor: str) -> Check:
    return functools.partial(optimized, executor=executor)


@pytest.fixture(name="assert_same_loop")
def _assert_same_loop(
    optimized: Check, assert_same_facts: Check, executor: str, record_property: Check
) -> Check:
    """Run a loop with copies of models and with optimized ones, and compare all that it yields."""

    def check(loop: Check, *models: nn.Module, sample: Any = None, **options: Any) -> list[Any]:
        eager = copy.deepcopy(models)
        sample = rows() if sample is None else sample
        ours = [optimized(model, sample, **options) for model in models]
        expected, actual = facts_of(loop, eager), facts_of(loop, ours)
        if executor == "eager":
            assert_same_facts(expected, actual)
            record_property("result", "bit-equal")
        else:
            record_property("difference", difference_of(expected, actual))
        return ours

    return check


def difference_of(expected: dict[str, Any], actual: dict[str, Any]) -> float:
    """Return by how much facts differ, relative to the largest element of each; assert it small."""
    assert list(expected) == list(actual)
    differences = [0.0]
    for key, before in expected.items():
        after = actual[key]
        if not isinstance(before, Tensor):
            assert before == after, key
            continue
        assert (before.shape, before.dtype) == (after.shape, after.dtype), key
        is_real = before.is_floating_point() or before.is_complex()
        if not is_real or not before.numel() or not before.isfinite().all():
            assert torch.equal(before.nan_to_num(), after.nan_to_num()), key
            continue
        largest = before.abs().max().clamp_min(SMALLEST)
        differences.append(((after - before).abs().max() / largest).item())
        assert differences[-1] <= CLOSE[before.abs().dtype], key
    return max(differences)


def facts_of(loop: Check, models: Any) -> dict[str, Any]:
    """Note what a loop yields: tensors, and of modules the parameters, gradients and buffers."""
    facts: dict[str, Any] = {}
    torch.manual_seed(1)
    for step, values in enumerate(loop(*models)):
        facts[f"{step}.random state"] = torch.get_rng_state()
        for index, value in enumerate(values):
            found = {"": value}
            if isinstance(value, nn.Module):
                found = {**dict(value.named_parameters()), **dict(value.named_buffers())}
                found |= {f"{name}.grad": p.grad for name, p in value.named_parameters()}
            for name, each in found.items():
                is_tensor = isinstance(each, Tensor)
                facts[f"{step}.{index}.{name}"] = each.detach().clone() if is_tensor else each
    return facts


def net(dropout: float = 0.2, width: int = 4) -> nn.Sequential:
    body = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout)
    return nn.Sequential(*body, nn.Linear(8, width), nn.GELU())


def rows(count: int = 6) -> Tensor:
    return torch.randn(count, 8)


def mean_square(module: nn.Module) -> Any:
    return module(rows()).square().mean()


def halve(*call: Any) -> Any:
    return call[-1] * 0.5


def train(module: nn.Module, loss: Check = mean_square, steps: int = 3) -> Steps:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        total = loss(module)
        total.backward()
        optimizer.step()
        yield total, module


def through_a_file(module: nn.Module) -> Any:
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


class Loops:
    @staticmethod
    def gradients_accumulate_over_micro_batches(module: nn.Module) -> Steps:
        yield from train(module, lambda m: [mean_square(m).backward(), mean_square(m)][1])

    @staticmethod
    def one_backward_goes_through_several_forwards(module: nn.Module) -> Steps:
        yield from train(module, lambda m: F.triplet_margin_loss(*(m(rows()) for _ in range(3))))

    @staticmethod
    def gradients_are_clipped_by_norm_and_by_value(module: nn.Module) -> Steps:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            mean_square(module).backward()
            yield nn.utils.clip_grad_norm_(module.parameters(), 1e-3), module
            nn.utils.clip_grad_value_(module.parameters(), 1e-4)
            optimizer.step()

    @staticmethod
    def body_and_head_have_optimizers_of_their_own(module: Any) -> Steps:
        head = torch.optim.Adam(module[4].parameters())
        others = [p for name, p in module.named_parameters() if not name.startswith("4.")]
        body = torch.optim.SGD(others, lr=0.1, momentum=0.9, weight_decay=0.01)
        for step in range(3):
            module.zero_grad()
            mean_square(module).backward()
            for optimizer in (head, body)[: 2 - step % 2]:
                optimizer.step()
            yield (module,)

    @staticmethod
    def an_average_of_the_weights_is_kept(module: nn.Module) -> Steps:
        average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        for step in train(module):
            average.update_parameters(module)
            yield *step, average.train()(rows()), average.eval()(rows()), *average.parameters()

    @staticmethod
    def a_frozen_copy_teaches_and_follows(module: nn.Module) -> Steps:
        teacher = copy.deepcopy(module).requires_grad_(False)
        for step in train(module, lambda module: F.mse_loss(module(x := rows()), teacher(x))):
            with torch.no_grad():
                torch._foreach_lerp_([*teacher.parameters()], [*module.parameters()], 0.1)
            yield *step, teacher

    @staticmethod
    def a_state_is_loaded_in_the_middle(module: nn.Module) -> Steps:
        first = copy.deepcopy(module.state_dict())
        for assign in (False, True):
            yield from train(module, steps=2)
            module.load_state_dict(first, assign=assign)
        yield from train(module, steps=2)

    @staticmethod
    def the_last_batch_is_smaller(module: nn.Module) -> Steps:
        counts = iter([6, 6, 2] * 2)
        yield from train(module, lambda module: module(rows(next(counts))).square().mean(), 6)

    @staticmethod
    def a_layer_thaws(module: Any) -> Steps:
        for frozen in ((), (0, 1), (4,), ()):
            for index, layer in enumerate(module):
                layer.requires_grad_(index not in frozen)
            yield from train(module, steps=1)
            assert all((p.grad is None) != p.requires_grad for p in module.parameters())

    @staticmethod
    def an_optimizer_calls_forward_several_times_in_a_step(module: nn.Module) -> Steps:
        optimizer = torch.optim.LBFGS(module.parameters(), max_iter=4)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = mean_square(module)
            loss.backward()
            return loss.detach()

        for _ in range(3):
            yield optimizer.step(closure), module

    @staticmethod
    def copies_of_copies_train_on_alone(module: nn.Module) -> Steps:
        for copied in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_a_file):
            yield from train(module, steps=2)
            first, module = module, copied(module)
            assert type(first) is type(module) and vars(first).keys() == vars(module).keys()
            yield from ((*step, first) for step in train(module, steps=2))

    @staticmethod
    def hooks_of_the_wrapper_run(module: Any) -> Steps:
        seen: list[Tensor] = []
        module[0].weight.register_hook(halve)
        module[4].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        module.register_full_backward_hook(lambda _, inputs, outputs: seen.extend(outputs))
        module.register_full_backward_pre_hook(lambda _, outputs: (outputs[0] * 3,))

        def loss(module: nn.Module) -> Any:
            x = rows().requires_grad_()
            x.register_hook(lambda grad: seen.append(grad.clone()))
            output = module(x)
            output.register_hook(halve)
            return output.square().mean()

        for step in train(module, loss):
            yield *step, len(seen), *seen

    @staticmethod
    def gradients_have_a_graph_of_their_own(module: nn.Module) -> Steps:
        for _ in range(3):
            loss = mean_square(module)
            yield torch.autograd.grad(loss, list(module.parameters()), create_graph=True)

    @staticmethod
    def a_functional_call_takes_other_parameters(module: nn.Module) -> Steps:
        own = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
        for step in range(3):
            weights = {name: weight * (1 + step) for name, weight in own.items()}
            torch.func.functional_call(module, weights, rows()).square().mean().backward()
            yield *(weight.grad for weight in own.values()), module

    @staticmethod
    def autocast_to_bfloat16(module: nn.Module) -> Steps:
        def loss(module: nn.Module) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return F.cross_entropy(module(rows()), torch.arange(6) % 4)

        yield from train(module, loss)

    @staticmethod
    def autocast_to_float16_with_a_scaler_that_skips_a_step(module: nn.Module) -> Steps:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, backoff_factor=2.0**-16)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.mse_loss(module(rows()), torch.ones(6, 4))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            yield loss, norm, scaler.get_scale(), module
        assert scaler.get_scale() == 2.0**8


PLAN_COUNTS = {"the_last_batch_is_smaller": 2, "hooks_of_the_wrapper_run": 2, "a_layer_thaws": 3}


@pytest.mark.parametrize("plan", ["offload_all", "recompute_all"])
@pytest.mark.parametrize("loop", [loop for loop in vars(Loops) if not loop.startswith("_")])
def test_where(assert_same_loop: Check, loop: str, plan: str, monkeypatch: Any) -> None:
    is_autocast = loop.startswith("autocast")
    if is_autocast:
        torch.set_default_dtype(torch.float32)  # autocast leaves float64 alone
        # Only what is really measured shows that norms save another dtype than was traced.
        monkeypatch.setattr(pipeline, "measure_ops", measure_ops)
    model = net(dropout=0 if is_autocast else 0.2)
    (module,) = assert_same_loop(getattr(Loops, loop), model, name=plan)
    assert is_autocast or len(module.plans) == PLAN_COUNTS.get(loop, 1)


@pytest.mark.parametrize("plan", PLANS)
def test_several_models_step_in_turn(assert_same_loop: Check, plan: str) -> None:
    def loop(*modules: nn.Module) -> Steps:
        loops = [train(module) for module in modules]
        for steps in zip(*loops, strict=True):
            yield tuple(value for step in steps for value in step)

    assert_same_loop(loop, net(), net(width=2), net(width=1), name=plan)


@pytest.mark.parametrize("plan", PLANS)
def test_a_generator_and_a_critic(assert_same_loop: Check, plan: str) -> None:
    def loop(generator: nn.Module, critic: nn.Module) -> Steps:
        first, second = (torch.optim.Adam(m.parameters(), 0.01) for m in (generator, critic))
        for step in range(3):
            fake = generator(rows())
            critic.zero_grad()
            loss = F.softplus(-critic(rows())).mean() + F.softplus(critic(fake.detach())).mean()
            loss.backward()
            second.step()
            yield loss, critic
            generator.zero_grad()
            critic.requires_grad_(step != 1)
            F.softplus(-critic(fake)).mean().backward()
            critic.requires_grad_(True)
            first.step()
            yield generator, critic

    ours = assert_same_loop(loop, net(width=8), net(width=1), name=plan)
    assert [len(each.plans) for each in ours] == [1, 3]


class LowRank(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, inputs) / 8)
        self.up = nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def adapted() -> nn.Module:
    wider, back = (nn.Linear(*sizes).requires_grad_(False) for sizes in ((8, 24), (24, 8)))
    between = (nn.ReLU(), wider, nn.ReLU(), back, nn.Sigmoid())
    return nn.Sequential(LowRank(8, 8), *between, LowRank(8, 4))


def test_nothing_is_saved_for_the_gradients_of_frozen_weights(
    optimized: Check, record_property: Check
) -> None:
    model, x = adapted(), rows()
    given = {value.untyped_storage().data_ptr() for value in (x, *model.parameters())}
    kept: dict[int, Tensor] = {}

    def note(value: Tensor) -> Tensor:
        return kept.setdefault(value.untyped_storage().data_ptr(), value)

    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        model(x)
    eager = [tuple(value.shape) for key, value in kept.items() if key not in given]
    saved = optimized(model, x, "keep_all").plan.graph.saved
    assert sorted(each.shape for each in saved) == sorted(eager)
    record_property("result", "as eager saves")


def test_forward_hooks_from_before_and_after_run(assert_same_loop: Check) -> None:
    def loop(module: Any) -> Steps:
        yield from train(module, steps=1)
        handles = (module[0].register_forward_hook(halve), module.register_forward_hook(halve))
        yield from train(module, steps=2)
        for handle in handles:
            handle.remove()
        yield from train(module, steps=1)

    model = net()
    model[1].register_forward_hook(lambda *call: call[2].register_hook(halve) and None)
    model[2].register_forward_hook(halve)
    model[4].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    model.register_forward_hook(halve)
    assert_same_loop(loop, model)


def test_a_modules_backward_hook_inside_the_model_is_refused(
    optimized: Check, record_property: Check
) -> None:
    module = optimized(model := net(), rows())
    model[4].register_full_backward_hook(lambda *_: None)
    for call in (module, lambda x: optimized(model, x)):
        with pytest.raises(CaptureError, match="backwards hooks"):
            call(rows())
    record_property("result", "refused")


@dataclasses.dataclass
class Result:
    loss: Tensor
    hidden_states: tuple[Tensor, ...]


class Returns(nn.Module):
    def __init__(self, result: Check) -> None:
        super().__init__()
        self.body, self.result = net(), result

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        return self.result(loss=hidden.square().mean(), hidden_states=(x, hidden))


@pytest.mark.parametrize("kind", ["dataclass", "dict", "ModelOutput"])
def test_a_structure_is_returned(assert_same_loop: Check, kind: str) -> None:
    def loss(module: nn.Module) -> Any:
        output = module(x=rows())
        types.append(type(output))
        fields = output if isinstance(output, dict) else vars(output)
        return fields["loss"] + fields["hidden_states"][1].mean()

    types: list[type] = []
    made: Any = {"dataclass": Result, "dict": dict}.get(kind)
    if kind == "ModelOutput":
        made = pytest.importorskip("transformers.modeling_outputs").CausalLMOutput
    assert_same_loop(lambda m: train(m, loss), Returns(made), sample={"x": rows()})
    assert types == [made] * 6


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        *body, left, right = self
        for layer in body:
            x = x + checkpoint(layer, x.tanh(), use_reentrant=False)
        return left(x), right(x)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("heads", [2, 1])
def test_checkpointed_regions(assert_same_loop: Check, heads: int, plan: str) -> None:
    def loop(module: nn.Module) -> Steps:
        yield from train(module, lambda _: torch.cat(module(rows())[:heads]).square().mean())

    body = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in range(2)]
    model = Checkpointed(*body, nn.Linear(8, 4), nn.Linear(8, 4))
    assert_same_loop(loop, model, name=plan)


class Spectrum(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(torch.fft.fft(x).tanh())
        return torch.view_as_real(z * z.conj()).sin() + z.abs().unsqueeze(-1)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1) * x.cos()


class Binary(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return StraightThrough.apply(super().forward(x).tanh()) * x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "adapters on frozen weights": adapted,
    "weight_norm": lambda: nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.GELU()),
    "spectral_norm": lambda: nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.GELU()),
    "complex numbers": lambda: Spectrum(8, 4, dtype=torch.get_default_dtype().to_complex()),
    "autograd.Function": lambda: Binary(8, 8),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_of(assert_same_loop: Check, model: str, plan: str) -> None:
    assert_same_loop(train, MODELS[model](), name=plan)


def test_an_embedding_gets_sparse_gradients(assert_same_loop: Check) -> None:
    def loop(module: Any) -> Steps:
        optimizer = torch.optim.SparseAdam([module[0].weight], lr=0.1)
        for _ in range(3):
            module.zero_grad()
            module(torch.randint(10, (6,))).square().mean().backward()
            optimizer.step()
            grads = [p.grad for p in module.parameters()]
            yield grads[0]._indices(), grads[0]._values(), *grads[1:], *module.parameters()

    model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 4), nn.Tanh())
    assert_same_loop(loop, model, sample=torch.arange(6))


def test_lengths_in_buckets_have_one_plan_each(assert_same_loop: Check) -> None:
    def loop(module: nn.Module) -> Steps:
        lengths = iter([4, 6, 8] * 2)

        def loss(module: nn.Module) -> Tensor:
            tokens = torch.randint(20, (2, next(lengths)))
            return F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())

        yield from train(module, loss, 6)

    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    model = nn.Sequential(nn.Embedding(20, 8), layer, nn.Linear(8, 20))
    (module,) = assert_same_loop(loop, model, sample=torch.ones(2, 4, dtype=torch.int64))
    assert len(module.plans) == len(module._capture.works) == 3


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_loader_forks_workers_after_optimize(assert_same_loop: Check, tmp_path: Path) -> None:
    def loop(module: nn.Module) -> Steps:
        loader = DataLoader(data, 3, shuffle=True, num_workers=2, multiprocessing_context="fork")
        for (x,) in loader:
            yield from train(module, lambda _, x=x: module(x).square().mean(), 1)

    data = TensorDataset(rows(12))
    assert_same_loop(loop, net(), sample=rows(3), link=DiskLink(tmp_path))


UNSUPPORTED: dict[str, Check] = {
    "torch.func.grad": lambda m: torch.func.grad(lambda x: m(x).sum())(rows()),
    "vmap": lambda m: torch.vmap(m)(torch.randn(2, 6, 8)),
    "forward mode": lambda m: jacobian(m, rows(), vectorize=True, strategy="forward-mode"),
    "double backward": lambda m: hessian(lambda x: m(x).sum(), rows()),
    "batched by": lambda m: jacobian(m, rows(), vectorize=True),
    "nested tensor": lambda m: m(nested_tensor([rows(2)], layout=torch.jagged)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", list(UNSUPPORTED))
def test_what_is_unsupported_is_refused_by_name(
    optimized: Check, name: str, record_property: Check
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    with pytest.raises(CaptureError, match=name):
        UNSUPPORTED[name](optimized(model, rows()))
    record_property("result", "refused")

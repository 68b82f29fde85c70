"""Compiled kernels give the same bytes as eager ones, and serve tensors of any length."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backhaul.records import Mode, PackedForm
from backhaul.runtime import kernel_compiler
from backhaul.runtime.kernel_compiler import EAGER, Kernels, executor, kernels_for
from backhaul.runtime.quantiser import BLOCK, dequantise, measure, needed_in, needs, quantise

CPU = torch.device("cpu")
# Some seconds of compilation each.
CASES: tuple[tuple[torch.dtype, Mode, bool], ...] = (
    (torch.float32, "zero", False),
    (torch.float32, "sign", True),
    (torch.float32, "dither", False),
    (torch.bfloat16, "zero", True),
    (torch.bfloat16, "sign", False),
)


def needs_compiler(dtype: torch.dtype, mode: Mode) -> None:
    told = executor(CPU, dtype, mode)
    if told.name == "eager":
        pytest.skip(told.reason)


def packed_and_back(x: Tensor, mode: Mode, is_sparse: bool = False) -> tuple[Tensor, Tensor]:
    bound = torch.tensor(0.03)
    least = needed_in(PackedForm(0, 0, is_sparse, mode), measure(x, bound, mode).tolist())
    assert least is not None
    misfits = least.exact_blocks
    form = replace(least, exact_blocks=misfits + 1)
    packed = quantise(x, bound, form)
    assert needs(packed, x.numel(), form, x.dtype).tolist() == [least.rows, misfits]
    # What is to spare, and waste.
    packed[misfits * BLOCK * x.itemsize :][: 2 * BLOCK * x.itemsize] = 0
    return packed, dequantise(packed, form, x.shape, x.stride(), x.dtype)


@pytest.mark.parametrize(("dtype", "mode", "is_sparse"), CASES)
def test_compiled_and_eager_kernels_give_the_same_bytes(
    dtype: torch.dtype, mode: Mode, is_sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_compiler(dtype, mode)
    random = torch.Generator().manual_seed(0)
    for blocks, rest in ((256, 0), (300, 7), (9000, 1)):
        scales = torch.exp(torch.randn(blocks + 1, generator=random)).repeat_interleave(BLOCK)
        x = torch.randn(blocks * BLOCK + rest, generator=random)
        x *= scales[: x.numel()]
        x = (x.relu() if mode == "sign" else x).to(dtype)
        x[[5, 9000]] = torch.tensor([math.nan, math.inf], dtype=dtype)
        assert kernels_for(blocks, dtype, mode, CPU).is_compiled
        packed, y = packed_and_back(x, mode, is_sparse)
        with monkeypatch.context() as patch:
            patch.setattr(kernel_compiler, "_is_worth_compiling", lambda _: False)
            eager_packed, eager_y = packed_and_back(x, mode, is_sparse)
        # The last row of the pool is waste.
        assert y.nan_to_num(nan=-1.0).equal(eager_y.nan_to_num(nan=-1.0))
        is_same = packed == eager_packed
        assert is_same.numel() - is_same.count_nonzero() <= 32
        finite = x.isfinite()
        assert (x.double() - y.double()).abs()[finite].max() <= torch.tensor(0.03).double()


def test_no_length_and_no_state_of_torch_compiles_a_kernel_again() -> None:
    needs_compiler(torch.float32, "zero")
    packed_and_back(torch.randn(256 * BLOCK), "zero", is_sparse=True)
    for blocks in (256, 257, 999):
        for is_training in (False, True):
            with (
                torch.set_grad_enabled(is_training),
                torch.compiler.set_stance("fail_on_recompile"),
                torch.autocast("cpu", enabled=is_training),
            ):
                packed_and_back(torch.randn(blocks * BLOCK), "zero")
                packed_and_back(torch.randn(blocks * BLOCK).relu(), "zero", is_sparse=True)


def test_a_compiled_function_that_calls_an_op_of_the_codec_runs_compiled_kernels() -> None:
    needs_compiler(torch.float32, "zero")

    @torch.library.custom_op("backhaul_test::round_trip", mutates_args=())
    def round_trip(x: Tensor) -> Tensor:
        assert kernels_for(256, x.dtype, "zero", x.device).is_compiled
        return packed_and_back(x, "zero")[1].clone()

    round_trip.register_fake(torch.empty_like)
    x = torch.randn(256 * BLOCK)
    y = torch.compile(lambda x: round_trip(x + 1) - 1)(x)
    assert (x - y).abs().max() < 0.0301


def test_a_watched_call_runs_eager_kernels() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    with Watching():
        assert not kernels_for(10**6, torch.float32, "zero", CPU).is_compiled


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Forget what has been compiled, before and after."""
    kernel_compiler._compiled.cache_clear()
    yield
    kernel_compiler._compiled.cache_clear()


def told_of_kernels() -> tuple[str, str, Kernels]:
    return (
        *executor(CPU, torch.float32, "zero"),
        kernels_for(10**6, torch.float32, "zero", CPU),
    )


@pytest.mark.usefixtures("forgotten")
def test_where_no_compiler_works_kernels_run_eagerly_and_say_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> object:
        raise RuntimeError("no g++ here\nand more")

    monkeypatch.setattr(kernel_compiler, "_compiled_one", broken)
    assert told_of_kernels() == ("eager", "RuntimeError: no g++ here", EAGER)
    assert "run eagerly: RuntimeError: no g++ here" in caplog.text


@pytest.mark.usefixtures("forgotten")
def test_where_compiling_is_disabled_kernels_run_eagerly() -> None:
    with torch._dynamo.config.patch(disable=True):
        assert told_of_kernels() == ("eager", "RuntimeError: torch.compile is disabled", EAGER)

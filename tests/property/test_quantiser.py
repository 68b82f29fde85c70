"""No element of any tensor comes back farther from itself than the bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backhaul.records import Mode, PackedForm
from backhaul.runtime import dense
from backhaul.runtime.block_kernels import PLANES, SECTION
from backhaul.runtime.quantiser import (
    BLOCK,
    dequantise,
    fake_quantise,
    fitting_forms,
    measure,
    needed_in,
    needs,
    quantise,
    quantised_nbytes,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LENGTHS = st.sampled_from((0, 1, 2, 7, 255, 256, 257, 511, 512, 2000, 5000))


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, float]:
    """Draw a dense tensor in any layout, and a bound that is not always a sensible one."""
    dtype = draw(st.sampled_from(DTYPES))
    numel = draw(LENGTHS)
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    noise = torch.randn(numel, generator=random, dtype=torch.float64)
    bound = draw(st.sampled_from((1e-3, 0.01, 0.03, 0.25, 0.1, 1.0, 7.0)))
    scale = draw(st.sampled_from((1.0, 1e-3, 100.0)))
    match draw(st.sampled_from(("normal", "relu", "ties", "constant", "denormal", "wide", "far"))):
        case "normal":
            values = noise * scale
        case "relu":
            values = noise.relu() * scale
        case "ties":  # Halfway between two numbers of steps, and exactly at the bound.
            values = noise.sign() * bound * torch.randint(0, 20, (numel,), generator=random)
        case "constant":
            values = torch.full_like(noise, draw(st.floats(-1e4, 1e4)))
        case "denormal":
            bound *= torch.finfo(dtype).tiny
            values = noise * torch.finfo(dtype).tiny
        case "wide":
            values = noise * torch.exp(20 * torch.randn(numel, generator=random))
        case _:
            values = noise * bound + draw(st.sampled_from((1e3, -4e4, 1e30)))
    if draw(st.booleans()):
        bound = draw(st.sampled_from((0.0, 1e-45, 1e-38, 1e20, 3e38)))
    x = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    for special in draw(st.lists(st.sampled_from((math.nan, math.inf, -math.inf)), max_size=3)):
        if numel:
            x[draw(st.integers(0, numel - 1))] = special
    return _laid_out(x, draw(st.sampled_from(("flat", "transposed", "channels_last")))), bound


def _laid_out(x: Tensor, layout: str) -> Tensor:
    """Give the elements of a flat tensor a shape and a dense layout."""
    count = x.numel()
    if layout == "transposed" and count % 4 == 0 and count:
        return x.view(4, -1).t()
    if layout == "channels_last" and count % 40 == 0 and count:
        return x.view(2, -1, 4, 5).permute(0, 3, 1, 2)
    return x


def check(case: tuple[Tensor, float], mode: Mode) -> None:
    """Pack and unpack, and look at every element."""
    for form in forms_of(case, mode):
        check_form(case, form)


def forms_of(case: tuple[Tensor, float], mode: Mode) -> list[PackedForm]:
    """List every form that a tensor has, with just the room that it needs."""
    x, bound = case
    return fitting_forms(measure(x, torch.tensor(bound), mode).tolist(), mode)


def check_form(case: tuple[Tensor, float], form: PackedForm) -> None:
    """Pack in one form and unpack, and look at every element."""
    x, bound = case
    told, mode = torch.tensor(bound), form.mode
    packed = quantise(x, told, form)
    assert packed.nbytes == quantised_nbytes(x.numel(), form, x.dtype)
    assert needs(packed, x.numel(), form, x.dtype).tolist() == [form.rows, form.exact_blocks]
    y = dequantise(packed, form, x.shape, x.stride(), x.dtype)
    assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), x.dtype)
    wide_x, wide_y = x.double(), y.double()
    finite = x.isfinite()
    assert ((wide_x - wide_y).abs()[finite] <= told.double()).all()
    assert mode == "dither" or (y[x == 0] == 0).all()
    assert y[x.isnan()].isnan().all() and torch.equal(y[x.isinf()], x[x.isinf()])
    if mode == "zero":
        assert (y[wide_x.abs() <= told] == 0).all()
    if mode == "sign":
        assert torch.equal(y > 0, x > 0)


MODES = st.sampled_from(("zero", "sign", "dither"))


@given(tensors(), MODES)
@settings(max_examples=300, deadline=None)
def test_every_element_keeps_to_the_bound(case: tuple[Tensor, float], mode: Mode) -> None:
    check(case, mode)


@pytest.mark.slow
@given(tensors(), MODES)
@settings(max_examples=6000, deadline=None)
def test_every_element_keeps_to_the_bound_at_length(case: tuple[Tensor, float], mode: Mode) -> None:
    check(case, mode)


def form_of(x: Tensor, bound: float, mode: Mode = "zero", is_sparse: bool = False) -> PackedForm:
    """Return a form with all the room that a tensor needs."""
    form = PackedForm(0, 0, is_sparse, mode)
    found = needed_in(form, measure(x, torch.tensor(bound), mode).tolist())
    assert found is not None
    return found


def round_trip(x: Tensor, bound: float, form: PackedForm) -> Tensor:
    """Pack and unpack a tensor."""
    packed = quantise(x, torch.tensor(bound), form)
    return dequantise(packed, form, x.shape, x.stride(), x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", range(1, PLANES + 1))
def test_a_block_takes_as_many_bits_as_its_numbers_span(bits: int, dtype: torch.dtype) -> None:
    x = torch.zeros(BLOCK, dtype=dtype)
    x[1] = 1 if bits == 1 else 3 * 2 ** (bits - 2)
    bound = torch.tensor(0.5 * (1 + 2.0**-8))
    assert measure(x, bound, "zero").tolist()[0] == [bits, 0]
    x[1] = 3 * 2**bits
    is_wide = bits + 2 > PLANES
    assert measure(x, bound, "zero").tolist()[0] == ([0, 1] if is_wide else [bits + 2, 0])


def test_zeros_take_one_bit_each_in_a_sparse_form() -> None:
    x = torch.zeros(4 * BLOCK)
    x[::4] = torch.randint(1, 256, (BLOCK,)).float()
    x[::BLOCK] = 255.0
    assert form_of(x, 0.501).rows == 4 * 8
    form = form_of(x, 0.501, is_sparse=True)
    assert form.rows == 8
    dense, sparse = (
        quantised_nbytes(x.numel(), replace(form, is_sparse=sparse), x.dtype)
        for sparse in (False, True)
    )
    assert sparse - dense == x.numel() // 8
    assert round_trip(x, 0.501, form).equal(round_trip(x, 0.501, form_of(x, 0.501)))


@pytest.mark.parametrize("is_sparse", (False, True))
def test_blocks_that_do_not_fit_are_counted_and_come_back_exactly(is_sparse: bool) -> None:
    x = torch.zeros(10 * BLOCK)
    x[0], x[3 * BLOCK + 5], x[7 * BLOCK] = 0.3, 1e6, math.nan
    x[3 * BLOCK + 6] = 0.009
    least = form_of(x, 0.01, is_sparse=is_sparse)
    assert least.exact_blocks == (1 if is_sparse else 2)
    for room in (2, 5, 10, 100):
        y = round_trip(x, 0.01, replace(least, exact_blocks=room))
        assert y[3 * BLOCK + 5] == 1e6 and y[7 * BLOCK].isnan()
        assert y[3 * BLOCK + 6] == 0  # Even there nothing small comes back as other than 0.
        assert y[0] != 0 and y.count_nonzero() == 3


@pytest.mark.parametrize("is_sparse", (False, True))
def test_too_little_room_is_told(is_sparse: bool) -> None:
    x = torch.randn(10 * BLOCK)
    x[0] = math.inf
    form = form_of(x, 0.1, is_sparse=is_sparse)
    tight = replace(form, rows=form.rows - 20, exact_blocks=0)
    packed = quantise(x, torch.tensor(0.1), tight)
    assert needs(packed, x.numel(), tight, x.dtype).tolist() == [form.rows, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_of_exactly_the_bound_comes_back_as_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([0.75, -0.75, 1.5, 0.0]).to(dtype)
    y = round_trip(x, 0.75, form_of(x, 0.75))
    assert y[[0, 1, 3]].tolist() == [0, 0, 0] and y[2] != 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_signs_stay_where_values_vanish(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    x = torch.tensor([0.7, 0.01, tiny, 0.0, -0.0, 2.5], dtype=torch.float64).to(dtype)
    y = round_trip(x, 0.75, form_of(x, 0.75, "sign"))
    assert y[3:5].tolist() == [0, 0] and (y[:3] == y[0]).all() and 0.5 < y[0] < 0.75 < y[5]
    assert form_of(-x, 0.75, "sign").exact_blocks == 1
    least = torch.finfo(torch.float32).smallest_normal * 2.0**-23
    assert form_of(x, least, "sign").exact_blocks == 1


def test_dithered_errors_of_equal_elements_differ() -> None:
    x = torch.full((4096,), 0.37)
    error = round_trip(x, 1.0, form_of(x, 1.0, "dither")) - x
    assert error.unique().numel() > 4000
    assert abs(float(error.mean())) < 0.05 and abs(float(error.std()) - 3**-0.5) < 0.02


@pytest.mark.parametrize("mode", ("zero", "sign", "dither"))
def test_numbers_of_steps_too_large_to_store_do_not_fit(mode: Mode) -> None:
    x = torch.full((BLOCK,), 1e12, dtype=torch.float64)
    assert form_of(x, 0.125, mode).exact_blocks == 1
    x[1:] = 1.0
    assert form_of(x, 0.125, mode).exact_blocks == 1


@pytest.mark.parametrize("mode", ("zero", "sign", "dither"))
def test_large_tensors_are_worked_on_in_pieces(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    x, bound = torch.randn(40 * BLOCK + 17).relu(), 0.03
    x[::1000] = 1e9
    form, told = form_of(x, bound, mode), torch.tensor(bound)
    packed, y = quantise(x, told, form), round_trip(x, bound, form)
    monkeypatch.setattr(dense, "TEMPORARY_BYTES", {"cpu": 24 * 3 * BLOCK})
    assert form_of(x, bound, mode) == form
    # The last exact block is waste.
    packed[form.exact_blocks * 1024 :][:1024] = 0
    again = quantise(x, told, form)
    again[form.exact_blocks * 1024 :][:1024] = 0
    assert again.equal(packed)
    assert round_trip(x, bound, form).equal(y)


def test_sections_are_compacted_apart() -> None:
    x = torch.zeros((2 * SECTION + 3) * BLOCK + 5)
    x[:: 3 * BLOCK + 1] = 1.0
    x[[7, SECTION * BLOCK, -1]] = torch.tensor((math.nan, 1e9, math.inf))
    # Only the last block of each section has zeros beside its ones.
    form = form_of(x, 0.01, is_sparse=True)
    assert form.exact_blocks == 3 and form.rows == 3 * 6
    y = round_trip(x, 0.01, form)
    assert y[7].isnan() and y[SECTION * BLOCK] == 1e9 and y[-1] == math.inf
    assert (y > 0).equal(x > 0) and (x - y).nan_to_num().abs().max() <= 0.01


def test_what_cannot_be_quantised_is_refused() -> None:
    bound, form = torch.tensor(1.0), PackedForm(4, 0, is_sparse=False, mode="zero")
    with pytest.raises(ValueError, match="int64"):
        fake_quantise(torch.zeros(3, dtype=torch.int64), bound, form)
    with pytest.raises(ValueError, match="not dense"):
        quantise(torch.zeros(4, 4)[:, ::2], bound, form)
    with pytest.raises(ValueError, match="36 bytes are not what"):
        dequantise(torch.zeros(36, dtype=torch.uint8), form, (3,), (1,), torch.float32)
    with pytest.raises(ValueError, match="dithering does not keep"):
        quantise(torch.zeros(4), bound, replace(form, mode="dither", is_sparse=True))

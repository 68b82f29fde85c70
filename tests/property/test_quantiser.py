"""No element of any tensor comes back farther from itself than the bound."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backhaul.records import Mode
from backhaul.runtime import dense
from backhaul.runtime.quantiser import (
    BLOCK,
    dequantise,
    fake_quantise,
    measure,
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
    x, bound = case
    told = torch.tensor(bound)
    room = measure(x, told, mode).tolist()
    packed = quantise(x, told, *room, mode)
    assert packed.nbytes == quantised_nbytes(x.numel(), *room, x.dtype)
    assert needs(packed, x.numel(), *room, x.dtype).tolist() == room
    y = dequantise(packed, *room, x.shape, x.stride(), x.dtype, mode)
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


def round_trip(x: Tensor, bound: float, mode: Mode = "zero", room: int | None = None) -> Tensor:
    """Pack and unpack a tensor, with all the room that it needs or so many exact blocks."""
    told = torch.tensor(bound)
    rows, misfits = measure(x, told, mode).tolist()
    room = misfits if room is None else room
    packed = quantise(x, told, rows, room, mode)
    return dequantise(packed, rows, room, x.shape, x.stride(), x.dtype, mode)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_a_block_takes_as_many_bits_as_its_numbers_span(bits: int, dtype: torch.dtype) -> None:
    x = torch.arange(BLOCK).remainder(2**bits).to(dtype)
    bound = torch.tensor(0.5 * (1 + 2.0**-8))
    assert measure(x, bound).tolist() == [bits, 0]
    x[1] = 3 * 2**bits
    assert measure(x, bound).tolist() == ([bits + 2, 0] if bits < 7 else [0, 1])


def test_blocks_that_do_not_fit_are_counted_and_come_back_exactly() -> None:
    x = torch.zeros(10 * BLOCK)
    x[0], x[3 * BLOCK + 5], x[7 * BLOCK] = 0.3, 1e6, math.nan
    x[3 * BLOCK + 6] = 0.009
    assert measure(x, torch.tensor(0.01))[1] == 2
    for room in (2, 5, 10, 100):
        y = round_trip(x, 0.01, room=room)
        assert y[3 * BLOCK + 5] == 1e6 and y[7 * BLOCK].isnan()
        assert y[3 * BLOCK + 6] == 0  # Even there nothing small comes back as other than 0.
        assert y[0] != 0 and y.count_nonzero() == 3


def test_too_little_room_is_told() -> None:
    x, bound = torch.randn(10 * BLOCK), torch.tensor(0.1)
    x[0] = math.inf
    rows, misfits = measure(x, bound).tolist()
    packed = quantise(x, bound, rows - 20, 0)
    assert needs(packed, x.numel(), rows - 20, 0, x.dtype).tolist() == [rows, misfits] == [rows, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_of_exactly_the_bound_comes_back_as_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([0.75, -0.75, 1.5, 0.0]).to(dtype)
    y = round_trip(x, 0.75)
    assert y[[0, 1, 3]].tolist() == [0, 0, 0] and y[2] != 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_signs_stay_where_values_vanish(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    x = torch.tensor([0.7, 0.01, tiny, 0.0, -0.0, 2.5], dtype=torch.float64).to(dtype)
    y = round_trip(x, 0.75, "sign")
    assert y[3:5].tolist() == [0, 0] and (y[:3] == y[0]).all() and 0.5 < y[0] < 0.75 < y[5]
    assert measure(-x, torch.tensor(0.75), "sign").tolist() == [0, 1]
    least = torch.finfo(torch.float32).smallest_normal * 2.0**-23
    assert measure(x, torch.tensor(least), "sign").tolist() == [0, 1]


def test_dithered_errors_of_equal_elements_differ() -> None:
    x = torch.full((4096,), 0.37)
    error = round_trip(x, 1.0, "dither") - x
    assert error.unique().numel() > 4000
    assert abs(float(error.mean())) < 0.05 and abs(float(error.std()) - 3**-0.5) < 0.02


def test_numbers_of_steps_too_large_to_store_do_not_fit() -> None:
    x = torch.full((BLOCK,), 1e12, dtype=torch.float64)
    assert measure(x, torch.tensor(0.125)).tolist() == [0, 1]


@pytest.mark.parametrize("mode", ("zero", "sign", "dither"))
def test_large_tensors_are_worked_on_in_pieces(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    x, bound = torch.randn(40 * BLOCK + 17).relu(), torch.tensor(0.03)
    x[::1000] = 1e9
    room = measure(x, bound, mode).tolist()
    packed, y = quantise(x, bound, *room, mode), round_trip(x, 0.03, mode)
    monkeypatch.setattr(dense, "TEMPORARY_BYTES", {"cpu": 24 * 3 * BLOCK})
    assert measure(x, bound, mode).tolist() == room
    assert quantise(x, bound, *room, mode).equal(packed)
    assert round_trip(x, 0.03, mode).equal(y)


def test_what_cannot_be_quantised_is_refused() -> None:
    bound = torch.tensor(1.0)
    with pytest.raises(ValueError, match="int64"):
        fake_quantise(torch.zeros(3, dtype=torch.int64), bound, 4, 0)
    with pytest.raises(ValueError, match="not dense"):
        quantise(torch.zeros(4, 4)[:, ::2], bound, 4, 0)
    with pytest.raises(ValueError, match="36 bytes are not what"):
        dequantise(torch.zeros(36, dtype=torch.uint8), 4, 0, (3,), (1,), torch.float32)

"""No element of any tensor comes back farther from itself than the bound."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backhaul.runtime import dense
from backhaul.runtime.quantiser import (
    BLOCK,
    dequantise,
    fake_quantise,
    misfit_count,
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


def misfits_of(x: Tensor, bound: float, bits: int, room: int) -> int:
    """Pack a tensor and count the blocks that do not fit."""
    packed = quantise(x, torch.tensor(bound), bits, room)
    return int(misfit_count(packed, x.numel(), bits, room, x.dtype))


def round_trip(x: Tensor, bound: float, bits: int, room: int) -> Tensor:
    """Pack and unpack a tensor."""
    packed = quantise(x, torch.tensor(bound), bits, room)
    assert packed.nbytes == quantised_nbytes(x.numel(), bits, room, x.dtype)
    return dequantise(packed, bits, room, x.shape, x.stride(), x.dtype)


def check(case: tuple[Tensor, float], bits: int, room: int) -> None:
    """Pack and unpack, and look at every element."""
    x, bound = case
    told = torch.tensor(bound).double()
    if misfits_of(x, bound, bits, room) > min(room, -(-x.numel() // BLOCK)):
        return
    y = round_trip(x, bound, bits, room)
    assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), x.dtype)
    wide_x, wide_y = x.double(), y.double()
    finite = x.isfinite()
    assert ((wide_x - wide_y).abs()[finite] <= told).all()
    assert (y[wide_x.abs() <= told] == 0).all()
    assert torch.equal(y[~finite], x[~finite]) or y[~finite].isnan().equal(x[~finite].isnan())
    assert y[x.isinf()].equal(x[x.isinf()])


BITS = st.integers(1, 8)
ROOMS = st.sampled_from((0, 1, 3, 100))


@given(tensors(), BITS, ROOMS)
@settings(max_examples=300, deadline=None)
def test_every_element_keeps_to_the_bound(case: tuple[Tensor, float], bits: int, room: int) -> None:
    check(case, bits, room)


@pytest.mark.slow
@given(tensors(), BITS, ROOMS)
@settings(max_examples=5000, deadline=None)
def test_every_element_keeps_to_the_bound_at_length(
    case: tuple[Tensor, float], bits: int, room: int
) -> None:
    check(case, bits, room)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_a_block_fits_whose_numbers_span_fewer_than_two_to_the_bits(
    bits: int, dtype: torch.dtype
) -> None:
    x = torch.arange(BLOCK).remainder(2**bits).to(dtype)
    bound = 0.5 * (1 + 2.0**-8)
    assert misfits_of(x, bound, bits, 0) == 0
    assert misfits_of(x * 3, bound, bits, 0) == 1


def test_blocks_that_do_not_fit_are_counted_and_come_back_exactly() -> None:
    x = torch.zeros(10 * BLOCK)
    x[3 * BLOCK + 5], x[7 * BLOCK] = 1e6, math.nan
    x[3 * BLOCK + 6] = 0.009
    for room in (2, 5, 10):
        assert misfits_of(x, 0.01, 4, room) == 2
        y = round_trip(x, 0.01, 4, room)
        assert y[3 * BLOCK + 5] == 1e6 and y[7 * BLOCK].isnan()
        assert y[3 * BLOCK + 6] == 0  # Even there nothing small comes back as other than 0.
    assert misfits_of(x, 0.01, 4, 1) == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_of_exactly_the_bound_comes_back_as_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([0.75, -0.75, 1.5, 0.0]).to(dtype)
    y = round_trip(x, 0.75, 4, 0)
    assert y[[0, 1, 3]].tolist() == [0, 0, 0] and y[2] != 0


def test_numbers_of_steps_too_large_to_store_do_not_fit() -> None:
    x = torch.full((BLOCK,), 1e12, dtype=torch.float64)
    assert misfits_of(x, 0.125, 4, 0) == 1


def test_large_tensors_are_worked_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(40 * BLOCK + 17)
    x[::1000] = 1e9
    packed, y = quantise(x, torch.tensor(0.3), 5, 41), round_trip(x, 0.3, 5, 41)
    monkeypatch.setattr(dense, "TEMPORARY_BYTES", {"cpu": 16 * 3 * BLOCK})
    assert quantise(x, torch.tensor(0.3), 5, 41).equal(packed)
    assert round_trip(x, 0.3, 5, 41).equal(y)


def test_what_cannot_be_quantised_is_refused() -> None:
    bound = torch.tensor(1.0)
    with pytest.raises(ValueError, match="1 to 8 bits, not 9"):
        quantise(torch.zeros(3), bound, 9, 0)
    with pytest.raises(ValueError, match="int64"):
        fake_quantise(torch.zeros(3, dtype=torch.int64), bound, 4, 0)
    with pytest.raises(ValueError, match="not dense"):
        quantise(torch.zeros(4, 4)[:, ::2], bound, 4, 0)
    with pytest.raises(ValueError, match="36 bytes are not what"):
        dequantise(torch.zeros(36, dtype=torch.uint8), 4, 0, (3,), (1,), torch.float32)

"""No element that is cast comes back farther from itself than its dtype's relative error."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backhaul.runtime import dense
from backhaul.runtime.casts import CAST_DTYPES, can_cast, cast_down, cast_down_nbytes, cast_up

PAIRS = [
    (dtype, to)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for to in CAST_DTYPES
    if can_cast(dtype, to)
]
# Of the largest element, or of 1.
ABSOLUTE = {torch.bfloat16: 0.0, torch.float16: 2.0**-38, torch.float8_e5m2: 2.0**-30}
LEAST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-149, torch.float8_e5m2: 2.0**-142}


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, torch.dtype]:
    dtype, to = draw(st.sampled_from(PAIRS))
    numel = draw(st.sampled_from((0, 1, 2, 7, 60, 1000)))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(numel, generator=random, dtype=torch.float64)
    x *= torch.exp(draw(st.sampled_from((0, 1, 20))) * torch.randn(numel, generator=random))
    x *= 10.0 ** draw(st.sampled_from((-44, -38, -6, 0, 4, 30, 38)))
    most = torch.finfo(dtype).max
    x = x.clamp(-most, most).to(dtype)
    for special in draw(
        st.lists(st.sampled_from((math.nan, math.inf, -math.inf, 0.0, most, -most)), max_size=3)
    ):
        if numel:
            x[draw(st.integers(0, numel - 1))] = special
    if numel == 60 and draw(st.booleans()):
        return x.view(1, 5, 4, 3).permute(0, 3, 1, 2), to
    return x, to


def check(x: Tensor, to: torch.dtype) -> None:
    packed = cast_down(x, to)
    assert packed.numel() == cast_down_nbytes(x.numel(), to)
    y = cast_up(packed, x.shape, x.stride(), x.dtype, to)
    assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), x.dtype)
    finite = x.isfinite()
    wide = x[finite].double()
    error = (wide - y[finite].double()).abs()
    largest = float(wide.abs().max()) if wide.numel() else 0.0
    least = max(ABSOLUTE[to] * largest, LEAST[to])
    # What comes back is rounded to its dtype, whose least numbers are far apart.
    least += torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps / 2
    assert (error <= (CAST_DTYPES[to] * wide.abs()).clamp(min=least)).all()
    assert torch.equal(y.isnan(), x.isnan()) and torch.equal(y[x.isinf()], x[x.isinf()])
    assert (y[x == 0] == 0).all() and (y[x < 0] <= 0).all()
    if x.dtype is torch.float32:
        assert torch.equal(y > 0, x > 0)


@given(tensors())
@settings(max_examples=300, deadline=None)
def test_every_element_keeps_to_the_relative_bound(case: tuple[Tensor, torch.dtype]) -> None:
    check(*case)


@pytest.mark.slow
@given(tensors())
@settings(max_examples=2000, deadline=None)
def test_every_element_keeps_to_the_relative_bound_at_length(
    case: tuple[Tensor, torch.dtype],
) -> None:
    check(*case)


def test_large_tensors_are_cast_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000)
    packed = cast_down(x, torch.float16)
    monkeypatch.setattr(dense, "TEMPORARY_BYTES", {"cpu": 64})
    assert cast_down(x, torch.float16).equal(packed)
    y = cast_up(packed, x.shape, x.stride(), x.dtype, torch.float16)
    assert (x - y).abs().max() < 2e-3


def test_what_cannot_be_cast_is_refused() -> None:
    with pytest.raises(ValueError, match=r"int64 is not cast to torch\.bfloat16"):
        cast_down(torch.zeros(3, dtype=torch.int64), torch.bfloat16)
    with pytest.raises(ValueError, match=r"float16 is not cast to torch\.bfloat16"):
        cast_down(torch.zeros(3, dtype=torch.float16), torch.bfloat16)
    with pytest.raises(ValueError, match="not dense"):
        cast_down(torch.zeros(4, 4)[:, ::2], torch.bfloat16)

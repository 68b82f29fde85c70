"""Lossy codecs on a GPU: what they pack there is what they pack on a CPU."""

from __future__ import annotations

import pytest
import torch

from backhaul.records import Mode
from backhaul.runtime.casts import CAST_DTYPES, cast_down, cast_up
from backhaul.runtime.kernel_compiler import executor
from backhaul.runtime.quantiser import (
    BLOCK,
    dequantise,
    fitting_forms,
    measure,
    needs,
    quantise,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("mode", ("zero", "sign", "dither"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_tensor_comes_back_as_on_a_cpu(mode: Mode, dtype: torch.dtype) -> None:
    assert executor(torch.device("cuda"), dtype, mode).name == "inductor"
    torch.manual_seed(0)
    x = torch.randn(9000 * BLOCK + 7)
    x = (x if mode == "dither" else x.relu()).to(dtype)
    x[[5, 3000, -1]] = torch.tensor((float("nan"), float("inf"), 1e9)).to(dtype)
    bound, there = torch.tensor(0.03), x.cuda()
    needed = measure(x, bound, mode).tolist()
    assert measure(there, bound.cuda(), mode).tolist() == needed
    for form in fitting_forms(needed, mode):
        packed = quantise(there, bound.cuda(), form)
        expected = [form.rows, form.exact_blocks]
        assert needs(packed, x.numel(), form, dtype).tolist() == expected
        y = dequantise(packed, form, x.shape, x.stride(), dtype).cpu()
        on_cpu = quantise(x, bound, form)
        z = dequantise(on_cpu, form, x.shape, x.stride(), dtype)
        assert y.nan_to_num(nan=-1.0).equal(z.nan_to_num(nan=-1.0))


@pytest.mark.parametrize("to", CAST_DTYPES)
def test_a_cast_is_that_of_a_cpu(to: torch.dtype) -> None:
    x = torch.randn(100_001)
    packed = cast_down(x.cuda(), to)
    assert packed.cpu().equal(cast_down(x, to))
    y = cast_up(packed, x.shape, x.stride(), x.dtype, to).cpu()
    assert y.equal(cast_up(cast_down(x, to), x.shape, x.stride(), x.dtype, to))

"""Compile the kernels of `block_kernels`, or say why they run as they are.

Inductor makes C++ of them on a CPU and Triton on a GPU.  A kernel serves every count of blocks.
It is compiled when a tensor first needs it, in some seconds, and kept on disk by Inductor's own
cache.  Where there is no compiler, or it fails, the same functions run eagerly, slower, and
`executor` says so.

Private torch API: whether a dispatch mode is active, and Dynamo's mark of a dynamic dimension.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from backhaul.records import Mode
from backhaul.runtime import block_kernels
from backhaul.runtime.block_kernels import LANES, ROW

__all__ = ["EAGER", "Executor", "Kernels", "executor", "kernels_for"]

_logger = logging.getLogger(__name__)

# Below this a kernel's launch, and all the more its compilation, is not worth it.
_FEWEST_BLOCKS = 256
# So many that Inductor decides for threads.
_EXAMPLE_BLOCKS = 4096

_OPTIONS: dict[str, Any] = {
    # One loop over memory: values are computed again rather than stored between two loops.
    "realize_opcount_threshold": 10**6,
    "realize_reads_threshold": 10**6,
    "realize_acc_reads_threshold": 10**6,
    # The rounding of each product and of each cast is what the bound was checked with.
    "emulate_precision_casts": True,
    "cpp.enable_floating_point_contract_flag": "off",
    # Rows are clamped to the pool.
    "assert_indirect_indexing": False,
    "cpp.dynamic_threads": True,
    "size_asserts": False,
    # The dtypes and the device are ours to keep, a kernel each; the count of blocks is symbolic.
    "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
}


class Executor(NamedTuple):
    """What runs the kernels, and why."""

    name: Literal["inductor", "eager"]
    reason: str


class Kernels(NamedTuple):
    """The functions of `block_kernels`, as they stand or compiled."""

    round: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    store: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    load: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    is_compiled: bool


EAGER = Kernels(
    block_kernels.round_blocks,
    block_kernels.store_blocks,
    block_kernels.load_blocks,
    is_compiled=False,
)


def executor(device: torch.device, dtype: torch.dtype, mode: Mode) -> Executor:
    """Say what runs the kernels for large tensors, compiling them if that has not been tried."""
    _, told = _compiled(dtype, mode, device.type)
    return told


def kernels_for(blocks: int, dtype: torch.dtype, mode: Mode, device: torch.device) -> Kernels:
    """Return the kernels for so many blocks of a tensor.

    Those of a few blocks are eager, and so are those that a tracer or a dispatch mode watches.
    """
    if (
        blocks < _FEWEST_BLOCKS
        or torch.compiler.is_compiling()
        or _get_current_dispatch_mode() is not None
    ):
        return EAGER
    kernels, _ = _compiled(dtype, mode, device.type)
    return kernels


@functools.cache
def _compiled(dtype: torch.dtype, mode: Mode, device: str) -> tuple[Kernels, Executor]:
    suffix = f"{dtype}_{mode}_{device}".replace(".", "_")
    kernels = Kernels(*(_compiling(kernel, suffix) for kernel in EAGER[:3]), is_compiled=True)
    try:
        _run_example(kernels, dtype, mode, device)
    except Exception as error:  # A compiler fails with whatever it likes.
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        _logger.warning("kernels for %s on %s run eagerly: %s", dtype, device, reason)
        return EAGER, Executor("eager", reason)
    return kernels, Executor("inductor", f"compiled for {dtype} on {device}")


def _compiling(kernel: Callable[..., Any], suffix: str) -> Callable[..., Any]:
    """Return a kernel of its own to compile: what is compiled of a function is kept by its code."""
    assert isinstance(kernel, FunctionType)
    name = f"{kernel.__name__}_{suffix}"
    own = FunctionType(kernel.__code__.replace(co_name=name), kernel.__globals__, name)
    compiled = torch.compile(own, fullgraph=True, options=_OPTIONS)

    def call(*args: Any) -> Any:
        with torch.no_grad():
            return compiled(*args)

    return call


def _run_example(kernels: Kernels, dtype: torch.dtype, mode: Mode, device: str) -> None:
    def dynamic(tensor: torch.Tensor) -> torch.Tensor:
        torch._dynamo.mark_dynamic(tensor, 0)
        return tensor

    if torch._dynamo.config.disable:
        raise RuntimeError("torch.compile is disabled")
    with torch.autocast(device, enabled=False):
        x = torch.zeros((_EXAMPLE_BLOCKS, LANES, ROW), dtype=dtype, device=device)
        scale = block_kernels.scale_of(torch.ones((), device=device), dtype, mode)
        zero = torch.zeros((), dtype=torch.int32, device=device)
        pool = torch.zeros((5 * _EXAMPLE_BLOCKS // 2, ROW), dtype=torch.int8, device=device)
        rounded = kernels.round(dynamic(x), zero, scale, mode)
        heads, _ = kernels.store(*map(dynamic, rounded), zero, dynamic(pool))
        kernels.load(dynamic(heads), zero, zero, dynamic(pool.clone()), scale, dtype, mode)

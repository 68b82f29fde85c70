"""Compile the kernels of `block_kernels`, or say why they run as they are.

Inductor makes C++ of them on a CPU and Triton on a GPU.  A kernel serves every count of blocks.
It is compiled for a device when a tensor there first needs it, in some seconds, and kept on disk by
Inductor's own cache.  Where there is no compiler, or it fails, the same functions run eagerly,
slower, and `executor` says so.

They are exported and compiled once rather than by `torch.compile`: no guard is asked at a call, and
no state of torch compiles them again in the middle of a step.

Private torch API: whether a dispatch mode is active, and Dynamo's switch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn
from torch.export import Dim
from torch.utils._python_dispatch import _get_current_dispatch_mode

from backhaul.records import Mode
from backhaul.runtime import block_kernels
from backhaul.runtime.block_kernels import LANES, ROW

__all__ = [
    "EAGER",
    "FEWEST_BLOCKS",
    "OPTIONS",
    "Executor",
    "FunctionModule",
    "Kernels",
    "SparseKernels",
    "executor",
    "kernels_for",
    "sparse_kernels_for",
]

K = TypeVar("K")
_logger = logging.getLogger(__name__)

# Below this a kernel's launch, and all the more its compilation, is not worth it.
FEWEST_BLOCKS = 256
# So many that Inductor decides for threads.
_EXAMPLE_BLOCKS = 4096

OPTIONS: dict[str, Any] = {
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
}


class Executor(NamedTuple):
    """What runs the kernels, and why."""

    name: Literal["inductor", "eager"]
    reason: str


class Kernels(NamedTuple):
    """The functions of `block_kernels` that pack blocks, as they stand or compiled."""

    round: Callable[..., tuple[torch.Tensor, ...]]
    store: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    load: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    is_compiled: bool


class SparseKernels(NamedTuple):
    """The functions of `block_kernels` that leave zeros out, as they stand or compiled."""

    mask: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    counts: Callable[..., torch.Tensor]
    compact: Callable[..., torch.Tensor]
    expand: Callable[..., torch.Tensor]


EAGER = Kernels(
    block_kernels.round_blocks,
    block_kernels.store_blocks,
    block_kernels.load_blocks,
    is_compiled=False,
)
_EAGER_SPARSE = SparseKernels(
    block_kernels.mask_blocks,
    block_kernels.count_blocks,
    block_kernels.compact_blocks,
    block_kernels.expand_blocks,
)


def executor(device: torch.device, dtype: torch.dtype, mode: Mode) -> Executor:
    """Say what runs the kernels for large tensors, compiling them if that has not been tried."""
    _, told = _compiled(dtype, mode, device)
    return told


def kernels_for(blocks: int, dtype: torch.dtype, mode: Mode, device: torch.device) -> Kernels:
    """Return the kernels for so many blocks of a tensor.

    Those of a few blocks are eager, and so are those that a tracer or a dispatch mode watches.
    """
    if not _is_worth_compiling(blocks):
        return EAGER
    kernels, _ = _compiled(dtype, mode, device)
    return kernels


def sparse_kernels_for(
    blocks: int, dtype: torch.dtype, mode: Mode, device: torch.device
) -> SparseKernels:
    """Return the kernels that leave out the zeros of so many blocks; see `kernels_for`."""
    if not _is_worth_compiling(blocks):
        return _EAGER_SPARSE
    return _compiled_sparse(dtype, mode, device)


def _is_worth_compiling(blocks: int) -> bool:
    return (
        blocks >= FEWEST_BLOCKS
        and not torch.compiler.is_compiling()
        and _get_current_dispatch_mode() is None
    )


@functools.cache
def _compiled(dtype: torch.dtype, mode: Mode, device: torch.device) -> tuple[Kernels, Executor]:
    return _tried(lambda: _compile(dtype, mode, device), EAGER, dtype, device)


@functools.cache
def _compiled_sparse(dtype: torch.dtype, mode: Mode, device: torch.device) -> SparseKernels:
    kernels, _ = _tried(lambda: _compile_sparse(dtype, mode, device), _EAGER_SPARSE, dtype, device)
    return kernels


def _tried(
    compile_: Callable[[], K], eager: K, dtype: torch.dtype, device: torch.device
) -> tuple[K, Executor]:
    try:
        if torch._dynamo.config.disable:
            raise RuntimeError("torch.compile is disabled")
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            kernels = compile_()
    except Exception as error:  # A compiler fails with whatever it likes.
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        _logger.warning("kernels for %s on %s run eagerly: %s", dtype, device, reason)
        return eager, Executor("eager", reason)
    return kernels, Executor("inductor", f"compiled for {dtype} on {device}")


def _compile(dtype: torch.dtype, mode: Mode, device: torch.device) -> Kernels:
    """Compile for any number of blocks, by examples so large that Inductor takes threads."""
    n, rows = Dim("n", min=2), Dim("rows", min=2)
    x, zero, scale = _examples(dtype, mode, device)
    pool = torch.zeros((2 * _EXAMPLE_BLOCKS, ROW), dtype=torch.int8, device=device)
    round_, store, load = EAGER[:3]
    rounded = round_(x, zero, scale, mode)
    heads, _ = store(mode, zero, pool, *rounded)
    kernels = Kernels(
        _compiled_one(lambda *args: round_(*args, mode), (x, zero, scale), (n, None, None)),
        _compiled_one(
            lambda *args: store(mode, *args),
            (zero, pool, *rounded),
            (None, rows, *len(rounded) * (n,)),
        ),
        _compiled_one(
            lambda *args: load(*args, dtype, mode),
            (heads, zero, zero.clone(), pool, scale),  # One tensor given twice is one input.
            (n, None, None, rows, None),
        ),
        is_compiled=True,
    )
    _check(kernels, dtype, mode, device)
    return kernels


def _check(kernels: Kernels, dtype: torch.dtype, mode: Mode, device: torch.device) -> None:
    """Refuse kernels that do not keep to a bound, as those of torch 2.11 in half precision."""
    random = torch.Generator().manual_seed(0)
    x, zero, scale = _examples(dtype, mode, device)
    scale = block_kernels.scale_of(0.03 * torch.ones((), device=device), dtype, mode)
    blocks = torch.randn(x.shape, generator=random) * torch.randn(len(x), 1, 1, generator=random)
    x.copy_(blocks.relu() if mode == "sign" else blocks)
    pool = torch.zeros((block_kernels.PLANES * len(x), ROW), dtype=torch.int8, device=device)
    heads, _ = kernels.store(mode, zero, pool, *kernels.round(x, zero, scale, mode))
    y, _ = kernels.load(heads, zero, zero.clone(), pool, scale, dtype, mode)
    fits = heads != block_kernels.MISFIT
    if not ((y - x)[fits].to(scale.dtype).abs() <= scale[0]).all():
        raise RuntimeError(f"with torch {torch.__version__} the compiler rounds otherwise")


def _compile_sparse(dtype: torch.dtype, mode: Mode, device: torch.device) -> SparseKernels:
    """Compile for any number of blocks; see `_compile`."""
    n, length = Dim("n", min=2), Dim("length", min=2)
    x, _, scale = _examples(dtype, mode, device)
    mask, count, compact, expand = _EAGER_SPARSE
    bits, counts = mask(x, scale, mode)
    places = bits, block_kernels.starts_of(counts), x.new_zeros(x.numel())
    return SparseKernels(
        _compiled_one(lambda *args: mask(*args, mode), (x, scale), (n, None)),
        _compiled_one(count, (bits,), (n,)),
        _compiled_one(compact, (x, *places), (n, n, n, length)),
        _compiled_one(expand, (*places, x), (n, n, length, n)),
    )


def _examples(
    dtype: torch.dtype, mode: Mode, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks, where they begin, and a scale."""
    x = torch.zeros((_EXAMPLE_BLOCKS, LANES, ROW), dtype=dtype, device=device)
    zero = torch.zeros((), dtype=torch.int32, device=device)
    return x, zero, block_kernels.scale_of(torch.ones((), device=device), dtype, mode)


class FunctionModule(nn.Module):
    """A function, as `torch.export` takes it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        """Call the function."""
        return self.function(*args)


def _compiled_one(
    kernel: Callable[..., Any],
    example: tuple[torch.Tensor, ...],
    first_dims: Sequence[Dim | None],
) -> Callable[..., Any]:
    dims = tuple(None if dim is None else {0: dim} for dim in first_dims)
    exported = torch.export.export(FunctionModule(kernel), example, dynamic_shapes=(dims,))
    compiled = torch._inductor.standalone_compile(
        exported.graph_module,
        list(example),
        dynamic_shapes="from_graph",
        options={"config_patches": OPTIONS},
    )

    def call(*args: Any) -> Any:
        # What is no tensor is part of the kernel.
        results = compiled(*(arg for arg in args if isinstance(arg, torch.Tensor)))
        return results[0] if len(results) == 1 else results

    return call

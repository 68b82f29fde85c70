"""Compile the quantiser's Triton kernels for an H200 (sm_90) where there is no GPU.

    python benchmarks/triton_kernels.py

Inductor is told of a device that is not there, its Triton code is taken before it would run, and
Triton's own compiler makes a binary of each kernel.  Prints a JSON line a kernel, and one for
encoding and decoding each: bytes that the kernels move for an element of float32, by Inductor's
count of what they read and write, beside the least that they can be, which is the tensor and its
packed form once each, and beside the 8 bytes that memcpy moves.  A sparse form has two lines more,
for what comes before encoding and after decoding; without the running sums between, which torch's
own kernels make of one int for each 8 elements.

It replaces private parts of torch and Triton, as this release has them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.runtime.hints import DeviceProperties
from torch.export import Dim
from torch.export.passes import move_to_device_pass
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from backhaul.records import Mode
from backhaul.runtime import block_kernels
from backhaul.runtime.block_kernels import BLOCK, LANES, ROW
from backhaul.runtime.kernel_compiler import OPTIONS, FunctionModule

TARGET = GPUTarget("cuda", 90, 32)
H200 = DeviceProperties(
    type="cuda", index=0, multi_processor_count=132, cc=90, major=9,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
    max_threads_per_block=1024, warp_size=32,
)  # fmt: skip
PROPERTIES = SimpleNamespace(**H200._asdict(), minor=0, name="NVIDIA H200", gcnArchName="")
BLOCKS, PLANES, NONZERO = 1 << 16, 5, 0.5
MODES: tuple[Mode, ...] = ("zero", "sign", "dither")


class Taken(Exception):
    """The code that Inductor wrote, instead of a run of it."""


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Let Inductor believe that there is an H200, and give its code away."""
    driver = SimpleNamespace(
        get_current_target=lambda: TARGET,
        get_current_device=lambda: 0,
        get_device_capability=lambda *_: (9, 0),
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )

    def take(graph: Any) -> None:
        code, _ = graph.codegen()
        raise Taken(code.value)

    replaced: dict[str, Callable[..., Any]] = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.get_device_properties": lambda *_: PROPERTIES,
        "torch.cuda.get_device_capability": lambda *_: (9, 0),
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda._exchange_device": lambda *_: 0,
        "torch.cuda._maybe_exchange_device": lambda *_: 0,
        "torch.cuda.get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": lambda *_: None,
        "torch._inductor.fx_passes.joint_graph.lazy_init": lambda *_: None,
        "torch._inductor.fx_passes.post_grad.lazy_init": lambda *_: None,
        "torch._inductor.graph.GraphLowering.compile_to_module": take,
    }
    with ExitStack() as stack:
        for name, substitute in replaced.items():
            stack.enter_context(mock.patch(name, substitute))
        patch = mock.patch.object
        stack.enter_context(patch(DeviceProperties, "create", lambda *_: H200))
        stack.enter_context(patch(CudaInterface, "get_compute_capability", lambda *_: 90))
        triton.runtime.driver.set_active(driver)
        yield


def triton_code(
    kernel: Callable[..., Any], example: tuple[torch.Tensor, ...], dims: tuple[Dim | None, ...]
) -> str:
    """Return what Inductor writes for a kernel on the device."""
    shapes = tuple(None if dim is None else {0: dim} for dim in dims)
    exported = torch.export.export(FunctionModule(kernel), example, dynamic_shapes=(shapes,))
    exported._example_inputs = None
    options = {name: value for name, value in OPTIONS.items() if not name.startswith("cpp.")}
    options |= {
        "joint_graph_constant_folding": False,
        "triton.autotune_at_compile_time": False,
        "profile_bandwidth": True,
        "force_disable_caches": True,
    }
    with pretended_gpu():
        moved = move_to_device_pass(exported, "cuda:0")
        inputs = [node.meta["val"] for node in moved.graph.nodes if node.op == "placeholder"]
        try:
            torch._inductor.standalone_compile(
                moved.graph_module,
                inputs,
                dynamic_shapes="from_graph",
                options={"config_patches": options},
            )
        except Exception as error:
            if Taken.__name__ not in str(error) and not isinstance(error, Taken):
                raise
            return str(error).partition("Taken: ")[2]
    raise RuntimeError("Inductor did not compile the kernel")


def compiled_kernels(code: str) -> Iterator[dict[str, Any]]:
    """Compile each Triton kernel of a wrapper."""
    for name, source in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code, re.S):
        signature = json.loads(
            re.search(r"'signature': (\{.*?\})", source)[1].replace("'", '"')  # type: ignore[index]
        )
        moved = re.search(r"'kernel_num_gb': ([\d.e-]+)", source)
        plain = re.sub(r"@triton_heuristics\..*?\n\)\n", "", source, flags=re.S)
        plain = plain.replace("triton_helpers.set_driver_to_gpu()", "")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.py"
            path.write_text(plain)
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sizes = {key: 32 for key, kind in signature.items() if kind == "constexpr"}
            built = triton.compile(
                ASTSource(getattr(module, name), signature, sizes), target=TARGET
            )
        yield {
            "kernel": name[:60],
            "binary bytes": len(built.asm["cubin"]),
            "bytes an element": float(moved[1]) * 1e9 / (BLOCKS * BLOCK) if moved else None,
        }


Kernel = tuple[Callable[..., Any], tuple[Tensor, ...], tuple[Dim | None, ...]]


def kernels_of(mode: Mode) -> dict[str, list[Kernel]]:
    """List the kernels that run one after the other, with examples and their first dimensions."""
    n, rows, length = (Dim(name, min=2) for name in ("n", "rows", "length"))
    x = torch.rand(BLOCKS, LANES, ROW)
    scale = block_kernels.scale_of(torch.tensor(0.02), x.dtype, mode)
    zero, pool = torch.zeros((), dtype=torch.int32), torch.zeros(PLANES * BLOCKS, ROW).char()
    rounded = block_kernels.round_blocks(x, zero, scale, mode)
    heads, _ = block_kernels.store_blocks(mode, zero, pool, *rounded)
    encode: list[Kernel] = [
        (
            lambda *args: block_kernels.round_blocks(*args, mode),
            (x, zero, scale),
            (n, None, None),
        ),
        (
            lambda *args: block_kernels.store_blocks(mode, *args),
            (zero, pool, *rounded),
            (None, rows, *len(rounded) * (n,)),
        ),
    ]
    decode: list[Kernel] = [
        (
            lambda *args: block_kernels.load_blocks(*args, torch.float32, mode),
            (heads, zero, zero.clone(), pool, scale),
            (n, None, None, rows, None),
        ),
    ]
    found = {"encode": encode, "decode": decode}
    if mode == "dither":
        return found
    bits, counts = block_kernels.mask_blocks(x, scale, mode)
    places = bits, block_kernels.starts_of(counts), x.new_zeros(int(NONZERO * x.numel()))
    leave_out: list[Kernel] = [
        (lambda *args: block_kernels.mask_blocks(*args, mode), (x, scale), (n, None)),
        (block_kernels.compact_blocks, (x, *places), (n, n, n, length)),
    ]
    put_in: list[Kernel] = [
        (block_kernels.count_blocks, (bits,), (n,)),
        (block_kernels.expand_blocks, (*places, x), (n, n, length, n)),
    ]
    return found | {"leave zeros out": leave_out, "put zeros in": put_in}


def main() -> None:
    """Print a JSON line a kernel and one a direction."""
    for mode in MODES:
        for direction, kernels in kernels_of(mode).items():
            found = [line for kernel in kernels for line in compiled_kernels(triton_code(*kernel))]
            for line in found:
                print(json.dumps({"mode": mode, "direction": direction, **line}), flush=True)
            least = 4 + (4 * NONZERO + 1 / 8 if "zeros" in direction else PLANES / 8 + 4 / BLOCK)
            total = sum(line["bytes an element"] or 0.0 for line in found)
            summary = {"mode": mode, "direction": direction, "kernels": len(found)}
            summary |= {"bytes an element": total, "least": least, "memcpy": 8}
            print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()

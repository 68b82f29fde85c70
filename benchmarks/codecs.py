"""Speed and ratio of the quantiser beside memcpy, SZ3, ZFP and Blosc2, on real activations.

    python benchmarks/codecs.py [--device cpu] [--rounds 9] [--bound 0.05]

The activations are inputs of convolutions and matrix products of networks that have run on
photographs or text.  Every codec gets the same absolute bound, a share of each tensor's standard
deviation, and its largest error is looked at.  Encoding, decoding and copying alternate in every
round; speeds are bytes of the tensor over median times, and *of memcpy* is the ratio of medians.
Blosc2 loses nothing, and is given the tensor rounded to steps of twice the bound, by NumPy.
Prints a JSON line a tensor and codec, then a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torchvision
import transformers
from allocator import keep_freed_memory
from torch import Tensor, nn

from backhaul.demo import photographs
from backhaul.runtime import quantiser

VISION = {
    "vgg16": ("features.2", "features.12", "features.26"),
    "resnet50": ("layer1.1.conv2", "layer2.1.conv1", "layer4.1.conv2"),
}


@dataclass(frozen=True, slots=True)
class Codec:
    """A way to pack a tensor.

    Attributes:
        name: What to call it.
        encode: Packs the tensor.
        decode: Unpacks what `encode` returned.
        nbytes: Size of what `encode` returned.
    """

    name: str
    encode: Callable[[], Any]
    decode: Callable[[Any], Any]
    nbytes: Callable[[Any], int]


def activations(device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield inputs of layers."""
    torch.manual_seed(0)
    images, _ = photographs(224, 8)
    for name, layers in VISION.items():
        model = torchvision.models.get_model(name, weights=None)
        for layer, x in inputs_of(model, layers, images).items():
            yield f"{name} {layer}", x.to(device)
    config = transformers.GPT2Config(n_embd=768, n_layer=2, n_head=12, vocab_size=256)
    text = (str(transformers.__doc__) + str(nn.Module.__doc__) + str(torch.__doc__)) * 4
    tokens = torch.tensor(list(text.encode("ascii", "replace")[: 8 * 512])).view(8, 512)
    layers = ("h.1.attn.c_attn", "h.1.mlp.c_proj")
    for layer, x in inputs_of(transformers.GPT2Model(config), layers, tokens).items():
        yield f"gpt2 {layer}", x.to(device)


def inputs_of(model: nn.Module, layers: tuple[str, ...], sample: Tensor) -> dict[str, Tensor]:
    """Run a model and return what these layers read."""
    found: dict[str, Tensor] = {}

    def keep(layer: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, args: found.update({layer: args[0].detach().clone()})

    for layer in layers:
        model.get_submodule(layer).register_forward_pre_hook(keep(layer))
    with torch.no_grad():
        model(sample)
    return found


def ours(x: Tensor, bound: float) -> Iterator[Codec]:
    """Make the quantiser in each form, with the room that this tensor needs."""
    told = torch.tensor(bound, device=x.device)
    share = float((x != 0).float().mean())
    mode = "dither" if share > 0.9 else "sign" if float(x.min()) >= 0 else "zero"
    for form in quantiser.fitting_forms(quantiser.measure(x, told, mode).tolist(), mode):
        yield Codec(
            f"backhaul, {mode}{', sparse' * form.is_sparse}",
            lambda form=form: quantiser.quantise(x, told, form),
            lambda p, form=form: quantiser.dequantise(p, form, x.shape, x.stride(), x.dtype),
            lambda packed: packed.nbytes,
        )


def peers(x: Tensor, bound: float) -> Iterator[Codec]:
    """Make the others, on the host."""
    import blosc2
    import zfpy
    from pysz import sz, szConfig, szErrorBoundMode

    values = np.ascontiguousarray(x.numpy())
    config = szConfig()
    config.errorBoundMode, config.absErrorBound, config.openmp = szErrorBoundMode.ABS, bound, True
    yield Codec(
        "SZ3",
        lambda: sz.compress(values, config)[0],
        lambda packed: sz.decompress(packed, np.float32, values.shape)[0],
        lambda packed: packed.nbytes,
    )
    yield Codec(
        "ZFP",
        lambda: zfpy.compress_numpy(values, tolerance=bound),
        zfpy.decompress_numpy,
        len,
    )
    step = np.float32(2 * bound * (1 - 2.0**-10))
    yield Codec(
        "rounding + Blosc2 (LZ4)",
        lambda: blosc2.pack_array2(
            np.rint(values / step) * step,
            cparams={"codec": blosc2.Codec.LZ4, "filters": [blosc2.Filter.BITSHUFFLE]},
        ),
        blosc2.unpack_array2,
        len,
    )


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Time one call."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def lines_of(x: Tensor, share: float, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure all codecs on one tensor."""
    bound = share * float(x.std())
    codecs = [*ours(x, bound), *(peers(x, bound) if x.device.type == "cpu" else ())]
    target = torch.empty_like(x)
    packed = [codec.encode() for codec in codecs]  # Compiles, too.
    errors = []
    for codec, each in zip(codecs, packed, strict=True):
        back = torch.as_tensor(codec.decode(each))
        errors.append(float((back.view(x.shape) - x).abs().max()) / bound)
    copy_s: list[float] = []
    encode_s: dict[str, list[float]] = {codec.name: [] for codec in codecs}
    decode_s: dict[str, list[float]] = {codec.name: [] for codec in codecs}
    for _ in range(rounds):
        copy_s.append(seconds(lambda: target.copy_(x), x.device))
        for codec, each in zip(codecs, packed, strict=True):
            encode_s[codec.name].append(seconds(codec.encode, x.device))
            decode_s[codec.name].append(
                seconds(lambda codec=codec, each=each: codec.decode(each), x.device)
            )
    copied = statistics.median(copy_s)
    for codec, each, error in zip(codecs, packed, errors, strict=True):
        encoded = statistics.median(encode_s[codec.name])
        decoded = statistics.median(decode_s[codec.name])
        yield {
            "codec": codec.name,
            "ratio": x.nbytes / codec.nbytes(each),
            "largest error": error,
            "memcpy GB/s": x.nbytes / copied / 1e9,
            "encode GB/s": x.nbytes / encoded / 1e9,
            "decode GB/s": x.nbytes / decoded / 1e9,
            "encode of memcpy": copied / encoded,
            "decode of memcpy": copied / decoded,
        }


def main() -> None:
    """Print every measurement as a JSON line, and a table of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bound", type=float, default=0.05, help="share of standard deviation")
    arguments = parser.parse_args()
    keep_freed_memory()
    rows = []
    for name, x in activations(torch.device(arguments.device)):
        for line in lines_of(x, arguments.bound, arguments.rounds):
            line = {"tensor": name, "MB": x.nbytes / 1e6, **line}
            print(json.dumps(line), flush=True)
            rows.append(line)
    print("\n| tensor | MB | codec | ratio | encode | of memcpy | decode | of memcpy |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row['tensor']} | {row['MB']:.0f} | {row['codec']} | {row['ratio']:.1f} "
            f"| {row['encode GB/s']:.2f} GB/s | {row['encode of memcpy']:.2f} "
            f"| {row['decode GB/s']:.2f} GB/s | {row['decode of memcpy']:.2f} |"
        )


if __name__ == "__main__":
    main()

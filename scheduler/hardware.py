"""Machines that one does not have: named profiles, and rooflines over them.

An op takes as long as its arithmetic at a share of the peak rate, or its bytes at a share of
the memory's bandwidth, whichever is longer, and never less than a launch.  Nothing here was
measured on the machine in question, and every cost says so: `modelled`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

from backhaul.errors import PlanError
from backhaul.records import LinkProfile, MachineProfile, OpCost
from backhaul.serial import SerialError, from_json

__all__ = [
    "Efficiency",
    "HardwareProfile",
    "OpClass",
    "OpWork",
    "Rate",
    "Sourced",
    "hardware_names",
    "load_hardware",
    "modelled_machine",
]

OpClass = Literal["matmul", "convolution", "attention", "memory", "view"]

ALIGNMENT_BYTES = 512
"""Block size of the caching allocator of accelerators."""

_LINK_SIZES_BYTES = (2**10, 2**30)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpWork:
    """What one distinct op has to do, on whatever hardware.

    Attributes:
        key: Operator, shapes, strides, dtypes and arguments.
        op_class: What bounds it, if it is not memory.
        dtype: Of its first floating-point input.
        flops: Floating-point operations, a multiply and an add counted as two.
        nbytes: Bytes that it reads and writes.
    """

    key: str
    op_class: OpClass
    dtype: str
    flops: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sourced:
    """A number, and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The peak rate of one class of ops in one dtype, dense."""

    op_class: OpClass
    dtype: str
    flops_per_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The share of a peak that ops of one class reach."""

    op_class: OpClass
    fraction: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """A machine on paper: every number with its source.

    Attributes:
        name: What the user calls it.
        device: The device's full name.
        memory_bytes: Memory of the device.
        memory_bytes_per_s: Bandwidth of that memory.
        kernel_latency_s: Least time of any op.
        rates: Peak rates; a class and dtype that is absent cannot be computed.
        efficiencies: One for each class.
        link_bytes_per_s: Bandwidth to pinned host memory, each way alone.
        link_latency_s: Least time of any copy.
        duplex_d2h_fraction: Offload bandwidth while reloading, over bandwidth alone.
        duplex_h2d_fraction: Reload bandwidth while offloading, over bandwidth alone.
        host_bytes: Host memory that may be pinned.
    """

    name: str
    device: str
    memory_bytes: Sourced
    memory_bytes_per_s: Sourced
    kernel_latency_s: Sourced
    rates: tuple[Rate, ...]
    efficiencies: tuple[Efficiency, ...]
    link_bytes_per_s: Sourced
    link_latency_s: Sourced
    duplex_d2h_fraction: Sourced
    duplex_h2d_fraction: Sourced
    host_bytes: Sourced


def hardware_names() -> list[str]:
    """List the machines that ship with the package."""
    return sorted(file.name.removesuffix(".json") for file in _folder().iterdir())


def load_hardware(name: str | os.PathLike[str]) -> HardwareProfile:
    """Read a profile.

    Args:
        name: One of `hardware_names`, or the path of a JSON file of the same form.

    Raises:
        PlanError: There is no such machine, or the file is no profile.
    """
    if isinstance(name, str) and name in hardware_names():
        text = (_folder() / f"{name}.json").read_text(encoding="utf-8")
    elif Path(name).suffix == ".json":
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"the hardware profile {name} cannot be read: {error}") from error
    else:
        raise PlanError(
            f"hardware={str(name)!r}: give one of {', '.join(hardware_names())}, or the path of "
            "a JSON file of the same form"
        )
    try:
        return from_json(HardwareProfile, json.loads(text))
    except (SerialError, ValueError, RecursionError) as error:
        raise PlanError(f"the hardware profile {name} is damaged: {error}") from error


def modelled_machine(
    hardware: HardwareProfile, works: Iterable[OpWork], torch_version: str
) -> MachineProfile:
    """Say what every op and copy would cost.

    Args:
        hardware: The machine.
        works: What each distinct op does.
        torch_version: The torch that the ops are those of.

    Raises:
        PlanError: The machine cannot compute in a dtype that an op needs.
    """
    return MachineProfile(
        device=f"{hardware.device}, modelled",
        torch_version=torch_version,
        alignment_bytes=ALIGNMENT_BYTES,
        link=_modelled_link(hardware),
        ops=tuple(_modelled_cost(hardware, work) for work in works),
    )


def _modelled_cost(hardware: HardwareProfile, work: OpWork) -> OpCost:
    if work.op_class == "view":
        return OpCost(key=work.key, duration_s=0.0, workspace_bytes=0, source="modelled")
    fraction = {each.op_class: each.fraction for each in hardware.efficiencies}
    memory_s = work.nbytes / (hardware.memory_bytes_per_s.value * fraction["memory"])
    compute_s = 0.0
    if work.op_class != "memory":
        rate = {(each.op_class, each.dtype): each.flops_per_s for each in hardware.rates}
        if (work.op_class, work.dtype) not in rate:
            raise PlanError(
                f"{hardware.name} has no rate for {work.op_class} in {work.dtype}, which "
                f"{work.key} needs; train in another dtype, or add the rate to a profile of "
                "your own"
            )
        compute_s = work.flops / (rate[work.op_class, work.dtype] * fraction[work.op_class])
    return OpCost(
        key=work.key,
        duration_s=max(memory_s, compute_s, hardware.kernel_latency_s.value),
        workspace_bytes=0,
        source="modelled",
    )


def _modelled_link(hardware: HardwareProfile) -> LinkProfile:
    times_s = tuple(
        hardware.link_latency_s.value + nbytes / hardware.link_bytes_per_s.value
        for nbytes in _LINK_SIZES_BYTES
    )
    return LinkProfile(
        tier="pinned host memory",
        sizes_bytes=_LINK_SIZES_BYTES,
        d2h_s=times_s,
        h2d_s=times_s,
        duplex_d2h_fraction=hardware.duplex_d2h_fraction.value,
        duplex_h2d_fraction=hardware.duplex_h2d_fraction.value,
        capacity_bytes=int(hardware.host_bytes.value),
        source="modelled",
    )


def _folder() -> Traversable:
    return resources.files(__package__) / "profiles"

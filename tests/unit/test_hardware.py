"""Machines on paper: rooflines by arithmetic, every number with a source."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from backhaul.errors import PlanError
from backhaul.scheduler.hardware import (
    HardwareProfile,
    OpWork,
    Sourced,
    hardware_names,
    load_hardware,
    modelled_machine,
)
from backhaul.serial import to_json

NAMES = ["a100-pcie4", "h100-pcie5", "h200", "rtx-4090", "titan-x", "v100"]


def work(**changes: object) -> OpWork:
    made = OpWork(key="op", op_class="matmul", dtype="float32", flops=0, nbytes=0)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]  # a test writes it


def duration_s(hardware: HardwareProfile, **changes: object) -> float:
    (cost,) = modelled_machine(hardware, [work(**changes)], "none").ops
    assert cost.source == "modelled"
    return cost.duration_s


def test_the_named_machines_are_there() -> None:
    assert hardware_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source_and_a_sense(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    numbers = [
        value
        for field in dataclasses.fields(hardware)
        if isinstance(value := getattr(hardware, field.name), Sourced)
    ]
    assert len(numbers) == 8
    for each in (*numbers, *hardware.rates, *hardware.efficiencies):
        assert len(each.source) > 10
    assert all(0 < each.fraction <= 1 for each in hardware.efficiencies)
    assert 8e9 < hardware.memory_bytes.value < 200e9
    assert hardware.memory_bytes_per_s.value > 10 * hardware.link_bytes_per_s.value
    assert {rate.dtype for rate in hardware.rates} >= {"float32", "float16"}


def test_an_op_takes_the_longest_of_arithmetic_memory_and_launch() -> None:
    hardware = load_hardware("v100")
    assert duration_s(hardware, flops=157 * 10**9) == pytest.approx(0.01 / 0.7)
    assert duration_s(hardware, nbytes=9 * 10**9) == pytest.approx(0.01 / 0.8)
    assert duration_s(hardware) == hardware.kernel_latency_s.value
    assert duration_s(hardware, op_class="memory", dtype="int64", flops=10**15) == 5e-6


def test_a_copy_takes_its_latency_and_its_bytes() -> None:
    link = modelled_machine(load_hardware("h200"), [], "none").link
    assert link.source == "modelled" and link.sizes_bytes[-1] == 2**30
    assert link.d2h_s[-1] == pytest.approx(1e-5 + 2**30 / (0.85 * 63e9))


def test_a_dtype_that_the_machine_cannot_compute_is_refused() -> None:
    with pytest.raises(PlanError, match="v100 has no rate for matmul in bfloat16"):
        duration_s(load_hardware("v100"), dtype="bfloat16")


def test_a_profile_of_ones_own_is_read_from_a_file(tmp_path: Path) -> None:
    own = dataclasses.replace(load_hardware("v100"), name="mine")
    (tmp_path / "mine.json").write_text(json.dumps(to_json(own)))
    assert load_hardware(tmp_path / "mine.json") == own


@pytest.mark.parametrize("name", ["abacus", "../h200", "", Path("folder")])
def test_a_machine_that_nobody_knows_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(PlanError, match="a100-pcie4, h100-pcie5"):
        load_hardware(name)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"type": "HardwareProfile"}'])
def test_a_damaged_profile_is_refused_by_its_path(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(PlanError, match=r"mine\.json is damaged"):
        load_hardware(tmp_path / "mine.json")
    with pytest.raises(PlanError, match=r"absent\.json cannot be read"):
        load_hardware(tmp_path / "absent.json")

"""The report says what the plan says, literally."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from backhaul.records import Budget, Measured, Plan
from backhaul.report import format_bytes, format_seconds, report_text
from backhaul.scheduler.planner import compress_all, keep_all, offload_all

BUDGET = Budget(kind="memory", value=1e9)


def made(tiny: Any, planner: Any, **options: Any) -> Plan:
    graph = tiny.chain(4, **options)
    plan: Plan = planner(graph, tiny.machine(graph), BUDGET)
    return plan


def test_every_table_is_there(tiny: Any) -> None:
    text = report_text(made(tiny, offload_all, pinned=("f1",)))
    for title in ("Before and after", "by action", "largest of 4", "What was skipped"):
        assert title in text
    assert "it is pinned" in text and "offloaded" in text
    assert " 3 " in next(line for line in text.splitlines() if line.strip().startswith("offload "))


def test_nothing_skipped_is_said(tiny: Any) -> None:
    assert "Nothing was skipped." in report_text(made(tiny, keep_all))


def test_a_codec_is_named_with_its_bytes(tiny: Any) -> None:
    text = report_text(made(tiny, compress_all, codecs=(tiny.codec(),)))
    assert "compress (bits, 125 B)" in text


def test_what_a_run_showed_stands_beside_the_prediction(tiny: Any) -> None:
    plan = made(tiny, keep_all)
    assert "measured" not in report_text(plan).split("by action")[0].split("Before")[1]
    measured = Measured(step_peak_bytes=2048, step_s=0.5)
    text = report_text(dataclasses.replace(plan, measured=measured))
    assert "2.0 KiB" in text and "500.00 ms" in text


def test_names_are_printed_as_they_are(tiny: Any) -> None:
    plan = made(tiny, keep_all)
    odd = dataclasses.replace(plan.graph.tensors[0], module="[red]a\x1b[2J[/red]")
    graph = dataclasses.replace(plan.graph, tensors=(odd, *plan.graph.tensors[1:]))
    text = report_text(dataclasses.replace(plan, graph=graph), width=200)
    assert "[red]a\\x1b[2J[/red]" in text and "\x1b" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (6 * 2**30, "6.0 GiB"),
        (2**51, "2048.0 TiB"),
    ],
)
def test_bytes_are_written_in_binary_units(value: int, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 s"), (2.5, "2.50 s"), (0.0125, "12.50 ms"), (42e-6, "42 us")]
)
def test_seconds_are_written_in_a_fitting_unit(value: float, text: str) -> None:
    assert format_seconds(value) == text

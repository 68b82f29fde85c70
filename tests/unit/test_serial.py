"""Records become JSON and come back, and a damaged file is refused where it is damaged."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from backhaul.cli import app
from backhaul.errors import PlanError
from backhaul.records import Plan
from backhaul.scheduler.planner import offload_all
from backhaul.serial import json_schema


@pytest.fixture(name="plan")
def _plan(tiny: Any) -> Plan:
    from backhaul.records import Budget

    graph = tiny.chain(3, codecs=(tiny.codec(),), pinned=("f1",))
    return offload_all(graph, tiny.machine(graph), Budget(kind="memory", value=1e9))


def test_a_plan_comes_back_equal_and_as_the_same_bytes(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "one.json")
    loaded = Plan.load(tmp_path / "one.json")
    loaded.save(tmp_path / "two.json")
    assert loaded == plan
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


SCHEMA = Path(__file__).parents[2] / "docs" / "plan.schema.json"


def test_the_published_schema_is_that_of_the_records() -> None:
    result = CliRunner().invoke(app, ["schema"])
    assert result.stdout == SCHEMA.read_text()
    assert json.loads(result.stdout) == json_schema(Plan)


def test_a_plan_file_is_valid_by_the_schema_and_a_damaged_one_is_not(
    plan: Plan, tmp_path: Path
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    validator.validate(json.loads(text))
    for damage in (drop, retype, truth, rename, literal, no_list):
        data = json.loads(text)
        damage(data)
        assert not validator.is_valid(data), damage.__name__


def drop(data: Any) -> None:
    del data["graph"]["fingerprint"]


def retype(data: Any) -> None:
    data["graph"]["forward_count"] = "3"


def truth(data: Any) -> None:
    data["graph"]["forward_count"] = True


def rename(data: Any) -> None:
    data["decisions"][0]["action"]["type"] = "Destroy"


def literal(data: Any) -> None:
    data["graph"]["tensors"][0]["role"] = "hostage"


def no_list(data: Any) -> None:
    data["graph"]["ops"] = {}


@pytest.mark.parametrize(
    ("damage", "path"),
    [
        (drop, "graph lacks fingerprint"),
        (retype, "graph.forward_count is str"),
        (truth, "graph.forward_count is bool"),
        (rename, r"decisions\[0\].action"),
        (literal, r"graph.tensors\[0\].role is 'hostage'"),
        (no_list, "graph.ops is dict"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_is_named_by_its_path(
    plan: Plan, tmp_path: Path, damage: Callable[[Any], None], path: str
) -> None:
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    damage(data)
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=path):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"plan"', "[" * 100_000])
def test_what_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.load(tmp_path / "plan.json")


def test_a_newer_schema_is_refused_and_a_later_minor_one_is_read(
    plan: Plan, tmp_path: Path
) -> None:
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    newer, later = copy.deepcopy(data), copy.deepcopy(data)
    newer["schema_version"] = "2.0"
    later["schema_version"], later["graph"]["colour"] = "1.9", "blue"
    (tmp_path / "newer.json").write_text(json.dumps(newer))
    (tmp_path / "later.json").write_text(json.dumps(later))
    with pytest.raises(PlanError, match=r"2\.0"):
        Plan.load(tmp_path / "newer.json")
    assert Plan.load(tmp_path / "later.json").graph == plan.graph

"""Run every training loop of the tests by each executor, and print what came of it as a table.

The loops are those of `tests/end_to_end/test_loops.py`, each by several plans.  By the eager
executor a loop is bit for bit as it runs without backhaul; by the Inductor executor it differs by
so much at most, relative to the largest element of the same tensor, in float64 (autocast apart).

    python benchmarks/loops.py
"""

from __future__ import annotations

import argparse
import collections
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1] / "tests" / "end_to_end" / "test_loops.py"
EXECUTORS = ("eager", "inductor")
PLANS = ("offload_all", "recompute_all", "frontier")


class Results:
    """Of each loop and executor, what its tests came to."""

    def __init__(self) -> None:
        self.outcomes: dict[str, dict[str, list[pytest.TestReport]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test's outcome; a skip or an error in its fixtures is one too."""
        if report.when == "call" or report.outcome != "passed":
            loop, executor = named(report.nodeid)
            by_executor = self.outcomes.setdefault(loop, collections.defaultdict(list))
            by_executor[executor].append(report)


def named(test: str) -> tuple[str, str]:
    """Return the loop and the executor that the name of a test tells."""
    name, _, parameters = test.rpartition("::")[2].removesuffix("]").partition("[")
    executor, *others = parameters.split("-")
    loop = " ".join([name.removeprefix("test_"), *(each for each in others if each not in PLANS)])
    return loop.replace("_", " "), executor


def told(reports: list[pytest.TestReport]) -> str:
    """Say in a few words what the tests of one loop and executor came to."""
    fallen = [report for report in reports if report.outcome != "passed"]
    if fallen:
        return f"{fallen[0].outcome}: {fallen[0].longreprtext.strip().splitlines()[-1]}"
    properties = [dict(report.user_properties) for report in reports]
    results = {str(each["result"]) for each in properties if "result" in each}
    differences = [float(str(each["difference"])) for each in properties if "difference" in each]
    if differences:
        results.add(f"within {max(differences):.0e}" if max(differences) else "equal")
    return ", ".join(sorted(results))


def main() -> None:
    """Run the loops and print the table; exit as pytest does."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    results = Results()
    code = pytest.main(
        ["-q", "-p", "no:logging", "-p", "no:cacheprovider", "-m", "", str(TESTS)], [results]
    )
    print("| Loop |", " | ".join(EXECUTORS), "| plans |")
    print("| --- |" + " --- |" * len(EXECUTORS), "---: |")
    for loop, by_executor in results.outcomes.items():
        cells = [told(by_executor[executor]) for executor in EXECUTORS]
        print(f"| {loop} |", " | ".join(cells), f"| {len(by_executor[EXECUTORS[0]])} |")
    sys.exit(code)


if __name__ == "__main__":
    main()

"""Show a plan in the terminal."""

from __future__ import annotations

from backhaul.records import Plan

__all__ = ["print_report"]


def print_report(plan: Plan) -> None:
    print(plan.summary)

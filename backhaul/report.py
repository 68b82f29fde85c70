"""Show a plan in the terminal: what it does with every saved activation, and why.

Names and reasons come from models and plan files, so they are printed as they are: never as
markup, and never as control characters.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import assert_never

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from backhaul.records import (
    Action,
    Budget,
    Compress,
    Keep,
    Offload,
    Plan,
    Prediction,
    Recompute,
    TensorRecord,
)

__all__ = ["format_bytes", "format_seconds", "print_report", "report_text"]

_LARGEST_COUNT = 10
_ACTION_NAMES = ("keep", "compress", "offload", "compress+offload", "recompute")


def print_report(plan: Plan, console: Console | None = None) -> None:
    """Print what a plan does, what it costs, and what it leaves alone.

    Args:
        plan: The plan; what a run of it showed stands beside the prediction if it holds that.
        console: Where to print; the terminal by default.
    """
    console = console or Console()
    _print_summary(plan, console)
    for table in (_cost_table(plan), _action_table(plan), _largest_table(plan)):
        console.print()
        console.print(table)
    console.print()
    if any(tensor.pinned_because for tensor in plan.graph.tensors):
        console.print(_skipped_table(plan.graph.tensors))
    else:
        console.print("Nothing was skipped.")


def report_text(plan: Plan, width: int = 120) -> str:
    """Return the report as plain text.

    Args:
        plan: The plan.
        width: Columns of the imagined terminal.
    """
    buffer = io.StringIO()
    print_report(plan, Console(file=buffer, width=width, color_system=None))
    return buffer.getvalue()


def format_bytes(nbytes: float) -> str:
    """Write bytes in the binary unit that leaves the fewest digits before the point."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def format_seconds(duration_s: float) -> str:
    """Write a duration in s, ms or us."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if duration_s * scale >= 1.0:
            return f"{duration_s * scale:.2f} {unit}"
    return f"{duration_s * 1e6:.0f} us" if duration_s else "0 s"


def _literal(text: str) -> Text:
    """Make text that prints as it is; a control character shows as its escape."""
    return Text("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


def _table(title: str, *columns: str, left_count: int = 1) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left_count else "right", overflow="fold")
    return table


def _print_summary(plan: Plan, console: Console) -> None:
    console.print(_literal(plan.summary), style="bold")
    for name, value in (
        ("Budget", f"{_budget_text(plan.budget)}, planner {plan.planner}"),
        ("Machine", f"{plan.machine.device}, torch {plan.machine.torch_version}"),
        ("Rounding", plan.machine.codec_kernels),
        (
            "Host tier",
            f"{plan.machine.link.tier} ({plan.machine.link.source}), "
            f"{format_bytes(plan.host_bytes)} a step",
        ),
    ):
        if value:
            console.print(_literal(f"{name}: {value}"))


def _budget_text(budget: Budget) -> str:
    match budget.kind:
        case "memory":
            return f"{format_bytes(budget.value)} on the device, the caller's tensors included"
        case "activations":
            return f"{format_bytes(budget.value)} of saved activations on the device"
        case "slowdown":
            return f"least memory within {budget.value:g} times the time of keeping everything"
        case _:
            assert_never(budget.kind)


def _cost_table(plan: Plan) -> Table:
    """Lay keeping everything beside the plan, and the prediction beside a run of it."""
    measured = plan.measured
    columns = ["", "keep everything", "this plan", "change"]
    table = _table("Before and after", *columns, *(["measured"] if measured else []))
    measured_by_row = (
        {
            "step peak without the caller's": format_bytes(measured.step_peak_bytes),
            "step time": format_seconds(measured.step_s),
        }
        if measured
        else {}
    )
    for name, value_of, write in _COST_ROWS:
        before, after = value_of(plan.baseline), value_of(plan.predicted)
        cells = [name, write(before), write(after), _change(before, after)]
        table.add_row(*cells, *([measured_by_row.get(name, "")] if measured else []))
    return table


_COST_ROWS: tuple[tuple[str, Callable[[Prediction], float], Callable[[float], str]], ...] = (
    ("peak on device", lambda cost: cost.peak_bytes, format_bytes),
    ("step peak without the caller's", lambda cost: cost.step_peak_bytes, format_bytes),
    ("saved activations peak", lambda cost: cost.saved_peak_bytes, format_bytes),
    ("step time", lambda cost: cost.step_s, format_seconds),
    ("exposed wait", lambda cost: cost.exposed_s, format_seconds),
    ("slowed by copies", lambda cost: cost.dragged_s, format_seconds),
    ("codec time", lambda cost: cost.codec_s, format_seconds),
    ("recompute time", lambda cost: cost.recompute_s, format_seconds),
    ("offloaded, each way", lambda cost: cost.offloaded_bytes, format_bytes),
)


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else ""


def _action_table(plan: Plan) -> Table:
    nbytes_by_tensor = {tensor.name: tensor.nbytes for tensor in plan.graph.planned}
    nbytes_by_action: dict[str, list[int]] = {name: [] for name in _ACTION_NAMES}
    for decision in plan.decisions:
        nbytes_by_action[_action_name(decision.action)].append(nbytes_by_tensor[decision.tensor])
    table = _table("Saved activations by action", "action", "count", "bytes", "share")
    total_bytes = sum(map(sum, nbytes_by_action.values()))
    for name, sizes in nbytes_by_action.items():
        share = f"{sum(sizes) / total_bytes:.1%}" if total_bytes else ""
        table.add_row(name, str(len(sizes)), format_bytes(sum(sizes)), share)
    return table


def _action_name(action: Action) -> str:
    match action:
        case Keep():
            return "keep"
        case Compress():
            return "compress"
        case Offload(codec=None):
            return "offload"
        case Offload():
            return "compress+offload"
        case Recompute():
            return "recompute"
        case _:
            assert_never(action)


def _action_text(action: Action) -> str:
    codec = action.codec if isinstance(action, (Compress, Offload)) else None
    name = _action_name(action)
    return name if codec is None else f"{name} ({codec.name}, {format_bytes(codec.packed_bytes)})"


def _largest_table(plan: Plan) -> Table:
    decision_by_tensor = {decision.tensor: decision for decision in plan.decisions}
    saved = sorted(plan.graph.saved, key=lambda tensor: -tensor.nbytes)
    shown = saved[:_LARGEST_COUNT]
    columns = ("module", "op", "shape", "dtype", "action", "reason", "bytes")
    title = f"The {len(shown)} largest of {len(saved)} saved activations"
    table = _table(title, *columns, left_count=6)
    for tensor in shown:
        decision = decision_by_tensor.get(tensor.name)
        table.add_row(
            _literal(tensor.module or "(root)"),
            _literal(tensor.target),
            "x".join(map(str, tensor.shape)) or "scalar",
            _literal(tensor.dtype),
            _action_text(decision.action) if decision else "keep",
            _literal(decision.reason if decision else tensor.pinned_because),
            format_bytes(tensor.nbytes),
        )
    return table


def _skipped_table(tensors: Iterable[TensorRecord]) -> Table:
    sizes_by_reason: dict[str, list[int]] = defaultdict(list)
    for tensor in tensors:
        if tensor.pinned_because:
            sizes_by_reason[tensor.pinned_because].append(tensor.nbytes)
    table = _table("What was skipped", "reason", "count", "bytes")
    for reason, sizes in sorted(sizes_by_reason.items(), key=lambda item: -sum(item[1])):
        table.add_row(_literal(reason), str(len(sizes)), format_bytes(sum(sizes)))
    return table

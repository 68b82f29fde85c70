"""Say how fast a step could at best be within a budget, whatever the planner.

A linear program that leaves out what makes planning hard: tensors may be treated in several
ways by shares, copies take no memory on their way, and recomputing keeps no source alive.
What is left holds for every plan: the bytes live during each op, the seconds that each way
costs, and that both engines copy one tensor after the other within their half of the step.

    x[t, w]     share of tensor t that is treated in way w
    stall_d2h   seconds that the forward waits for copies out
    stall_h2d   seconds that the backward waits for copies back
"""

from __future__ import annotations

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from backhaul.errors import InternalError
from backhaul.records import GraphRecord, MachineProfile
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.frontier import Kind
from backhaul.scheduler.spans import LIVE, SAVED
from backhaul.scheduler.ways import Option, options_of

__all__ = ["least_step_s"]


def least_step_s(
    graph: GraphRecord, machine: MachineProfile, kind: Kind, budget_bytes: int
) -> float:
    """Return a time that no plan within the budget can beat, infinite if none can fit.

    Args:
        graph: The step.
        machine: Measurements that cover it.
        kind: What the budget counts.
        budget_bytes: The budget.
    """
    cost = CostModel(graph, machine)
    saved_only = kind == "activations"
    limit = budget_bytes if saved_only else budget_bytes - cost.caller_bytes
    offers = [
        (name, option)
        for name, tensor in cost.planned.items()
        if tensor.role == "saved" and tensor.first_backward_use >= 0
        for option in options_of(cost, tensor)
    ]
    floor = cost.kept.levels()[0][:-1, SAVED if saved_only else LIVE].copy()
    if not saved_only:
        floor += cost.workspace_bytes
    rows, columns, values = [], [], []
    for column, (name, option) in enumerate(offers):
        tensor = cost.planned[name]
        first = tensor.last_forward_use + 1
        last = tensor.first_backward_use - (0 if saved_only else 1)
        if option.way == "keep":
            floor[first : last + 1] -= cost.nbytes[name]
        if option.held_bytes and first <= last:
            rows += [first, last + 1]
            columns += [column, column]
            values += [option.held_bytes, -option.held_bytes]
    return _solved(cost, offers, floor, limit, sparse.coo_array((values, (rows, columns))))


def _solved(
    cost: CostModel,
    offers: list[tuple[str, Option]],
    floor: np.ndarray,
    limit: int,
    held: sparse.coo_array,
) -> float:
    """Solve the program; `held` has the bytes that each offer begins and ends to hold.

    Bytes are in units of the limit: solvers want numbers near 1.
    """
    if (floor > limit).any():
        return float("inf")
    byte_unit = float(max(limit, 1))
    count, width = len(cost.duration_s), len(offers)
    # Columns: the offers, the two stalls, and the bytes held during each op.
    held = sparse.coo_array((held.data, held.coords), shape=(count + 1, width)).tocsr()[:count]
    held = held / byte_unit
    step = sparse.eye(count) - sparse.eye(count, k=-1)
    balance = sparse.hstack([-held, sparse.csr_array((count, 2)), step])
    names = list(dict.fromkeys(name for name, _ in offers))
    row_of = {name: row for row, name in enumerate(names)}
    whole = sparse.coo_array(
        (np.ones(width), ([row_of[name] for name, _ in offers], range(width))),
        shape=(len(names), width + 2 + count),
    )
    late, late_limit = _late_copies(cost, offers)
    bounds: list[tuple[int, float | None]] = [(0, 1)] * width + [(0, None)] * 2
    bounds += [(0, int(limit - bytes_at) / byte_unit) for bytes_at in floor]
    seconds = [option.compute_s for _, option in offers] + [1.0, 1.0] + [0.0] * count
    solved = linprog(
        seconds,
        A_ub=sparse.hstack([late, sparse.csr_array((late.shape[0], count))]).tocsr(),
        b_ub=late_limit,
        A_eq=sparse.vstack([whole, balance]).tocsr(),
        b_eq=[1.0] * len(names) + [0.0] * count,
        bounds=bounds,
        method="highs",
    )
    if solved.status == 2:
        return float("inf")
    if solved.status != 0:
        raise InternalError(f"the linear program of a lower bound was not solved: {solved.message}")
    return float(sum(cost.duration_s) + solved.fun)


def _late_copies(
    cost: CostModel, offers: list[tuple[str, Option]]
) -> tuple[sparse.csr_array, list[float]]:
    """Write that copies fit: those out between birth and the forward's end, those back likewise.

    For each moment of the forward, what is born later has the rest of the forward, packing and
    stalls included, to get out; for each of the backward, what is needed sooner has what went
    before.
    """
    starts_s, middle = cost.starts_s, cost.forward_count
    width = len(offers)
    packing_s = np.array([option.compute_s for _, option in offers])
    rows, limits = [], []
    births = sorted({cost.layout.ready[name] for name, option in offers if option.d2h_s})
    for birth in births:
        row = np.zeros(width + 2)
        for column, (name, option) in enumerate(offers):
            if cost.layout.ready[name] >= birth:
                row[column] = option.d2h_s
        row[:width] -= packing_s
        row[width] = -1.0
        rows.append(row)
        limits.append(starts_s[middle] - starts_s[birth + 1])
    uses = sorted({cost.planned[name].first_backward_use for name, o in offers if o.h2d_s})
    for use in uses:
        row = np.zeros(width + 2)
        for column, (name, option) in enumerate(offers):
            if cost.planned[name].first_backward_use <= use:
                row[column] = option.h2d_s
        row[:width] -= packing_s
        row[width + 1] = -1.0
        rows.append(row)
        limits.append(starts_s[use] - starts_s[middle])
    if not rows:
        return sparse.csr_array((0, width + 2)), []
    return sparse.csr_array(np.array(rows)), limits

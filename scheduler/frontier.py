"""Find the trade-off between memory and time: plans of which none is beaten in both.

The search does not know the budget.  It makes one set of candidates for a graph and a
machine, and a budget only picks from the set, so that more budget never costs time and less
never raises the peak.

Several paths (`scheduler.paths`) walk down from keeping everything; each charges the link
otherwise.  Where a path first fits a level of memory, its copies are placed for that level and
the simulator judges the whole.  Small graphs are searched further, a tensor or
two at a time, and the smallest through and through.

    levels between the floor and keeping everything     8 to 24, fewer for more ops
    finer levels about the one that is asked for        8
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, islice, pairwise, product
from typing import Literal

from backhaul.records import Action, Offload, Prediction
from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.paths import NEVER, Path
from backhaul.scheduler.placement import Limit, place
from backhaul.scheduler.simulator import predict
from backhaul.scheduler.ways import (
    ALL_WAYS,
    Option,
    Way,
    asked_ways,
    options_of,
    recipes_find_values,
)

__all__ = ["Candidate", "Frontier", "Kind"]

Kind = Literal["memory", "activations"]
Ways = Mapping[str, Way]

_LEVEL_EVENTS, _LEVELS_LEAST, _LEVELS_MOST = 60_000, 8, 24
_FINE_COUNT = 8
_SLACKS = (0.0, 0.04, 0.12)
"""Shares of the range that a plan leaves free of tensors, for copies on their way."""

_CHARGES = ((0.0, 1.0), (0.2, 1.0), (1.0, 1.0), (NEVER, 1.0), (0.0, NEVER))
"""Seconds charged for each second of copying, and of recomputing."""

_SEARCH_EVENTS = 60_000
_SEARCH_LEAST, _SEARCH_MOST, _SEARCH_WIDTH = 200, 1500, 2
"""Ops and plans that may be simulated to search further, and tensors that change at once."""

_EXHAUST_LEVELS_LEAST, _EXHAUST_LEVELS_MOST = 3, 12
"""Limits for which the copies of every possible plan are placed, if all are tried."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan, judged.

    Attributes:
        ways: What happens to each tensor that is not kept.
        actions: The same with positions.
        prediction: What the simulator says of it.
        used_bytes: Bytes that the budget counts.
    """

    ways: Ways
    actions: Mapping[str, Action]
    prediction: Prediction
    used_bytes: int

    @property
    def rank(self) -> tuple[float, int, int]:
        """Order by time, then memory, then how much is left alone."""
        return self.prediction.step_s, self.used_bytes, len(self.ways)


class Frontier:
    """The candidates for one graph on one machine.

    Args:
        cost: The costs of the step.
        kind: What a budget counts: everything on the device, or saved activations.
        allowed: The ways to consider.

    Attributes:
        keep: Everything is kept, but for what is asked of single tensors.
        floor: The least memory that any candidate needs.
        candidates: Those that no other beats in both memory and time, by rising memory.
    """

    def __init__(self, cost: CostModel, kind: Kind, allowed: frozenset[Way] = ALL_WAYS) -> None:
        self._cost = cost
        self._saved_only = kind == "activations"
        self._options = {
            name: options_of(cost, tensor, allowed) for name, tensor in cost.planned.items()
        }
        self._asked = asked_ways(cost.planned, self._options)
        no_limit = Limit(float("inf"), self._saved_only)
        self.keep = self._judged(self._asked, place(cost, self._asked, no_limit))
        self._known: dict[tuple[tuple[tuple[str, Way], ...], float], Candidate] = {}
        self._found = [self.keep]
        self._paths = [
            Path(cost, self._options, self._asked, self._saved_only, copy_charge, recompute_charge)
            for copy_charge, recompute_charge in _CHARGES
        ]
        self._options |= {name: self._options[name][1:] for name in self._asked}
        self._found += self._tightest()
        self._floor_bytes = min(found.used_bytes for found in self._found)
        level_count = _LEVEL_EVENTS // max(1, len(cost.duration_s))
        level_count = min(max(level_count, _LEVELS_LEAST), _LEVELS_MOST)
        for level in self._spread(self._floor_bytes, self.keep.used_bytes, level_count):
            self._found += self._at(level)
        self._found += self._polished()
        self._search()
        self.candidates = _unbeaten(self._found)
        self.floor = self.candidates[0]

    def fastest(self, nbytes: int) -> Candidate | None:
        """Return the fastest plan that uses at most so many bytes, or None if none does."""
        fitting = [found for found in self._near(nbytes) if found.used_bytes <= nbytes]
        return min(fitting, key=lambda found: found.rank, default=None)

    def smallest(self, step_s: float) -> Candidate:
        """Return the plan with the least memory that takes at most so long."""

        def least(among: Iterable[Candidate]) -> Candidate:
            in_time = [found for found in among if found.prediction.step_s <= step_s]
            return min(in_time, key=lambda found: (found.used_bytes, found.rank), default=self.keep)

        return least(self._near(least(self.candidates).used_bytes - 1))

    def _near(self, nbytes: int) -> list[Candidate]:
        """Return the candidates, with finer ones between the two levels about a size.

        A finer one that is faster than what the upper level offers is left out: it would make
        more memory cost time.
        """
        upper = next((found for found in self.candidates if found.used_bytes > nbytes), None)
        lower = max(
            (found.used_bytes for found in self.candidates if found.used_bytes <= nbytes),
            default=None,
        )
        if upper is None or lower is None:
            return list(self.candidates)
        finer: list[Candidate] = []
        for level in self._spread(lower, upper.used_bytes, _FINE_COUNT):
            finer += self._at(level)
        return list(self.candidates) + [
            found
            for found in finer
            if lower < found.used_bytes < upper.used_bytes
            and found.prediction.step_s >= upper.prediction.step_s
        ]

    def _spread(self, low: int, high: int, count: int) -> list[int]:
        """Return levels between two sizes."""
        return sorted({low + (high - low) * i // count for i in range(1, count)} - {low, high})

    def _tightest(self) -> list[Candidate]:
        """Judge the ends of the paths with nothing held longer than it must be."""
        return [self._placed(path.end(), 0) for path in self._paths]

    def _at(self, nbytes: int) -> list[Candidate]:
        """Judge what each path offers for a budget of so many bytes."""
        limit = self._limit(nbytes)
        span = self.keep.used_bytes - self._floor_bytes
        found = []
        for path in self._paths:
            for slack in _SLACKS if path.moves else _SLACKS[:1]:
                ways = path.first_within(limit - int(slack * span))
                if ways is not None:
                    found.append(self._placed(ways, limit))
        return found

    def _limit(self, nbytes: int) -> int:
        """Return what a budget leaves for the step."""
        return nbytes if self._saved_only else nbytes - self._cost.caller_bytes

    def _placed(self, ways: Ways, limit: float) -> Candidate:
        """Place the copies for a limit and judge the plan, once."""
        key = tuple(ways.items()), limit if _moves(ways) else 0
        if key not in self._known:
            actions = place(self._cost, ways, Limit(limit, self._saved_only))
            self._known[key] = self._judged(ways, actions)
        return self._known[key]

    def _judged(self, ways: Ways, actions: Mapping[str, Action]) -> Candidate:
        prediction = predict(self._cost, actions)
        used = prediction.saved_peak_bytes if self._saved_only else prediction.peak_bytes
        return Candidate(ways, actions, prediction, used)

    def _polished(self) -> list[Candidate]:
        """Place the copies of the unbeaten plans again, for what they use and a little more."""
        unbeaten = _unbeaten(self._found)
        return [
            self._placed(found.ways, self._limit(nbytes))
            for found, larger in pairwise(unbeaten)
            if _moves(found.ways)
            for nbytes in (found.used_bytes, larger.used_bytes - 1)
        ]

    def _search(self) -> None:
        """Search a small graph further: through all ways if they are few, or near the best."""
        most = min(_SEARCH_EVENTS // max(1, len(self._cost.duration_s)), _SEARCH_MOST)
        if most < _SEARCH_LEAST:
            return
        level_count = most // math.prod(len(offered) for offered in self._options.values())
        if level_count >= _EXHAUST_LEVELS_LEAST:
            self._exhaust(min(level_count, _EXHAUST_LEVELS_MOST))
        else:
            self._improve(most)
        self._shift_copies(most)

    def _exhaust(self, level_count: int) -> None:
        """Try every way of every tensor, with copies placed for no limit and for several."""
        every = [
            _changed(zip(self._options, chosen, strict=True))
            for chosen in product(*self._options.values())
        ]
        legal = [ways for ways in every if self._is_legal(ways)]
        for ways in legal:
            self._found += self._tightest_of(ways)
        # A plan can use what another one uses at the least.
        used = sorted({found.used_bytes for found in self._found})
        levels = [self._limit(nbytes) for nbytes in used[:: -(-len(used) // (level_count - 2))]]
        for limit in (float("inf"), *levels):
            self._found += [self._placed(ways, limit) for ways in legal if _moves(ways)]
        self._found += self._polished()

    def _improve(self, left: int) -> None:
        """Change a tensor or two of the unbeaten plans, so many times at most."""
        done: set[tuple[int, tuple[tuple[str, Way], ...]]] = set()
        width = 1
        while width <= _SEARCH_WIDTH:
            near = [f for f in _unbeaten(self._found) if (width, tuple(f.ways.items())) not in done]
            if not near:
                width += 1
                continue
            done |= {(width, tuple(found.ways.items())) for found in near}
            for found in near:
                for ways in _neighbours(found.ways, self._options, width):
                    if not self._is_legal(ways):
                        continue
                    new = self._tightest_of(ways)
                    if _moves(ways):
                        limits = (self._limit(found.used_bytes), float("inf"))
                        new += [self._placed(ways, limit) for limit in limits]
                    self._found += new
                    left -= len(new)
                    if left <= 0:
                        return
            self._found = _unbeaten(self._found + self._polished())
            width = 1

    def _tightest_of(self, ways: Ways) -> list[Candidate]:
        """Judge ways with their copies held no longer than must be, then as long as is free."""
        tight = self._placed(ways, 0)
        if not _moves(ways):
            return [tight]
        return [tight, self._placed(ways, self._limit(tight.used_bytes))]

    def _shift_copies(self, left: int) -> None:
        """Move a wait or a reload of the unbeaten plans elsewhere, so many times at most."""
        done: set[int] = set()
        while near := [found for found in _unbeaten(self._found) if id(found) not in done]:
            done |= {id(found) for found in near}
            for found in near:
                shifted = islice(self._shifted(found), left)
                new = [self._judged(found.ways, actions) for actions in shifted]
                self._found += new
                left -= len(new)

    def _shifted(self, found: Candidate) -> Iterator[dict[str, Action]]:
        """Yield a plan's actions with one copy waited for, or started, at another moment."""
        lives = self._cost.layout.lives_under(found.actions)
        for name, action in found.actions.items():
            if not isinstance(action, Offload):
                continue
            idle = self._cost.planned[name].last_forward_use
            others = [
                replace(action, wait_after=at) for at in range(idle, self._cost.forward_count)
            ]
            others += [
                replace(action, reload_before=at)
                for at in range(self._cost.forward_count, lives[name].use + 1)
            ]
            for other in others:
                if other != action:
                    yield {**found.actions, name: other}

    def _is_legal(self, ways: Ways) -> bool:
        """Say whether the host tier holds it all, and every recipe finds the values it reads."""
        host_bytes = sum(
            option.host_bytes
            for name, way in ways.items()
            for option in self._options[name]
            if option.way == way
        )
        fits = host_bytes <= self._cost.host_capacity_bytes
        return fits and recipes_find_values(self._cost.planned, ways)


def _neighbours(
    near: Ways, options: Mapping[str, tuple[Option, ...]], width: int
) -> Iterator[dict[str, Way]]:
    """Yield the ways that differ in so many tensors."""
    for names in combinations([name for name, offered in options.items() if offered[1:]], width):
        current = [near.get(name, "keep") for name in names]
        for chosen in product(*(options[name] for name in names)):
            if any(option.way == way for option, way in zip(chosen, current, strict=True)):
                continue
            changed = {name: way for name, way in near.items() if name not in names}
            changed |= _changed(zip(names, chosen, strict=True))
            yield dict(sorted(changed.items()))


def _changed(chosen: Iterable[tuple[str, Option]]) -> dict[str, Way]:
    """Return the ways of the tensors that are not kept."""
    return {name: option.way for name, option in chosen if option.way != "keep"}


def _moves(ways: Ways) -> bool:
    return any("move" in way for way in ways.values())


def _unbeaten(found: Iterable[Candidate]) -> list[Candidate]:
    """Return the plans that no other beats in both memory and time, by rising memory."""
    kept: list[Candidate] = []
    for each in sorted(found, key=lambda each: (each.used_bytes, each.rank)):
        if not kept or each.prediction.step_s < kept[-1].prediction.step_s:
            kept.append(each)
    return kept

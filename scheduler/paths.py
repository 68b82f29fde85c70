"""Walk from keeping everything down to the least memory, the cheapest bytes first.

Each step looks at the op where most memory is live, as if every copy took no time, and treats
one of the tensors that are held there in another way: the one that costs the fewest seconds
for each byte that it frees.  Recomputing a tensor makes its sources live sooner and longer,
so that it is tried before it is taken: what it frees there counts without what its sources
add, and less where they undo, over the whole step, what it was to free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from backhaul.scheduler.cost import CostModel
from backhaul.scheduler.spans import LIVE, SAVED
from backhaul.scheduler.ways import Option, Way, spoils_recipes

__all__ = ["NEVER", "Path"]

_LEAST_EFFECT = 0.02
"""A step that its own side effects undo counts as this much of one that has none."""

_USELESS = 1e9

NEVER = float("inf")
"""The charge of what a path does without."""


_Former = tuple[int, int, int, int, bool]
"""A tensor with the life that it had before it was read by one recipe more."""


class Path:
    """One walk, as a list of steps.

    Attributes:
        moves: Whether any step sends a tensor over the link.

    Args:
        cost: The costs of the step.
        options: The ways to treat each saved tensor and checkpoint.
        asked: The ways that the walk begins with, whatever they cost.
        saved_only: Whether only saved activations count as memory.
        copy_charge: Seconds charged for each second of copying, beyond what cannot be hidden.
        recompute_charge: Seconds charged for each second of recomputing; either may be `NEVER`.
    """

    def __init__(
        self,
        cost: CostModel,
        options: Mapping[str, Sequence[Option]],
        asked: Mapping[str, Way],
        saved_only: bool,
        copy_charge: float,
        recompute_charge: float,
    ) -> None:
        offered = {
            name: [
                option
                for option in ways
                if name in asked or _is_affordable(option.way, copy_charge, recompute_charge)
            ]
            for name, ways in options.items()
        }
        walker = _Walker(cost, offered, saved_only, 0.0 if copy_charge == NEVER else copy_charge)
        self._steps = list(asked.items())
        for name, way in self._steps:
            walker.take(name, way)
        peaks = [walker.peak_bytes] * len(asked)
        while (step := walker.step()) is not None:
            self._steps.append(step)
            peaks.append(walker.peak_bytes)
        self._least_peaks = [-peak for peak in accumulate(peaks, min)]
        self._asked_count = len(asked)
        self.moves = any("move" in way for _, way in self._steps)

    def end(self) -> dict[str, Way]:
        """Return the ways at the end of the walk."""
        return dict(self._steps)

    def first_within(self, nbytes: int) -> dict[str, Way] | None:
        """Return the ways after the first step that needs at most so much, or None.

        Args:
            nbytes: Bytes live at once, without what the caller holds.
        """
        count = max(bisect_left(self._least_peaks, -nbytes) + 1, self._asked_count)
        return dict(self._steps[:count]) if count <= len(self._steps) else None


class _Walker:
    """Where the walk has come to: the way and the life of each tensor, and memory over time."""

    def __init__(
        self,
        cost: CostModel,
        options: Mapping[str, Sequence[Option]],
        saved_only: bool,
        copy_charge: float,
    ) -> None:
        self._saved_only = saved_only
        self._tensors = list(cost.planned.values())
        index = {tensor.name: i for i, tensor in enumerate(self._tensors)}
        self._nbytes = [cost.nbytes[tensor.name] for tensor in self._tensors]
        self._beyond = [
            cost.recipe_peak_bytes.get(tensor.name, 0) - self._nbytes[i]
            for i, tensor in enumerate(self._tensors)
        ]
        self._sources = [
            [index[source] for source in tensor.recipe.sources] if tensor.recipe else []
            for tensor in self._tensors
        ]
        self._idle = np.array([t.last_forward_use for t in self._tensors], dtype=np.int64)
        self._use = np.array([t.first_backward_use for t in self._tensors], dtype=np.int64)
        self._until = [t.first_backward_use for t in self._tensors]
        self._dies = [t.dies for t in self._tensors]
        self._held = np.array(self._nbytes, dtype=np.int64)
        self._paid_s = np.zeros(len(self._tensors))
        self._is_read = [False] * len(self._tensors)
        self._option = [options[tensor.name][0] for tensor in self._tensors]

        self._offers = [
            (index[name], option) for name, offered in options.items() for option in offered[1:]
        ]
        self._offer_tensor = np.array([i for i, _ in self._offers], dtype=np.int64)
        self._offer_held = np.array([o.held_bytes for _, o in self._offers], dtype=np.int64)
        self._offer_d2h_s = np.array([o.d2h_s for _, o in self._offers])
        self._offer_h2d_s = np.array([o.h2d_s for _, o in self._offers])
        self._offer_s = np.array(
            [o.compute_s + o.exposed_s + copy_charge * (o.d2h_s + o.h2d_s) for _, o in self._offers]
        )
        self._offer_host = np.array([o.host_bytes for _, o in self._offers], dtype=np.int64)
        self._free_host_bytes = cost.host_capacity_bytes
        self._effect = np.ones(len(self._offers))
        self._is_open = np.ones(len(self._offers), dtype=bool)
        self._is_recipe = np.array([o.way == "recompute" for _, o in self._offers], dtype=bool)
        self._offers_of: dict[int, list[int]] = {}
        for number, (i, _) in enumerate(self._offers):
            self._offers_of.setdefault(i, []).append(number)
        self._spoils = [spoils_recipes(option.way, self._tensors[i]) for i, option in self._offers]

        count = len(cost.duration_s)
        self._free_d2h_s = sum(cost.duration_s[: cost.forward_count])
        self._free_h2d_s = sum(cost.duration_s[cost.forward_count :])
        during, _ = cost.kept.levels()
        self._live = during[:-1, SAVED if saved_only else LIVE].copy()
        self._workspace = np.zeros(count, dtype=np.int64)
        if not saved_only:
            self._workspace += cost.workspace_bytes

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes live at once."""
        return int((self._live + self._workspace).max())

    def take(self, name: str, way: Way) -> None:
        """Treat a tensor in one of the ways that are offered for it."""
        for number, (i, option) in enumerate(self._offers):
            if option.way == way and self._tensors[i].name == name:
                self._take(number)

    def step(self) -> tuple[str, Way] | None:
        """Take the cheapest step that frees memory where most is live, or None if none does."""
        memory = self._live + self._workspace
        position = int(memory.argmax())
        owner = self._offer_tensor
        last = position - 1 if self._saved_only else position
        is_held = self._is_open & (self._idle[owner] < position) & (self._use[owner] > last)
        is_held &= self._offer_host <= self._free_host_bytes
        numbers = np.flatnonzero(is_held)
        gain = self._held[owner[numbers]] - self._offer_held[numbers]
        numbers, gain = numbers[gain > 0], gain[gain > 0]
        if not numbers.size:
            return None
        price_s = np.maximum(self._price_s(numbers), 1e-12)
        tried: set[int] = set()
        while True:
            score = price_s / (gain * self._effect[numbers])
            at = int(score.argmin())
            number = int(numbers[at])
            if number in tried and self._effect[number] <= 1 / _USELESS:
                return None
            if number in tried or not self._is_recipe[number]:
                self._take(number)
                return self._told(number)
            tried.add(number)
            self._effect[number] = self._tried_effect(number, position, int(gain[at]))

    def _told(self, number: int) -> tuple[str, Way]:
        i, option = self._offers[number]
        return self._tensors[i].name, option.way

    def _price_s(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Price the offers: what they add to what was paid, and what the link cannot hide."""
        paid_s = self._paid_s[self._offer_tensor[numbers]]
        d2h_s, h2d_s = self._offer_d2h_s[numbers], self._offer_h2d_s[numbers]
        late_s = np.clip(d2h_s - self._free_d2h_s, 0, d2h_s)
        late_s += np.clip(h2d_s - self._free_h2d_s, 0, h2d_s)
        price: NDArray[np.float64] = self._offer_s[numbers] + late_s - paid_s
        return price

    def _tried_effect(self, number: int, position: int, gain: int) -> float:
        """Say which share of an offer's gain is left when its sources' lives are counted."""
        i, _ = self._offers[number]
        if any(
            spoils_recipes(self._option[source].way, self._tensors[source])
            for source in self._sources[i]
        ):
            return 1 / _USELESS
        before, workspace = self._live.copy(), self._workspace.copy()
        undo = self._take(number)
        freed = int((before + workspace)[position] - (self._live + self._workspace)[position])
        own = gain * int(self._use[i] - self._idle[i])
        volume = int(before.sum() - self._live.sum())
        self._live, self._workspace = before, workspace
        undo()
        if freed <= 0:
            return 1 / _USELESS
        return min(1.0, freed / gain) * min(1.0, max(volume / max(own, 1), _LEAST_EFFECT))

    def _take(self, number: int) -> Callable[[], None]:
        """Change the way of one tensor; returns how to take it back but for the memory."""
        i, option = self._offers[number]
        former = self._option[i], int(self._held[i]), float(self._paid_s[i])
        lives: list[_Former] = []
        closed: list[int] = []
        free = self._free_d2h_s, self._free_h2d_s, self._free_host_bytes

        self._occupy(i, -1)
        self._option[i] = option
        self._held[i] = option.held_bytes
        self._paid_s[i] = self._offer_s[number]
        self._free_d2h_s -= option.d2h_s
        self._free_h2d_s -= option.h2d_s
        self._free_host_bytes -= option.host_bytes
        self._occupy(i, 1)
        for other in self._offers_of[i]:
            if self._is_open[other] and (other == number or option.way == "recompute"):
                self._is_open[other] = False
                closed.append(other)
        if option.way == "recompute":
            self._read_sources(i, lives, closed)

        def undo() -> None:
            self._option[i], self._held[i], self._paid_s[i] = former
            self._free_d2h_s, self._free_h2d_s, self._free_host_bytes = free
            for other in closed:
                self._is_open[other] = True
            for source, use, until, dies, was_read in reversed(lives):
                self._use[source], self._until[source] = use, until
                self._dies[source] = dies
                self._is_read[source] = was_read

        return undo

    def _read_sources(self, i: int, lives: list[_Former], closed: list[int]) -> None:
        """Let the sources of a recomputed tensor be there when it is needed, and theirs."""
        position = int(self._use[i])
        for source in self._sources[i]:
            use, until, dies = int(self._use[source]), self._until[source], self._dies[source]
            lives.append((source, use, until, dies, self._is_read[source]))
            if not self._is_read[source]:
                self._is_read[source] = True
                for other in self._offers_of.get(source, ()):
                    if self._is_open[other] and self._spoils[other]:
                        self._is_open[other] = False
                        closed.append(other)
            if 0 <= use <= position <= until:
                continue
            self._occupy(source, -1)
            self._use[source] = position if use < 0 else min(use, position)
            self._until[source] = max(until, position)
            self._dies[source] = max(dies, position)
            self._occupy(source, 1)
            if self._option[source].way == "recompute":
                self._read_sources(source, lives, closed)

    def _occupy(self, i: int, sign: int) -> None:
        """Add what a tensor takes to the memory over time, or take it away."""
        tensor, whole, option = self._tensors[i], sign * self._nbytes[i], self._option[i]
        idle, use, until, dies = (
            tensor.last_forward_use,
            int(self._use[i]),
            self._until[i],
            self._dies[i],
        )
        live, held = self._live, sign * option.held_bytes
        if self._saved_only and option.way == "keep":
            live[idle + 1 : until + 1] += whole
        elif self._saved_only:
            live[idle + 1 : use + 1] += held
            live[use + 1 : until + 1] += whole
            if option.moved_bytes:
                # On its way it is there in the form that it crosses the link in.
                live[[idle + 1, use]] += sign * option.moved_bytes
        elif option.way == "keep" or use < 0:
            live[tensor.born : dies + 1] += whole
        else:
            live[tensor.born : idle + 1] += whole
            live[use : dies + 1] += whole
            live[idle : use + 1] += held
            if option.way == "recompute" and sign > 0:
                self._workspace[use] = max(self._workspace[use], self._beyond[i])


def _is_affordable(way: Way, copy_charge: float, recompute_charge: float) -> bool:
    moves_for_ever = "move" in way and copy_charge == NEVER
    return not moves_for_ever and not (way == "recompute" and recompute_charge == NEVER)

"""Choose how far activations may be rounded, from what training shows, and follow it.

    warm-up      every step is exact; the last ones are watched
    a look       some steps are watched: how much of an error each layer would hear
    a refresh    bounds that spend the budget are chosen; some steps are measured for the room that
                 packed forms need with them; where it differs, the plan is made anew

A look comes ten times between refreshes, and makes one of its own if a bound has moved by more
than `MOVE`, or a packed form had no room.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch

from backhaul.passes.describe import Roundable
from backhaul.records import ErrorBound, Mode, PackedForm
from backhaul.runtime.block_kernels import PLANES
from backhaul.runtime.observer import Observer, ReadSums
from backhaul.runtime.quantiser import BLOCK, Needs, fitting_forms, needed_in, quantised_nbytes
from backhaul.scheduler.error_budget import LinearNoise, bounds_of, comet_bound

__all__ = ["DEFAULT_ERROR_BUDGET", "AdaptiveCompression", "Policy", "Refresh"]

_logger = logging.getLogger(__name__)

Policy = Literal["bytes", "comet"]
Change = Literal["", "turn", "plan"]

DEFAULT_ERROR_BUDGET = 0.01
"""COMET's share (Jin et al. 2021)."""

WATCHED_STEPS = 8
SIZED_STEPS = 4
LOOKS = 10
MOVE = 2.0
LARGEST_BOUND = 1 / 8
"""Largest bound of what is not dithered, as a share of the root mean square of its elements."""
DENSE = 0.9
"""Share of elements that are not zero from which on zeros are no matter."""

ROOM, ROOM_BLOCKS = 1.1, 2
"""Rows that are given for each one that is needed, and blocks' worth of them beside."""
ROOM_TO_SPARE = 1.5
"""Rows given for each one needed beyond which the plan is made anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refresh:
    """What one refresh decided.

    Attributes:
        step: The step that it came before.
        reference_norm: Norm of the momentum, or of the gradient, that noise is a share of.
        noise_share: Expected norm of all noise over it, by what is really rounded.
        bounds: Largest error of each activation that is rounded.
        bits: Bits that an element takes, its share of every side buffer included.
        exact_fractions: Share of each that did not fit and is kept as it is, without an error.
    """

    step: int
    reference_norm: float
    noise_share: float
    bounds: dict[str, float]
    bits: dict[str, float]
    exact_fractions: dict[str, float]


class AdaptiveCompression:
    """The controller of one module's error bounds.

    Args:
        error_budget: Norm that rounding may add to the weights' gradients, as a share of the
            momentum's; COMET allows 0.01.  With 0 nothing is rounded, and zeros are left out.
        policy: `bytes` spends one budget where it saves most bytes; `comet` is the rule of COMET
            for each layer, with its fitted constant, for comparison.
        warmup_steps: Exact steps before the first refresh.
        refresh_steps: Steps between refreshes.
        optimizer: Its momentum (`momentum_buffer` or `exp_avg`) is the reference; without one the
            gradient itself is, as its norm is seen in the backward.  Give none if the loss is
            scaled.

    Attributes:
        error_bounds: What the plan is made with; none while everything is exact.
        history: Every refresh so far.
        observer: Watches the backward.
    """

    def __init__(
        self,
        error_budget: float = DEFAULT_ERROR_BUDGET,
        *,
        policy: Policy = "bytes",
        warmup_steps: int = 100,
        refresh_steps: int = 1000,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        _check(error_budget, policy, warmup_steps, refresh_steps)
        self.error_budget = error_budget
        self.policy: Policy = policy
        self.warmup_steps = warmup_steps
        self.refresh_steps = refresh_steps
        self.optimizer = optimizer
        self.observer = Observer()
        self.error_bounds: tuple[ErrorBound, ...] = ()
        self.history: list[Refresh] = []
        self._step = 0
        self._refreshed_at = 0
        self._look_at = warmup_steps
        self._overflow_count = 0
        self._had_no_room = False
        self._is_loaded = False
        self._pending: tuple[float, dict[str, LinearNoise]] | None = None
        self._roundable: dict[str, Roundable] = {}

    def learn(self, roundable: Iterable[Roundable]) -> None:
        """Take note of what may be rounded in a graph that was captured."""
        for each in roundable:
            known = self._roundable.get(each.tensor)
            # Of several shapes, room is given to the largest.
            if known is None or known.numel <= each.numel:
                self._roundable[each.tensor] = each

    def begin_step(self, overflow_count: int) -> Change:
        """Begin a training step; say whether bounds or the plan must change before it runs.

        Args:
            overflow_count: How many packed forms had no room since the plan was made.
        """
        self._had_no_room |= overflow_count > self._overflow_count
        self._overflow_count = overflow_count
        step, self._step = self._step, self._step + 1
        if self._is_loaded:
            self._is_loaded = False
            return "plan"
        if self._pending is not None:
            return self._refresh(step)
        if step < self._look_at - WATCHED_STEPS:
            self.observer.mode = "off"
        elif step < self._look_at:
            self.observer.mode = "norms"
        else:
            self._end_look(step)
        return ""

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run needs to go on, in plain numbers and names."""
        return {
            "step": self._step,
            "refreshed_at": self._refreshed_at,
            "look_at": self._look_at,
            "error_bounds": [asdict(given) for given in self.error_bounds],
            "history": [asdict(refresh) for refresh in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; the next step is planned anew.

        Raises:
            KeyError: It is no such state.
        """
        error_bounds = tuple(_bound_of(given) for given in state["error_bounds"])
        history = [Refresh(**refresh) for refresh in state["history"]]
        self._step, self._refreshed_at, self._look_at = (
            state[name] for name in ("step", "refreshed_at", "look_at")
        )
        self.error_bounds, self.history = error_bounds, history
        self._pending = None
        self._is_loaded = True
        self.observer.forget()

    def copied(self) -> AdaptiveCompression:
        """Return a controller of the same state for a copy of the model, without optimizer."""
        copy = AdaptiveCompression(
            self.error_budget,
            policy=self.policy,
            warmup_steps=self.warmup_steps,
            refresh_steps=self.refresh_steps,
        )
        copy.load_state_dict(self.state_dict())
        return copy

    def _end_look(self, step: int) -> None:
        """Choose bounds from what was seen, and measure a step with them if they are news."""
        self.observer.mode = "off"
        sums = self._sums_by_tensor()
        self._look_at = step + max(self.refresh_steps // LOOKS, WATCHED_STEPS)
        if not sums:
            return
        if not all(each.is_finite for reads in sums.values() for each in reads):
            _logger.warning("a watched gradient was not finite: bounds stay until the next look")
            return
        layers = {
            name: LinearNoise(
                numel=self._roundable[name].numel, spread=sum(each.spread for each in reads)
            )
            for name, reads in sums.items()
        }
        reference = self._reference_norm(sums)
        bounds = self._bounds(sums, layers, reference)
        if not bounds:  # No error would be heard, as where every gradient is 0.
            return
        is_due = not self.history or step - self._refreshed_at >= self.refresh_steps
        if is_due or self._had_no_room or self._have_moved(bounds):
            self._pending = reference, layers
            self.observer.bounds = {
                name: (bound, self._mode(name, sums[name])) for name, bound in bounds.items()
            }
            self.observer.mode = "sizes"

    def _refresh(self, step: int) -> Change:
        assert self._pending is not None
        if self.observer.sized_count < SIZED_STEPS:
            return ""
        needs = self.observer.needs()
        reference, layers = self._pending
        self._pending = None
        self.observer.mode = "off"
        self.observer.forget()
        former = {given.tensor: given for given in self.error_bounds}
        wanted = {
            name: given
            for name, need in needs.items()
            if (given := self._given(name, need)) is not None
        }
        has_room = former.keys() == wanted.keys() and all(
            _has_room(former[name].form, needs[name])
            and former[name].form.mode == wanted[name].form.mode
            for name in wanted
        )
        can_turn = has_room and not self._had_no_room
        if can_turn:
            wanted = {n: replace(former[n], bound=given.bound) for n, given in wanted.items()}
        self.error_bounds = tuple(wanted.values())
        self._refreshed_at, self._had_no_room = step, False
        exact = {name: self._exact_fraction(given, needs[name]) for name, given in wanted.items()}
        noise = math.hypot(
            *(layers[n].noise(given.bound) * (1 - exact[n]) ** 0.5 for n, given in wanted.items())
        )
        self.history.append(
            Refresh(
                step=step,
                reference_norm=reference,
                noise_share=noise / reference if reference else 0.0,
                bounds={name: given.bound for name, given in wanted.items()},
                bits={name: self._bits(given) for name, given in wanted.items()},
                exact_fractions=exact,
            )
        )
        return "turn" if can_turn else "plan"

    def _sums_by_tensor(self) -> dict[str, list[ReadSums]]:
        found: dict[str, list[ReadSums]] = {}
        for read, sums in self.observer.sums().items():
            if read.tensor in self._roundable:
                found.setdefault(read.tensor, []).append(sums)
        self.observer.forget()
        return found

    def _reference_norm(self, sums: Mapping[str, list[ReadSums]]) -> float:
        momentum = _momentum_norm(self.optimizer) if self.optimizer else 0.0
        if momentum:
            return momentum
        return math.sqrt(sum(each.squared_norm for reads in sums.values() for each in reads))

    def _bounds(
        self,
        sums: Mapping[str, list[ReadSums]],
        layers: Mapping[str, LinearNoise],
        reference: float,
    ) -> dict[str, float]:
        if not self.error_budget:
            return dict.fromkeys(sums, 0.0)
        if self.policy == "bytes":
            bounds = {
                name: min(bound, self._largest_bound(name, sums[name]))
                for name, bound in bounds_of(layers, self.error_budget * reference).items()
                if bound < math.inf
            }
        else:
            gradient = math.sqrt(sum(s.squared_norm for reads in sums.values() for s in reads))
            scale = reference / gradient if gradient else 0.0
            bounds = {
                name: min(
                    comet_bound(
                        momentum_mean=each.weight_gradient_mean * scale,
                        gradient_mean=each.gradient_mean,
                        batch=self._roundable[name].batch,
                        nonzero_fraction=each.nonzero_fraction,
                        share=self.error_budget,
                    )
                    for each in reads
                )
                for name, reads in sums.items()
            }
        return {name: bound for name, bound in bounds.items() if 0 < bound < math.inf}

    def _largest_bound(self, name: str, sums: Iterable[ReadSums]) -> float:
        """Return the bound up to which errors are as good as independent of the activation."""
        if self._mode(name, sums) == "dither":
            return math.inf
        return LARGEST_BOUND * math.sqrt(min(each.nonzero_square for each in sums))

    def _have_moved(self, bounds: Mapping[str, float]) -> bool:
        """Say whether a bound is now far from the one that is in force."""
        return any(
            not given.bound / MOVE <= bounds.get(given.tensor, 0.0) <= given.bound * MOVE
            for given in self.error_bounds
        )

    def _mode(self, name: str, sums: Iterable[ReadSums]) -> Mode:
        """Say how to round: what has zeros keeps them, and what has none gets unbiased errors."""
        if self._roundable[name].keeps_sign:
            return "sign"
        return "dither" if min(each.nonzero_fraction for each in sums) > DENSE else "zero"

    def _given(self, name: str, needs: Needs) -> ErrorBound | None:
        """Return what a tensor is to be packed with, or None if no form is smaller than it."""
        (bound, mode), most = self.observer.bounds[name], self._blocks(name)
        given = [
            ErrorBound(tensor=name, bound=bound, form=_with_room(form, most))
            for form in fitting_forms(needs, mode)
        ]
        least = min(given, key=self._nbytes)
        return least if self._nbytes(least) < self._roundable[name].nbytes else None

    def _exact_fraction(self, given: ErrorBound, needs: Needs) -> float:
        """Return the share of a tensor's blocks that do not fit."""
        least = needed_in(given.form, needs)
        assert least is not None
        return min(1.0, least.exact_blocks / self._blocks(given.tensor))

    def _blocks(self, name: str) -> int:
        return -(-self._roundable[name].numel // BLOCK)

    def _nbytes(self, given: ErrorBound) -> int:
        tensor = self._roundable[given.tensor]
        return quantised_nbytes(tensor.numel, given.form, tensor.dtype)

    def _bits(self, given: ErrorBound) -> float:
        return 8 * self._nbytes(given) / self._roundable[given.tensor].numel


def _with_room(form: PackedForm, blocks: int) -> PackedForm:
    """Give a form of so many blocks some room to spare."""
    return replace(
        form,
        rows=min(math.ceil(form.rows * ROOM) + PLANES * ROOM_BLOCKS, PLANES * blocks),
        exact_blocks=min(math.ceil(form.exact_blocks * ROOM) + ROOM_BLOCKS, blocks),
    )


def _has_room(form: PackedForm, needs: Needs) -> bool:
    """Say whether a packed form has room, and not far too much."""
    least = needed_in(form, needs)
    if least is None:
        return False
    is_wide = form.rows > math.ceil(least.rows * ROOM * ROOM_TO_SPARE) + PLANES * ROOM_BLOCKS
    return least.rows <= form.rows and least.exact_blocks <= form.exact_blocks and not is_wide


def _bound_of(state: Mapping[str, Any]) -> ErrorBound:
    return ErrorBound(**{**state, "form": PackedForm(**state["form"])})


def _momentum_norm(optimizer: torch.optim.Optimizer) -> float:
    """Return the norm of the momentum of all weights, 0 if there is none yet."""
    states = [optimizer.state.get(p, {}) for g in optimizer.param_groups for p in g["params"]]
    found = [state.get("momentum_buffer", state.get("exp_avg")) for state in states]
    weights = [momentum for momentum in found if momentum is not None and momentum.dim() > 1]
    if not weights:
        return 0.0
    norms = torch.stack([torch.linalg.vector_norm(each, dtype=torch.float32) for each in weights])
    return float(torch.linalg.vector_norm(norms))


def _check(error_budget: float, policy: str, warmup_steps: int, refresh_steps: int) -> None:
    if not isinstance(error_budget, (int, float)) or not 0 <= error_budget < 1:
        raise ValueError(f"error_budget={error_budget!r}: give a share below 1, as 0.01")
    if policy not in get_args(Policy):
        raise ValueError(f"policy={policy!r}: give one of {', '.join(get_args(Policy))}")
    if not isinstance(warmup_steps, int) or warmup_steps < 1:
        raise ValueError(f"warmup_steps={warmup_steps!r}: at least one step must be watched")
    if not isinstance(refresh_steps, int) or refresh_steps < 1:
        raise ValueError(f"refresh_steps={refresh_steps!r}: give 1 or more")

"""The rounding in one rewritten graph: bounds that may be turned, and originals that had to stay.

A packed form has room for what its tensor needed when the plan was made.  Where a step needs
more, the packed form is void, and the original is kept until the step is over.  A CPU knows at
once.  An accelerator's answer is waited for when the next tensor is packed or unpacked, so that
one original at most stays longer than it must, and the device never idles for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backhaul.records import CodecRecord, PackedForm
from backhaul.runtime import quantiser

__all__ = ["Dials"]


@dataclass(frozen=True, slots=True)
class _Question:
    """Whether a tensor that was packed found room, which an accelerator is about to tell."""

    step_id: int
    dial: int
    original: Tensor
    form: PackedForm
    needs: Tensor
    answered: torch.Event


class Dials:
    """One dial for each tensor that is rounded.

    Args:
        rounded: The tensors by name, with their codecs; their order is that of the dials.

    Attributes:
        names: The tensors.
        overflow_counts: How often each found no room.
    """

    def __init__(self, rounded: Sequence[tuple[str, CodecRecord]] = ()) -> None:
        self.names = tuple(name for name, _ in rounded)
        self.overflow_counts = [0] * len(rounded)
        self._bounds = [codec.bound or 0.0 for _, codec in rounded]
        # Made at the first step: a session is made in the middle of a compilation.
        self._bounds_there: Tensor | None = None
        self._original_by_step: dict[int, dict[int, Tensor]] = {}
        self._question: _Question | None = None

    def turn(self, bounds: Sequence[float]) -> None:
        """Set the bounds of the steps that are to come; what is packed keeps its own."""
        self._bounds = list(bounds)
        self._bounds_there = None

    def pack(self, step_id: int, dial: int, x: Tensor, form: PackedForm) -> Tensor:
        """Pack a tensor; see `quantiser.quantise`."""
        self._settle()
        if self._bounds_there is None:
            self._bounds_there = torch.tensor(self._bounds, dtype=torch.float32, device=x.device)
        bound = self._bounds_there[dial]
        packed = quantiser.quantise(x, bound, form)
        needs = quantiser.needs(packed, x.numel(), form, x.dtype)
        if x.device.type == "cpu":
            self._keep_if_void(step_id, dial, x, form, needs)
        else:
            host = torch.empty(2, dtype=torch.int32, pin_memory=True)
            host.copy_(needs, non_blocking=True)
            answered = torch.Event(x.device)
            answered.record()
            self._question = _Question(step_id, dial, x, form, host, answered)
        return packed

    def original(self, step_id: int, dial: int) -> Tensor | None:
        """Return the tensor if its packed form is void."""
        self._settle()
        return self._original_by_step.get(step_id, {}).get(dial)

    def end_step(self, step_id: int) -> None:
        """Let go of a step's originals; a finaliser calls it on any thread at any moment."""
        self._original_by_step.pop(step_id, None)

    def _settle(self) -> None:
        question, self._question = self._question, None
        if question is not None:
            question.answered.synchronize()
            self._keep_if_void(
                question.step_id, question.dial, question.original, question.form, question.needs
            )

    def _keep_if_void(
        self, step_id: int, dial: int, x: Tensor, form: PackedForm, needs: Tensor
    ) -> None:
        rows, exact_blocks = needs.tolist()
        if rows > form.rows or exact_blocks > form.exact_blocks:
            self.overflow_counts[dial] += 1
            self._original_by_step.setdefault(step_id, {})[dial] = x

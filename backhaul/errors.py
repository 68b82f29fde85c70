"""The errors that users can catch, each with what was wrong, where, and what to do."""

from __future__ import annotations

from typing import Any

__all__ = [
    "BackhaulError",
    "BudgetError",
    "CaptureError",
    "InternalError",
    "PlanError",
    "TransferError",
    "VerifyError",
]


class BackhaulError(Exception):
    """Root of every error that this package raises on purpose; other processes may be told it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, self.__dict__)


class CaptureError(BackhaulError, ValueError):
    """The model or its input could not be captured as one forward and backward graph."""


class PlanError(BackhaulError, ValueError):
    """A plan cannot be read, or does not belong to the graph it is applied to."""


class BudgetError(BackhaulError, ValueError):
    """No plan fits the budget.

    Attributes:
        budget_bytes: What was asked for.
        smallest_bytes: The smallest budget of the same kind that a plan fits.
    """

    def __init__(self, message: str, *, budget_bytes: int, smallest_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes


class VerifyError(BackhaulError, RuntimeError):
    """A rewritten graph broke one of the rules that keep gradients exact.

    Attributes:
        check: Name of the rule.
        node: Name of the graph node where it is broken.
    """

    def __init__(self, message: str, *, check: str, node: str) -> None:
        super().__init__(message)
        self.check = check
        self.node = node


class TransferError(BackhaulError, RuntimeError):
    """Bytes could not be moved between the device and a host tier.

    Attributes:
        tier: The tier that failed, as the report names it.
        nbytes: How many bytes the failed request was for.
    """

    def __init__(self, message: str, *, tier: str, nbytes: int) -> None:
        super().__init__(message)
        self.tier = tier
        self.nbytes = nbytes


class InternalError(BackhaulError, RuntimeError):
    """A fault in this package: please report it with the message."""


def _rebuilt(cls: type[BackhaulError], args: tuple[Any, ...], state: Any) -> BackhaulError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error

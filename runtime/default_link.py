"""The link that a model gets when the user names none."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from backhaul.runtime.disk import DiskLink
from backhaul.runtime.links import Link
from backhaul.runtime.pinned import PinnedLink

__all__ = ["default_link"]


def default_link(model: nn.Module, spill_folder: str | os.PathLike[str] | None) -> Link:
    """Link an accelerator to pinned host memory, and a CPU to a spill file.

    Args:
        model: Its parameters say which device trains.
        spill_folder: Where the spill file lies; None for the default folder.

    Raises:
        TransferError: The host tier cannot be used.
    """
    for parameter in model.parameters():
        if parameter.device.type not in ("cpu", "meta"):
            return PinnedLink(parameter.device)
    return DiskLink(None if spill_folder is None else Path(spill_folder))

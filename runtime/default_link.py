"""The link that a model gets when the user names none."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from backhaul.runtime.disk import DiskLink
from backhaul.runtime.links import Link
from backhaul.runtime.pinned import PinnedLink

__all__ = ["default_link", "link_of"]


def default_link(model: nn.Module, spill_folder: str | os.PathLike[str] | None) -> Link:
    """Link an accelerator to pinned host memory, and a CPU to a spill file.

    Args:
        model: Its parameters say which device trains.
        spill_folder: Where the spill file lies; None for the default folder.

    Raises:
        TransferError: The host tier cannot be used.
    """
    return link_of(model.parameters(), spill_folder)


def link_of(tensors: Iterable[Tensor], spill_folder: str | os.PathLike[str] | None) -> Link:
    """Return the link of the first device that is no CPU; see `default_link`."""
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "meta"):
            return PinnedLink(tensor.device)
    return DiskLink(None if spill_folder is None else Path(spill_folder))

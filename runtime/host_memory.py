"""How much memory this process may still take: the machine's, within its container's limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["available_host_bytes"]

CGROUP_ROOT = "sys/fs/cgroup"


def available_host_bytes(root: Path = Path("/")) -> int:
    """Count the bytes of memory that are available before the machine or a limit is full.

    Args:
        root: Where `proc` and `sys` lie; tests give a folder.

    Returns:
        The least of what the kernel says is available and of what every control group of this
        process, version 1 or 2, leaves below its limit.
    """
    room_bytes = [_meminfo_available_bytes(root)]
    room_bytes += [
        # Page cache counts as used and is given back on demand, so this errs on the safe side.
        max(0, limit - used)
        for limit, used in _cgroup_limits(root)
    ]
    return min(room_bytes)


def _meminfo_available_bytes(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    return 0


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of every control group that bounds this process's memory."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in memberships:
        number, controllers, path = line.split(":", 2)
        folders: tuple[str, ...]
        if number == "0":
            folders = (CGROUP_ROOT, f"{CGROUP_ROOT}/unified")
            names = ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            folders = (f"{CGROUP_ROOT}/memory",)
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = PurePosixPath(path)
        # A parent's limit holds too.  In a container its own group is mounted as the root.
        for ancestor in (group, *group.parents):
            for folder in folders:
                base = root / folder / ancestor.relative_to("/")
                limit, used = (_read_bytes(base / name) for name in names)
                if limit is not None and used is not None:
                    yield limit, used


def _read_bytes(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # No such group here, or `max`: no limit.

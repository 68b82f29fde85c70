"""Keep measured costs of ops on disk, so that a graph is measured once on a machine."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from backhaul.records import OpCost

__all__ = ["OpCache", "device_name"]

_logger = logging.getLogger(__name__)

_SCHEMA = 4


class OpCache:
    """Measured costs on disk, one file for each device, torch version, and thread and rank count.

    Processes may share a file: each writes a whole one and puts it in place at once, with what
    the others have put there since.  A file that cannot be read is started anew.

    Args:
        device: The device that the costs belong to.
        rank_count: How many processes measure and train beside each other.
        directory: Where the file is; by default `$BACKHAUL_CACHE_DIR`, or `backhaul` in the
            user's cache directory.
    """

    def __init__(
        self, device: torch.device, directory: Path | None = None, *, rank_count: int = 1
    ) -> None:
        name = f"{device_name(device)} torch {torch.__version__} threads {torch.get_num_threads()}"
        name += f" ranks {rank_count}" if rank_count > 1 else ""
        file_name = re.sub(r"[^\w.+-]+", "-", name) + ".json"
        self.path = (directory or _cache_directory()) / file_name
        self._cost_by_key = self._read()

    def get(self, key: str) -> OpCost | None:
        """Return the cost of an op, or None if it has not been measured here."""
        return self._cost_by_key.get(key)

    def add(self, costs: Sequence[OpCost]) -> None:
        """Keep the measured ones of these costs, in memory and on disk."""
        measured = {cost.key: cost for cost in costs if cost.source == "measured"}
        if not measured:
            return
        self._cost_by_key = self._read() | self._cost_by_key | measured
        try:
            self._write()
        except OSError as error:
            _logger.warning("measured costs are not kept: cannot write %s: %s", self.path, error)

    def _read(self) -> dict[str, OpCost]:
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
            if record["schema"] != _SCHEMA:
                return {}
            return {
                key: OpCost(
                    key=key,
                    duration_s=float(duration_s),
                    workspace_bytes=int(workspace_bytes),
                    source="measured",
                    made=tuple(map(str, made)),
                )
                for key, (duration_s, workspace_bytes, made) in record["ops"].items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _logger.warning("measured costs in %s are lost: cannot read it: %s", self.path, error)
            return {}

    def _write(self) -> None:
        ops = {
            key: (cost.duration_s, cost.workspace_bytes, cost.made)
            for key, cost in sorted(self._cost_by_key.items())
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".ops-", suffix=".json")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"schema": _SCHEMA, "ops": ops}, file)
            os.replace(name, self.path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


def device_name(device: torch.device) -> str:
    """Return device type and name, as `cpu: Intel(R) Xeon(R) Processor`."""
    if device.type == "cpu":
        return f"cpu: {_cpu_name()}"
    module = torch.get_device_module(device)
    return f"{device.type}: {module.get_device_name(device)}"


def _cache_directory() -> Path:
    chosen = os.environ.get("BACKHAUL_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "backhaul"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()

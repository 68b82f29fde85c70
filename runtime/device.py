"""What the allocator of a device does, and how much it can give."""

from __future__ import annotations

import torch

from backhaul.runtime.host_memory import available_host_bytes

__all__ = ["allocator_alignment_bytes", "capacity_bytes", "random_state_bytes"]

ACCELERATOR_ALIGNMENT_BYTES = 512
"""Block size of the caching allocator: `kMinBlockSize` in c10."""

ACCELERATOR_STATE_BYTES = 16
"""A Philox generator's state: seed and offset."""


def random_state_bytes(device: torch.device) -> int:
    """Return the size of the state of a device's generator."""
    return torch.get_rng_state().numel() if device.type == "cpu" else ACCELERATOR_STATE_BYTES


def allocator_alignment_bytes(device: torch.device) -> int:
    """Return what the allocator rounds every size up to; the CPU's reports exact sizes."""
    return 1 if device.type == "cpu" else ACCELERATOR_ALIGNMENT_BYTES


def capacity_bytes(device: torch.device) -> int:
    """Count the bytes that training may hold: what is free, and what torch holds already."""
    if device.type == "cpu":
        return available_host_bytes()
    free_bytes, _ = torch.get_device_module(device).mem_get_info(device)
    return int(free_bytes + torch.get_device_module(device).memory_reserved(device))

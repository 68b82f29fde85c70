"""Find the modules whose hooks exchange tensors with other ranks: no graph can hold those."""

from __future__ import annotations

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["why_it_exchanges"]


def why_it_exchanges(model: nn.Module) -> str:
    """Say which module of a model is wrapped for many ranks, and what to do; "" if none is."""
    kinds = _kinds()
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            return (
                f"{type(model).__name__} cannot be optimized: {name or 'it'} is a "
                f"{type(module).__name__}, which exchanges tensors with other ranks outside of "
                "any graph; optimize first and wrap what that returns, as in "
                "DistributedDataParallel(backhaul.optimize(model, ...)) or "
                "fully_shard(backhaul.optimize(block, ...)), with no wrapped module inside"
            )
    return ""


def _kinds() -> tuple[type, ...]:
    if not distributed.is_available():
        return ()
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)

"""Say which ops Inductor makes one kernel of, which tensors exist then, and what kernels cost.

A stated model of Inductor's fusion, as its own decisions are made while it compiles:

    called     matrix products, convolutions, attention, whatever has no lowering: measured alone
    fused      the rest: ops with as many calls before them, on the longest way, share a kernel
    exists     what is saved, returned, or read by a call or by another kernel; the rest lies in
               registers, and takes no memory, as does a constant, and what one op alone reads
    costs      a kernel reads each tensor that it needs once, and writes those that exist: it takes
               the time of a copy of as many bytes

A sum over anything but the last dimensions reads its input before what follows can begin: that is
another kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from backhaul.passes.op_calls import call_of, codec_call
from backhaul.passes.step_graphs import Storages, is_alias_op, results_of, tensors_of
from backhaul.passes.torch_compat import is_fusible, storage_id
from backhaul.runtime.measure_ops import OpCall, TensorSpec

__all__ = ["Fusion"]

_ITEM_BYTES = 4


class Fusion:
    """The kernels that one graph is compiled to.

    Args:
        gm: The forward or the backward.
        storages: Its storages.
    """

    def __init__(self, gm: fx.GraphModule, storages: Storages) -> None:
        self._storages = storages
        self._is_fused = {
            node: node.target is operator.getitem or is_fusible(node.target)
            for node in gm.graph.nodes
        }
        self._depth = self._depths(gm)
        returned = {node for node in results_of(gm) if isinstance(node, fx.Node)}
        self._existing = {
            key
            for key, holders in storages.holders.items()
            if self._exists(holders, bool(returned & set(holders)))
        }
        self._bytes = self._bytes_of_kernels(gm)

    def exists(self, key: int) -> bool:
        """Say whether a storage takes memory."""
        return key in self._existing

    def call_of(self, node: fx.Node) -> OpCall | None:
        """Describe the call whose time a node takes, or None if it takes none."""
        if not self._is_fused[node]:
            return call_of(node, self._storages)
        nbytes = self._bytes.get(node, 0)
        if not nbytes:
            return None
        length = max(nbytes // (2 * _ITEM_BYTES), 1)
        device = next(tensors_of(node)).device
        copied = TensorSpec(
            size=(length,), stride=(1,), storage_offset=0, dtype=torch.float32, device=device
        )
        return codec_call(torch.ops.aten.clone.default, copied)

    def _depths(self, gm: fx.GraphModule) -> dict[fx.Node, int]:
        """Count the calls before each node, on the longest way."""
        depths: dict[fx.Node, int] = {}
        for node in gm.graph.nodes:
            depths[node] = max(
                (
                    depths[source] + (not self._is_fused[source] or _ends_kernel(source))
                    for source in node.all_input_nodes
                ),
                default=0,
            )
        return depths

    def _exists(self, holders: list[fx.Node], is_returned: bool) -> bool:
        maker = holders[0]
        if is_returned or not self._is_fused[maker]:
            return True
        readers = {user for holder in holders for user in holder.users} - set(holders)
        if any(not self._is_fused[reader] for reader in readers):
            return True
        is_inlined = not maker.all_input_nodes or (len(readers) < 2 and not _is_reduction(maker))
        return not is_inlined and {self._depth[reader] for reader in readers} != {
            self._depth[maker]
        }

    def _bytes_of_kernels(self, gm: fx.GraphModule) -> dict[fx.Node, int]:
        """Give each op the bytes that its kernel moves for it, and for no op before it."""
        found: dict[fx.Node, int] = {}
        moved: set[tuple[int, int]] = set()
        for node in gm.graph.nodes:
            if not self._is_fused[node] or is_alias_op(node, self._storages):
                continue
            for value in self._touched(node):
                key = (self._depth[node], storage_id(value))
                if key not in moved and self.exists(key[1]):
                    moved.add(key)
                    found[node] = found.get(node, 0) + value.numel() * value.element_size()
        return found

    def _touched(self, node: fx.Node) -> Iterator[torch.Tensor]:
        yield from tensors_of(node)
        for source in node.all_input_nodes:
            yield from tensors_of(source)


def _is_reduction(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and (
        torch.Tag.reduction in node.target.tags
    )


def _ends_kernel(node: fx.Node) -> bool:
    """Say whether a node sums over dimensions that are not the last."""
    source, *rest = node.args or (None,)
    if not _is_reduction(node) or not isinstance(source, fx.Node):
        return False
    dims = rest[0] if rest else None
    if not isinstance(dims, (list, tuple)):
        return False
    rank = source.meta["val"].dim()
    summed = sorted(dim % rank for dim in dims if isinstance(dim, int))
    return summed != list(range(rank - len(summed), rank))

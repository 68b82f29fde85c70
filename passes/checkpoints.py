"""Choose what the forward should hold so that the backward can compute the rest again, cheaply.

What a model saves is not always what is smallest to begin again from: a norm in mixed precision
saves its input in float32 where the residual stream beside it has half the bytes and is saved
by nobody.  The smallest set of tensors, in bytes, from which cheap ops alone lead to everything
that is saved is a minimum cut between the forward and the backward.  Tensors of the cut that
are not saved already become *checkpoints*: a recipe may begin with them, and they are held only
if one does.

    backward -> out(t)    for everything that is saved
    out(t) -> in(t)       at the size of t: hold it
    in(t) -> out(u)       for every u that the op of t reads, if that op is cheap
    in(t) -> forward      if it is not: t must be held
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

import networkx as nx
from torch import fx

from backhaul.passes.op_work import is_costly
from backhaul.passes.step_graphs import Storages, nbytes_of

__all__ = ["find_checkpoints"]


def find_checkpoints(
    storages: Storages, saved: Set[int], can_run_again: Callable[[fx.Node], bool]
) -> set[int]:
    """Return the storages of a forward that are worth holding, and that nobody saves.

    Args:
        storages: The storages of the forward.
        saved: Those that the backward reads.
        can_run_again: Whether a second run of an op gives the same bits.
    """
    network: nx.DiGraph[object] = nx.DiGraph()
    network.add_nodes_from(["backward", "forward"])
    waiting = sorted(saved & storages.holders.keys())
    network.add_edges_from(("backward", ("out", key)) for key in waiting)
    seen = set(waiting)
    while waiting:
        key = waiting.pop()
        maker = storages.holders[key][0]
        if maker.op == "placeholder":
            continue
        # What is saved anyway wins a draw.
        nbytes = nbytes_of(maker, key) * 1000
        network.add_edge(("out", key), ("in", key), capacity=nbytes + (key not in saved))
        if is_costly(maker) or not can_run_again(maker):
            network.add_edge(("in", key), "forward")
            continue
        for read in _read(maker, storages):
            network.add_edge(("in", key), ("out", read))
            if read not in seen:
                seen.add(read)
                waiting.append(read)
    _, (near, _) = nx.minimum_cut(network, "backward", "forward")
    held = {key for key in seen if ("out", key) in near and ("in", key) not in near}
    return {key for key in held - saved if storages.holders[key][0].op == "call_function"}


def _read(maker: fx.Node, storages: Storages) -> Iterator[int]:
    for source in maker.all_input_nodes:
        yield from storages.ids.get(source, ())

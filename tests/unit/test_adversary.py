from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backhaul.errors import TransferError
from backhaul.runtime.adversary import AdversaryLink, Order
from backhaul.runtime.links import Arena

NBYTES = 32
POISON = torch.full((NBYTES,), 0xFF, dtype=torch.uint8)
ORDERS: tuple[Order, ...] = ("first", "last", "random")


def bytes_of(value: int) -> Tensor:
    return torch.full((NBYTES,), value, dtype=torch.uint8)


def run_step(link: AdversaryLink, *, wait_offload: bool = True, wait_reload: bool = True) -> bool:
    """Move two storages out and back; say whether the backward saw the bytes of the first."""
    arena = link.reserve(2 * NBYTES)
    sources = [bytes_of(1), bytes_of(2)]
    for slot, x in enumerate(sources):
        arena.start_offload(slot * NBYTES, x)
    if wait_offload:
        arena.wait_offload(0)
        arena.wait_offload(NBYTES)
    del x
    sources.clear()
    destinations = [bytes_of(0), bytes_of(0)]
    for slot, y in enumerate(destinations):
        arena.start_reload(slot * NBYTES, y)
    if wait_reload:
        arena.wait_reload(0)
        arena.wait_reload(NBYTES)
    seen = destinations[0].clone()
    arena.release()
    return torch.equal(seen, bytes_of(1))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(20))
def test_bytes_come_back_when_everything_is_waited_for(order: Order, seed: int) -> None:
    link = AdversaryLink(order, seed)
    assert all(run_step(link) for _ in range(3))


def test_the_last_moment_shows_a_missing_wait_for_the_copy_out() -> None:
    assert not run_step(AdversaryLink("last"), wait_offload=False)


def test_the_last_moment_shows_a_missing_wait_for_the_copy_back() -> None:
    assert not run_step(AdversaryLink("last"), wait_reload=False)


def test_the_first_moment_hides_missing_waits() -> None:
    assert run_step(AdversaryLink("first"), wait_offload=False, wait_reload=False)


@pytest.mark.parametrize("missing", ["wait_offload", "wait_reload"])
def test_random_moments_show_and_hide_a_missing_wait(missing: str) -> None:
    seen = {run_step(AdversaryLink("random", seed), **{missing: False}) for seed in range(40)}
    assert seen == {True, False}


def test_a_seed_repeats_its_moments() -> None:
    def outcomes() -> list[bool]:
        link = AdversaryLink("random", 7)
        return [run_step(link, wait_offload=False) for _ in range(20)]

    assert outcomes() == outcomes()


def test_a_late_copy_is_exact_while_the_graph_holds_the_source() -> None:
    arena = AdversaryLink("last").reserve(NBYTES)
    x = bytes_of(1)
    view = x[3:].view(-1)
    arena.start_offload(0, x)
    del x  # A view keeps the storage, as in the graph.
    y = bytes_of(0)
    arena.start_reload(0, y)
    arena.wait_reload(0)
    assert torch.equal(y, bytes_of(1))
    assert int(view[0]) == 1


def test_a_source_that_the_graph_changes_too_early_arrives_changed() -> None:
    arena = AdversaryLink("last").reserve(NBYTES)
    x = bytes_of(1)
    arena.start_offload(0, x)
    x.fill_(2)
    arena.wait_offload(0)
    y = bytes_of(0)
    arena.start_reload(0, y)
    arena.wait_reload(0)
    assert torch.equal(y, bytes_of(2))


def test_a_destination_is_poison_until_its_copy() -> None:
    arena = AdversaryLink("last").reserve(NBYTES)
    x, y = bytes_of(1), bytes_of(0)
    arena.start_offload(0, x)
    arena.wait_offload(0)
    arena.start_reload(0, y)
    assert torch.equal(y, POISON)
    assert y.view(torch.float32).isnan().all()
    arena.wait_reload(0)
    assert torch.equal(y, x)


def test_the_poison_can_be_chosen() -> None:
    arena = AdversaryLink("last", poison_byte=0).reserve(NBYTES)
    x, y = bytes_of(1), bytes_of(9)
    arena.start_offload(0, x)
    arena.start_reload(0, y)
    assert torch.equal(y, bytes_of(0))


def test_a_waited_source_is_let_go() -> None:
    arena = AdversaryLink("last").reserve(NBYTES)
    x = bytes_of(1)
    arena.start_offload(0, x)
    arena.wait_offload(0)
    assert torch._C._storage_Use_Count(x.untyped_storage()._cdata) == 2


def test_slots_do_not_survive_their_step() -> None:
    link = AdversaryLink("first")
    arena = link.reserve(NBYTES)
    arena.start_offload(0, bytes_of(1))
    memory = arena._memory.storage  # type: ignore[attr-defined]
    assert memory.tolist() == [1] * NBYTES
    arena.release()
    assert memory.tolist() == [0xFF] * NBYTES
    memory.fill_(3)
    link.reserve(NBYTES)
    assert memory.tolist() == [0xFF] * NBYTES


def test_a_slot_can_be_reloaded_again() -> None:
    arena = AdversaryLink("last").reserve(NBYTES)
    x = bytes_of(1)
    arena.start_offload(0, x)
    arena.wait_offload(0)
    for _ in range(2):
        y = bytes_of(0)
        arena.start_reload(0, y)
        arena.wait_reload(0)
        assert torch.equal(y, x)


def test_a_random_order_never_reads_a_slot_before_it_is_written() -> None:
    for seed in range(50):
        arena = AdversaryLink("random", seed).reserve(4 * NBYTES)
        sources = [bytes_of(slot) for slot in range(4)]
        destinations = [bytes_of(99) for _ in range(4)]
        for slot, source in enumerate(sources):
            arena.start_offload(slot * NBYTES, source)
        order = random.Random(seed).sample(range(4), 4)
        for slot in order:
            arena.start_reload(slot * NBYTES, destinations[slot])
        for slot in order:
            arena.wait_reload(slot * NBYTES)
        assert all(map(torch.equal, destinations, sources))


def use_outside(arena: Arena) -> None:
    arena.start_offload(1, bytes_of(1))


def wait_unstarted(arena: Arena) -> None:
    arena.wait_reload(0)


def reload_unstarted(arena: Arena) -> None:
    arena.start_reload(0, bytes_of(1))


@pytest.mark.parametrize("use", [use_outside, wait_unstarted, reload_unstarted])
def test_misuse_is_an_error(use: Callable[[Arena], None]) -> None:
    arena = AdversaryLink("first").reserve(NBYTES)
    with pytest.raises(TransferError, match="adversary: "):
        use(arena)


def test_a_closed_link_is_an_error() -> None:
    link = AdversaryLink("first")
    arena = link.reserve(NBYTES)
    link.close()
    with pytest.raises(TransferError, match="is closed"):
        link.reserve(NBYTES)
    with pytest.raises(TransferError, match="is closed"):
        arena.start_offload(0, bytes_of(1))

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import backhaul.runtime.ops  # noqa: F401  (registers the ops)
from backhaul.errors import TransferError
from backhaul.records import SlotRecord
from backhaul.runtime.measure_link import measure_link
from backhaul.runtime.pinned import PinnedLink
from backhaul.runtime.session import Session

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: torch finds none"
)

MIB = 2**20
OPS = torch.ops.backhaul


@pytest.fixture
def link() -> Iterator[PinnedLink]:
    link = PinnedLink(torch.device("cuda"))
    yield link
    link.close()


def make_session(link: PinnedLink, nbytes: int, slot_count: int) -> Session:
    slots = tuple(
        SlotRecord(tensor=f"x{index}", offset_bytes=index * nbytes, nbytes=nbytes)
        for index in range(slot_count)
    )
    return Session(link, slots, slot_count * nbytes)


def send(x: Tensor, token: Tensor, slot: int) -> Tensor:
    return OPS.offload_wait(OPS.offload(x, token, slot), x)


def fetch(handle: Tensor, like: Tensor) -> Tensor:
    nbytes = like.untyped_storage().nbytes()
    y = OPS.reload(
        handle, like.shape, like.stride(), like.storage_offset(), nbytes, like.dtype, like.device
    )
    return OPS.reload_wait(y, handle)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_a_round_trip_keeps_bytes_and_strides(link: PinnedLink, dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (33, 65), device="cuda").to(dtype).t()[1:, ::2]
    session = make_session(link, x.untyped_storage().nbytes(), 1)
    y = fetch(send(x, OPS.begin_step(session.session_id, 1), 0), x)
    assert (y.stride(), y.storage_offset(), y.device) == (x.stride(), x.storage_offset(), x.device)
    assert torch.equal(y, x)


def run_step(session: Session, step: int, nbytes: int, slot_count: int) -> Tensor:
    """Move tensors out and back while their memory is reused; return how many were wrong."""
    token = OPS.begin_step(session.session_id, slot_count)
    handles, like = [], None
    for slot in range(slot_count):
        x = torch.full((nbytes,), (7 * step + slot) % 251, dtype=torch.uint8, device="cuda")
        handles.append(send(x, token, slot))
        like = torch.empty_like(x, device="meta")
        del x
        torch.full((nbytes,), 255, dtype=torch.uint8, device="cuda")  # Takes the memory over.
    assert like is not None
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for slot in reversed(range(slot_count)):
        torch.full((nbytes,), 255, dtype=torch.uint8, device="cuda")
        y = OPS.reload(
            handles[slot], like.shape, like.stride(), 0, nbytes, like.dtype, torch.device("cuda")
        )
        y = OPS.reload_wait(y, handles[slot])
        wrong += (y != (7 * step + slot) % 251).sum()
    return wrong


def test_1000_steps_that_reuse_their_memory_are_exact(link: PinnedLink) -> None:
    session = make_session(link, 16 * MIB, 3)
    wrong = [run_step(session, step, 16 * MIB, 3) for step in range(1000)]
    assert int(torch.stack(wrong).sum()) == 0
    assert (link.open_arena_count, link.idle_arena_count) == (0, 1)


def test_large_tensors_are_exact_on_a_side_stream(link: PinnedLink) -> None:
    session = make_session(link, 256 * MIB, 2)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wrong = [run_step(session, step, 256 * MIB, 2) for step in range(20)]
    stream.synchronize()
    assert int(torch.stack(wrong).sum()) == 0


def test_an_abandoned_reload_does_not_write_over_later_tensors(link: PinnedLink) -> None:
    nbytes = 256 * MIB
    session = make_session(link, nbytes, 1)
    for _ in range(20):
        x = torch.full((nbytes,), 1, dtype=torch.uint8, device="cuda")
        handle = send(x, OPS.begin_step(session.session_id, 1), 0)
        OPS.reload(handle, [nbytes], [1], 0, nbytes, torch.uint8, x.device)
        del handle, x
        later = torch.full((nbytes,), 2, dtype=torch.uint8, device="cuda")
        assert int((later != 2).sum()) == 0


def test_memory_falls_after_the_wait(link: PinnedLink) -> None:
    nbytes = 256 * MIB
    session = make_session(link, nbytes, 1)
    before_bytes = torch.cuda.memory_allocated()
    x = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    handle = send(x, OPS.begin_step(session.session_id, 1), 0)
    del x
    assert torch.cuda.memory_allocated() == before_bytes
    del handle


def test_host_memory_that_cannot_be_pinned_is_no_cuda_error_later(link: PinnedLink) -> None:
    with pytest.raises(TransferError, match="pinned host memory: cannot pin"):
        link.reserve(2**50)
    torch.zeros(4, device="cuda").add_(1)
    torch.cuda.synchronize()


def test_the_arena_is_pinned(link: PinnedLink) -> None:
    arena = link.reserve(3 * MIB + 5)
    assert arena._buffer.memory.tensor.is_pinned()  # type: ignore[attr-defined]
    assert arena._buffer.memory.nbytes == 3 * MIB + 5  # type: ignore[attr-defined]


def test_the_link_can_be_measured(link: PinnedLink) -> None:
    profile = measure_link(link, torch.device("cuda"))
    assert all(duration_s > 0 for duration_s in profile.d2h_s + profile.h2d_s)
    assert profile.d2h_s[0] < profile.d2h_s[-1]

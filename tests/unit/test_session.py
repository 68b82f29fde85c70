from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backhaul.errors import InternalError, TransferError
from backhaul.records import SlotRecord
from backhaul.runtime.adversary import AdversaryLink
from backhaul.runtime.session import SESSIONS, Session

NBYTES = 16


def make_session(slot_count: int = 2) -> Session:
    slots = tuple(
        SlotRecord(tensor=f"relu_{index}", offset_bytes=index * NBYTES, nbytes=NBYTES)
        for index in range(slot_count)
    )
    return Session(AdversaryLink("last"), slots, slot_count * NBYTES)


def bytes_of(value: int, nbytes: int = NBYTES) -> Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


class Offloaded(torch.autograd.Function):
    """Squares, with its input offloaded: as a compiled forward and backward would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, session: Session) -> Tensor:
        token = session.begin_step()
        _, step_id, _ = token[0].tolist()
        source = x.detach().clone().view(torch.uint8)
        session.start_offload(step_id, 0, source)
        session.wait_offload(step_id, 0)
        ctx.save_for_backward(token[0])
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (handle,) = ctx.saved_tensors
        session_id, step_id, index = handle.tolist()
        session = SESSIONS.find(session_id)
        y = torch.empty(NBYTES, dtype=torch.uint8)
        session.start_reload(step_id, index, y)
        session.wait_reload(step_id, index)
        return 2 * y.view(torch.float32) * grad, None


def make_input(value: float = 3.0) -> Tensor:
    return torch.full((4,), value, requires_grad=True)


def test_a_token_row_names_session_step_and_slot() -> None:
    session = make_session(3)
    token = session.begin_step()
    assert token.dtype == torch.int64
    assert token.device.type == "cpu"
    assert token.tolist() == [[session.session_id, 1, index] for index in range(3)]
    assert session.begin_step().tolist()[0] == [session.session_id, 2, 0]


def test_a_session_without_slots_has_a_token_of_one_row() -> None:
    assert make_session(0).begin_step().shape == (1, 3)


def test_a_step_lives_as_long_as_any_row_of_its_token() -> None:
    session = make_session()
    token = session.begin_step()
    row = token[1]
    part = row[2:].view(1, 1)
    del token
    assert session.live_step_count == 1
    del row
    assert session.live_step_count == 1
    del part
    assert session.live_step_count == 0
    assert (session.link.open_arena_count, session.link.idle_arena_count) == (0, 1)


def test_a_step_ends_with_its_backward() -> None:
    session = make_session(1)
    x = make_input()
    loss = Offloaded.apply(x, session).sum()
    gc.collect()
    assert session.live_step_count == 1  # Autograd alone holds it.
    loss.backward()
    assert session.live_step_count == 0
    assert torch.equal(x.grad, torch.full((4,), 6.0))


def test_a_dropped_loss_ends_its_step() -> None:
    session = make_session(1)
    loss = Offloaded.apply(make_input(), session).sum()
    del loss
    assert session.live_step_count == 0


def test_a_retained_graph_keeps_its_step_for_another_backward() -> None:
    session = make_session(1)
    x = make_input()
    loss = Offloaded.apply(x, session).sum()
    loss.backward(retain_graph=True)
    assert session.live_step_count == 1
    loss.backward()
    assert session.live_step_count == 0
    assert torch.equal(x.grad, torch.full((4,), 12.0))


def test_two_forwards_before_one_backward_keep_their_own_slots() -> None:
    session = make_session(1)
    x, y = make_input(3.0), make_input(5.0)
    first, second = (Offloaded.apply(v, session).sum() for v in (x, y))
    assert session.live_step_count == 2
    first.backward()
    assert session.live_step_count == 1
    second.backward()
    assert session.live_step_count == 0
    assert torch.equal(x.grad, torch.full((4,), 6.0))
    assert torch.equal(y.grad, torch.full((4,), 10.0))


def test_an_exception_in_the_forward_ends_its_step() -> None:
    session = make_session(1)

    def forward() -> None:
        token = session.begin_step()
        session.start_offload(int(token[0, 1]), 0, bytes_of(1))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        forward()
    assert session.live_step_count == 0


def test_an_exception_in_the_backward_keeps_the_step_as_long_as_the_graph() -> None:
    session = make_session(1)
    x = make_input()
    y = Offloaded.apply(x, session)
    loss = y.sum()

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    hook = y.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    assert session.live_step_count == 1
    hook.remove()
    loss.backward()
    assert session.live_step_count == 0
    assert torch.equal(x.grad, torch.full((4,), 6.0))


def test_a_backward_finds_its_session_after_everybody_else_let_go() -> None:
    session = make_session(1)
    session_id = session.session_id
    x = make_input()
    loss = Offloaded.apply(x, session).sum()
    del session
    gc.collect()
    loss.backward()
    assert torch.equal(x.grad, torch.full((4,), 6.0))
    del loss
    gc.collect()
    with pytest.raises(InternalError, match=f"no session {session_id}"):
        SESSIONS.find(session_id)


def test_a_token_that_dies_on_another_thread_ends_its_step() -> None:
    session = make_session()
    tokens = [session.begin_step()]
    thread = threading.Thread(target=tokens.clear)
    thread.start()
    thread.join()
    assert session.live_step_count == 0


def test_1000_steps_use_one_arena() -> None:
    session = make_session(1)
    for _ in range(1000):
        Offloaded.apply(make_input(), session).sum().backward()
    assert (session.link.open_arena_count, session.link.idle_arena_count) == (0, 1)


def test_a_reserve_that_fails_leaves_no_step() -> None:
    session = make_session()
    session.link.close()
    with pytest.raises(TransferError):
        session.begin_step()
    assert session.live_step_count == 0


def test_a_storage_of_another_size_is_an_error_that_names_the_tensor() -> None:
    session = make_session()
    token = session.begin_step()
    step_id = int(token[0, 1])
    message = "adversary: relu_1 was planned with 16 bytes of storage but has 20"
    for start in (session.start_offload, session.start_reload):
        with pytest.raises(TransferError, match=message) as error:
            start(step_id, 1, bytes_of(0, 20))
        assert (error.value.tier, error.value.nbytes) == ("adversary", 20)


def test_a_failed_wait_names_its_tensor() -> None:
    session = make_session()
    token = session.begin_step()
    with pytest.raises(TransferError) as error:
        session.wait_reload(int(token[0, 1]), 1)
    assert error.value.__notes__ == ["The bytes are those of relu_1."]


def test_a_closed_session_releases_its_steps_and_refuses_their_backward() -> None:
    session = make_session(1)
    loss = Offloaded.apply(make_input(), session).sum()
    session.close()
    assert session.live_step_count == 0
    assert session.link.open_arena_count == 0
    with pytest.raises(TransferError, match=r"relu_0 .* the session was closed"):
        loss.backward()
    with pytest.raises(TransferError, match="the session was closed"):
        session.begin_step()


@pytest.mark.parametrize(
    ("second_offset", "host_bytes", "message"), [(8, 32, "begins before"), (16, 31, "end at 32")]
)
def test_a_layout_that_would_lose_bytes_is_refused(
    second_offset: int, host_bytes: int, message: str
) -> None:
    slots = tuple(
        SlotRecord(tensor="x", offset_bytes=offset, nbytes=NBYTES) for offset in (0, second_offset)
    )
    with pytest.raises(InternalError, match=message):
        Session(AdversaryLink("first"), slots, host_bytes)


def test_empty_slots_share_an_offset_with_others() -> None:
    sizes_bytes = (0, NBYTES, 0)
    slots = tuple(
        SlotRecord(tensor=f"x{index}", offset_bytes=0, nbytes=nbytes)
        for index, nbytes in enumerate(sizes_bytes)
    )
    session = Session(AdversaryLink("last"), slots, NBYTES)
    token = session.begin_step()
    step_id = int(token[0, 1])
    sources = [bytes_of(7, nbytes) for nbytes in sizes_bytes]
    for index, source in enumerate(sources):
        session.start_offload(step_id, index, source)
    for index in range(3):
        session.wait_offload(step_id, index)
    for index, nbytes in enumerate(sizes_bytes):
        y = bytes_of(0, nbytes)
        session.start_reload(step_id, index, y)
        session.wait_reload(step_id, index)
        assert torch.equal(y, sources[index])


def test_a_step_that_lives_at_exit_says_nothing() -> None:
    script = (
        "import torch\n"
        "from pathlib import Path\n"
        "from backhaul.records import SlotRecord\n"
        "from backhaul.runtime.disk import DiskLink\n"
        "from backhaul.runtime.session import Session\n"
        "slot = SlotRecord(tensor='x', offset_bytes=0, nbytes=16)\n"
        "session = Session(DiskLink(), (slot,), 16)\n"
        "token = session.begin_step()\n"
        "session.start_offload(1, 0, torch.zeros(16, dtype=torch.uint8))\n"
    )
    assert_exits_silently(script)


def test_a_thread_that_copies_at_exit_is_waited_for() -> None:
    # Without the wait the interpreter goes away under the thread, which aborts the process.
    script = (
        "import torch\n"
        "from backhaul.runtime.disk import DiskLink\n"
        "arena = DiskLink().reserve(20000)\n"
        "for index in range(20000):\n"
        "    arena.start_offload(index, torch.zeros(1, dtype=torch.uint8))\n"
    )
    assert_exits_silently(script)


def assert_exits_silently(script: str) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

from __future__ import annotations

from typing import Any

from backhaul.records import Action, Compress, GraphRecord, Offload
from backhaul.scheduler.schedule import Event, codec_of, events, offload_after


def told(graph: GraphRecord, actions: dict[str, Action]) -> list[str]:
    """Write the events as words, an op by its name."""

    def word(event: Event) -> str:
        if event.kind == "run":
            return graph.ops[event.position].name
        return f"{event.kind} {event.tensor}"

    return [word(event) for event in events(graph, actions)]


def test_keeping_everything_runs_the_ops_alone(tiny: Any) -> None:
    assert told(tiny.chain(2), {}) == ["f0", "f1", "b1", "b0"]


def test_unpacked_tensor_leaves_as_soon_as_it_is_made(tiny: Any) -> None:
    actions: dict[str, Action] = {"f0": Offload(codec=None, wait_after=1, reload_before=2)}
    assert told(tiny.chain(2), actions) == [
        "f0",
        "offload f0",
        "f1",
        "offload_wait f0",
        "reload f0",
        "b1",
        "reload_wait f0",
        "b0",
    ]


def test_packed_tensor_is_packed_after_its_last_forward_use(tiny: Any) -> None:
    codec = tiny.codec()
    assert told(tiny.chain(2, codecs=(codec,)), {"f0": Compress(codec=codec)}) == [
        "f0",
        "f1",
        "pack f0",
        "b1",
        "unpack f0",
        "b0",
    ]


def test_packed_tensor_leaves_packed_and_is_unpacked_last(tiny: Any) -> None:
    codec = tiny.codec()
    actions: dict[str, Action] = {"f0": Offload(codec=codec, wait_after=1, reload_before=3)}
    assert told(tiny.chain(2, codecs=(codec,)), actions) == [
        "f0",
        "f1",
        "pack f0",
        "offload f0",
        "offload_wait f0",
        "b1",
        "reload f0",
        "reload_wait f0",
        "unpack f0",
        "b0",
    ]


def test_reloads_that_start_together_go_in_the_order_of_their_use(tiny: Any) -> None:
    actions: dict[str, Action] = {
        name: Offload(codec=None, wait_after=2, reload_before=3) for name in ("f0", "f1", "f2")
    }
    reloads = [word for word in told(tiny.chain(3), actions) if word.startswith("reload ")]
    assert reloads == ["reload f2", "reload f1", "reload f0"]


def test_copy_out_starts_when_ready_or_when_packed(tiny: Any) -> None:
    tensor = tiny.chain(2).saved[0]
    plain = Offload(codec=None, wait_after=1, reload_before=2)
    packed = Offload(codec=tiny.codec(), wait_after=1, reload_before=2)
    assert offload_after(tensor, 0, plain) == 0
    assert offload_after(tensor, 0, packed) == 1
    assert codec_of(plain) is None
    assert codec_of(packed) == tiny.codec()

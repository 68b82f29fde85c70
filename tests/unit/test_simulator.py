from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from backhaul.records import Action, Compress, Offload, Prediction
from backhaul.scheduler.simulator import Simulation, simulate


def offload(wait_after: int, reload_before: int) -> Offload:
    return Offload(codec=None, wait_after=wait_after, reload_before=reload_before)


def span(simulation: Simulation, kind: str, tensor: str) -> tuple[float, float]:
    (found,) = (
        (moment.start_s, moment.end_s)
        for moment in simulation.moments
        if moment.event.kind == kind and moment.event.tensor == tensor
    )
    return found


def test_keeping_everything_costs_its_ops_and_all_saved_bytes(tiny: Any) -> None:
    graph = tiny.chain(4)
    predicted = simulate(graph, tiny.machine(graph), {}).prediction
    assert predicted.step_s == 8.0
    assert predicted.exposed_s == predicted.codec_s == predicted.offloaded_bytes == 0
    assert predicted.peak_bytes == predicted.step_peak_bytes == 4000
    assert predicted.saved_peak_bytes == 4000


def test_copies_that_fit_beside_compute_cost_nothing(tiny: Any) -> None:
    # f0 ends at 1, its copy at 2, when f1 ends; b0 begins at 7, its copy back at 6.
    graph = tiny.chain(4)
    actions: dict[str, Action] = {"f0": offload(1, 6)}
    simulation = simulate(graph, tiny.machine(graph), actions)
    assert simulation.prediction.exposed_s == 0.0
    assert simulation.prediction.step_s == 8.0
    assert span(simulation, "offload", "f0") == (1.0, 2.0)
    assert span(simulation, "reload", "f0") == (6.0, 7.0)
    assert simulation.prediction.offloaded_bytes == 1000


def test_slow_copies_are_exposed_by_exactly_what_compute_does_not_hide(tiny: Any) -> None:
    # Out: 1..5, awaited at 2, so 3 s. Back: starts before b1 at 5+4 = 9, 10 when b0 is due, 13.
    graph = tiny.chain(4)
    actions: dict[str, Action] = {"f0": offload(1, 6)}
    simulation = simulate(graph, tiny.machine(graph, tiny.link(250.0, 250.0)), actions)
    assert span(simulation, "offload_wait", "f0") == (2.0, 5.0)
    assert span(simulation, "reload", "f0") == (9.0, 13.0)
    assert simulation.prediction.exposed_s == 3.0 + 3.0
    assert simulation.prediction.step_s == 8.0 + 6.0


def test_copies_of_one_direction_queue(tiny: Any) -> None:
    # Three copies of 2 s each, ready at 1, 2 and 3.
    graph = tiny.chain(4)
    actions: dict[str, Action] = {f"f{i}": offload(3, 4) for i in range(3)}
    simulation = simulate(graph, tiny.machine(graph, tiny.link(500.0, 500.0)), actions)
    assert [span(simulation, "offload", f"f{i}") for i in range(3)] == [(1, 3), (3, 5), (5, 7)]
    assert simulation.prediction.exposed_s == (7 - 4) + (9 - 8) + (11 - 10) + (13 - 12)


def test_both_directions_at_once_slow_each_other(tiny: Any) -> None:
    # f1's copy out of 8 s is under way, 9..17 at the latest, when f0's copy back starts.
    graph = tiny.chain(
        2,
        extra=(tiny.tensor("f0_long", born=0, dies=3, last=0, use=3, role="temporary"),),
    )
    half = tiny.machine(graph, tiny.link(500.0, 500.0, duplex_h2d=0.5))
    actions: dict[str, Action] = {"f0": offload(1, 2)}
    alone = simulate(graph, half, actions)
    assert span(alone, "reload", "f0") == (3.0, 5.0)
    # A copy out whose wait is the very last event of the forward leaves the engine idle: only
    # an engine that is busy slows the other, so with every copy out awaited there is no overlap.
    assert alone.prediction.step_s == 4.0 + 1.0 + 1.0


def test_copy_back_waits_for_its_own_copy_out(tiny: Any) -> None:
    graph = tiny.chain(2)
    actions: dict[str, Action] = {"f0": offload(1, 2), "f1": offload(1, 2)}
    simulation = simulate(graph, tiny.machine(graph, tiny.link(100.0, 1000.0)), actions)
    assert span(simulation, "offload", "f1")[1] == 21.0
    assert span(simulation, "reload", "f1") == (21.0, 22.0)


def test_peak_falls_by_what_is_away(tiny: Any) -> None:
    # Every op holds its own tensor and its input; waits free each input at once.
    graph = tiny.chain(4)
    actions: dict[str, Action] = {f"f{i}": offload(min(i + 1, 3), 7 - i) for i in range(4)}
    simulation = simulate(graph, tiny.machine(graph), actions)
    assert simulation.prediction.step_peak_bytes == 2000
    live = [m.live_bytes for m in simulation.moments if m.event.kind == "run"]
    assert live == [1000, 2000, 2000, 2000, 1000, 1000, 1000, 1000]


def test_prefetched_tensor_counts_from_the_start_of_its_copy(tiny: Any) -> None:
    graph = tiny.chain(3)
    actions: dict[str, Action] = {"f0": offload(1, 3)}
    live = {
        (m.event.kind, m.event.position, m.event.tensor): m.live_bytes
        for m in simulate(graph, tiny.machine(graph), actions).moments
    }
    assert live["run", 2, ""] == 2000
    assert live["reload", 3, "f0"] == 3000
    assert live["run", 3, ""] == 3000


def test_packed_form_replaces_the_original_by_hand(tiny: Any) -> None:
    codec = tiny.codec(125)
    graph = tiny.chain(4, codecs=(codec,))
    actions: dict[str, Action] = {f"f{i}": Compress(codec=codec) for i in range(4)}
    simulation = simulate(graph, tiny.machine(graph), actions)
    live = [m.live_bytes for m in simulation.moments if m.event.kind in ("run", "pack", "unpack")]
    forward = [1000, 2000, 2125, 2125, 2250, 2250, 2375, 1500]
    backward = [1500, 1375, 1375, 1250, 1250, 1125, 1125, 1000]
    assert live == forward + backward
    assert simulation.prediction.codec_s == 4 * 0.75
    assert simulation.prediction.step_s == 8.0 + 4 * 0.75


def test_packed_tensor_crosses_the_link_packed(tiny: Any) -> None:
    codec = tiny.codec(500)
    graph = tiny.chain(4, codecs=(codec,))
    actions: dict[str, Action] = {"f0": Offload(codec=codec, wait_after=2, reload_before=6)}
    simulation = simulate(graph, tiny.machine(graph), actions)
    assert simulation.prediction.offloaded_bytes == 500
    # Packed after f1, at 2.25; back before b1, which begins at 6.25, done at 6.75.
    assert span(simulation, "offload", "f0") == (2.25, 2.75)
    assert span(simulation, "reload", "f0") == (6.25, 6.75)
    assert simulation.prediction.exposed_s == 0.0


def test_workspace_counts_while_its_op_runs(tiny: Any) -> None:
    graph = tiny.chain(3)
    machine = tiny.machine(graph, workspace_bytes={"f0": 5000})
    predicted = simulate(graph, machine, {}).prediction
    assert predicted.step_peak_bytes == 1000 + 5000
    assert predicted.saved_peak_bytes == 3000


def test_workspace_of_a_codec_counts_while_it_packs(tiny: Any) -> None:
    codec = tiny.codec(125)
    graph = tiny.chain(1, codecs=(codec,))
    machine = tiny.machine(graph, workspace_bytes={"encode": 300, "decode": 400})
    actions: dict[str, Action] = {"f0": Compress(codec=codec)}
    assert simulate(graph, machine, actions).prediction.step_peak_bytes == 1125 + 400


def test_bytes_of_the_caller_are_counted_once_and_apart(tiny: Any) -> None:
    parameter = tiny.tensor("primals_1", born=-1, dies=4, nbytes=700, role="input")
    graph = tiny.chain(2, extra=(parameter,))
    predicted = simulate(graph, tiny.machine(graph, alignment_bytes=512), {}).prediction
    assert predicted.step_peak_bytes == 2 * 1024
    assert predicted.peak_bytes == 1024 + 2 * 1024


def test_temporaries_outputs_and_gradients_are_no_saved_activations(tiny: Any) -> None:
    extra = (
        tiny.tensor("t", born=0, dies=1, nbytes=10, role="temporary"),
        tiny.tensor("y", born=1, dies=4, nbytes=20, role="output"),
        tiny.tensor("g", born=3, dies=4, nbytes=40, role="gradient"),
    )
    graph = tiny.chain(2, extra=extra)
    simulation = simulate(graph, tiny.machine(graph), {})
    assert [m.live_bytes for m in simulation.moments] == [1010, 2030, 2020, 1060]
    assert [m.saved_bytes for m in simulation.moments] == [0, 0, 2000, 1000]


def _alone_and_dragged(tiny: Any, name: str, bytes_per_s: float) -> tuple[Prediction, Prediction]:
    """Offload one tensor over a link that takes nothing from compute, and over one that does."""
    graph = tiny.chain(2)
    actions = {name: Offload(codec=None, wait_after=1, reload_before=2)}
    free = tiny.link(bytes_per_s, bytes_per_s)
    dragging = dataclasses.replace(free, drag_s=(0.0, 200.0))
    alone, dragged = (
        simulate(graph, tiny.machine(graph, link), actions).prediction for link in (free, dragging)
    )
    return alone, dragged


def test_copies_slow_the_ops_beside_them(tiny: Any) -> None:
    alone, slowed = _alone_and_dragged(tiny, "f0", 2000.0)
    assert alone.dragged_s == 0.0 and alone.exposed_s == 0.0
    # A fifth of a second for a copy of 1,000 bytes.
    assert slowed.dragged_s == pytest.approx(0.4)
    assert slowed.step_s == pytest.approx(alone.step_s + 0.4)


def test_a_copy_that_is_waited_for_at_once_takes_as_long_as_ever(tiny: Any) -> None:
    alone, slowed = _alone_and_dragged(tiny, "f1", 100.0)
    assert slowed.step_s == pytest.approx(alone.step_s)


def test_a_drag_is_told_for_each_size_of_copy(tiny: Any) -> None:
    with pytest.raises(ValueError, match="a drag for each size"):
        dataclasses.replace(tiny.link(100.0, 100.0), drag_s=(1.0,))

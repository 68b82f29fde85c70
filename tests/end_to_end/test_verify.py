"""Every rule of a rewritten graph is broken once on purpose, and found by its check."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import fx, nn

import backhaul
from backhaul.errors import VerifyError
from backhaul.passes.step_graphs import StepGraphs, results_of
from backhaul.passes.verify import (
    CHECKS,
    DEQUANTISE,
    OFFLOAD,
    OFFLOAD_WAIT,
    QUANTISE,
    RELOAD,
    RELOAD_WAIT,
    verify,
)
from backhaul.records import Decision, ErrorBound, PackedForm, Recompute

Break = Callable[[StepGraphs], None]

aten = torch.ops.aten


@pytest.fixture(name="step")
def _step(optimized: Callable[..., Any]) -> Iterator[StepGraphs]:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
    module = optimized(net, torch.randn(8, 8), "offload_all")
    step: StepGraphs = module._capture.works[0].step
    assert len(find(step.forward, OFFLOAD)) == 2
    yield StepGraphs(copied(step.forward), copied(step.backward), step.output_count)


@pytest.fixture(name="recomputing")
def _recomputing(optimized: Callable[..., Any]) -> Iterator[StepGraphs]:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(4, 4, 3),
        nn.Sigmoid(),
        nn.Conv2d(4, 4, 3),
    )
    module = optimized(net, torch.randn(2, 3, 12, 12), "recompute_all")
    step: StepGraphs = module._capture.works[0].step
    yield StepGraphs(copied(step.forward), copied(step.backward), step.output_count)


@pytest.fixture(name="rounding")
def _rounding() -> Iterator[StepGraphs]:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3)
    )
    x = torch.randn(2, 3, 32, 32)
    module = backhaul.optimize(net, x, planner="compress_all", lossless=False)
    assert module.compression is not None
    roundable = module._capture.works[0].description.roundable
    bounds = [
        asdict(ErrorBound(tensor=each.tensor, bound=0.1, form=PackedForm(40, 1, False, mode)))
        for each, mode in zip(roundable, ("sign", "dither"), strict=True)
    ]
    state = module.compression.state_dict() | {"error_bounds": bounds}
    module.compression.load_state_dict(state)
    module(x).sum().backward()
    step: StepGraphs = module._capture.works[0].step
    assert len(find(step.backward, DEQUANTISE)) == 2
    yield StepGraphs(copied(step.forward), copied(step.backward), step.output_count)


def compute_from_rounded(step: StepGraphs) -> None:
    source = find(step.backward, DEQUANTISE)[0]
    node = add(step.backward, source, aten.sigmoid.default, (source,))
    action = Decision(tensor="x", action=Recompute(), reason="")
    node.meta["backhaul"] = action


def unpack_with_less_room(step: StepGraphs) -> None:
    node = find(step.backward, DEQUANTISE)[0]
    node.args = (*node.args[:6], 39, *node.args[7:])


def unpack_in_another_mode(step: StepGraphs) -> None:
    node = next(n for n in find(step.backward, DEQUANTISE) if n.args[-1] == "dither")
    node.args = (*node.args[:-1], "zero")


def unpack_what_was_never_packed(step: StepGraphs) -> None:
    node = find(step.backward, DEQUANTISE)[0]
    node.args = (*node.args[:2], 7, *node.args[3:])


def share_a_dial(step: StepGraphs) -> None:
    node = next(n for n in find(step.forward, QUANTISE) if n.args[2])
    node.args = (*node.args[:2], 0, *node.args[3:])


def read_a_rounded_value(step: StepGraphs) -> None:
    source = find(step.backward, DEQUANTISE)[0]
    add(step.backward, source, aten.sigmoid.default, (source,))


def read_signs_that_may_have_vanished(step: StepGraphs) -> None:
    for gm in (step.forward, step.backward):
        for node in gm.graph.nodes:
            if node.target in (QUANTISE, DEQUANTISE):
                node.args = (*node.args[:-1], "zero")


ROUNDING_BREAKS: dict[Break, str] = {
    compute_from_rounded: "recipes_read_exact_values",
    unpack_with_less_room: "each_rounded_tensor_comes_back_as_it_left",
    unpack_in_another_mode: "each_rounded_tensor_comes_back_as_it_left",
    unpack_what_was_never_packed: "each_rounded_tensor_comes_back_as_it_left",
    share_a_dial: "each_rounded_tensor_comes_back_as_it_left",
    read_a_rounded_value: "rounded_values_reach_weights_alone",
    read_signs_that_may_have_vanished: "rounded_values_reach_weights_alone",
}


@pytest.mark.parametrize("broken", ROUNDING_BREAKS, ids=lambda broken: broken.__name__)
def test_a_step_that_rounds_wrongly_is_refused_by_the_right_check(
    rounding: StepGraphs, broken: Break
) -> None:
    verify(rounding)
    broken(rounding)
    with pytest.raises(VerifyError) as caught:
        verify(rounding)
    assert caught.value.check == ROUNDING_BREAKS[broken]


def draw_again(step: StepGraphs) -> None:
    node = find(step.backward, torch.ops.higher_order.run_with_rng_state)[0]
    _, node.target, *args = node.args
    node.args = tuple(args)


def count_batch_norm_twice(step: StepGraphs) -> None:
    node = find(step.backward, aten._native_batch_norm_legit.no_stats)[0]
    x, weight, bias, *rest = node.args
    node.target = aten._native_batch_norm_legit_functional.default
    node.args = (x, weight, bias, weight, weight, *rest)


def write_again(step: StepGraphs) -> None:
    find(step.backward, aten.sigmoid.default)[0].target = aten.sigmoid_.default


def compute_from_signs(step: StepGraphs) -> None:
    node = find(step.backward, aten.sigmoid.default)[0]
    source = node.args[0]
    bits = torch.ops.backhaul.unpack_bits.default
    value = source.meta["val"]
    args = (source, list(value.shape), list(value.stride()), value.dtype)
    unpacked = add(step.backward, source, bits, args)
    node.replace_input_with(source, unpacked)


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    return fx.GraphModule(gm, copy.deepcopy(gm.graph))


def find(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


def drop_a_value(step: StepGraphs) -> None:
    del find(step.forward, torch.ops.backhaul.begin_step.default)[0].meta["val"]


def call_a_parameter_by_the_name_of_another(step: StepGraphs) -> None:
    first, second = step.backward.graph.find_nodes(op="placeholder")[:2]
    first.target = second.name


def drop_the_wait_for_a_copy_out(step: StepGraphs) -> None:
    wait = find(step.forward, OFFLOAD_WAIT)[0]
    wait.replace_all_uses_with(wait.args[0])
    step.forward.graph.erase_node(wait)


def wait_twice_for_a_copy_out(step: StepGraphs) -> None:
    wait = find(step.forward, OFFLOAD_WAIT)[0]
    add(step.forward, wait, OFFLOAD_WAIT, wait.args)


def keep_another_tensor_alive(step: StepGraphs) -> None:
    first, second = find(step.forward, OFFLOAD_WAIT)
    second.args = (second.args[0], first.args[1])


def drop_the_wait_for_a_copy_back(step: StepGraphs) -> None:
    wait = find(step.backward, RELOAD_WAIT)[0]
    wait.replace_all_uses_with(wait.args[0])
    step.backward.graph.erase_node(wait)


def read_before_the_wait_for_a_copy_back(step: StepGraphs) -> None:
    reload = find(step.backward, RELOAD)[0]
    add(step.backward, reload, aten.neg.default, (reload,))


def reload_twice(step: StepGraphs) -> None:
    wait = find(step.backward, RELOAD_WAIT)[0]
    reload = wait.args[0]
    again = add(step.backward, wait, RELOAD, reload.args)
    add(step.backward, again, RELOAD_WAIT, (again, reload.args[0]))


def never_reload(step: StepGraphs) -> None:
    wait = find(step.backward, RELOAD_WAIT)[0]
    reload, handle = wait.args
    wait.replace_all_uses_with(step.tangents[0])
    for node in (wait, reload, handle):
        step.backward.graph.erase_node(node)
    index = [node.name for node in step.saved].index(handle.name)
    results = results_of(step.forward)
    del results[step.output_count + index]
    step.forward.graph.output_node().args = (tuple(results),)


def reload_what_was_never_offloaded(step: StepGraphs) -> None:
    reload = find(step.backward, RELOAD)[0]
    reload.args = (step.tangents[0], *reload.args[1:])


def share_a_slot(step: StepGraphs) -> None:
    first, second = find(step.forward, OFFLOAD)
    second.args = (*second.args[:2], first.args[2])


def change_the_strides(step: StepGraphs) -> None:
    reload = find(step.backward, RELOAD)[0]
    reload.meta["val"] = reload.meta["val"].t()


def change_the_dtype(step: StepGraphs) -> None:
    reload = find(step.backward, RELOAD)[0]
    reload.meta["val"] = reload.meta["val"].view(torch.int32)


def move(step: StepGraphs, moved: fx.Node) -> None:
    start, source = find(step.forward, OFFLOAD_WAIT)[0].args
    start.replace_input_with(source, moved)
    find(step.forward, OFFLOAD_WAIT)[0].replace_input_with(source, moved)


def move_a_parameter(step: StepGraphs) -> None:
    placeholders = step.forward.graph.find_nodes(op="placeholder")
    move(step, next(node for node in placeholders if node.meta["val"].dim() == 2))


def move_an_output(step: StepGraphs) -> None:
    wait = find(step.forward, OFFLOAD_WAIT)[0]
    move(step, step.outputs[0])
    step.outputs[0].append(wait.args[0])
    wait.args[0].append(wait)


def read_a_view_after_the_memory_was_freed(step: StepGraphs) -> None:
    wait = find(step.forward, OFFLOAD_WAIT)[0]
    source = wait.args[1]
    view = add(step.forward, source, aten.alias.default, (source,), source.meta["val"])
    add(step.forward, wait, aten.neg.default, (view,))


def save_beside_the_copy(step: StepGraphs) -> None:
    source, tangent = find(step.forward, OFFLOAD_WAIT)[0].args[1], step.tangents[0]
    step.forward.graph.output_node().args = ((*results_of(step.forward), source),)
    with step.backward.graph.inserting_before(tangent):
        step.backward.graph.placeholder("beside").meta["val"] = source.meta["val"]


def write_under_the_copy(step: StepGraphs) -> None:
    start = find(step.forward, OFFLOAD)[0]
    source = start.args[0]
    add(step.forward, start, aten.relu_.default, (source,), source.meta["val"])


def change_what_was_saved(step: StepGraphs) -> None:
    saved = next(node for node in step.saved if node.op == "placeholder")
    add(step.forward, step.outputs[0], aten.copy_.default, (saved, saved), saved.meta["val"])


def add(gm: fx.GraphModule, after: fx.Node, target: Any, args: Any, value: Any = None) -> fx.Node:
    with gm.graph.inserting_after(after):
        node = gm.graph.call_function(target, tuple(args))
    node.meta["val"] = after.meta["val"] if value is None else value
    return node


BREAKS: dict[Break, str] = {
    drop_a_value: "every_node_has_a_value",
    call_a_parameter_by_the_name_of_another: "no_parameter_is_overwritten",
    drop_the_wait_for_a_copy_out: "each_offload_is_waited_for_once",
    wait_twice_for_a_copy_out: "each_offload_is_waited_for_once",
    keep_another_tensor_alive: "each_offload_is_waited_for_once",
    drop_the_wait_for_a_copy_back: "each_reload_is_waited_for_once",
    read_before_the_wait_for_a_copy_back: "each_reload_is_waited_for_once",
    reload_twice: "each_offload_is_reloaded_once",
    never_reload: "each_offload_is_reloaded_once",
    reload_what_was_never_offloaded: "each_offload_is_reloaded_once",
    share_a_slot: "each_slot_is_used_once",
    change_the_strides: "every_geometry_comes_back",
    change_the_dtype: "every_geometry_comes_back",
    move_a_parameter: "only_activations_move",
    move_an_output: "only_activations_move",
    read_a_view_after_the_memory_was_freed: "nothing_is_read_after_it_was_freed",
    save_beside_the_copy: "nothing_is_read_after_it_was_freed",
    write_under_the_copy: "nothing_is_written_while_it_is_copied",
    change_what_was_saved: "changed_inputs_are_read_as_they_were",
}


RECOMPUTING_BREAKS: dict[Break, str] = {
    draw_again: "random_ops_run_again_from_their_state",
    count_batch_norm_twice: "nothing_changes_twice",
    write_again: "nothing_changes_twice",
    compute_from_signs: "recipes_read_exact_values",
}


def test_a_whole_step_passes(step: StepGraphs, recomputing: StepGraphs) -> None:
    verify(step)
    verify(recomputing)


@pytest.mark.parametrize("broken", RECOMPUTING_BREAKS, ids=lambda broken: broken.__name__)
def test_a_step_that_recomputes_wrongly_is_refused_by_the_right_check(
    recomputing: StepGraphs, broken: Break
) -> None:
    broken(recomputing)
    with pytest.raises(VerifyError) as caught:
        verify(recomputing)
    assert caught.value.check == RECOMPUTING_BREAKS[broken]


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.__name__)
def test_a_broken_step_is_refused_by_the_right_check(step: StepGraphs, broken: Break) -> None:
    broken(step)
    with pytest.raises(VerifyError) as caught:
        verify(step)
    assert caught.value.check == BREAKS[broken]
    assert caught.value.node in str(caught.value)


def test_every_check_is_broken_by_a_test() -> None:
    broken = {*BREAKS.values(), *RECOMPUTING_BREAKS.values(), *ROUNDING_BREAKS.values()}
    assert broken == {check.__name__ for check in CHECKS}

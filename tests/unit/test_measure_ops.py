import functools
import gc
import json
import logging
import re
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from functorch.compile import default_partition, make_boxed_func
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import profiler
from torch.fx.experimental.proxy_tensor import make_fx

from backhaul.records import OpCost
from backhaul.runtime import measure_ops as measure_ops_module
from backhaul.runtime.measure_ops import OpCache, OpCall, TensorSpec, device_name, measure_ops
from backhaul.runtime.memory import measure_peak_bytes

aten = torch.ops.aten
CPU = torch.device("cpu")


def spec(*size, stride=None, offset=0, dtype=torch.float32):
    return TensorSpec(
        size=size,
        stride=torch.empty(size, device="meta").stride() if stride is None else stride,
        storage_offset=offset,
        dtype=dtype,
        device=CPU,
    )


def call(target, *args, key="op", **kwargs):
    return OpCall(key=key, target=target, args=args, kwargs=kwargs)


def measure(*calls, cache=None):
    return measure_ops(calls, CPU, cache=cache)


def measured(target, *args, **kwargs):
    (cost,) = measure(call(target, *args, **kwargs))
    assert cost.source == "measured"
    return cost


def test_each_key_is_measured_once_in_order_of_appearance():
    runs = []

    def first(x):
        runs.append("first")

    def never(x):
        runs.append("never")

    costs = measure(
        call(first, spec(2), key="b"),
        call(aten.relu.default, spec(2), key="a"),
        call(never, key="b"),
    )
    assert [cost.key for cost in costs] == ["b", "a"]
    assert set(runs) == {"first"}


def test_a_call_gets_tensors_of_the_geometry_that_was_asked_for():
    seen = {}

    def target(x, nested, *, mask):
        seen["x"] = (x.shape, x.stride(), x.storage_offset(), x.dtype)
        seen["nested"] = [item.dtype if isinstance(item, torch.Tensor) else item for item in nested]
        seen["mask"] = mask.unique().tolist()
        seen["range"] = (x.min() >= 0, x.max() < 1, x.unique().numel() > 1)

    measured(
        target,
        spec(4, 8, stride=(1, 5), offset=3, dtype=torch.float64),
        [None, spec(2, dtype=torch.int32), 7],
        mask=spec(100, dtype=torch.bool),
    )
    assert seen["x"] == ((4, 8), (1, 5), 3, torch.float64)
    assert seen["nested"] == [None, torch.int32, 7]
    assert seen["mask"] == [False, True]
    assert all(seen["range"])


@pytest.mark.parametrize(
    "size", [(), (0,), (0, 3), (1,), (1 << 17,)], ids=["scalar", "empty", "empty2", "one", "long"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_every_size_and_dtype_can_be_made(size, dtype):
    assert measured(aten.clone.default, spec(*size, dtype=dtype)).duration_s > 0


@pytest.mark.parametrize("long_s", [0.0, 1e9])
def test_workspace_is_what_an_op_holds_beyond_its_outputs(monkeypatch, long_s):
    monkeypatch.setattr(measure_ops_module, "_LONG_S", long_s)

    def target(x):
        temporary = x + x
        return (temporary.sum(0), x.view(-1), None)

    assert measured(target, spec(100, 50)).workspace_bytes == 100 * 50 * 4
    assert measured(aten.relu.default, spec(100, 50)).workspace_bytes == 0


def test_workspace_is_what_the_allocator_says_of_a_real_call():
    x, weight = torch.rand(2, 8, 16, 16), torch.rand(8, 8, 3, 3)
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    with torch.no_grad():
        real = measure_peak_bytes(lambda: aten.convolution.default(x, weight, *rest), CPU)
    cost = measured(aten.convolution.default, spec(*x.shape), spec(*weight.shape), *rest)
    assert cost.workspace_bytes == real.peak_bytes - real.end_bytes


@pytest.mark.parametrize(
    "target", [aten.relu_.default, aten.view.default, aten.split.Tensor, aten._assert_async.default]
)
def test_outputs_that_alias_inputs_or_are_missing_have_no_workspace(target):
    args = {
        aten.view.default: ([-1],),
        aten.split.Tensor: (1,),
    }.get(target, ())
    size = (1,) if target is aten._assert_async.default else (4, 4)
    assert measured(target, spec(*size), *args).workspace_bytes == 0


def test_an_op_that_cannot_bear_zeros_is_measured_on_ones():
    integers = spec(8, dtype=torch.int64)
    assert measured(aten.floor_divide.default, integers, integers).duration_s > 0


def test_an_op_that_cannot_be_called_is_assumed_and_named(caplog):
    with caplog.at_level(logging.WARNING):
        bad, worse, good = measure(
            call(aten.mm.default, spec(2, 3), spec(2, 3), key="mm of misfits"),
            call(aten.mm.default, spec(4, 3), spec(2, 3), key="another"),
            call(aten.relu.default, spec(4), key="relu"),
        )
    assert (bad.source, worse.source, good.source) == ("assumed", "assumed", "measured")
    assert bad.workspace_bytes == 0
    assert worse.duration_s == pytest.approx(bad.duration_s * 18 / 12)
    assert "mm of misfits" in caplog.text
    assert "RuntimeError" in caplog.text


def test_random_state_and_gradient_mode_are_as_before():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    measured(aten.native_dropout.default, spec(100), 0.5, True)
    assert torch.equal(torch.rand(4), expected)
    assert torch.is_grad_enabled()


def test_gradients_are_off_while_measuring():
    seen = []
    measured(lambda x: seen.append(torch.is_grad_enabled()), spec(2))
    assert not any(seen)


def test_autocast_does_not_change_what_is_measured():
    seen = set()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured(lambda a, b: seen.add(torch.mm(a, b).dtype), spec(4, 4), spec(4, 4))
    assert seen == {torch.float32}


@pytest.mark.parametrize("fails", [False, True])
def test_no_tensor_outlives_its_measurement(fails):
    references = []

    def target(x):
        references.append(weakref.ref(x))
        if fails:
            raise RuntimeError("as planned")
        return x + 1

    gc.disable()
    try:
        measure(call(target, spec(1000)))
        alive = [reference() for reference in references]
    finally:
        gc.enable()
    assert references
    assert alive == [None] * len(references)


def test_a_long_op_is_timed_once_and_not_by_its_first_call(monkeypatch):
    monkeypatch.setattr(measure_ops_module, "_LONG_S", 0.0)
    runs = []
    measured(lambda x: runs.append(x), spec(2))
    # To warm up, for its workspace, for its time.
    assert len(runs) == 3


def test_the_first_call_does_not_count():
    pauses_s = [0.2]
    cost = measured(lambda x: time.sleep(pauses_s.pop() if pauses_s else 0.0), spec(2))
    assert cost.duration_s < 0.1


def test_ops_are_timed_in_rounds():
    runs = []
    targets = {name: functools.partial(lambda name, x: runs.append(name), name) for name in "ab"}
    measure(*(call(target, spec(2), key=name) for name, target in targets.items()))
    rounds = re.sub(r"(.)\1+", r"\1", "".join(runs))
    assert rounds == "ab" * 6


def test_an_op_that_fails_later_is_assumed_and_named(caplog):
    runs = []

    def target(x):
        runs.append(0)
        if len(runs) > 3:
            raise RuntimeError("too often")

    (cost,) = measure(call(target, spec(2)))
    assert cost.source == "assumed"
    assert "too often" in caplog.text


def test_a_short_op_is_called_often_enough_for_a_median():
    runs = []
    measured(lambda x: runs.append(0), spec(2))
    assert len(runs) >= 5


def test_under_a_profiler_times_are_measured_and_workspace_is_assumed(caplog):
    with profiler.profile(use_kineto=True):
        (cost,) = measure(call(aten.relu.default, spec(100)))
    assert cost.source == "assumed"
    assert cost.duration_s > 0
    assert "profiler" in caplog.text


def test_ops_are_measured_for_real_in_the_middle_of_a_compilation():
    costs, kinds = [], set()

    def target(x):
        kinds.add(type(x))
        return torch.mm(x, x), float(x.sum())

    def partition(gm, joint_inputs, **kwargs):
        before = len(gm.graph.nodes)
        costs.extend(measure(call(target, spec(64, 64), key="mm")))
        costs.extend(measure(call(aten.relu.default, spec(64, 64), key="relu")))
        assert len(gm.graph.nodes) == before
        return default_partition(gm, joint_inputs, **kwargs)

    def compiler(gm, inputs):
        return make_boxed_func(gm.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Dropout(0.5))
    x = torch.randn(4, 8)
    torch.compile(net, backend=backend, dynamic=False)(x).sum().backward()
    assert [cost.source for cost in costs] == ["measured", "measured"]
    assert kinds == {torch.Tensor}
    assert net[0].weight.grad is not None


def test_ops_are_measured_for_real_inside_fake_and_tracing_modes():
    kinds, dispatchers = set(), set()
    asked = spec(4)

    def target(x):
        key = torch._C.DispatchKey.PythonDispatcher
        dispatchers.add(torch._C._dispatch_tls_is_dispatch_key_included(key))
        kinds.add(type(x))
        return x.relu()

    def traced(x):
        measured(target, asked)
        return x + 1

    with FakeTensorMode(), enable_python_dispatcher():
        measured(target, asked)
    gm = make_fx(traced, tracing_mode="fake")(torch.ones(4))
    assert kinds == {torch.Tensor}
    assert dispatchers == {False}
    assert [node.target for node in gm.graph.nodes if node.op == "call_function"] == [
        aten.add.Tensor
    ]


def test_the_cache_is_asked_before_measuring_and_survives_the_process(tmp_path):
    runs = []
    counted = call(lambda x: runs.append(0), spec(2), key="counted")
    first = measure(counted, cache=OpCache(CPU, tmp_path))
    run_count = len(runs)
    again = measure(counted, cache=OpCache(CPU, tmp_path))
    assert first == again
    assert len(runs) == run_count > 0


def test_only_what_the_cache_lacks_is_measured_and_the_order_is_kept(tmp_path):
    cache = OpCache(CPU, tmp_path)
    cache.add([cost("known")])
    costs = measure(
        call(aten.relu.default, spec(2), key="first"),
        call(aten.relu.default, spec(2), key="known"),
        call(aten.relu.default, spec(2), key="last"),
        cache=cache,
    )
    assert [each.key for each in costs] == ["first", "known", "last"]
    assert costs[1] == cost("known")


def test_assumed_costs_are_not_cached(tmp_path):
    cache = OpCache(CPU, tmp_path)
    measure(call(aten.mm.default, spec(2, 3), spec(2, 3)), cache=cache)
    assert cache.get("op") is None
    assert not cache.path.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 4, "ops": {"a": 3}}', '{"ops": []}'])
def test_a_broken_cache_file_is_reported_and_started_anew(tmp_path, text, caplog):
    path = OpCache(CPU, tmp_path).path
    path.write_text(text)
    cache = OpCache(CPU, tmp_path)
    assert str(path) in caplog.text
    measure(call(aten.relu.default, spec(2)), cache=cache)
    assert OpCache(CPU, tmp_path).get("op") == cache.get("op") is not None


def test_a_cache_file_of_another_schema_is_not_read(tmp_path):
    path = OpCache(CPU, tmp_path).path
    path.write_text(json.dumps({"schema": 0, "ops": {"op": [1.0, 2]}}))
    assert OpCache(CPU, tmp_path).get("op") is None


def test_a_cache_that_cannot_be_written_is_reported_and_still_serves(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    cache = OpCache(CPU, blocked / "folder")
    measure(call(aten.relu.default, spec(2)), cache=cache)
    assert cache.get("op") is not None
    assert "not kept" in caplog.text


def cost(key):
    return OpCost(key=key, duration_s=1.0, workspace_bytes=2, source="measured")


def test_two_caches_on_one_file_keep_each_others_costs(tmp_path):
    ours, theirs = OpCache(CPU, tmp_path), OpCache(CPU, tmp_path)
    ours.add([cost("ours")])
    theirs.add([cost("theirs")])
    reopened = OpCache(CPU, tmp_path)
    assert (reopened.get("ours"), reopened.get("theirs")) == (cost("ours"), cost("theirs"))


def test_many_writers_at_once_leave_a_whole_file_and_no_litter(tmp_path):
    caches = [OpCache(CPU, tmp_path) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: [caches[i].add([cost(f"{i} {j}")]) for j in range(20)], range(8)))
    (only,) = tmp_path.iterdir()
    assert json.loads(only.read_text())["ops"]


def test_cache_files_are_apart_by_thread_count_and_lie_where_the_environment_says(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("BACKHAUL_CACHE_DIR", str(tmp_path / "chosen"))
    threads = torch.get_num_threads()
    path = OpCache(CPU).path
    try:
        torch.set_num_threads(threads + 1)
        other = OpCache(CPU).path
    finally:
        torch.set_num_threads(threads)
    assert path.parent == tmp_path / "chosen"
    assert path != other
    monkeypatch.delenv("BACKHAUL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert OpCache(CPU).path == tmp_path / "xdg" / "backhaul" / path.name


def test_the_cpu_has_a_name():
    assert device_name(CPU).startswith("cpu: ")
    assert len(device_name(CPU)) > len("cpu: ")


def test_measuring_in_a_fresh_process_writes_nothing_to_the_terminal():
    code = (
        "import torch\n"
        "from backhaul.runtime.measure_ops import OpCall, measure_ops\n"
        "call = OpCall(key='a', target=lambda: torch.ones(3), args=())\n"
        "(cost,) = measure_ops([call], torch.device('cpu'), cache=None)\n"
        "assert cost.source == 'measured'\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout + ran.stderr == ""

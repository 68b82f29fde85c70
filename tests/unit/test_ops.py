from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import backhaul.runtime.ops  # noqa: F401  (registers the ops)
from backhaul.errors import InternalError, TransferError
from backhaul.records import SlotRecord
from backhaul.runtime.adversary import AdversaryLink
from backhaul.runtime.disk import DiskLink
from backhaul.runtime.links import Link
from backhaul.runtime.session import Session

OPS = torch.ops.backhaul
CPU = torch.device("cpu")


@pytest.fixture(params=["disk", "first", "last", "random"])
def link(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Link]:
    link = DiskLink(tmp_path) if request.param == "disk" else AdversaryLink(request.param)
    yield link
    link.close()


def storage_nbytes(x: Tensor) -> int:
    return x.untyped_storage().nbytes()


def make_session(link: Link, *tensors: Tensor) -> Session:
    slots, end_bytes = [], 0
    for index, tensor in enumerate(tensors):
        nbytes = storage_nbytes(tensor)
        slots.append(SlotRecord(tensor=f"x{index}", offset_bytes=end_bytes, nbytes=nbytes))
        end_bytes += nbytes
    return Session(link, tuple(slots), end_bytes)


def geometry(x: Tensor) -> tuple[Any, ...]:
    return (
        list(x.size()),
        list(x.stride()),
        x.storage_offset(),
        storage_nbytes(x),
        x.dtype,
        x.device,
    )


def send(x: Tensor, token: Tensor, slot: int) -> Tensor:
    return OPS.offload_wait(OPS.offload(x, token, slot), x)


def fetch(handle: Tensor, x_geometry: tuple[Any, ...]) -> Tensor:
    return OPS.reload_wait(OPS.reload(handle, *x_geometry), handle)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "every second column": lambda x: x[:, ::2],
    "with an offset": lambda x: x[2:, 1:],
    "expanded": lambda x: x[0, :1].expand(5, 3),
    "expanded rows": lambda x: x[:1].expand(4, 6),
    "scalar": lambda x: x[1, 2],
    "a dimension of one with a strange stride": lambda x: x.as_strided((1, 3), (17, 2)),
    "no element": lambda x: x[:0],
}
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int64,
    torch.uint8,
    torch.complex64,
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_round_trip_keeps_bytes_strides_and_offset(
    link: Link, layout: str, dtype: torch.dtype
) -> None:
    x = LAYOUTS[layout](torch.randint(0, 2, (6, 6)).to(dtype))
    session = make_session(link, x)
    y = fetch(send(x, OPS.begin_step(session.session_id, 1), 0), geometry(x))
    assert geometry(y) == geometry(x)
    assert y.untyped_storage().tolist() == x.untyped_storage().tolist()
    assert y.untyped_storage()._cdata != x.untyped_storage()._cdata


def test_bytes_are_moved_and_not_values(link: Link) -> None:
    x = torch.tensor([float("nan"), -0.0, float("-inf"), 1e-45])
    session = make_session(link, x)
    y = fetch(send(x, OPS.begin_step(session.session_id, 1), 0), geometry(x))
    assert torch.equal(y.view(torch.int32), x.view(torch.int32))


def test_empty_storages_work_beside_others(link: Link) -> None:
    x, empty = torch.randn(3), torch.empty(0, 4)
    session = make_session(link, empty, x, empty)
    token = OPS.begin_step(session.session_id, 3)
    handles = [send(t, token, slot) for slot, t in enumerate((empty, x, empty))]
    reloaded = [fetch(h, geometry(t)) for h, t in zip(handles, (empty, x, empty), strict=True)]
    assert [tuple(y.shape) for y in reloaded] == [(0, 4), (3,), (0, 4)]
    assert torch.equal(reloaded[1], x)


def test_a_storage_that_is_no_whole_number_of_elements_comes_back(link: Link) -> None:
    x = torch.arange(7, dtype=torch.uint8)[:4].view(torch.float32)
    session = make_session(link, x)
    y = fetch(send(x, OPS.begin_step(session.session_id, 1), 0), geometry(x))
    assert geometry(y) == geometry(x)
    assert y.untyped_storage().tolist() == list(range(7))


def test_a_tensor_that_needs_a_gradient_can_be_moved(link: Link) -> None:
    x = torch.randn(4, requires_grad=True)
    session = make_session(link, x)
    handle = send(x, OPS.begin_step(session.session_id, 1), 0)
    assert not handle.requires_grad
    assert torch.equal(fetch(handle, geometry(x)), x)


def test_ops_work_in_inference_mode(link: Link) -> None:
    with torch.inference_mode():
        x = torch.randn(4)
        session = make_session(link, x)
        handle = send(x, OPS.begin_step(session.session_id, 1), 0)
        assert torch.equal(fetch(handle, geometry(x)), x)


def test_every_handle_is_a_view_that_keeps_the_step() -> None:
    x = torch.randn(4)
    session = make_session(AdversaryLink("last"), x)
    token = OPS.begin_step(session.session_id, 1)
    handle = OPS.offload(x, token, 0)
    waited = OPS.offload_wait(handle, x)
    for view in (handle, waited):
        assert view.untyped_storage().data_ptr() == token.untyped_storage().data_ptr()
    del token, handle, view
    assert session.live_step_count == 1
    del waited
    assert session.live_step_count == 0


def test_a_reload_does_not_keep_the_step() -> None:
    x = torch.randn(4)
    session = make_session(AdversaryLink("last"), x)
    y = fetch(send(x, OPS.begin_step(session.session_id, 1), 0), geometry(x))
    assert session.live_step_count == 0
    assert torch.equal(y, x)


@pytest.mark.parametrize("missing", ["offload_wait", "reload_wait"])
def test_a_missing_wait_gives_wrong_numbers(missing: str) -> None:
    kept = torch.randn(4)
    session = make_session(AdversaryLink("last"), kept)
    x = kept.clone()
    handle = OPS.offload(x, OPS.begin_step(session.session_id, 1), 0)
    if missing != "offload_wait":
        handle = OPS.offload_wait(handle, x)
    x_geometry = geometry(x)
    del x
    y = OPS.reload(handle, *x_geometry)
    if missing != "reload_wait":
        y = OPS.reload_wait(y, handle)
    assert y.isnan().all()


def test_a_storage_of_another_size_is_an_error() -> None:
    session = make_session(AdversaryLink("last"), torch.zeros(4))
    token = OPS.begin_step(session.session_id, 1)
    with pytest.raises(TransferError, match="x0 was planned with 16 bytes of storage but has 20"):
        OPS.offload(torch.zeros(5)[:4], token, 0)


def test_a_part_of_a_larger_storage_is_laid_out_alone() -> None:
    x = torch.arange(6.0)[1:5]
    session = make_session(AdversaryLink("last"), torch.zeros(4))
    handle = send(OPS.laid_out(x, 16), OPS.begin_step(session.session_id, 1), 0)
    assert torch.equal(fetch(handle, ([4], [1], 0, 16, x.dtype, x.device)), x)
    whole = torch.zeros(4)
    assert OPS.laid_out(whole, 16).data_ptr() == whole.data_ptr()


def test_a_reload_larger_than_its_storage_is_an_error() -> None:
    x = torch.zeros(4)
    session = make_session(AdversaryLink("last"), x)
    handle = send(x, OPS.begin_step(session.session_id, 1), 0)
    with pytest.raises(TransferError, match="has 20"):
        OPS.reload(handle, [5], [1], 0, 16, x.dtype, x.device)


def test_a_graph_with_other_slots_is_an_error() -> None:
    session = make_session(AdversaryLink("last"), torch.zeros(4))
    with pytest.raises(InternalError, match="a graph of 2 slots"):
        OPS.begin_step(session.session_id, 2)


def test_an_unknown_session_is_an_error() -> None:
    with pytest.raises(InternalError, match="no session 0 "):
        OPS.begin_step(0, 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_kernels_say_device_geometry_and_aliases(device: str) -> None:
    with FakeTensorMode():
        x = torch.empty((2, 3), dtype=torch.bfloat16, device=device).t()
        token = OPS.begin_step(0, 2)
        handle = OPS.offload(x, token, 1)
        waited = OPS.offload_wait(handle, x)
        y = OPS.reload(waited, *geometry(x))
        done = OPS.reload_wait(y, waited)
    assert (token.shape, token.dtype, token.device) == ((2, 3), torch.int64, CPU)
    for row in (handle, waited):
        assert (row.shape, row.dtype, row.device) == ((3,), torch.int64, CPU)
        assert row.untyped_storage()._cdata == token.untyped_storage()._cdata
    for reloaded in (y, done):
        assert geometry(reloaded) == geometry(x)
        assert reloaded.untyped_storage()._cdata == y.untyped_storage()._cdata
    assert y.untyped_storage()._cdata != x.untyped_storage()._cdata


def test_what_a_kernel_returns_aliases_what_its_schema_says() -> None:
    x = torch.randn(3, 4)[:, 1:]
    # The bytes of a reload change until its wait, which no schema can say: let all be early.
    session = make_session(AdversaryLink("first"), x)
    with SchemaCheckMode():
        y = fetch(send(x, OPS.begin_step(session.session_id, 1), 0), geometry(x))
    assert torch.equal(y, x)


def make_graph(session: Session, x: Tensor) -> fx.GraphModule:
    graph = fx.Graph()
    relu = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    token = graph.call_function(OPS.begin_step.default, (session.session_id, 1))
    handle = graph.call_function(OPS.offload.default, (relu, token, 0))
    handle = graph.call_function(OPS.offload_wait.default, (handle, relu))
    y = graph.call_function(OPS.reload.default, (handle, *geometry(x)))
    graph.output(graph.call_function(OPS.reload_wait.default, (y, handle)))
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)


def test_a_graph_of_the_ops_runs_and_can_be_propagated(link: Link) -> None:
    x = torch.randn(3, 4)
    session = make_session(link, x)
    gm = make_graph(session, x)
    FakeTensorProp(gm).propagate(x)
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")
    assert session.live_step_count == 0
    assert torch.equal(gm(x), x.relu())
    assert session.live_step_count == 0


def test_sizes_can_be_symbolic() -> None:
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    real = torch.empty(5, 7)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x = mode.from_tensor(real, symbolic_context=dynamic)
        rows, columns = x.shape
        handle = OPS.offload(x, OPS.begin_step(0, 1), 0)
        y = OPS.reload(handle, [rows, columns], [columns, 1], 0, rows * columns * 4, x.dtype, CPU)
    assert y.shape == x.shape
    assert isinstance(y.shape[0], torch.SymInt)

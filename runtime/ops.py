"""The graph ops, each with its fake kernel beside it.

They are two-node asynchronous: a start and a wait.  A handle is a row of the step's token, see
`runtime.session`, so that data edges alone keep the step alive and the order right:

    token = begin_step(session, slot_count)
    h = offload(x, token, slot)
    h = offload_wait(h, x)
    y = reload(h, size, stride, storage_offset, storage_nbytes, dtype, device)
    y = reload_wait(y, h)

Where a compiler lays tensors out, the copy and its wait share what `laid_out` makes of x:

    x = laid_out(x, storage_nbytes)

What is rounded asks the step, too: for its bound, and for the original if there was no room.

    p = quantise(x, token, dial, *form)
    y = dequantise(p, token, dial, size, stride, dtype, *form)
    observe(gradient, y, weight_gradient, token, read)

An op moves the whole storage under its tensor, whatever view of it that is.  No op frees
anything: `x` dies after `offload_wait` by its last reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from backhaul.errors import InternalError
from backhaul.records import PackedForm
from backhaul.runtime import codec_ops
from backhaul.runtime.codec_ops import FORM_SCHEMA
from backhaul.runtime.device import random_state_bytes
from backhaul.runtime.session import SESSIONS, Session

__all__ = ["NAMESPACE"]

NAMESPACE = "backhaul"

# Holds the registrations: they go when it goes.
_LIBRARY = Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]  # torch gives no types


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    tags = (
        torch.Tag.pt2_compliant_tag,
        # A replayed CUDA graph would skip the work that a kernel does on the host.
        torch.Tag.cudagraph_unsafe,
        # What is moved comes back as the plan says that it lies.
        torch.Tag.needs_exact_strides,
    )
    _LIBRARY.define(schema, tags=tags)  # type: ignore[no-untyped-call]  # torch gives no types
    # One kernel for every backend: a handle lies on the CPU whatever the device of the rest,
    # and `begin_step` has no tensor to choose a backend by.
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)


def _begin_step(session: int, slot_count: int) -> Tensor:
    found = SESSIONS.find(session)
    if len(found.slots) != slot_count:
        raise InternalError(
            f"a graph of {slot_count} slots runs with session {session} of {len(found.slots)}"
        )
    return found.begin_step()


def _fake_begin_step(session: int, slot_count: int) -> Tensor:
    return torch.empty((max(1, slot_count), 3), dtype=torch.int64, device="cpu")


_define("begin_step(int session, int slot_count) -> Tensor", _begin_step, _fake_begin_step)


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)  # type: ignore[no-any-return]


def _fake_random_state(device: torch.device) -> Tensor:
    length = random_state_bytes(device)
    return torch.empty(length, dtype=torch.uint8, device="cpu")


_define("random_state(Device device) -> Tensor", _random_state, _fake_random_state)


def _laid_out(x: Tensor, storage_nbytes: int) -> Tensor:
    if x.untyped_storage().nbytes() == storage_nbytes:
        return _alias(x)
    return x.clone(memory_format=torch.preserve_format)


def _fake_laid_out(x: Tensor, storage_nbytes: int) -> Tensor:
    return _alias(x)


# Closes two hazards of compilers.  Where a tensor lies otherwise than traced, each op that reads it
# is given a copy of its own, and the one that is being moved would die before the wait for it.  And
# a tensor may lie in the storage of a larger one, which is not what was planned to be moved.
_define("laid_out(Tensor(a) x, SymInt storage_nbytes) -> Tensor(a)", _laid_out, _fake_laid_out)


def _offload(x: Tensor, token: Tensor, slot: int) -> Tensor:
    handle = token.select(0, slot)
    session, step_id, index = _open_handle(handle)
    session.start_offload(step_id, index, _bytes_of(x))
    return handle


def _fake_offload(x: Tensor, token: Tensor, slot: int) -> Tensor:
    return token.select(0, slot)


_define("offload(Tensor x, Tensor(a) token, int slot) -> Tensor(a)", _offload, _fake_offload)


def _offload_wait(handle: Tensor, keepalive: Tensor) -> Tensor:
    session, step_id, index = _open_handle(handle)
    session.wait_offload(step_id, index)
    return _alias(handle)


def _fake_offload_wait(handle: Tensor, keepalive: Tensor) -> Tensor:
    return _alias(handle)


_define(
    "offload_wait(Tensor(a) handle, Tensor keepalive) -> Tensor(a)",
    _offload_wait,
    _fake_offload_wait,
)


def _reload(
    handle: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int,
    storage_nbytes: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    session, step_id, index = _open_handle(handle)
    y = _fake_reload(handle, size, stride, storage_offset, storage_nbytes, dtype, device)
    session.start_reload(step_id, index, _bytes_of(y))
    return y


def _fake_reload(
    handle: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int,
    storage_nbytes: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    storage = torch.empty(storage_nbytes, dtype=torch.uint8, device=device).untyped_storage()
    y = torch.empty(0, dtype=dtype, device=device)
    # No `as_strided`: a storage need not be a whole number of elements.
    return y.set_(storage, storage_offset, size, stride)


_define(
    "reload(Tensor handle, SymInt[] size, SymInt[] stride, SymInt storage_offset, "
    "SymInt storage_nbytes, ScalarType dtype, Device device) -> Tensor",
    _reload,
    _fake_reload,
)


def _reload_wait(reloaded: Tensor, handle: Tensor) -> Tensor:
    session, step_id, index = _open_handle(handle)
    session.wait_reload(step_id, index)
    return _alias(reloaded)


def _fake_reload_wait(reloaded: Tensor, handle: Tensor) -> Tensor:
    return _alias(reloaded)


_define(
    "reload_wait(Tensor(a) reloaded, Tensor handle) -> Tensor(a)", _reload_wait, _fake_reload_wait
)


def _quantise(x: Tensor, token: Tensor, dial: int, *form: Any) -> Tensor:
    session, step_id, _ = _open_handle(token[0])
    return session.dials.pack(step_id, dial, x, PackedForm(*form))


def _fake_quantise(x: Tensor, token: Tensor, dial: int, *form: Any) -> Tensor:
    return codec_ops.fake_quantise(x, token, *form)


_define(
    "quantise(Tensor x, Tensor token, int dial, " + FORM_SCHEMA + ") -> Tensor",
    _quantise,
    _fake_quantise,
)


def _dequantise(packed: Tensor, token: Tensor, dial: int, *geometry_and_form: Any) -> Tensor:
    session, step_id, _ = _open_handle(token[0])
    original = session.dials.original(step_id, dial)
    if original is not None:
        return _alias(original)
    return codec_ops.dequantise(packed, *geometry_and_form)


def _fake_dequantise(packed: Tensor, token: Tensor, dial: int, *geometry_and_form: Any) -> Tensor:
    return codec_ops.fake_dequantise(packed, *geometry_and_form)


_define(
    "dequantise(Tensor packed, Tensor token, int dial, SymInt[] size, SymInt[] stride, "
    "ScalarType dtype, " + FORM_SCHEMA + ") -> Tensor",
    _dequantise,
    _fake_dequantise,
)


def _observe(
    gradient: Tensor, activation: Tensor, result: Tensor, token: Tensor, read: int
) -> None:
    session, _, _ = _open_handle(token[0])
    session.observer.watch(session.reads[read], gradient, activation, result)


def _fake_observe(
    gradient: Tensor, activation: Tensor, result: Tensor, token: Tensor, read: int
) -> None:
    return None


_define(
    "observe(Tensor gradient, Tensor activation, Tensor result, Tensor token, int read) -> ()",
    _observe,
    _fake_observe,
)


def _open_handle(handle: Tensor) -> tuple[Session, int, int]:
    session_id, step_id, index = handle.tolist()
    return SESSIONS.find(session_id), step_id, index


def _alias(tensor: Tensor) -> Tensor:
    # Not `view_as`, which changes the strides of dimensions of size one.
    alias: Tensor = torch.ops.aten.alias.default(tensor)
    return alias


def _bytes_of(tensor: Tensor) -> Tensor:
    """View the whole storage under a tensor as 1-D uint8."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)

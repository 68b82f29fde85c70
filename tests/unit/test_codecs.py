import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from backhaul.runtime import (
    codec_ops,  # noqa: F401  # defines the ops
    codecs,
    dense,
)
from backhaul.runtime.memory import measure_peak_bytes

ops = torch.ops.backhaul
few_examples = settings(max_examples=40, deadline=None)
many_examples = settings(max_examples=2000, deadline=None)
MASKED_DTYPES = [torch.bool, torch.float32, torch.bfloat16, torch.int64]
SPECIAL = (math.nan, math.inf, -math.inf, 1e-45, -1e-45, -0.0)


@pytest.fixture
def tiny_chunks(monkeypatch):
    """Cut even small tensors into many chunks."""
    monkeypatch.setattr(dense, "TEMPORARY_BYTES", {"cpu": 64})


@st.composite
def dense_geometries(draw, max_length=9):
    """Draw a size and the strides of one of its dense layouts, odd strides of 1s included."""
    size = draw(st.lists(st.integers(0, max_length), max_size=4))
    order = draw(st.permutations(range(len(size))))
    stride = [0] * len(size)
    step = 1
    for dim in order:
        stride[dim] = step if size[dim] != 1 else draw(st.integers(0, 50))
        step *= max(size[dim], 1)
    return size, stride


@st.composite
def pools(draw):
    """Draw the size of a plane and the arguments of a pooling that is legal on it."""
    kernel, stride, padding, dilation, plane = [], [], [], [], []
    for _ in range(2):
        kernel.append(draw(st.integers(1, 5)))
        stride.append(draw(st.integers(1, 4)))
        padding.append(draw(st.integers(0, kernel[-1] // 2)))
        dilation.append(draw(st.integers(1, 3)))
        shortest = dilation[-1] * (kernel[-1] - 1) + 1 - 2 * padding[-1]
        plane.append(draw(st.integers(max(shortest, 1), max(shortest, 1) + 9)))
    return plane, kernel, stride, padding, dilation


def filled(size, stride, dtype):
    """Make a tensor with a value in every element, of either sign where there is one."""
    values = torch.randint(-1, 2, (math.prod(size),)).to(dtype)
    if dtype.is_floating_point:
        special = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), values.shape)].to(dtype)
        values = torch.where(torch.rand(values.shape) < 0.3, special, values)
    tensor = torch.empty_strided(size, stride, dtype=dtype)
    tensor.as_strided(values.shape, (1,)).copy_(values)
    return tensor


def assert_bits_round_trip(x):
    packed = codecs.pack_bits(x)
    unpacked = codecs.unpack_bits(packed, x.size(), x.stride(), x.dtype)
    assert packed.dtype is torch.uint8
    assert packed.shape == (codecs.pack_bits_nbytes(x.numel()),)
    assert unpacked.stride() == x.stride()
    assert torch.equal(unpacked, torch.logical_not(x <= 0).to(x.dtype))


def assert_pool_round_trip(indices, *pool):
    packed = codecs.pack_pool_offsets(indices, *pool)
    unpacked = codecs.unpack_pool_offsets(packed, indices.size(), indices.stride(), *pool)
    assert packed.dtype is torch.uint8
    assert packed.shape == (codecs.pack_pool_offsets_nbytes(indices.numel()),)
    assert unpacked.dtype is torch.int64
    assert unpacked.stride() == indices.stride()
    assert torch.equal(unpacked, indices)


def pool_indices(x, kernel, stride, padding, dilation, ceil_mode=False):
    return torch.ops.aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil_mode)[
        1
    ]


def test_dense_is_every_permutation_of_a_contiguous_tensor_and_no_slice():
    x = torch.empty(2, 3, 4, 5)
    for order in itertools.permutations(range(4)):
        assert dense.is_dense(x.permute(order).shape, x.permute(order).stride())
    for view in (x[:, ::2], x[:, :, :2], x[:1].expand(7, 3, 4, 5), x.unfold(3, 3, 1)):
        assert not dense.is_dense(view.shape, view.stride())


def test_dense_ignores_the_strides_of_empty_tensors_and_of_single_dimensions():
    assert dense.is_dense((), ())
    assert dense.is_dense((1, 3), (999, 1))
    assert dense.is_dense((0, 3), (7, 7))


@pytest.mark.parametrize("dtype", MASKED_DTYPES)
@given(geometry=dense_geometries())
@few_examples
def test_bits_round_trip_in_every_dense_layout(dtype, geometry):
    assert_bits_round_trip(filled(*geometry, dtype))


@pytest.mark.slow
@given(dtype=st.sampled_from(MASKED_DTYPES), geometry=dense_geometries())
@many_examples
def test_bits_round_trip_at_length(dtype, geometry):
    assert_bits_round_trip(filled(*geometry, dtype))


@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 63, 64, 65, 511, 512, 513, 1000])
def test_bits_round_trip_across_chunks(numel):
    assert_bits_round_trip(torch.randn(numel))
    assert_bits_round_trip(torch.randn(numel) > 0)


def test_bits_of_a_view_at_an_offset_are_its_own():
    assert_bits_round_trip(torch.randn(100)[3:78])


def test_bit_order_is_lowest_first_and_the_rest_of_the_last_byte_is_zero():
    x = torch.zeros(10)
    x[[0, 3, 9]] = 1.0
    assert codecs.pack_bits(x).tolist() == [0b00001001, 0b00000010]
    assert codecs.pack_bits(torch.ones(3)).tolist() == [0b111]


def test_bits_decide_special_values_as_threshold_backward_does():
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 2.0])
    grad = torch.arange(1.0, 9.0)
    unpacked = codecs.unpack_bits(codecs.pack_bits(x), x.size(), x.stride(), x.dtype)
    expected = torch.ops.aten.threshold_backward(grad, x, 0)
    assert torch.equal(torch.ops.aten.threshold_backward(grad, unpacked, 0), expected)
    assert unpacked[0] == 1


def test_bits_refuse_a_layout_with_holes():
    with pytest.raises(ValueError, match="not dense"):
        codecs.pack_bits(torch.randn(4, 4)[:, ::2])
    with pytest.raises(ValueError, match="not dense"):
        codecs.unpack_bits(torch.zeros(1, dtype=torch.uint8), (2, 2), (4, 1), torch.float32)


def test_bits_refuse_a_packed_tensor_of_another_size():
    with pytest.raises(ValueError, match="size"):
        codecs.unpack_bits(torch.zeros(1, dtype=torch.uint8), (9,), (1,), torch.float32)


@pytest.mark.parametrize("ceil_mode", [False, True])
@given(pool=pools(), batch=st.sampled_from([(3,), (2, 3), (1, 1)]))
@few_examples
def test_pool_indices_round_trip(ceil_mode, pool, batch):
    plane, *window = pool
    indices = pool_indices(torch.randn(*batch, *plane), *window, ceil_mode)
    assert_pool_round_trip(indices, plane, *window)


@pytest.mark.slow
@given(st.booleans(), pools(), st.sampled_from([(3,), (2, 3), (1, 1), (0, 2)]))
@many_examples
def test_pool_indices_round_trip_at_length(ceil_mode, pool, batch):
    plane, *window = pool
    indices = pool_indices(torch.randn(*batch, *plane), *window, ceil_mode)
    assert_pool_round_trip(indices, plane, *window)


@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(2, 5, 13, 11), (1, 70, 9, 9), (40, 1, 4, 4)])
def test_pool_indices_round_trip_in_both_layouts_across_chunks(layout, shape):
    x = torch.randn(shape).to(memory_format=layout)
    window = ([3, 3], [2, 2], [1, 1], [1, 1])
    indices = pool_indices(x, *window)
    assert indices.is_contiguous(memory_format=layout)
    assert_pool_round_trip(indices, shape[-2:], *window)


def test_pool_indices_of_nan_and_infinite_planes_round_trip():
    x = torch.randn(1, 2, 8, 8)
    x[0, 0, 3, 3] = math.nan
    x[0, 1] = -math.inf
    window = ([3, 3], [2, 2], [1, 1], [1, 1])
    assert_pool_round_trip(pool_indices(x, *window), (8, 8), *window)


def test_pool_indices_round_trip_where_taps_share_a_distance():
    window = ([3, 3], [1, 1], [1, 1], [1, 1])
    assert_pool_round_trip(pool_indices(torch.randn(2, 3, 5, 2), *window), (5, 2), *window)


def test_pool_arguments_may_be_one_number_or_left_to_their_defaults():
    indices = pool_indices(torch.randn(2, 6, 6), [2], [], [0], [1])
    assert_pool_round_trip(indices, (6, 6), [2], [], [0], [1])


def test_no_pool_indices_round_trip():
    assert_pool_round_trip(torch.empty(0, 3, 4, 4, dtype=torch.int64), (8, 8), [2], [2], [0], [1])


def test_a_window_of_256_taps_is_packed_and_one_of_257_refused():
    window = ([16, 16], [8, 8], [0, 0], [1, 1])
    assert_pool_round_trip(pool_indices(torch.randn(2, 40, 40), *window), (40, 40), *window)
    assert not codecs.can_pack_pool_offsets([1, 257])
    indices = torch.zeros(1, 1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="256 taps"):
        codecs.pack_pool_offsets(indices, (1, 257), [1, 257], [1, 1], [0, 0], [1, 1])


def test_indices_outside_their_window_are_packed_without_a_fault():
    stray = torch.tensor([[[-5, 10**12], [0, 63]]])
    assert codecs.pack_pool_offsets(stray, (4, 4), [2], [2], [0], [1]).numel() == 4


@pytest.mark.parametrize(
    ("bound", "dtype"),
    [
        (0, torch.uint8),
        (256, torch.uint8),
        (257, torch.int16),
        (2**15, torch.int16),
        (2**15 + 1, torch.int32),
        (2**31, torch.int32),
        (2**31 + 1, torch.int64),
    ],
)
def test_narrowest_dtype_holds_the_bound_and_the_next_smaller_does_not(bound, dtype):
    assert codecs.narrowest_dtype(bound) is dtype


def assert_integers_round_trip(dtype, geometry, bound):
    size, stride = geometry
    x = torch.empty_strided(size, stride, dtype=dtype)
    flat = x.as_strided((x.numel(),), (1,))
    flat.copy_(torch.randint(0, bound, flat.shape))
    flat[-1:].fill_(bound - 1)
    packed = codecs.narrow(x, codecs.narrowest_dtype(bound))
    widened = codecs.widen(packed, size, stride, dtype)
    assert packed.nbytes == codecs.narrow_nbytes(x.numel(), packed.dtype)
    assert torch.equal(widened, x)
    assert widened.dtype is dtype
    assert widened.stride() == tuple(stride)


BOUNDS = st.sampled_from([1, 256, 2**15, 2**31])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@given(geometry=dense_geometries(), bound=BOUNDS)
@few_examples
def test_integers_below_the_bound_round_trip(dtype, geometry, bound):
    assert_integers_round_trip(dtype, geometry, bound)


@pytest.mark.slow
@given(st.sampled_from([torch.int64, torch.int32]), dense_geometries(), BOUNDS)
@many_examples
def test_integers_below_the_bound_round_trip_at_length(dtype, geometry, bound):
    assert_integers_round_trip(dtype, geometry, bound)


def every_op_call():
    """List each codec op with arguments that it takes."""
    window = ((13, 11), [3, 3], [2, 2], [1, 1], [1, 1])
    relu = torch.randn(2, 3, 5, 7).relu().to(memory_format=torch.channels_last)
    indices = pool_indices(torch.randn(2, 3, 13, 11), *window[1:])
    geometry, index_geometry = (
        (relu.shape, relu.stride()),
        (indices.shape, indices.stride()),
    )
    taps = codecs.pack_pool_offsets(indices, *window)
    narrowed = codecs.narrow(indices, torch.uint8)
    return {
        "pack_bits": (relu,),
        "unpack_bits": (codecs.pack_bits(relu), *geometry, torch.float32),
        "pack_pool_offsets": (indices, *window),
        "unpack_pool_offsets": (taps, *index_geometry, *window),
        "narrow_integers": (indices, torch.uint8),
        "widen_integers": (narrowed, *index_geometry, torch.int64),
    }


def test_temporaries_do_not_grow_with_the_tensor():
    x, cpu = torch.randn(4, 16, 256, 256), torch.device("cpu")
    window = ((512, 512), [3, 3], [2, 2], [1, 1], [1, 1])
    indices = pool_indices(torch.randn(4, 16, 512, 512), *window[1:])
    bits, taps = codecs.pack_bits(x), codecs.pack_pool_offsets(indices, *window)
    plane_bytes = 256 * 256 * 8
    steps = (
        lambda: codecs.pack_bits(x),
        lambda: codecs.unpack_bits(bits, x.size(), x.stride(), x.dtype),
        lambda: codecs.pack_pool_offsets(indices, *window),
        lambda: codecs.unpack_pool_offsets(taps, indices.size(), indices.stride(), *window),
    )
    for step in steps:
        memory = measure_peak_bytes(step, cpu)
        allowed_bytes = dense.TEMPORARY_BYTES["cpu"] + plane_bytes + (64 << 10)
        assert memory.peak_bytes - memory.end_bytes <= allowed_bytes < x.nbytes / 10


@pytest.mark.parametrize("name", every_op_call())
def test_the_fake_of_an_op_has_the_geometry_of_its_output(name):
    op, args = getattr(ops, name).default, every_op_call()[name]
    real = op(*args)
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        fake = op(*faked)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("name", every_op_call())
def test_an_op_keeps_the_rules_of_custom_ops(name):
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(ops, name).default, every_op_call()[name], test_utils=checks)


def test_the_ops_of_a_graph_compile_with_symbolic_sizes():
    def through_bits(x):
        packed = ops.pack_bits(x)
        return ops.unpack_bits(packed, x.size(), x.stride(), x.dtype)

    compiled = torch.compile(through_bits, backend="aot_eager", dynamic=True, fullgraph=True)
    for length in (3, 9, 20):
        x = torch.randn(length, 5)
        assert torch.equal(compiled(x), (x > 0).float())

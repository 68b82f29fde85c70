import threading

import pytest
import torch
from torch.autograd import profiler

from backhaul.runtime.memory import PeakMemory, can_measure_peak, measure_peak_bytes

CPU = torch.device("cpu")


def hold(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


def measure(step):
    return measure_peak_bytes(step, CPU)


def peak(peak_bytes, end_bytes=0):
    return PeakMemory(peak_bytes=peak_bytes, end_bytes=end_bytes)


def test_a_step_without_tensors_holds_nothing():
    assert measure(lambda: None) == peak(0)


def test_the_peak_is_the_most_held_at_once_not_the_sum():
    def step():
        for _ in range(10):
            hold(1000)

    assert measure(step) == peak(1000)


def test_nested_frees_count_in_their_order():
    def step():
        first = hold(1000)
        second = hold(500)
        del first
        third = hold(300)
        fourth = hold(900)  # 1700 here
        del second, third
        return fourth, hold(64)

    assert measure(step) == peak(1700, 964)


def test_a_result_is_held_at_the_end_and_kept_references_too():
    kept = []
    assert measure(lambda: kept.append(hold(700)) or hold(50)) == peak(750, 750)


def test_a_free_of_memory_from_before_does_not_count():
    earlier = [hold(1 << 20)]

    def step():
        earlier.clear()
        return hold(100)

    assert measure(step) == peak(100, 100)


def test_a_free_of_memory_from_an_earlier_measurement_does_not_count():
    kept = []
    measure(lambda: kept.append(hold(1 << 20)))

    def step():
        kept.clear()
        return hold(100)

    assert measure(step) == peak(100, 100)


def test_measurements_do_not_add_up():
    assert [measure(lambda: hold(100)) for _ in range(3)] == [peak(100, 100)] * 3


def test_a_temporary_inside_a_kernel_counts():
    x = torch.randn(64, 64)

    def step():
        return x.sum(0, dtype=torch.float64)

    # The output alone is 512 bytes; casting inside the kernel needs no copy of the input.
    assert measure(step).end_bytes == 512
    transposed = x.t()
    copied = measure(lambda: torch.linalg.inv(transposed))
    assert copied.end_bytes >= x.nbytes
    assert copied.peak_bytes > copied.end_bytes


def test_views_and_operations_in_place_hold_nothing():
    x = torch.ones(1000)
    assert measure(lambda: x.view(10, 100).t().relu_()) == peak(0)


def test_a_forward_and_backward_hold_what_arithmetic_says():
    width, batch = 256, 1024
    weight = torch.randn(width, width, requires_grad=True)
    x = torch.randn(batch, width)
    activation_bytes, weight_bytes, loss_bytes = batch * width * 4, width * width * 4, 4

    def step():
        hidden = (x @ weight).relu_().sum()
        hidden.backward()

    # The saved ReLU output, its expanded gradient masked, then the weight's gradient.
    measured = measure(step)
    assert measured.end_bytes == weight_bytes
    assert 2 * activation_bytes < measured.peak_bytes
    assert measured.peak_bytes <= 2 * activation_bytes + weight_bytes + 3 * loss_bytes
    weight.grad = None
    assert measure(step) == measured


def test_memory_made_and_freed_by_autograds_own_threads_counts():
    """Backwards nested deeper than autograd's limit of 60 go on in threads of its pool."""
    threads = set()

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            threads.add(threading.get_ident())
            held = hold(1000)
            if ctx.depth > 0:
                with torch.enable_grad():
                    x = torch.ones((), requires_grad=True)
                    Nested.apply(x, ctx.depth - 1).backward()
            del held
            return grad, None

    x = torch.ones((), requires_grad=True)
    out = Nested.apply(x, 99)
    measured = measure(out.backward)
    assert len(threads) > 1
    assert 100 * 1000 <= measured.peak_bytes < 100 * 1000 + 100 * 50
    assert measured.end_bytes == 4


def test_frees_of_one_thread_and_allocations_of_another_stay_exact():
    """Another thread's tensors die in the measured one: they were never counted."""

    def step():
        made = []
        thread = threading.Thread(target=lambda: made.append(hold(5000)))
        thread.start()
        thread.join()
        made.clear()
        return hold(100)

    assert measure(step) == peak(100, 100)


def test_an_error_in_the_step_is_the_callers_and_the_next_measurement_works():
    def step():
        hold(100)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure(step)
    assert measure(lambda: hold(100)) == peak(100, 100)


def test_a_running_profiler_is_not_cancelled():
    with profiler.profile(use_kineto=True) as session:
        assert not can_measure_peak(CPU)
        with pytest.raises(RuntimeError, match="another profiler"):
            measure(lambda: None)
        torch.ones(3).neg()
    assert can_measure_peak(CPU)
    assert "aten::neg" in {event.name for event in session.function_events}


def test_measuring_writes_nothing_to_the_terminal(capfd):
    measure(lambda: hold(100))
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""

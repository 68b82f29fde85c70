"""Training on a GPU: the same plans, bit-equal to eager, within the memory that was predicted."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import backhaul
from backhaul.runtime.memory import measure_peak_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

PLANNERS: dict[str, dict[str, Any]] = {
    "keep_all": {},
    "offload_all": {},
    "compress_all": {},
    "frontier": {"activation_budget": 0.5},
}


def make_net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (16, 32, 64):
        layers += [nn.LazyConv2d(width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2), nn.Dropout(0.1)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10)).cuda()
    net(torch.randn(2, 3, 64, 64, device="cuda"))
    return net


def train_once(net: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    net.zero_grad(set_to_none=True)
    loss = net(images).square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    return [loss.detach(), *gradients, *(buffer.clone() for buffer in net.buffers())]


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_plan_is_bit_equal_to_eager_over_many_steps(planner: str) -> None:
    net = make_net()
    eager = copy.deepcopy(net)
    images = torch.randn(32, 3, 64, 64, device="cuda")
    planned = backhaul.optimize(net, images, planner=planner, **PLANNERS[planner])
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        for _ in range(50):
            expected, actual = train_once(eager, images), train_once(planned, images)
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_training_on_a_side_stream_is_bit_equal() -> None:
    net = make_net()
    eager = copy.deepcopy(net)
    images = torch.randn(32, 3, 64, 64, device="cuda")
    planned = backhaul.optimize(net, images, planner="offload_all")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.backends.cudnn.flags(deterministic=True):
        for _ in range(20):
            expected, actual = train_once(eager, images), train_once(planned, images)
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_measured_peak_is_within_two_percent_of_the_prediction() -> None:
    net = make_net()
    images = torch.randn(256, 3, 64, 64, device="cuda")
    planned = backhaul.optimize(net, images, activation_budget=0.5)
    train_once(planned, images)
    planned.zero_grad(set_to_none=True)
    peak = measure_peak_bytes(lambda: train_once(planned, images), torch.device("cuda"))
    predicted_bytes = planned.plan.predicted.step_peak_bytes
    assert abs(peak.peak_bytes - predicted_bytes) <= 0.02 * predicted_bytes

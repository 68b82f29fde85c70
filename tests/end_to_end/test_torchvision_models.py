"""Every family of torchvision's classifiers trains bit for bit as eager does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.maxvit import MaxVit

pytestmark = pytest.mark.slow

# The smallest variant of each family: options, and the smallest sensible height and width.
SAMPLE: dict[str, tuple[dict[str, Any], int]] = {
    "alexnet": ({}, 64),
    "mobilenet_v3_small": ({}, 32),
    "resnet18": ({}, 32),
    "shufflenet_v2_x0_5": ({}, 32),
    "squeezenet1_1": ({}, 32),
    "vgg11_bn": ({}, 32),
}
REST: dict[str, tuple[dict[str, Any], int]] = {
    "convnext_tiny": ({}, 32),
    "densenet121": ({}, 32),
    "efficientnet_b0": ({}, 32),
    "efficientnet_v2_s": ({}, 32),
    "googlenet": ({"aux_logits": True, "init_weights": False}, 64),
    "inception_v3": ({"aux_logits": True, "init_weights": False}, 299),
    "inception_v3 without aux": ({"aux_logits": False, "init_weights": False}, 75),
    "mnasnet0_5": ({}, 32),
    "mobilenet_v2": ({}, 32),
    "mobilenet_v3_large": ({}, 32),
    "regnet_x_400mf": ({}, 32),
    "regnet_y_400mf": ({}, 32),
    "resnet50": ({}, 32),
    "resnext50_32x4d": ({}, 32),
    "squeezenet1_0": ({}, 32),
    "swin_t": ({}, 32),
    "swin_v2_t": ({}, 32),
    "vgg11": ({}, 32),
    "vit_b_16": ({"image_size": 32}, 32),
    "wide_resnet50_2": ({}, 32),
}
# `maxvit_t` trains at 224 only; this is the same code, smaller.
OWN_TEST = {"maxvit"}


def make(name: str, options: dict[str, Any]) -> nn.Module:
    return torchvision.models.get_model(name.split()[0], num_classes=10, **options)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_classifier_trains_as_eager(name: str, assert_bit_equal: Callable[..., Any]) -> None:
    options, side = SAMPLE[name]
    assert_bit_equal(lambda: make(name, options), lambda: torch.randn(2, 3, side, side))


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_every_other_family_trains_as_eager(
    name: str, assert_bit_equal: Callable[..., Any]
) -> None:
    options, side = REST[name]
    assert_bit_equal(lambda: make(name, options), lambda: torch.randn(2, 3, side, side))


def test_a_checkpointed_densenet_trains_as_one_that_is_not(
    assert_bit_equal: Callable[..., Any],
) -> None:
    # Eager would update the statistics of its BatchNorms twice.
    assert_bit_equal(
        lambda: make("densenet121", {"memory_efficient": True}),
        lambda: torch.randn(2, 3, 32, 32),
        make_reference=lambda: make("densenet121", {}),
    )


def test_a_small_maxvit_trains_as_eager(assert_bit_equal: Callable[..., Any]) -> None:
    assert_bit_equal(
        lambda: MaxVit(
            input_size=(32, 32),
            stem_channels=8,
            partition_size=2,
            block_channels=[8, 16],
            block_layers=[1, 1],
            head_dim=8,
            stochastic_depth_prob=0.2,
            num_classes=10,
        ),
        lambda: torch.randn(2, 3, 32, 32),
    )


def test_no_family_is_forgotten() -> None:
    tested = {family(name) for name in (*SAMPLE, *REST)} | OWN_TEST
    listed = torchvision.models.list_models(module=torchvision.models)
    assert {family(name) for name in listed} <= tested


def family(name: str) -> str:
    """Strip a size from a name: `resnet18` and `resnet152` are one family."""
    name = re.sub(r"^(vgg)\d+", r"\1", name.split()[0])
    name = re.sub(r"_(\d+x\d+d|x?\d+_\d+|\d+(_\d+)?[gm]f|tiny|small|base|large|[tsblm])$", "", name)
    name = re.sub(r"_b\d$|_[blh]_\d+$", "", name)
    return re.sub(r"(?<=net)\d[\d_]*", "", re.sub(r"(?<=resnext)\d+.*|_2$", "", name))

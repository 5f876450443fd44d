"""Models of torchvision and timm in a loop of one's own, as their users write it.

A torchvision from PyPI is built for a GPU. Beside a CPU build of torch it can be imported if its two operators without
an implementation are declared. Both libraries are optional: pip install --no-deps torchvision timm
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dtrain
from tests.helpers.oracle import normwise_error

F = nn.functional

_OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[torch.library.Library] = []  # an operator lives as long as its library


def library(name: str) -> Any:
    """Imports a module of torchvision or timm, or skips the test."""
    for top in ("torchvision", "timm"):
        if importlib.util.find_spec(top) is None:
            pytest.skip(f"{top} is not installed; pip install --no-deps torchvision timm")
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:  # of a build for another torch
        if "torchvision::nms" not in str(error):
            raise
        for module in [one for one in sys.modules if one.partition(".")[0] == "torchvision"]:
            del sys.modules[module]
        _declared.append(torch.library.Library("torchvision", "DEF"))
        for operator, schema in _OPERATORS.items():
            _declared[-1].define(operator + schema)
    return importlib.import_module(name)


def resnet() -> nn.Module:
    module = library("torchvision.models.resnet")
    model: nn.Module = module.ResNet(module.BasicBlock, [1, 1, 1, 1], num_classes=4, width_per_group=64)
    return model


def densenet() -> nn.Module:
    model: nn.Module = library("torchvision.models").DenseNet(
        growth_rate=8, block_config=(2, 2), num_init_features=16, num_classes=4
    )
    return model


def swin() -> nn.Module:
    model: nn.Module = library("torchvision.models").SwinTransformer(
        [2, 2], embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=[4, 4], stochastic_depth_prob=0.0,
        num_classes=4,
    )  # fmt: skip
    return model


def vit() -> nn.Module:
    model: nn.Module = library("timm.models.vision_transformer").VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=4
    )
    return model


def convnext() -> nn.Module:
    model: nn.Module = library("timm.models.convnext").ConvNeXt(
        depths=(1, 1, 1, 1), dims=(8, 16, 32, 64), num_classes=4
    )
    return model


def images() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4


@pytest.mark.parametrize("build", [resnet, densenet, swin, vit, convnext])
@pytest.mark.parametrize("stage", [2, 3])
def test_trains_as_plain_torch_and_in_bf16(build: Callable[[], nn.Module], stage: int) -> None:
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(build())
    plain, *own = models
    settings: dict[str, Any] = {"optimizer": dtrain.SGD(lr=0.02, momentum=0.9), "max_grad_norm": None, "seed": 0}
    exact, low = (
        dtrain.initialize(model, precision=precision, zero_stage=stage, **settings)
        for model, precision in zip(own, ("fp32", "bf16"), strict=True)
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.02, momentum=0.9)
    x, y = images()
    losses: list[list[float]] = []
    for _ in range(4):
        wanted = F.cross_entropy(plain(x), y)
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
        losses.append([wanted.item()])
        for engine in (exact, low):
            loss = F.cross_entropy(engine(x), y)
            engine.backward(loss)
            assert engine.step().applied
            losses[-1].append(loss.item())
    for wanted_loss, in_fp32, _ in losses:
        assert in_fp32 == pytest.approx(wanted_loss, rel=1e-5)
    assert losses[0][2] == pytest.approx(losses[0][0], rel=0.03)  # later steps amplify what BF16 has rounded
    assert all(last < first for first, last in zip(losses[0], losses[-1], strict=True))
    masters = exact.master_state()
    assert normwise_error(masters, {name: p.detach() for name, p in plain.named_parameters()}) < 1e-5

"""``model=convnet``: shapes, formats, memory layout, and training as plain PyTorch does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.errors import ConfigError
from dtrain.models.task_model import TaskModel
from dtrain.parameters.groups import find_units
from tests.helpers.image_models import batch, build, classification, start, train

TASK = classification(3, 12, 10)
UNITS = ["model.blocks.0", "model.blocks.1", "model.blocks.2"]


def network(**keys: Any) -> TaskModel:
    return build("images.convnet", TASK, **{"num_layers": 1, "hidden_dim": 16} | keys)


def test_its_shapes_and_that_gradients_reach_every_parameter() -> None:
    model = network()
    convolutions = 9 * (3 * 16 + 2 * 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64) + 16 * 32 + 32 * 64
    norms = 2 * (3 * 16 + 3 * 32 + 3 * 64)
    assert sum(p.numel() for p in model.parameters()) == convolutions + norms + 64 * 16 + 16, "5 classes padded to 16"
    assert find_units(model, "auto") == UNITS
    output = model(**batch(TASK))
    assert output.prediction.shape == (8, 5)
    output.loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("shape", [(7,), (3, 3, 32), (1, 3, 8, 8)])
def test_other_inputs_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^model=convnet takes images .*(choose model=mlp|3 x 32; resize)"):
        build("images.convnet", classification(*shape))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.exhaustive), "fp8"])
def test_norms_stay_in_fp32(precision: str) -> None:
    model = network()
    engine = start(model, precision=precision)
    train(engine, TASK, steps=1)
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    low = torch.float16 if precision == "fp16" else torch.bfloat16
    assert len(norms) == 9
    for name, norm in norms.items():
        assert norm.weight.dtype == norm.running_mean.dtype == torch.float32, name
        assert norm.num_batches_tracked == 1
        assert norm.running_mean.any(), name
        assert engine.contract.replica_dtypes[f"{name}.weight"] == torch.float32
    assert model.model.stem.weight.dtype == model.model.blocks[1].shortcut.weight.dtype == low
    # convolutions have no FP8 products, and the last Linear computes in BF16 unless a rule says otherwise
    assert engine.contract.float8_modules == ()
    if precision == "fp8":
        engine = start(network(), precision=dtrain.PrecisionPolicy.named("fp8", rules={"model.head": "fp8"}))
        assert engine.contract.float8_modules == ("model.head",)
        train(engine, TASK, steps=1)


def test_channels_last_changes_the_layout_and_no_number() -> None:
    results = []
    for channels_last in (False, True, "auto"):
        model = network(channels_last=channels_last)
        seen: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(lambda _, args, output, seen=seen: seen.append(output))
        output = model(**batch(TASK))
        output.loss.backward()
        assert len(seen) == 9
        for convolved in seen:
            assert convolved.is_contiguous(memory_format=torch.channels_last) is bool(channels_last)
        assert all(p.is_contiguous() for p in model.parameters())
        results.append((output.prediction, *(p.grad for p in model.parameters())))
    for plain, last, auto in zip(*results, strict=True):
        torch.testing.assert_close(plain, last, rtol=1e-4, atol=1e-5)
        assert torch.equal(last, auto), "auto has the channels last on a CPU"


def test_every_stage_trains_as_plain_pytorch() -> None:
    plain = network().train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        loss = plain(**batch(TASK, seed=step)).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for stage in (0, 3):
        model = network()
        engine = start(model, engine=dtrain.Native(zero_stage=stage))
        torch.testing.assert_close(train(engine, TASK), losses, rtol=1e-6, atol=0.0)
        masters = engine.master_state()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(masters[name], parameter.detach(), rtol=1e-5, atol=1e-6)
        for (name, got), want in zip(model.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=name)


def test_recomputation_changes_no_bit_of_weights_and_statistics() -> None:
    results = []
    for blocks in (None, dtrain.Blocks(recompute="full")):
        model = network()
        engine = start(model, blocks=blocks)
        losses = train(engine, TASK)
        results.append((losses, engine.master_state(), dict(model.named_buffers())))
    (want_losses, *want), (losses, *got) = results
    assert losses == want_losses
    for expected, found in zip(want, got, strict=True):
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)

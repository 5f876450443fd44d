"""Offloaded states beside a GPU: the order of real copies, the memory of the device, and the results."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.sharding.offload import Copied, DeviceLink
from tests.gpu.device import DEVICE, needs_gpu

pytestmark = needs_gpu("two memories")
DIM, NUM_BLOCKS = 1024, 8


class Blocks(nn.Module):
    """Eight groups of 2 MiB in BF16, and as many products."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.float().square().mean()


def make(offload: str, **options: Any) -> Any:
    torch.manual_seed(0)
    settings = {"precision": "bf16", "zero_stage": 2, "seed": 0, "optimizer": dtrain.AdamW(lr=1e-3), **options}
    return dtrain.initialize(Blocks().to(DEVICE), offload=offload, **settings)


def train(engine: Any, num_steps: int = 5, num_micro_batches: int = 2) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    outcomes = []
    for _ in range(num_steps):
        for _ in engine.accumulate(range(num_micro_batches)):
            engine.backward(engine(torch.randn(2048, DIM, generator=generator).to(DEVICE)))
        outcomes.append(engine.step())
    return [outcome.loss for outcome in outcomes]


class _Waiting(DeviceLink):
    """A link whose copies are complete when they return."""

    def start_to_host(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Copied:
        return self._after(super().start_to_host(pairs))

    def start_to_device(self, target: Tensor, source: Tensor) -> Copied:
        return self._after(super().start_to_device(target, source))

    def _after(self, copied: Copied) -> Copied:
        torch.cuda.synchronize(self.device)
        return copied


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_overlapping_copies_change_no_bit(stage: int) -> None:
    overlapping = make("cpu", zero_stage=stage)
    with mock.patch("dtrain.sharding.offload.DeviceLink", _Waiting):
        waiting = make("cpu", zero_stage=stage)
    assert train(overlapping) == train(waiting)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        expected = dict(waiting.full_state(kind))
        assert all(torch.equal(expected[name], tensor) for name, tensor in overlapping.full_state(kind))


def test_the_losses_are_those_of_states_on_the_device() -> None:
    assert train(make("cpu")) == pytest.approx(train(make("none")), rel=1e-3)


def test_the_device_holds_what_the_formula_says() -> None:
    train(make("none"), 1)  # cuBLAS takes a workspace for each thread that calls it; backward has its own
    gc.collect()
    before = torch.cuda.memory_allocated(DEVICE)
    engine = make("cpu")
    train(engine, 2)
    memory = engine.memory()
    on_device = {kind: nbytes for kind, nbytes in memory.items() if kind not in engine.host_kinds}
    assert on_device["compute"] == engine.memory_formula()["compute"] == 2 * engine.num_parameters
    held = torch.cuda.memory_allocated(DEVICE) - before
    # the rest is small change, such as losses
    assert 0 <= held - sum(on_device.values()) < 8 * 2**20
    for buffer in engine.sharded.buffers:
        assert {buffer.master.device.type, buffer.gradient.main_grad.device.type} == {"cpu"}
    assert all(tensor.is_pinned() for tensor in engine.sharded.offload.on_host if tensor.numel())

"""Weights that the user writes between steps are trained on, as in plain PyTorch, or refused by a named error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.engine.step import StepEngine
from dtrain.errors import DivergenceError, UsageError
from dtrain.parameters.groups import decayed_names
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

LR, DECAY = 1e-2, 0.1
X, Y = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
# ZeRO shards nothing on a single rank, except with fsdp2 and deepspeed
SINGLE = [("native", 0), ("native", 2), ("ddp", 0), ("fsdp2", 2), ("fsdp2", 3)]
SEVERAL = [("native", 0), ("native", 1), ("native", 2), ("native", 3), ("ddp", 0), ("fsdp2", 3)]


class Net(nn.Module):
    """Units, tied and frozen weights, and a parameter of one element."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)])
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.head = nn.Linear(4, 4)
            self.last = nn.Linear(4, 4)
        self.last.weight = self.head.weight
        self.gain = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(torch.tanh(self.head(self.frozen(x)))) * self.gain


def loss_of(model: Any) -> Tensor:
    return nn.functional.mse_loss(model(X), Y)


def start(engine: str, stage: int, precision: str = "fp32", **options: Any) -> StepEngine:
    torch.set_num_threads(1)
    built = dtrain.initialize(
        Net(0), optimizer=dtrain.AdamW(lr=LR, weight_decay=DECAY), engine=engine, zero_stage=stage,
        precision=precision, max_grad_norm=None, seed=0, **options,
    )  # fmt: skip
    assert isinstance(built, StepEngine)
    return built


def train_step(engine: StepEngine) -> None:
    engine.backward(loss_of(engine))
    assert engine.step().applied


class Reference:
    """The same training in plain PyTorch."""

    def __init__(self) -> None:
        self.module = Net(0)
        decayed = decayed_names(self.module)
        groups = [
            {"params": [p for n, p in self.trained() if (n in decayed) is decays], "weight_decay": DECAY * decays}
            for decays in (True, False)
        ]
        betas = dtrain.AdamW().betas
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=betas, eps=dtrain.AdamW().eps)

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss_of(self.module).backward()
            self.optimizer.step()

    def require_equal(self, engine: StepEngine) -> None:
        masters = engine.master_state()
        for name, parameter in self.trained() if engine.rank == 0 else ():
            torch.testing.assert_close(masters[name], parameter.detach(), rtol=1e-6, atol=1e-6, msg=f"{name} differs")


# -- ways to write -----------------------------------------------------------------------------------------------------


def load_state_dict(model: nn.Module) -> None:
    model.load_state_dict(Net(1).state_dict())


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.2, 0.2)


@torch.no_grad()
def zero(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.zero_()


def write_modified(engine: StepEngine, write: Callable[[nn.Module], None]) -> None:
    kept = dict(engine.module.named_parameters())
    with engine.modify_weights():
        for name, parameter in engine.module.named_parameters():
            assert parameter.shape == Net(0).get_parameter(name).shape
            assert parameter.dtype == torch.float32 or not parameter.requires_grad
            assert engine.name == "fsdp2" or parameter is kept[name]
        write(engine.module)
    for name, parameter in engine.module.named_parameters():
        assert parameter is kept[name], name


def follow(engine: StepEngine, write: Callable[[nn.Module], None], *, modifies: bool) -> None:
    """Trains, writes and trains again, beside plain PyTorch."""
    reference = Reference()
    train_step(engine)
    reference.train(1)
    if modifies:
        write_modified(engine, write)
    else:
        write(engine.module)
    write(reference.module)
    for _ in range(3):
        train_step(engine)
    reference.train(3)
    reference.require_equal(engine)


@pytest.mark.parametrize("modifies", [False, True], ids=["in_place", "modify_weights"])
@pytest.mark.parametrize("write", [load_state_dict, clamp])
@pytest.mark.parametrize(("name", "stage"), SINGLE)
def test_training_goes_on_from_what_was_written(
    name: str, stage: int, write: Callable[[nn.Module], None], modifies: bool
) -> None:
    engine = start(name, stage)
    if name == "fsdp2" and write is load_state_dict and not modifies:
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            write(engine.module)
        return
    follow(engine, write, modifies=modifies)


def deepspeed_cases(rank: int, world: int, stage: int) -> None:
    for write in (load_state_dict, clamp):
        follow(start("deepspeed", stage), write, modifies=True)
        if stage < 3:
            follow(start("deepspeed", stage), write, modifies=False)
    if stage:
        require_unrounded(start("deepspeed", stage, "bf16"), in_place=stage < 3)
    if stage == 3:
        engine = start("deepspeed", stage)
        train_step(engine)
        clamp(engine.module)  # of empty tensors, so it does nothing
        with pytest.raises(UsageError, match=r"was written to .* engine.modify_weights"):
            engine.save("nowhere")
        train_step(engine)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeed_goes_on_from_what_was_written(stage: int) -> None:
    run_ranks(1, deepspeed_cases, stage)


# -- in BF16: rounding -------------------------------------------------------------------------------------------------


@torch.no_grad()
def require_unrounded(engine: StepEngine, *, in_place: bool) -> None:
    """Writes a part of each parameter; elsewhere the masters keep what their replicas round off."""
    with torch.enable_grad():
        train_step(engine)
    before = engine.master_state()
    assert any(not torch.equal(t, t.bfloat16().float()) for t in before.values())
    if in_place:
        for parameter in engine.module.parameters():
            parameter[:1] = 0.3
        after = engine.master_state()
        for name, old in before.items():
            assert torch.equal(after[name][:1], torch.full_like(old[:1], 0.3).to(engine.module.get_parameter(name).dtype).float())
            assert torch.equal(after[name][1:], old[1:]), name
        before = after
    with engine.modify_weights("blocks.*"):
        for name, parameter in engine.module.named_parameters():
            if name.startswith("blocks"):
                assert torch.equal(parameter, before[name])
                parameter[:1].mul_(0.7)
    after = engine.master_state()
    for name, old in before.items():
        assert torch.equal(after[name][:1], old[:1] * 0.7 if name.startswith("blocks") else old[:1]), name
        assert torch.equal(after[name][1:], old[1:]), name


@pytest.mark.parametrize(("name", "stage"), [("native", 0), ("native", 2), ("ddp", 0)])
def test_masters_keep_their_bits_where_nothing_was_written(name: str, stage: int) -> None:
    require_unrounded(start(name, stage, "bf16"), in_place=True)


def test_fsdp2_takes_over_the_low_precision_parameters_that_it_replicates() -> None:
    engine = start("fsdp2", 3, "bf16")
    train_step(engine)
    engine._replicated._low_precision  # noqa: B018

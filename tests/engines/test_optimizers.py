"""Every elementwise optimizer in the engines: equal bits at every stage and world size, torch's results, skips."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dtrain
from dtrain.config.optim import SGD, Adam, AdamW, AdamWBF16, Lion, Optimizer
from dtrain.engine.step import StepEngine
from tests.engines.helpers import VOCAB, digest, train_step
from tests.helpers.arena import torch_optimizer
from tests.helpers.one_rank import build as small_model
from tests.helpers.one_rank import loss_of
from tests.helpers.one_rank import start as start_small
from tests.helpers.one_rank import train_step as train_small
from tests.helpers.oracle import assert_close_to_largest
from tests.helpers.ranks import run_ranks

SLOWER: dict[str, Any] = {"*up*": {"lr_factor": 0.3, "weight_decay": 0.02}, "head.bias": {"weight_decay": 0.1}}
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": AdamW(lr=3e-3, groups=SLOWER),
    "adamw-bf16": AdamWBF16(lr=3e-3, groups={**SLOWER, "blocks.1*": {"betas": (0.8, 0.9)}}),
    "adam": Adam(lr=3e-3, weight_decay=0.01, groups=SLOWER),
    "sgd": SGD(lr=0.3, nesterov=True, weight_decay=0.01, groups=SLOWER),
    "lion": Lion(lr=1e-3, groups=SLOWER),
}
MICRO_BATCHES = 12
STAGES = {
    1: ((0, 3), (0, 3)),  # nothing is sharded
    2: ((0, 1, 2, 3), (0, 1, 2, 3)),
    3: ((0, 2), (1, 3)),
    4: ((1, 3), (0, 2)),
}
"""By number of ranks: stages of every other optimizer, and of the rest. All pairs of the three come."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.up = nn.Linear(48, 100)
        self.down = nn.Linear(100, 48)

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + residual


class Model(nn.Module):
    """Each block's flat buffer has ten chunks, so that four ranks share it unevenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 48)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(48, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float()[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def start(engine: str, stage: int, optimizer: Optimizer, *, seed: int = 5, **options: Any) -> StepEngine:
    """The model under an engine; ``seed`` decides its weights too."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"precision": "bf16", "max_grad_norm": 0.05, **options}
    built = dtrain.initialize(Model(), optimizer=optimizer, engine=engine, zero_stage=stage, seed=seed, **settings)
    assert isinstance(built, StepEngine)
    return built


def state_of(engine: StepEngine) -> dict[str, str]:
    """Digests of masters and states in full; all ranks call."""
    kinds = ("master", *engine.plan.specs)
    return {f"{kind}:{name}": digest(tensor) for kind in kinds for name, tensor in engine.full_state(kind)}


def train(engine: StepEngine) -> dict[str, str]:
    for _ in range(2):
        assert train_step(engine, MICRO_BATCHES).applied
    return state_of(engine)


def run_native(rank: int, world: int, folder: Path) -> dict[tuple[str, int], list[dict[str, str]]]:
    """Returns the states after 2 and 4 steps, at each stage; one rank saves the former."""
    found = {}
    for number, (name, record) in enumerate(OPTIMIZERS.items()):
        for stage in STAGES[world][number % 2]:
            engine = start("native", stage, record, reproducible=True)
            half = train(engine)
            if (world, stage) == (1, 0):
                engine.save(folder / name)
            found[name, stage] = [half, train(engine)]
    return found


def run_resumed(rank: int, world: int, folder: Path) -> dict[str, list[dict[str, str]]]:
    """Returns the states when each optimizer's checkpoint is loaded, and after 2 more steps."""
    found = {}
    for name, record in OPTIMIZERS.items():
        engine = start("native", world - 1, record, reproducible=True, seed=7)
        engine.load(folder / name)
        found[name] = [state_of(engine), train(engine)]
    return found


def run_library(rank: int, world: int, folder: Path) -> dict[str, list[dict[str, str]]]:
    """Returns the states when a library's engine has loaded each checkpoint, and when native loads what it saves."""
    found = {}
    for engine, stage in (("ddp", 0), ("fsdp2", 3)):
        for name, record in OPTIMIZERS.items():
            library = start(engine, stage, record, seed=7)
            library.load(folder / name)
            loaded = state_of(library)
            trained = train(library)
            library.save(folder / f"{name}-{engine}")
            native = start("native", 2, record, seed=8)
            native.load(folder / f"{name}-{engine}")
            assert state_of(native) == trained, (engine, name)
            found[f"{engine} {name}"] = [loaded]
    return found


def run_all(rank: int, world: int, folder: Path) -> list[Any]:
    native = run_native(rank, world, folder)
    resumed = run_resumed(rank, world, folder) if world > 1 else {}
    return [native, resumed, run_library(rank, world, folder) if world == 2 else {}]


@pytest.mark.processes
def test_every_stage_world_size_and_engine_has_the_same_bits(tmp_path: Path) -> None:
    (native, _, _), *_ = run_ranks(1, run_all, tmp_path)
    for world in (2, 3, 4):
        own, resumed, library = run_ranks(world, run_all, tmp_path)[0]
        for (name, stage), states in own.items():
            assert states == native[name, 0], f"{name}, stage {stage}, {world} ranks"
        for name, states in resumed.items():
            assert states == native[name, 0], f"{name} resumed on {world} ranks"
        for case, (loaded,) in library.items():
            assert loaded == native[case.split()[1], 0][0], f"{case} on {world} ranks"
    assert all(half != whole for half, whole in native.values())


@pytest.mark.parametrize("engine", ["native", "ddp"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_follows_torch(name: str, engine: str) -> None:
    """With BF16 moments only the first step follows torch's: masters move by the moments before they are rounded."""
    record: Any = replace(OPTIMIZERS[name], groups={"2.*": {"lr_factor": 0.3, "weight_decay": 0.02}})
    trained = start_small(engine=engine, optimizer=record, max_grad_norm=None)
    model = small_model()
    groups = [
        {"params": [parameter], "weight_decay": 0.02 if name.startswith("2.") else record.weight_decay, "lr": lr}
        if name.startswith("2.") or parameter.dim() > 1
        else {"params": [parameter], "weight_decay": 0.0, "lr": lr}
        for name, parameter in model.named_parameters()
        for lr in [record.lr * (0.3 if name.startswith("2.") else 1.0)]
    ]
    reference = torch_optimizer(record, groups)
    for _ in range(1 if isinstance(record, AdamWBF16) else 20):
        assert train_small(trained).applied
        reference.zero_grad()
        loss_of(model).backward()
        reference.step()
    assert_close_to_largest(trained.master_state(), {n: p.detach() for n, p in model.named_parameters()}, 1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_hundred_overflows_leave_every_bit(name: str) -> None:
    record = replace(OPTIMIZERS[name], groups={})
    engine = start_small(optimizer=record, engine=dtrain.Native(max_consecutive_skips=1000))
    assert train_small(engine).applied
    before = state_of(engine)
    for number in range(100):
        engine.backward(loss_of(engine) * (math.inf if number % 2 else math.nan))
        assert not engine.step().applied
    assert state_of(engine) == before
    assert train_small(engine).applied
    assert state_of(engine) != before


def test_sgd_without_momentum_keeps_no_state() -> None:
    engine = start_small(optimizer=SGD(momentum=0.0))
    assert train_small(engine).applied
    assert engine.memory()["moments"] == 0

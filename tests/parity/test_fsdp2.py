"""The FSDP2 engine: its collectives, sharded FP32 modules, shared weights, evaluation, culprits and guards."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.engine.adapters.fsdp2 import units as fsdp2_units
from dtrain.errors import ContractError, ModelError, UsageError
from tests.helpers.net import Net
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Result, Run, forward_backward, start, train, train_engine

pytestmark = pytest.mark.processes


def fsdp2(model: str = "transformer", precision: str = "bf16", stage: int = 3, **run: Any) -> Run:
    options = {"engine": "fsdp2", "precision": precision, "zero_stage": stage}
    return Run(model, options=options, **{"accumulation": 2, "unequal_weights": True, **run})


def train_with_sharded_fp32_modules(rank: int, world: int, run: Run) -> tuple[Result, Result, list[int]]:
    whole = train(rank, world, run)
    with mock.patch.object(fsdp2_units, "LARGE_NUMEL", 1):
        sharded = start(run)
    return whole, train_engine(sharded, run), sharded.memory_formula()["master"]


def test_large_fp32_modules_are_sharded() -> None:
    """Norms are whole on every rank; as large as a unit, they are shards, and nothing else changes."""
    whole, sharded, held = run_ranks(2, train_with_sharded_fp32_modules, fsdp2(steps=3))[0]
    assert held == 2 * sum(master.numel() for master in whole.masters.values()), "4 bytes an element, on two ranks"
    for name, master in whole.masters.items():  # in another order of sums
        torch.testing.assert_close(sharded.masters[name], master, rtol=1e-4, atol=1e-6, msg=name)


def collectives_of_a_step(rank: int, world: int, run: Run) -> Counter[str]:
    engine = start(run)
    for step in range(2):
        forward_backward(engine, run, step)
        log = list(engine.comm.schedule.log)
        engine.step()
    assert engine.memory()["unsharded"] == 0, "no gathered weight outlives the step"
    return Counter(entry.split(",")[0] for entry in log)


def test_stage_2_gathers_once_a_step() -> None:
    """Stage 3 gathers a block for each of two forwards and backwards, and the root, which stays, for each forward."""
    for stage, gathers, of_root in ((2, 1, 1), (3, 4, 2)):
        log = run_ranks(2, collectives_of_a_step, fsdp2(stage=stage))[0]
        assert log["all_gather(weights of blocks.0"] == gathers
        assert log["all_gather(weights of root"] == of_root
        assert log["all_to_all_single(gradients of blocks.0"] == 2


def evaluate_between(rank: int, world: int, run: Run) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Forwards in eval mode after a step, and between the backward of two micro-batches."""
    engine, undisturbed = start(run), start(run)
    tokens = torch.arange(6).expand(2, 6)
    losses = []
    for _ in range(3):
        with engine.eval():
            losses.append(engine(tokens=tokens).item())
        for index in engine.accumulate([rank, world + rank]):
            loss = engine(tokens=(tokens + index) % 13)
            with engine.eval():
                losses.append(engine(tokens=tokens).item())
            engine.backward(loss)
        for index in undisturbed.accumulate([rank, world + rank]):
            undisturbed.backward(undisturbed(tokens=(tokens + index) % 13))
        assert engine.step() == undisturbed.step()
    return losses, engine.master_state(), undisturbed.master_state()


def test_forwards_in_eval_mode_see_the_new_weights_and_disturb_nothing() -> None:
    for stage in (2, 3):
        losses, masters, expected = run_ranks(2, evaluate_between, fsdp2("tied", "fp32", stage))[0]
        assert len({*losses}) == 3, "one value for each state of the weights"
        assert losses[0::3] == losses[1::3] == losses[2::3]
        assert all(torch.equal(masters[name], master) for name, master in expected.items())


class Shared(nn.Module):
    """A weight that two units share, and one that a unit shares with the model, which has others before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5)) for _ in range(2))
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.blocks[1][1].weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.embedding(tokens))
        return nn.functional.cross_entropy(self.blocks[1](x + self.blocks[0](x)[..., :4]).float(), tokens)


def train_shared(rank: int, world: int) -> list[dict[str, Tensor]]:
    found = []
    for engine in ("native", "fsdp2"):
        torch.manual_seed(0)
        trained = dtrain.initialize(Shared(), engine=engine, precision="fp32", seed=0, optimizer=dtrain.AdamW(eps=1e-3))
        for step in range(3):
            trained.backward(trained((torch.arange(6) + rank + step) % 5), weight=1.0 + rank)
            assert trained.step().applied
        found.append(trained.master_state())
    return found


def test_weights_that_units_share() -> None:
    native, fsdp2 = run_ranks(2, train_shared)[0]
    for name, master in native.items():
        torch.testing.assert_close(fsdp2[name], master, rtol=1e-5, atol=1e-7, msg=name)


class HidesItsOutput(nn.Linear):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return type("Opaque", (), {"value": super().forward(x)})()


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        if self.fails:
            raise ValueError("a bad batch")
        return x


def misuse(rank: int, world: int) -> list[str]:
    x = torch.ones(2, 4)

    def begin(module: nn.Module) -> Any:
        return dtrain.initialize(module, engine="fsdp2", precision="fp32", seed=0)

    engine = begin(HidesItsOutput(4, 4))
    with pytest.raises(ModelError, match="reduced no gradient: fully_shard finds no tensor"):
        engine.backward(engine(x).value.sum())
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
    engine = begin(Net(lambda net, x: net.blocks[1](net.blocks[0][0](x)), blocks=blocks))
    with pytest.raises(ModelError, match="a parameter of a unit was read outside a call of that unit"):
        engine(x)
    with pytest.raises(UsageError, match=r"outside engine\.backward; call engine\.backward"):
        begin(Failing())(x).sum().backward()
    engine = begin(Failing())
    engine.module.fails = True
    with pytest.raises(ValueError, match="a bad batch"):
        engine(x)
    engine.module.fails = False
    engine.backward(engine(x).sum())
    assert engine.step().applied, "a forward that failed leaves nothing behind"
    engine.module.layers[0].weight.requires_grad_(False)
    engine.backward(engine(x).sum())
    with pytest.raises(ContractError, match=r"'layers\.0\.weight' was frozen after dtrain\.initialize"):
        engine.step()
    return listening()


def listening() -> list[str]:
    """The addresses on which this process listens, in the kernel's hexadecimal."""
    own = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.exists()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]


def test_misuse_is_named_and_one_rank_listens_on_loopback_alone() -> None:
    addresses = run_ranks(1, misuse)[0]
    assert set(addresses) <= {"0100007F", "00000000000000000000000001000000"}

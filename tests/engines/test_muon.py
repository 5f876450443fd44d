"""Muon over sharded masters: the same bits at every stage and world size, and torch's own update."""

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
from dtrain.config.optim import Muon
from dtrain.engine.step import StepEngine
from dtrain.errors import CheckpointError
from tests.engines.helpers import digest
from tests.helpers.ranks import run_ranks

DIM, KV, VOCAB, MICRO_BATCHES = 48, 24, 11, 12
# exact in FP32, in which AdamW takes it here: Newton-Schulz amplifies the last bit of a gradient of low rank 500 times
LR = 2.0**-9
RECORD = Muon(lr=LR, weight_decay=0.1, splits={"*.qkv": [DIM, KV, KV]})


class Block(nn.Module):
    """A fused weight, matrices that chunks cut, and matrices of one row and of one column."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        qkv = torch.randn(DIM + 2 * KV, DIM) / 7
        if is_fused:
            self.qkv = nn.Parameter(qkv)
        else:
            self.q, self.k, self.v = map(nn.Parameter, qkv.split([DIM, KV, KV]))
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 100)
        self.down = nn.Linear(100, DIM, bias=False)
        self.row = nn.Linear(DIM, 1, bias=False)
        self.column = nn.Parameter(torch.randn(DIM, 1))

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv if hasattr(self, "qkv") else torch.cat([self.q, self.k, self.v])
        q, k, v = F.linear(self.norm(x), fused).split([DIM, KV, KV], dim=-1)
        x = x + q * torch.cat([k, v.tanh()], dim=-1)
        x = x + self.down(F.gelu(self.up(x)))
        moved: Tensor = x + self.row(x).sigmoid() * self.column.view(-1)
        return moved


class Model(nn.Module):
    def __init__(self, *, is_fused: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embed = nn.Embedding(VOCAB, DIM)
            self.blocks = nn.ModuleList(Block(is_fused=is_fused) for _ in range(2))
            self.mix = nn.Linear(DIM, 2 * DIM)
            self.head = nn.Linear(2 * DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor, *, overflows: bool = False) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if overflows:
            x = x + (0 * x).sqrt()  # no change, and a gradient of Inf x 0
        loss: Tensor = F.cross_entropy(self.head(self.mix(x))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return loss


def batch(index: int) -> Tensor:
    return torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(index))


def start(engine: str, stage: int, **options: Any) -> StepEngine:
    torch.set_num_threads(1)
    options = {"optimizer": RECORD, "precision": "fp32", "max_grad_norm": None, **options}
    built = dtrain.initialize(Model(), engine=engine, zero_stage=stage, seed=0, **options)
    assert isinstance(built, StepEngine)
    return built


def train(engine: StepEngine, num_steps: int, num_micro_batches: int = MICRO_BATCHES) -> None:
    for _ in range(num_steps):
        step = engine.attempted_steps
        for index in engine.accumulate(range(engine.rank, num_micro_batches, engine.world_size)):
            engine.backward(engine(tokens=batch(num_micro_batches * step + index)))
        engine.data_cursor += num_micro_batches
        assert engine.step().applied


def overflow(engine: StepEngine, factor: float) -> None:
    """A step with gradients that are not finite, and a loss that is not if ``factor`` is not."""
    for index in engine.accumulate([engine.rank]):
        engine.backward(engine(tokens=batch(index), overflows=True) * factor)
    outcome = engine.step()
    assert outcome.reason == ("overflow" if math.isfinite(factor) else "nonfinite_loss")


def state_of(engine: StepEngine) -> dict[str, str]:
    kinds = ("master", "momentum", "exp_avg", "exp_avg_sq")
    return {f"{kind}:{name}": digest(tensor) for kind in kinds for name, tensor in engine.full_state(kind)}


# -- the same bits everywhere ------------------------------------------------------------------------------------------


def run_stages(rank: int, world: int, folder: Path) -> list[tuple[dict[str, str], list[str]]]:
    """Returns the state after two steps at each stage, and the collectives of the second that move matrices."""
    found = []
    for stage in range(4):
        engine = start("native", stage, precision="bf16", max_grad_norm=0.5, reproducible=True)
        train(engine, 2)
        moved = [entry for entry in engine.comm.schedule.log if "owners" in entry]
        found.append((state_of(engine), moved))
        engine.save(folder / f"{world}-{stage}")
    return found


def run_resumed(rank: int, world: int, stage: int, source: Path | None) -> dict[str, str]:
    engine = start("native", stage, precision="bf16", max_grad_norm=0.5, reproducible=True)
    if source is not None:
        engine.load(source)
    train(engine, 4 - engine.attempted_steps)
    return state_of(engine)


def test_a_checkpoint_in_which_adamw_updated_other_matrices_is_refused(tmp_path: Path) -> None:
    start("native", 1).save(tmp_path)
    others = start("native", 1, optimizer=replace(RECORD, adamw=["mix"]))
    with pytest.raises(
        CheckpointError, match=r"no exp_avg(_sq)? of 'mix\.weight', which the optimizer keeps; .* groups"
    ):
        others.load(tmp_path)


@pytest.mark.processes
def test_all_states_have_the_same_bits_at_every_stage_and_world_size(tmp_path: Path) -> None:
    found = {world: run_ranks(world, run_stages, tmp_path) for world in (1, 2, 3, 4)}
    first = found[1][0][0][0]
    assert {name.partition(":")[0] for name in first} == {"master", "momentum", "exp_avg", "exp_avg_sq"}
    for world, results in found.items():
        for rank, by_stage in enumerate(results):
            for stage, (state, _) in enumerate(by_stage):
                assert state == first, (world, rank, stage)
    check_traffic(found)
    # resumed at another stage by another number of ranks
    whole = run_ranks(1, run_resumed, 2, None)[0]
    for world, stage, source in [(2, 3, "3-1"), (3, 0, "4-2"), (1, 1, "2-0")]:
        assert run_ranks(world, run_resumed, stage, tmp_path / source)[0] == whole, (world, stage, source)


def check_traffic(found: dict[int, Any]) -> None:
    matrices = sum(p.numel() for name, p in Model().named_parameters() if p.dim() == 2 and "embed" not in name)
    matrices -= Model().head.weight.numel()
    for world, results in found.items():
        for stage, (_, moved) in enumerate(results[0]):
            if world == 1:
                assert moved == []
            elif stage == 0:  # every rank holds the matrices, so only the results are sent
                assert len(moved) == 1
                assert moved[0].startswith("all_gather(")
                numel = int(moved[0].split(", ")[1].split(" x ")[0])
                assert matrices <= numel < 1.3 * matrices  # sections of one size
            else:  # there and back; no more than every element, and less by what the owners hold
                assert [entry.partition("(")[0] for entry in moved] == ["all_to_all"] * 2
                assert moved[0].endswith(" x bfloat16) in step")
                sizes = {int(entry.split(", ")[1].split(" x ")[0]) for entry in moved}
                assert len(sizes) == 1
                assert 0.3 * matrices < sizes.pop() <= matrices


# -- torch's update ----------------------------------------------------------------------------------------------------


def torchs_masters(num_steps: int, num_micro_batches: int) -> dict[str, Tensor]:
    """Returns the weights that torch's own optimizers give, on one process, fused ones fused."""
    model = Model(is_fused=False)
    adamw = {name: p for name, p in model.named_parameters() if p.dim() < 2 or name.startswith(("embed", "head"))}
    matrices = [p for name, p in model.named_parameters() if name not in adamw]
    options: dict[str, Any] = {"lr": LR, "weight_decay": RECORD.weight_decay}
    plain = [p for p in adamw.values() if p.dim() < 2]
    optimizers = [
        torch.optim.Muon(matrices, momentum=RECORD.momentum, adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW([p for p in adamw.values() if p.dim() == 2], betas=RECORD.betas, fused=True, **options),
        torch.optim.AdamW(plain, lr=LR, betas=RECORD.betas, weight_decay=0.0, fused=True),
    ]
    for step in range(num_steps):
        for index in range(num_micro_batches):
            (model(batch(num_micro_batches * step + index)) / num_micro_batches).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = {name: p.detach() for name, p in model.named_parameters()}
    for number in range(2):
        parts = [found.pop(f"blocks.{number}.{name}") for name in "qkv"]
        found[f"blocks.{number}.qkv"] = torch.cat(parts)
    return found


def run_plain(rank: int, world: int, engine: str, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the masters after one step and after four, of two micro-batches in all."""
    trained = start(engine, stage)
    found = []
    for num_steps in (1, 3):
        train(trained, num_steps, 2)
        found.append(dict(trained.full_state("master")))
    return found[0], found[1]


@pytest.mark.processes
@pytest.mark.parametrize(("engine", "stage"), [("native", 0), ("native", 3), ("ddp", 0), ("fsdp2", 2)])
def test_follows_torchs_muon_and_adamw(engine: str, stage: int) -> None:
    start_weights = dict(Model().named_parameters())
    for world in (1, 2):
        for num_steps, got in zip((1, 4), run_ranks(world, run_plain, engine, stage)[0], strict=True):
            want = torchs_masters(num_steps, 2)
            assert got.keys() == want.keys()
            for name, tensor in got.items():
                torch.testing.assert_close(tensor, want[name], rtol=0, atol=1e-6)
                assert not torch.allclose(tensor, start_weights[name], rtol=0, atol=1e-4)


# -- overflows ---------------------------------------------------------------------------------------------------------


def run_overflows(rank: int, world: int, engine: str, stage: int) -> bool:
    trained = start(engine, stage, precision="bf16")
    is_kept = True
    for _ in range(5):
        train(trained, 1)
        before = state_of(trained)
        for _ in range(10):
            overflow(trained, 1.0)
            overflow(trained, math.inf)
        is_kept &= state_of(trained) == before
    train(trained, 1)
    return is_kept and state_of(trained) != before


@pytest.mark.processes
@pytest.mark.parametrize(("engine", "stage"), [("native", 0), ("native", 2), ("ddp", 0), ("fsdp2", 3)])
def test_a_hundred_overflows_leave_every_bit_of_all_states(engine: str, stage: int) -> None:
    assert run_ranks(2, run_overflows, engine, stage) == [True, True]

"""Masters that are a BF16 weight and a remainder train as full ones do, bit for bit.

The full masters of these tests are cast as a pair rounds ([Note: ties]), so that both compute with the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.checkpoint import open_newest
from dtrain.engine.model_state import MAIN_GRAD, MASTER
from dtrain.engine.native import NativeEngine
from dtrain.errors import ConfigError, CorruptionError
from dtrain.optim import flat, matrix
from dtrain.precision.remainder import RemainderPair, split
from dtrain.sharding.group import FlatBuffer
from tests.engines.helpers import batch, computed, digest, start, train_step
from tests.helpers.bit_flips import flip_bit
from tests.helpers.checkpoints import ALONE
from tests.helpers.one_rank import start as start_small
from tests.helpers.ranks import run_ranks

RUNS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {"ema_decay": 0.9}),
    (2, {"optimizer": dtrain.AdamWBF16(lr=3e-3), "reproducible": True}),
    (2, {"optimizer": dtrain.Muon(lr=3e-3)}),
    (3, {"optimizer": dtrain.SGD(lr=3e-2)}),
    (3, {"ema_decay": 0.9}),
]
"""Stages, optimizers and averages; each on one rank and on two."""


@contextmanager
def rounded_away() -> Iterator[None]:
    """Context in which full masters are cast into BF16 replicas as pairs round."""

    def cast(replica: Tensor, master: Tensor) -> None:
        if replica.dtype == torch.bfloat16:
            replica.view(torch.int16).copy_(split(master)[0])
        else:
            replica.copy_(master)

    def store(slices: Any, group: Any) -> None:
        for part, master in zip(slices, group.masters, strict=True):
            if isinstance(part.master, RemainderPair):
                part.master.write(master)
            elif part.replica is not None:
                cast(part.replica, master)

    def cast_master(buffer: FlatBuffer) -> None:
        if buffer._cast_target is not None:
            assert isinstance(buffer.master, Tensor)
            cast(buffer._cast_target, buffer.master)

    with (
        mock.patch.object(flat, "store", store),
        mock.patch.object(matrix, "store", store),
        mock.patch.object(FlatBuffer, "cast_master", cast_master),
    ):
        yield


def new_engine(stage: int, master: str, seed: int = 5, **options: Any) -> NativeEngine:
    engine = start("native", stage, precision="bf16", master=master, seed=seed, **options)
    assert isinstance(engine, NativeEngine)
    assert any(isinstance(buffer.master, RemainderPair) for buffer in engine.sharded.buffers) == (master != "full")
    return engine


def state(engine: NativeEngine) -> dict[str, str]:
    """All states in full and the output of a forward, in bits; all ranks call."""
    found = {f"{kind}:{name}": digest(t) for kind in engine.saved_dtypes for name, t in engine.full_state(kind)}
    return {**found, "output": digest(computed(engine))}


def overflow(engine: NativeEngine) -> None:
    for index in engine.accumulate([engine.rank]):
        engine.backward(engine(tokens=batch(index)) * math.inf)
    assert not engine.step().applied


def train(stage: int, master: str, **options: Any) -> dict[str, Any]:
    engine = new_engine(stage, master, **options)
    found: dict[str, Any] = {"losses": [train_step(engine, 4).loss for _ in range(3)]}
    before = state(engine)
    overflow(engine)
    assert state(engine) == before, "a skipped step changed a bit"
    found["losses"] += [train_step(engine, 4).loss for _ in range(3)]
    if engine.ema_decay is not None:
        found["trained"] = state(engine)
        with engine.ema():
            found["averaged"] = digest(computed(engine))
        assert state(engine) == found["trained"]
    return {**found, **state(engine)}


def train_both(rank: int, world: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    with rounded_away():
        return [(train(stage, "full", **run), train(stage, "remainder", **run)) for stage, run in RUNS]


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2])
def test_every_stage_and_optimizer_trains_bit_for_bit(world: int) -> None:
    for found in run_ranks(world, train_both):
        for (full, remainder), run in zip(found, RUNS, strict=True):
            assert remainder == full, run
            assert len(set(full["losses"])) == 6


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved(rank: int, world: int, stage: int, master: str, folder: Path, load: Path | None = None) -> dict[str, str]:
    """Trains, after a load if there is one, and saves; returns the state."""
    with rounded_away():
        engine = new_engine(stage, master, seed=5 if load is None else 6)
        if load is not None:
            engine.load(load)
        for _ in range(2):
            train_step(engine, 4)
        engine.save(folder)
        return state(engine)


@pytest.mark.processes
def test_checkpoints_load_under_either_setting(tmp_path: Path) -> None:
    names = ("full", "remainder")
    first = {name: run_ranks(2, saved, 2, name, tmp_path / name)[0] for name in names}
    assert first["remainder"] == first["full"]
    # the bytes of every tensor, which a hash in the manifest stands for
    files = [
        {(t.kind, t.name): digest(reader.read(t.kind, t.name)) for t in reader.tensors}
        for reader in (open_newest(tmp_path / name, ALONE) for name in names)
    ]
    assert files[0] == files[1]
    assert {kind for kind, _ in files[0]} >= {MASTER, "exp_avg"}
    # to another stage, number of ranks and setting, and back
    onward = [
        run_ranks(1, saved, stage, name, tmp_path / f"next{stage}", tmp_path / source)[0]
        for stage, name, source in ((3, "full", "remainder"), (0, "remainder", "full"))
    ]
    assert onward[0] == onward[1]


@pytest.mark.processes
def test_fsdp2_loads_and_is_loaded(tmp_path: Path) -> None:
    engine = new_engine(2, "remainder")
    train_step(engine, 2)
    engine.save(tmp_path / "own")
    want = engine.master_state()
    run_ranks(1, _through_fsdp2, tmp_path)  # in a process of its own: the library leaves a process group
    engine.load(tmp_path / "fsdp2")
    assert all(torch.equal(value, want[name]) for name, value in engine.master_state().items())


def _through_fsdp2(rank: int, world: int, folder: Path) -> None:
    engine = start("fsdp2", 3, precision="bf16")
    engine.load(folder / "own")
    engine.save(folder / "fsdp2")


# -- writes and faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_modify_weights_writes_whole_masters(stage: int) -> None:
    engine = new_engine(stage, "remainder")
    train_step(engine, 2)
    before = engine.master_state()
    with engine.modify_weights("mix.*"):
        weight = engine.module.get_parameter("mix.weight")
        assert torch.equal(weight, before["mix.weight"])
        weight[0] = 1 / 3
    after = engine.master_state()
    assert torch.equal(after["mix.weight"][0], torch.full_like(after["mix.weight"][0], 1 / 3))
    assert torch.equal(after["mix.weight"][1:], before["mix.weight"][1:])
    assert torch.equal(after["mix.bias"], before["mix.bias"])


def test_a_write_in_place_becomes_the_whole_master_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine = new_engine(2, "remainder")
    train_step(engine, 2)
    before = engine.master_state()
    weight = engine.module.get_parameter("mix.weight")
    with torch.no_grad():
        weight[0] = 0.375
    after = engine.master_state()
    assert torch.equal(after["mix.weight"], weight.float())
    assert all(torch.equal(after[name], before[name]) for name in after if name != "mix.weight")
    assert "'mix.weight' was written to" in caplog.text
    assert train_step(engine, 2).applied


@pytest.mark.parametrize("half", ["weight", "remainder"])
def test_the_audit_finds_a_flipped_bit_in_either_half(half: str) -> None:
    engine = new_engine(2, "remainder", audit=1)
    train_step(engine, 2)
    shard = next(shard for shard in engine.local_shards(MASTER) if isinstance(shard.values, RemainderPair))
    flip_bit(getattr(shard.values, half), 1, 3)
    with pytest.raises(CorruptionError) as caught:
        train_step(engine, 2)
    assert [(item.tensor, item.kind) for item in caught.value.corruptions] == [(shard.name, MASTER)]


# -- what is held, and what is refused ---------------------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.LayerNorm(256))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).float().square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("optimizer", "nbytes"), [(dtrain.AdamW(), 16), (dtrain.AdamWBF16(), 12)])
def test_the_states_take_two_bytes_less(optimizer: Any, nbytes: int) -> None:
    engine = start_small(Stack(), precision="bf16", optimizer=optimizer, master="remainder")
    engine.backward(engine(torch.ones(2, 256)))
    assert engine.step().applied
    held, formula = sum(engine.memory().values()), sum(engine.memory_formula().values())
    assert formula <= held <= 1.02 * formula
    assert formula == pytest.approx(nbytes * engine.num_parameters, rel=0.005)  # the norm's masters are whole
    assert engine.memory()[MAIN_GRAD] >= 4 * engine.num_parameters


def test_fp8_weights_keep_full_masters() -> None:
    engine = start_small(
        Stack(), precision=dtrain.PrecisionPolicy.named("fp8", rules={"blocks.0": "bf16"}), master="remainder"
    )
    found = {buffer.layout.dtype: type(buffer.master) for buffer in engine.sharded.buffers}
    assert found == {torch.float8_e4m3fn: Tensor, torch.bfloat16: RemainderPair, torch.float32: Tensor}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp32"}, "no weight is BF16"),
        ({"precision": "tf32"}, "no weight is BF16"),
        ({"precision": "fp16"}, "fewer exponent bits"),
        ({"precision": "bf16", "optimizer": dtrain.TorchOptimizer(torch.optim.RAdam)}, "optimizer=torch"),
        ({"precision": "bf16", "engine": "fsdp2"}, "a setting of engine=native"),
        ({"precision": dtrain.PrecisionPolicy.named("bf16", rules={"*": "fp32"})}, "no trained parameter has a BF16"),
    ],
)
def test_what_cannot_be_a_pair_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start_small(**{"master": "remainder", **options})

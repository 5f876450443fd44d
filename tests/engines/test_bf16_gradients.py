"""BF16 main grads: not rounded if nothing is summed, deterministic; all states then take 10 bytes a parameter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.engine.model_state import MAIN_GRAD
from dtrain.engine.native import NativeEngine
from dtrain.errors import ConfigError
from tests.engines.helpers import batch, digest, start, state_digests, train_step
from tests.engines.test_remainder import Stack
from tests.helpers.one_rank import start as start_small
from tests.helpers.ranks import run_ranks

COMPACT: dict[str, Any] = {"optimizer": dtrain.AdamWBF16(lr=3e-3), "master": "remainder", "grad_dtype": "bf16"}


def new_engine(stage: int, **options: Any) -> NativeEngine:
    engine = start("native", stage, precision="bf16", **options)
    assert isinstance(engine, NativeEngine)
    return engine


def dtypes(engine: NativeEngine) -> set[torch.dtype]:
    return {buffer.gradient.main_grad.dtype for buffer in engine.sharded.buffers}


@pytest.mark.parametrize("stage", [0, 2])
def test_a_single_micro_batch_trains_bit_for_bit(stage: int) -> None:
    found = []
    for grad_dtype in ("fp32", "bf16"):
        engine = new_engine(stage, grad_dtype=grad_dtype)
        outcomes = [train_step(engine, 1) for _ in range(3)]
        found.append(([(o.loss, o.grad_norm) for o in outcomes], state_digests(engine)))
    assert found[0] == found[1]
    assert dtypes(engine) == {torch.bfloat16, torch.float32}  # FP32 modules have FP32 gradients


def gradients(rank: int, world: int, stage: int, grad_dtype: str) -> dict[str, Tensor]:
    """Main grads of a step of four weighted micro-batches, after another step."""
    engine = new_engine(stage, grad_dtype=grad_dtype)
    train_step(engine, 4)
    for index in engine.accumulate(range(rank, 4, world)):
        engine.backward(engine(tokens=batch(index)), weight=1.0 + index)
    engine.finish_gradients()
    return {name: tensor.float() for name, tensor in engine.full_state(MAIN_GRAD)}


def all_gradients(rank: int, world: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return [(gradients(rank, world, stage, "fp32"), gradients(rank, world, stage, "bf16")) for stage in range(4)]


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2])
def test_sums_are_those_of_fp32_up_to_one_rounding_an_addition(world: int) -> None:
    for found in run_ranks(world, all_gradients):
        for full, low in found:
            for name, want in full.items():
                error = torch.linalg.vector_norm(low[name] - want)
                assert error <= 4 * 2**-8 * torch.linalg.vector_norm(want), name
            assert any(not torch.equal(low[name], full[name]) for name in full)


def resumed(rank: int, world: int, stage: int, folder: Path) -> list[dict[str, str]]:
    """States after six steps, at once, and with a save and a load in the middle."""
    whole, first = new_engine(stage, **COMPACT), new_engine(stage, **COMPACT)
    for _ in range(6):
        assert train_step(whole, 4).applied
    for _ in range(3):
        train_step(first, 4)
    first.save(folder / f"{stage}")
    second = new_engine(stage, seed=6, **COMPACT)
    second.load(folder / f"{stage}")
    for _ in range(3):
        train_step(second, 4)
    return [state_digests(whole), state_digests(second)]


def resume_all(rank: int, world: int, folder: Path) -> list[list[dict[str, str]]]:
    return [resumed(rank, world, stage, folder) for stage in (1, 3)]


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_draws_the_same_random_bits(world: int, tmp_path: Path) -> None:
    for stages in run_ranks(world, resume_all, tmp_path):
        assert all(whole == second for whole, second in stages)


def skipped(rank: int, world: int, stage: int) -> tuple[dict[str, str], dict[str, str]]:
    engine = new_engine(stage, **COMPACT)
    train_step(engine, 4)
    before = state_digests(engine)
    for index in engine.accumulate(range(2)):
        engine.backward(engine(tokens=batch(index)) * (math.inf if index == rank else 1.0))
    assert not engine.step().applied
    after = state_digests(engine)
    assert train_step(engine, 4).applied
    return before, after


@pytest.mark.processes
@pytest.mark.parametrize("stage", [1, 3])
def test_an_overflow_skips_and_leaves_every_bit(stage: int) -> None:
    for before, after in run_ranks(2, skipped, stage):
        same = {name for name in before if before[name] == after[name]}
        assert {name for name in before if not name.startswith("buffer:")} <= same


def reproducible(rank: int, world: int, stage: int) -> dict[str, str]:
    engine = new_engine(stage, reproducible=True, **COMPACT)
    for _ in range(3):
        assert train_step(engine, 4).applied
    return {f"{kind}:{name}": digest(t) for kind in engine.saved_dtypes for name, t in engine.full_state(kind)}


@pytest.mark.processes
def test_reproducible_runs_have_the_same_bits_at_any_size() -> None:
    found = [run_ranks(world, reproducible, stage)[0] for world, stage in ((1, 0), (2, 1), (2, 3))]
    assert all(other == found[0] for other in found[1:])


def test_all_states_take_ten_bytes_a_parameter() -> None:
    engine = start_small(Stack(), precision="bf16", **COMPACT)
    engine.backward(engine(torch.ones(2, 256)))
    assert engine.step().applied
    memory, formula = engine.memory(), engine.memory_formula()
    assert sum(formula.values()) <= sum(memory.values()) <= 1.02 * sum(formula.values())
    assert engine.contract.describe()[-1] == (
        "states: masters fp32 as bf16 weight and 16-bit remainder, main grads bf16, moments bf16"
    )
    for kind, nbytes in {"compute": 2, "master": 2, "main_grad": 2, "moments": 4}.items():
        assert formula[kind] == pytest.approx(nbytes * engine.num_parameters, rel=0.01), kind


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_gradients_that_are_not_bf16_are_refused(precision: str) -> None:
    with pytest.raises(ConfigError, match="grad_dtype=bf16 with precision="):
        start_small(precision=precision, grad_dtype="bf16")

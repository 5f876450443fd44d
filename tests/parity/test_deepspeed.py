"""The DeepSpeed engine follows the FP32 oracle, a skipped step changes nothing, and checkpoints fit every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.engine.deepspeed import config as deepspeed_config
from dtrain.engine.deepspeed.engine import DeepSpeedEngine
from dtrain.engine.step import StepEngine
from tests.helpers import runs
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import (
    Result,
    Run,
    assert_follows_the_oracle,
    assert_odd_models_follow,
    forward_backward,
    train_engine,
)
from tests.helpers.zoo import make

pytestmark = pytest.mark.processes

PRECISIONS = ("fp32", "bf16")
STATES = ("master", "exp_avg", "exp_avg_sq")


def start(run: Run, engine: str = "deepspeed", weights: int = 0) -> StepEngine:
    # as for a model that is large enough: at stage 3 no weight stays gathered
    deepspeed_config.PERSISTENT = 0
    return runs.start(run, weights=weights, engine=engine)  # type: ignore[no-any-return]


def state(engine: StepEngine, *kinds: str) -> dict[str, Tensor]:
    return {f"{kind} {name}": tensor.clone() for kind in kinds for name, tensor in engine.full_state(kind)}


def own_state(engine: StepEngine) -> dict[str, Tensor]:
    """This rank's shards, which two engines of one kind cut alike."""
    return {f"{kind} {shard.name}": shard.data.clone() for kind in STATES for shard in engine.owned_shards(kind)}


def train(rank: int, world: int, run: Run) -> Result:
    engine = start(run)
    originals = {f"master {n}": p for n, p in make(run.model).build(0).named_parameters() if p.requires_grad}
    masters = state(engine, "master")
    for name, original in originals.items():
        assert torch.equal(masters[name], original), f"{run}: {name} was rounded"
    result = train_engine(engine, run)
    assert isinstance(engine, DeepSpeedEngine)
    assert engine._deepspeed.global_steps == run.steps
    return result


def train_all(rank: int, world: int, runs: list[Run]) -> list[Result]:
    return [train(rank, world, run) for run in runs]


CASES = [("fp32", 0, "none", 1), ("fp32", 1, "none", 2), ("fp32", 2, "none", 2), ("bf16", 3, "none", 2)]
OFFLOADED = [("fp32", 2, "cpu", 2)]
ALL_CASES = [(precision, stage, "none", number) for precision in PRECISIONS for stage in range(4) for number in (1, 2)]
ALL_OFFLOADED = [(precision, stage, "cpu", 2) for precision in PRECISIONS for stage in (1, 2, 3)]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, CASES + OFFLOADED),
        pytest.param(1, ALL_CASES, marks=pytest.mark.exhaustive),
        pytest.param(2, ALL_CASES + ALL_OFFLOADED, marks=pytest.mark.exhaustive),
    ],
    ids=["default", "one rank", "two ranks"],
)
def test_follows_the_oracle(world: int, cases: list[tuple[str, int, str, int]]) -> None:
    runs = [
        Run(
            "transformer",
            steps=8,
            accumulation=accumulation,
            unequal_weights=True,
            options={"precision": precision, "zero_stage": stage, "offload": offload},
        )
        for precision, stage, offload, accumulation in cases
    ]
    assert_follows_the_oracle(run_ranks(world, train_all, runs, timeout=280), runs)


ODD = {"odd_sizes": 2, "object_output": 1, "partly_frozen": 3, "tied": 3, "unused": 2}
ALL_ODD = [
    (name, stage)
    for name in (*ODD, "attention", "conv_batch_norm", "gru", "weight_norm")
    for stage in (1, 2, 3)
    if (name, stage) != ("odd_sizes", 3)  # refused
]


@pytest.mark.parametrize(
    "cases", [list(ODD.items()), pytest.param(ALL_ODD, marks=pytest.mark.exhaustive)], ids=["default", "all"]
)
def test_odd_models_follow_the_oracle(cases: list[tuple[str, int]]) -> None:
    runs = [
        Run(name, steps=3, accumulation=2, unequal_weights=True, options={"precision": "bf16", "zero_stage": stage})
        for name, stage in cases
    ]
    assert_odd_models_follow(run_ranks(2, train_all, runs, timeout=280), runs)


# -- skipped steps -----------------------------------------------------------------------------------------------------

SKIPS = {"loss": "nonfinite_loss", "gradient": "overflow", "huge": "overflow", "empty": "empty"}


def bad_step(engine: StepEngine, run: Run, kind: str) -> dtrain.StepOutcome:
    """A step of two micro-batches, the last of which has something wrong on the last rank."""
    entry = make(run.model)
    for number in engine.accumulate(range(2)):
        loss, weight = entry.loss(engine, entry.batch(100 + number)), 0.0 if kind == "empty" else 1.0
        if number == 1 and engine.rank == engine.world_size - 1:
            if kind == "gradient":
                loss = _InfiniteGradient.apply(loss)
            elif kind != "empty":
                loss = loss * {"loss": torch.inf, "huge": 1e30}[kind]
        engine.backward(loss, weight=weight)
    return engine.step()


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * torch.inf


def skip_steps(rank: int, world: int, cases: list[tuple[str, int, str, int]]) -> list[str]:
    """Two engines take the same good steps, and one of them bad ones between: what they hold is the same to the bit."""
    found = []
    for precision, stage, offload, _ in cases:
        options = {"precision": precision, "zero_stage": stage, "offload": offload}
        run = Run("tied", accumulation=2, options=options)
        reference, tried = start(run), start(run)
        assert isinstance(tried, DeepSpeedEngine)
        for step, (kind, reason) in enumerate(SKIPS.items()):
            before = own_state(tried)
            outcome = bad_step(tried, run, kind)
            where = f"{run.options} {kind}"
            if (outcome.applied, outcome.reason) != (False, reason):
                found.append(f"{where}: {outcome}")
            culprit = outcome.culprit
            if kind != "empty" and (culprit is None or (culprit.rank, culprit.micro_batch) != _expected(kind, world)):
                found.append(f"{where}: {culprit}")
            after = own_state(tried)
            found += [f"{where}: {name} changed" for name in before if not torch.equal(before[name], after[name])]
            for engine in (reference, tried):
                forward_backward(engine, run, step)
                if not engine.step().applied:
                    found.append(f"{where}: the good step after it was not applied")
            want, got = own_state(reference), own_state(tried)
            found += [f"{where}: leaked into {name}" for name in want if not torch.equal(want[name], got[name])]
        if tried._deepspeed.global_steps != tried.applied_steps:
            found.append(f"{run.options}: DeepSpeed counted {tried._deepspeed.global_steps} steps")
    return found


def _expected(kind: str, world: int) -> tuple[int, int | None]:
    """Rank and micro-batch of the culprit; a norm that overflows has none."""
    return (-1, None) if kind == "huge" else (world - 1, 1)


@pytest.mark.parametrize(
    "cases",
    [CASES + OFFLOADED, pytest.param(ALL_CASES[1::2] + ALL_OFFLOADED, marks=pytest.mark.exhaustive)],
    ids=["default", "all"],
)
def test_a_skipped_step_changes_nothing(cases: list[tuple[str, int, str, int]]) -> None:
    for rank, found in enumerate(run_ranks(2, skip_steps, cases, timeout=280)):
        assert not found, f"rank {rank}:\n" + "\n".join(found)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save_and_load(rank: int, world: int, folder: str) -> list[str]:
    """From each stage to the next and to the native engine and back, from before the first step on."""
    run = Run("partly_frozen", accumulation=2)
    stages: list[tuple[str, int, str]] = [
        *(("deepspeed", stage, "none") for stage in (3, 0, 1, 2, 3)),
        ("native", 2, "none"),
        ("deepspeed", 1, "cpu"),
    ]
    found: list[str] = []
    expected: dict[str, Tensor] = {}
    for number, (name, stage, offload) in enumerate(stages):
        # other weights each time, frozen ones too: what was saved must come back
        own = {"offload": offload} if name == "deepspeed" else {}
        engine = start(run.with_options(precision="bf16", zero_stage=stage, **own), name, weights=number)
        if number:
            engine.load(folder)
            got = state(engine, *STATES)
            found += [f"{name} {stage}: {k} differs" for k in expected if not torch.equal(expected[k], got[k])]
        found += computes_with_other_weights(engine, run, f"{name} {stage} after load")
        if number:
            forward_backward(engine, run, number)
            evaluate(engine, run)
            if not engine.step(lr=0.1).applied:
                found.append(f"{name} {stage}: not applied")
            found += computes_with_other_weights(engine, run, f"{name} {stage} after a step")
        expected = state(engine, *STATES)
        engine.save(folder)
    return found


def evaluate(engine: StepEngine, run: Run) -> Tensor:
    entry = make(run.model)
    with engine.eval():
        return entry.loss(engine, entry.batch(7))


def computes_with_other_weights(engine: StepEngine, run: Run, where: str) -> list[str]:
    """It should compute with the cast masters, and with the frozen weights that it was given."""
    loss, entry = evaluate(engine, run), make(run.model)
    reference = make(run.model).build(0)
    masters = engine.full_state("master")
    with torch.no_grad():
        for key, tensor in masters:
            reference.get_parameter(key).copy_(tensor)
    want = entry.loss(reference.bfloat16(), entry.batch(7))
    close = torch.isclose(loss, want.float(), rtol=2e-2)
    return [] if close else [f"{where}: loss {loss.item()} with {want.item()} expected"]


def test_any_stage_and_engine_loads_the_checkpoint(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, save_and_load, str(tmp_path), timeout=280)):
        assert not found, f"rank {rank}:\n" + "\n".join(found)

"""DeepSpeed ZeRO under dtrain: it follows the FP32 oracle, a vetoed step leaves no trace, and states travel.

A rank needs seconds to import DeepSpeed, so each job goes through many cases.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.engine.deepspeed import config as deepspeed_config
from dtrain.engine.deepspeed.engine import DeepSpeedEngine
from dtrain.engine.step import StepEngine
from tests.helpers.oracle import assert_close_to_largest, normwise_error
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Result, Run, oracle_run
from tests.helpers.zoo import make

pytestmark = pytest.mark.processes

# as for the native engine, see test_against_oracle: elementwise of the main grads, normwise of the masters
TOLERANCES = {"fp32": (1e-6, 5e-5), "bf16": (4e-2, 1.5e-2)}
STATES = ("master", "exp_avg", "exp_avg_sq")


def begin(run: Run, engine: str = "deepspeed", weights: int = 0) -> StepEngine:
    torch.set_num_threads(1)
    # as for any model that is large enough: at stage 3 nothing stays gathered
    deepspeed_config.PERSISTENT = 0
    built = dtrain.initialize(
        make(run.model).build(weights),
        engine=engine,
        optimizer=dtrain.AdamW(lr=run.lr),
        schedule=dtrain.Cosine(warmup_steps=3, total_steps=40),
        max_grad_norm=run.max_grad_norm,
        seed=run.seed,
        **run.options,
    )
    assert isinstance(built, StepEngine)
    return built


def forward_backward(engine: StepEngine, run: Run, step: int) -> None:
    entry = make(run.model)
    total = run.accumulation * engine.world_size
    for index in engine.accumulate([i * engine.world_size + engine.rank for i in range(run.accumulation)]):
        loss = entry.loss(engine, entry.batch(step * total + index))
        engine.backward(loss, weight=run.weight(step, index))


def state(engine: StepEngine, *kinds: str) -> dict[str, Tensor]:
    return {f"{kind} {name}": tensor.clone() for kind in kinds for name, tensor in engine.full_state(kind)}


def own_state(engine: StepEngine) -> dict[str, Tensor]:
    """This rank's part of it, which two engines of one kind cut alike."""
    return {f"{kind} {piece.name}": piece.data.clone() for kind in STATES for piece in engine.owned_shards(kind)}


def train(rank: int, world: int, run: Run) -> Result:
    engine = begin(run)
    originals = {f"master {n}": p for n, p in make(run.model).build(0).named_parameters() if p.requires_grad}
    start = state(engine, "master")
    for name, original in originals.items():
        assert torch.equal(start[name], original), f"{run}: {name} was rounded"
    gradients: dict[str, Tensor] = {}
    outcomes = []
    for step in range(run.steps):
        forward_backward(engine, run, step)
        if step == 0:
            engine.finish_gradients()
            weights = sum(run.weight(step, index) for index in range(run.accumulation * world))
            gradients = {name: (g / weights).clone() for name, g in engine.full_state("main_grad")}
        outcomes.append(engine.step())
    assert isinstance(engine, DeepSpeedEngine)
    assert engine._deepspeed.global_steps == run.steps
    return Result(gradients, outcomes, engine.master_state())


def train_all(rank: int, world: int, runs: list[Run]) -> list[Result]:
    return [train(rank, world, run) for run in runs]


def runs(world: int, precision: str) -> list[Run]:
    every = [(stage, "none", 2) for stage in range(4)] + [(2, "none", 1), (3, "none", 3)]
    offloaded = [(stage, "cpu", 2) for stage in (1, 2, 3)] if world == 2 else []
    return [
        Run(
            "transformer",
            steps=8,
            accumulation=accumulation,
            unequal_weights=True,
            options={"precision": precision, "zero_stage": stage, "offload": offload},
        )
        for stage, offload, accumulation in every + offloaded
    ]


cached_oracle = functools.lru_cache(maxsize=None)(
    lambda model, accumulation, world, steps: oracle_run(
        Run(model, steps=steps, accumulation=accumulation, unequal_weights=True), world
    )
)


@pytest.mark.parametrize("world", [1, 2])
def test_follows_the_oracle(world: int) -> None:
    all_runs = [run for precision in TOLERANCES for run in runs(world, precision)]
    results = run_ranks(world, train_all, all_runs, timeout=280)
    for number, run in enumerate(all_runs):
        where = f"world={world} accumulation={run.accumulation} {run.options}"
        grad_tolerance, master_tolerance = TOLERANCES[run.options["precision"]]
        got: Result = results[0][number]
        oracle, steps = cached_oracle(run.model, run.accumulation, world, run.steps)
        assert all(outcome.applied for outcome in got.outcomes), where
        assert all(step.grad_norm > run.max_grad_norm for step in steps), "clipping must be active"
        assert_close_to_largest(got.gradients, steps[0].gradients, grad_tolerance)
        error = normwise_error(got.masters, oracle.masters())
        assert error < master_tolerance, f"{where}: masters off by {error:.3g}"
        assert got.outcomes[0].loss == pytest.approx(steps[0].loss, rel=grad_tolerance), where
        assert got.outcomes[0].grad_norm == pytest.approx(steps[0].grad_norm, rel=grad_tolerance), where
        for rank in range(1, world):
            assert results[rank][number].outcomes == got.outcomes, f"{where}: rank {rank} saw another outcome"


ODD = (
    "attention",
    "conv_batch_norm",
    "gru",
    "object_output",
    "odd_sizes",
    "partly_frozen",
    "tied",
    "unused",
    "weight_norm",
)


def test_odd_models_train_like_the_oracle() -> None:
    all_runs = [
        Run(name, steps=3, accumulation=2, unequal_weights=True, options={"precision": "bf16", "zero_stage": stage})
        for name in ODD
        for stage in (1, 2, 3)
        if (name, stage) != ("odd_sizes", 3)  # refused
        if stage > 1 or name in ("object_output", "odd_sizes", "tied", "unused")
    ]
    results = run_ranks(2, train_all, all_runs, timeout=280)[0]
    for run, got in zip(all_runs, results, strict=True):
        oracle, steps = cached_oracle(run.model, run.accumulation, 2, run.steps)
        error = normwise_error(got.gradients, {name: steps[0].gradients[name] for name in got.gradients})
        assert error < 0.05, f"{run.model} {run.options}: gradients off by {error:.3g}"
        largest = max(float(g.abs().max()) for g in steps[0].gradients.values() if g.numel())
        # Adam turns even rounding noise into steps of the learning rate: such a parameter's path is arbitrary
        noisy = {n for n, g in steps[0].gradients.items() if g.numel() and 0 < float(g.abs().max()) < 1e-6 * largest}
        masters = {
            name: tensor for name, tensor in oracle.masters().items() if name in got.masters and name not in noisy
        }
        error = normwise_error({name: got.masters[name] for name in masters}, masters)
        assert error < 2e-2, f"{run.model} {run.options}: masters off by {error:.3g}"


# -- vetoes ------------------------------------------------------------------------------------------------------------

VETOES = {"loss": "nonfinite_loss", "gradient": "overflow", "huge": "overflow", "empty": "empty"}


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


VETO_RUNS = [
    Run("tied", accumulation=2, options={"precision": precision, "zero_stage": stage, "offload": offload})
    for precision, stage, offload in [
        *((precision, stage, "none") for precision in TOLERANCES for stage in range(4)),
        *(("bf16", stage, "cpu") for stage in (1, 2, 3)),
        ("fp32", 2, "cpu"),
    ]
]


def veto(rank: int, world: int) -> list[str]:
    """Two engines take the same good steps, and one of them bad ones between: what they hold is the same to the bit."""
    found = []
    for run in VETO_RUNS:
        plain, tried = begin(run), begin(run)
        assert isinstance(tried, DeepSpeedEngine)
        for step, (kind, reason) in enumerate(VETOES.items()):
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
            for engine in (plain, tried):
                forward_backward(engine, run, step)
                if not engine.step().applied:
                    found.append(f"{where}: the good step after it was not applied")
            want, got = own_state(plain), own_state(tried)
            found += [f"{where}: leaked into {name}" for name in want if not torch.equal(want[name], got[name])]
        if tried._deepspeed.global_steps != tried.applied_steps:
            found.append(f"{run.options}: DeepSpeed counted {tried._deepspeed.global_steps} steps")
    return found


def _expected(kind: str, world: int) -> tuple[int, int | None]:
    """The rank and the micro-batch at fault; a norm that overflows is nobody's."""
    return (-1, None) if kind == "huge" else (world - 1, 1)


def test_a_vetoed_step_leaves_no_trace() -> None:
    for rank, found in enumerate(run_ranks(2, veto, timeout=280)):
        assert not found, f"rank {rank}:\n" + "\n".join(found)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def travel(rank: int, world: int, folder: str) -> list[str]:
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
        engine = begin(run.with_options(precision="bf16", zero_stage=stage, offload=offload), name, weights=number)
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
    """What it should compute with are the cast masters, and the frozen weights that it was given."""
    loss, entry = evaluate(engine, run), make(run.model)
    twin = make(run.model).build(0)
    masters = engine.full_state("master")
    with torch.no_grad():
        for key, tensor in masters:
            twin.get_parameter(key).copy_(tensor)
    want = entry.loss(twin.bfloat16(), entry.batch(7))
    close = torch.isclose(loss, want.float(), rtol=2e-2)
    return [] if close else [f"{where}: loss {loss.item()} with {want.item()} expected"]


def test_states_travel_between_stages_and_engines(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, travel, str(tmp_path), timeout=280)):
        assert not found, f"rank {rank}:\n" + "\n".join(found)

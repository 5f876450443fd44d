"""Inf, NaN and empty steps under every engine: skipped by all ranks, the culprit named, and nothing of them left."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

import dtrain
from dtrain.engine.outcome import Culprit
from dtrain.engine.step import StepEngine
from dtrain.errors import DivergenceError
from tests.engines.helpers import DIM, STAGES, VOCAB, batch, computed, held, same, start, train_step
from tests.helpers.ranks import run_ranks

WORLD, ACCUMULATION = 2, 2
MICRO_BATCHES = WORLD * ACCUMULATION
HUGE = 3e38  # twice that is above FP32
# (parameter, element): the first of the model and the last, of a block, and of a norm
LOCATIONS = [
    ("embedding.weight", 0),
    ("head.bias", VOCAB - 1),
    ("blocks.0.up.weight", 3 * DIM - 1),
    ("blocks.1.norm.weight", 0),
]


@dataclass(frozen=True)
class Fault:
    """A number that replaces an element in a micro-batch of some ranks.

    Attributes:
        value: the number.
        location: the parameter and the element of its gradient that become it; None: the loss is multiplied by it.
        rank: that gives it; None: all, in the same micro-batch.
        micro_batch: which of theirs.
        is_empty: there is no such number: all weights are 0.
    """

    value: float = 1.0
    location: tuple[str, int] | None = None
    rank: int | None = None
    micro_batch: int = 0
    is_empty: bool = False

    def expected(self, step: int) -> tuple[str, Culprit | None]:
        """(reason, culprit); the rank of a reduced gradient's culprit is left as -1."""
        if self.is_empty:
            return "empty", None
        counts = {"num_inf": int(not math.isnan(self.value)), "num_nan": int(math.isnan(self.value))}
        if self.location is None:
            assert self.rank is not None
            return "nonfinite_loss", Culprit(
                self.rank, step, "forward loss", self.micro_batch, num_bad_losses=1, **counts
            )
        name, element = self.location
        where = {"tensor": name, "start": element, "stop": element + 1}
        if self.rank is None:
            return "overflow", Culprit(-1, step, "reduced gradient", None, **where, **counts)
        return "overflow", Culprit(self.rank, step, "local gradient", self.micro_batch, **where, **counts)


def faults(precision: str) -> list[Fault]:
    numbers = (math.inf, math.nan)
    # alternates over rank 0 and the last, and micro-batches 0 and 1
    found = [
        Fault(value, location, rank=(i + j) % WORLD, micro_batch=(i + j // 2) % ACCUMULATION)
        for i, location in enumerate(LOCATIONS)
        for j, value in enumerate(numbers)
    ]
    found += [Fault(value, None, rank=rank, micro_batch=1 - rank) for rank, value in enumerate(numbers)]
    found.append(Fault(is_empty=True))
    if precision != "fp16":  # where no rank can hold such a number
        found.append(Fault(HUGE, LOCATIONS[1]))
    return found


def attempt(engine: StepEngine, step: int, fault: Fault) -> dtrain.StepOutcome:
    """The micro-batches of ``step`` with a fault."""
    for number in engine.accumulate(range(ACCUMULATION)):
        hit = not fault.is_empty and fault.rank in (None, engine.rank) and fault.micro_batch == number
        module = None
        if hit and fault.location is not None:
            owner, _, name = fault.location[0].rpartition(".")
            module = engine.module.get_submodule(owner)
            module.faults = {name: (fault.location[1], fault.value)}  # type: ignore[assignment]
        loss = engine(tokens=batch(step * MICRO_BATCHES + number * WORLD + engine.rank))
        if hit and fault.location is None:
            loss = loss * fault.value
        engine.backward(loss, weight=0.0 if fault.is_empty else 1.0)
        if module is not None:
            module.faults = {}  # type: ignore[assignment]
    return engine.step()


def run(rank: int, world: int, folder: Path, cases: list[tuple[str, int, str]]) -> list[str]:
    """Every fault in each (engine, stage, precision), followed by a clean step; what all ranks must see alike."""
    return [line for case in cases for line in _run(*case, folder / "-".join(map(str, case)))]


def _run(name: str, stage: int, precision: str, folder: Path) -> list[str]:
    where = f"engine={name} zero_stage={stage} precision={precision}"
    # powers of two: they change no bit of the gradients that they scale
    scale = dtrain.LossScale.of(256.0) if precision == "fp16" else dtrain.LossScale("dynamic", init=2.0**20)
    engine = start(name, stage, precision=precision, loss_scale=scale)
    all_faults = faults(precision)
    engine.save(folder)
    clean = []
    for step in range(len(all_faults)):
        assert train_step(engine, MICRO_BATCHES, step=step).applied, where
        clean.append([*held(engine), computed(engine)])
    engine.load(folder)
    seen = []
    expected_scale = scale.init
    for step, fault in enumerate(all_faults):
        before = [*held(engine), computed(engine)]
        reason, culprit = fault.expected(2 * step)
        outcome = attempt(engine, step, fault)
        context = f"{where} {fault}: {outcome}"
        assert (outcome.applied, outcome.reason, outcome.loss_scale) == (False, reason, expected_scale), context
        if culprit is not None and culprit.phase == "reduced gradient":
            assert outcome.culprit is not None, context
            assert outcome.culprit.rank in range(WORLD), context
            culprit = Culprit(**{**vars(culprit), "rank": outcome.culprit.rank})
        assert outcome.culprit == culprit, context
        if reason == "overflow" and precision != "fp16":
            expected_scale /= 2
        assert engine.loss_scale.scale == expected_scale, f"{context}: a bad gradient halves it, nothing else does"
        assert same([*held(engine), computed(engine)], before), f"{context}: masters, moments and weights"
        following = train_step(engine, MICRO_BATCHES, step=step)
        assert following.applied, f"{context}: {following}"
        assert (engine.attempted_steps, engine.applied_steps) == (2 * step + 2, step + 1), context
        assert same([*held(engine), computed(engine)], clean[step]), (
            f"{context}: something of it came into the next step"
        )
        seen.append(f"{context} {following}")
    _diverge(engine, "lr" if stage % 2 else "data_cursor")
    return seen


def _diverge(engine: StepEngine, in_what: str) -> None:
    """The last rank differs from the others: all stop, and nothing is updated."""
    before = held(engine)
    differs = engine.rank == WORLD - 1
    for index in engine.accumulate(range(ACCUMULATION)):
        engine.backward(engine(tokens=batch(index)))
    if differs and in_what == "data_cursor":
        engine.data_cursor += 1
    with pytest.raises(DivergenceError, match=f"(?s){in_what}.*rank {WORLD - 1}"):
        engine.step(lr=2e-3 if differs and in_what == "lr" else 1e-3)
    assert same(held(engine), before), f"{engine.name}: updated although the ranks differ in {in_what}"
    with pytest.raises(DivergenceError):
        engine.backward(engine(tokens=batch(0)))


CASES = {
    "native": [("native", 3, "bf16")],  # the control: tests/faults has all of its stages
    "fsdp2": [("fsdp2", 2, "bf16"), ("fsdp2", 3, "bf16"), ("fsdp2", 3, "fp32"), ("fsdp2", 2, "fp16")],
    "deepspeed": [*(("deepspeed", stage, "bf16") for stage in range(4)), ("deepspeed", 2, "fp32")],
    "ddp": [("ddp", 0, "bf16"), ("ddp", 0, "fp32"), ("ddp", 0, "fp16")],
}


@pytest.mark.processes
@pytest.mark.parametrize("engine", CASES)
def test_all_ranks_skip_and_the_next_step_is_clean(tmp_path: Path, engine: str) -> None:
    cases = CASES[engine]
    first, *others = run_ranks(WORLD, run, tmp_path, cases)
    assert len(first) == sum(len(faults(precision)) for _, _, precision in cases)
    for rank in others:
        assert rank == first, "the ranks disagree"


def test_every_stage_of_every_engine_is_tried() -> None:
    tried = {case[:2] for cases in CASES.values() for case in cases}
    assert tried >= {(engine, stage) for engine, stage in STAGES if engine != "native"}

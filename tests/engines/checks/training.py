"""Training: micro-batches, norms of any size, recomputed blocks, the loss head, what is measured and who is slow."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dtrain
from dtrain.config.model import ModelConfig
from dtrain.distributed.progress import Phase
from dtrain.distributed.transport.choose import make_communicator
from dtrain.engine.step import StepEngine
from dtrain.errors import ConfigError
from dtrain.models import build_model
from tests.engines import float8_model
from tests.engines.helpers import batch, state_digests, train_step
from tests.engines.matrix import Case, Trial, check
from tests.helpers.oracle import normwise_error
from tests.helpers.runs import Run, forward_backward
from tests.helpers.runs import start as start_run


def told(engine: StepEngine, numbers: Sequence[int], last: int | None) -> Iterator[int]:
    for number in numbers:
        with engine.micro_batch(last=number == last):
            yield number


def train_through(engine: StepEngine, numbers: Iterable[int]) -> Any:
    for number in numbers:
        index = number * engine.world_size + engine.rank
        engine.backward(engine(tokens=batch(index)), weight=1 + index % 3)
    outcome = engine.step()
    assert outcome.applied
    return outcome, state_digests(engine)


@check(
    precisions=("bf16", "fp32"),
    ranks=(2, 1),
    variants={"": {}, "reproducible": {"reproducible": True}},
    unless=lambda case: bool(case.variant) and case.engine != "native",
)
def told_micro_batches_train_as_iterated_ones(trial: Trial) -> None:
    engine = trial.start(dropout=0.3)
    engine.save(trial.folder)
    expected = train_through(engine, engine.accumulate(range(3)))
    # the last is the control: the same samples, with the random numbers of other micro-batches
    for numbers, last, is_equal in ((range(3), 2, True), (range(3), None, True), (range(2, -1, -1), 0, False)):
        engine.load(trial.folder)
        assert (train_through(engine, told(engine, numbers, last)) == expected) is is_equal, (numbers, last)


@check(unless=lambda case: case == Case("deepspeed", 2))
def weights_of_any_magnitude_change_no_bit(trial: Trial) -> None:
    """Norm, clipping and update keep their bits; powers of two round nothing."""
    runs = []
    for weight in (1.0, 2.0**-83, *([2.0**83] if trial.case.engine != "deepspeed" else [])):
        engine, norms = trial.start(), []
        for step in range(2):
            engine.backward(engine(tokens=batch(2 * step + trial.rank)), weight=weight)
            outcome = engine.step()
            assert outcome.applied, outcome
            assert outcome.grad_norm > 0.05, "clipping is active"
            norms.append(outcome.grad_norm)
        runs.append((norms, state_digests(engine)))
    assert all(run == runs[0] for run in runs)


def language_model(**config: Any) -> nn.Module:
    return build_model(ModelConfig(num_layers=4, hidden_dim=32, num_heads=2, max_seq_len=16, **config), 64, seed=0)


def tokens_of(step: int, index: int) -> Tensor:
    return torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(100 * step + index))


def train_language_model(engine: StepEngine, steps: int = 2) -> list[float]:
    """Two micro-batches a step over all ranks; returns losses and norms."""
    curve = []
    for step in range(steps):
        for index in engine.accumulate(range(engine.rank, 2, engine.world_size)):
            tokens = tokens_of(step, index)
            engine.backward(engine(tokens=tokens[:, :-1], targets=tokens[:, 1:]))
        outcome = engine.step(lr=1e-3)
        curve += [outcome.loss, outcome.grad_norm]
    return curve


@check(
    precisions=("bf16", "fp32"),
    variants={way: {"blocks": dtrain.Blocks(recompute=way)} for way in ("full", "selective")},
)
def recomputed_blocks_have_the_bits_of_stored_ones(trial: Trial) -> None:
    runs = []
    for options in ({}, trial.options):
        engine = trial.engine(language_model(dropout=0.2), seed=3, audit=0, **options)
        runs.append((train_language_model(engine, 1), state_digests(engine)))
    assert runs[0] == runs[1]


@check(precisions=("fp32", "bf16"))
def losses_and_weights_are_those_of_full_logits(trial: Trial) -> None:
    """With and without a tied head."""
    found = []
    for chunk in (5, "none"):
        model = language_model(dropout=0.0, loss_chunk=chunk, tie_embeddings=trial.case.stage % 2 == 0)
        engine = trial.engine(model, audit=0)
        losses, tokens = train_language_model(engine, 1), tokens_of(9, 0)
        found.append((losses, engine.master_state()))
        output: Any = engine(tokens[:, :-1], targets=tokens[:, 1:])
        assert (output.logits is None) == (chunk == 5)
        with engine.eval():
            assert engine(tokens).logits.shape == (2, 17, 64)
    (chunked, weights), (full, others) = found
    exact = trial.case.precision == "fp32"
    assert chunked == pytest.approx(full, rel=1e-5 if exact else 2e-3)
    assert trial.rank or normwise_error(weights, others) < (1e-5 if exact else 2e-3)


@check(engines=("native",), stages=(3,))
def refuses_a_chunked_loss_if_the_head_is_a_unit_of_sharding(trial: Trial) -> None:
    units, tokens = {"sharding_units": ["blocks.*", "head"]}, tokens_of(0, trial.rank)
    chunked, automatic = (
        trial.engine(language_model(tie_embeddings=False, loss_chunk=chunk), audit=0, **units) for chunk in (5, "auto")
    )
    with pytest.raises(ConfigError, match=r"model.loss_chunk=5: the output layer 'head' .* use model.loss_chunk=none"):
        chunked(tokens[:, :-1], targets=tokens[:, 1:])
    output: Any = automatic(tokens[:, :-1], targets=tokens[:, 1:])
    assert output.logits is not None, "auto falls back"


@check()
def only_native_trains_with_a_subset_of_the_ranks(trial: Trial) -> None:
    """The libraries reduce over the whole process group, so two parts would add up each other's gradients."""
    groups = [dist.new_group([other]) for other in range(trial.ranks)]
    comm = make_communicator(groups[trial.rank], torch.device("cpu"))
    if trial.case.engine == "native":
        assert train_step(trial.start(comm=comm), 1).applied
        return
    with pytest.raises(ConfigError, match="all ranks of the process group, 2, and got a communicator of 1"):
        trial.start(comm=comm)


@check(precisions=("bf16",))
def a_measured_step_is_reported_alike_by_all_ranks(trial: Trial) -> str:
    run = Run("transformer", accumulation=2, options={"zero_stage": trial.case.stage, "precision": "bf16"})
    engine = start_run(run, engine=trial.case.engine)
    for step in range(2):
        with engine.measure_precision(["blocks.0"]) as measurement:
            forward_backward(engine, run, step)
            engine.step()
    report: Any = measurement.report()
    assert (report.step, report.applied) == (2, True)
    trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    assert {own.name for own in report.parameters} == trained
    for own in report.parameters:
        assert own.gradient.total == own.numel * 4, own.name
        assert own.update is None or 0 <= own.update.lost_fp16 <= own.update.lost_bf16 <= 1
    changed = sum(own.update.num_changed for own in report.parameters if own.update is not None)
    assert changed > 0.9 * sum(own.numel for own in report.parameters)
    (block,) = report.activations
    assert block.output.total == block.gradient.total > 0
    return repr(report)


def without_last_bits(value: Any) -> Any:
    """Rounds means, and leaves out norms of updates, whose last bits depend on the sharding."""
    if isinstance(value, dict):
        return {key: without_last_bits(item) for key, item in value.items() if key != "ratio"}
    if isinstance(value, list | tuple):
        return [without_last_bits(item) for item in value]
    return f"{value:.6g}" if isinstance(value, float) else value


@check(
    engines=("native",),
    precisions=("bf16", "fp8"),
    ranks=(2, 1),
    equals=lambda case: Case("native", 0, case.precision, 1),
)
def what_is_measured_depends_on_no_rank_and_stage(trial: Trial) -> Any:
    """Counts, and the operands of FP8, which are measured once over all ranks."""
    engine = float8_model.start("native", trial.case.stage, trial.case.precision, reproducible=True)
    with engine.measure_precision(["blocks.0"]) as measurement:
        float8_model.train_step(engine)
    report: Any = measurement.report()
    assert bool(report.float8) == (trial.case.precision == "fp8")
    return without_last_bits([asdict(own) for own in (*report.parameters, *report.activations, *report.float8)])


class Delayed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.delays: dict[Phase, float] = {}

    def sleep(self, phase: Phase) -> None:
        time.sleep(self.delays.get(phase, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x.register_hook(lambda _: self.sleep(Phase.BACKWARD))
        self.sleep(Phase.FORWARD)
        return x.square().mean()


@check(engines=("native", "ddp", "fsdp2"), unless=lambda case: case == Case("fsdp2", 2))
def names_a_delayed_rank_with_its_phase(trial: Trial) -> None:
    """In each phase in which the engine sees its waits; the last of them is the update, which no user code delays."""
    model = Delayed()
    engine = trial.engine(model)
    engine.busy.every = 2
    phases = {("native", 3): Phase.BACKWARD, ("ddp", 0): Phase.FORWARD, ("fsdp2", 3): Phase.DATA}
    assert phases.get((trial.case.engine, trial.case.stage), Phase.DATA) in engine.timed_phases[:3]
    for phase in engine.timed_phases[:3]:
        for delay in (0.05, 0.5, 2.0):  # a busy machine delays ranks too
            model.delays = {phase: delay} if trial.rank == 1 else {}
            for _ in range(4):  # one window at least is of this phase alone
                model.sleep(Phase.DATA)
                engine.backward(engine(torch.ones(2, 8)))
                engine.step()
            found = (engine.busy.latest.slowest_rank, engine.busy.latest.phase)
            if found == (1, phase):
                break
        assert found == (1, phase)

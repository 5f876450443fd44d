"""Steps that are skipped: Inf and NaN anywhere, the culprit and its origin, running statistics, ranks that differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.engine.outcome import Culprit
from dtrain.engine.step import StepEngine
from dtrain.errors import DivergenceError
from tests.engines.helpers import DIM, VOCAB, batch, computed, held, same, train_step
from tests.engines.matrix import Trial, check
from tests.helpers import planted_faults as planted

ACCUMULATION = 2
HUGE = 3e38  # twice that is above FP32


def attempt(
    engine: StepEngine, step: int, value: float, location: str, element: int, rank: int | None, micro_batch: int
) -> dtrain.StepOutcome:
    """The step with a number in a gradient at ``location``, or a factor of a loss, of one rank or (None) of all."""
    for number in engine.accumulate(range(ACCUMULATION)):
        is_hit = rank in (None, engine.rank) and number == micro_batch
        owner, _, name = location.rpartition(".")
        module: Any = engine.module.get_submodule(owner)
        module.faults = {name: (element, value)} if is_hit and name else {}
        loss = engine(tokens=batch((step * ACCUMULATION + number) * engine.world_size + engine.rank))
        engine.backward(loss * value if is_hit and not location else loss)
        module.faults = {}
    return engine.step()


@check(precisions=("bf16", "fp32", "fp16"), ranks=(2, 1))
def skips_a_bad_number_on_all_ranks_and_nothing_of_it_is_left(trial: Trial) -> None:
    """In the first and the last tensor of the model, in a block, in a loss, in all ranks' sum, and no weight at all."""
    last, fp16 = trial.ranks - 1, trial.case.precision == "fp16"
    # powers of two: they change no bit of the gradients that they scale
    scale = dtrain.LossScale.of(256.0) if fp16 else dtrain.LossScale("dynamic", init=2.0**20)
    faults: list[tuple[float, str, int, int | None, int]] = [
        (math.inf, "embedding.weight", 0, 0, 1),
        (math.nan, "head.bias", VOCAB - 1, last, 0),
        (math.inf, "blocks.0.up.weight", 3 * DIM - 1, last, 1),
        (math.nan, "", 0, last, 1),
        *([] if fp16 or trial.ranks == 1 else [(HUGE, "head.bias", 2, None, 0)]),
    ]
    engine, clean = (trial.start(loss_scale=scale) for _ in range(2))
    expected_scale = scale.init
    for step, fault in enumerate(faults):
        value, location, element, rank, micro_batch = fault
        before = [*held(engine), computed(engine)]
        outcome = attempt(engine, step, *fault)
        assert not outcome.applied, fault
        assert outcome.loss_scale == expected_scale
        counts: dict[str, Any] = {"num_inf": int(not math.isnan(value)), "num_nan": int(math.isnan(value))}
        where: dict[str, Any] = {"tensor": location, "start": element, "stop": element + 1}
        assert outcome.culprit is not None, fault
        if rank is None:
            want = Culprit(outcome.culprit.rank, 2 * step, "reduced gradient", None, **where, **counts)
        elif location:
            want = Culprit(rank, 2 * step, "local gradient", micro_batch, **where, **counts)
        else:
            want = Culprit(rank, 2 * step, "forward loss", micro_batch, num_bad_losses=1, **counts)
        assert outcome.culprit == want
        assert outcome.reason == ("overflow" if location else "nonfinite_loss"), fault
        expected_scale /= 2 if location and not fp16 else 1
        assert engine.loss_scale.scale == expected_scale, "a bad gradient halves it, nothing else does"
        assert same([*held(engine), computed(engine)], before), fault
        for trained in (engine, clean):
            assert train_step(trained, ACCUMULATION * trial.ranks, step=step).applied
        assert (engine.attempted_steps, engine.applied_steps) == (2 * step + 2, step + 1)
        assert same([*held(engine), computed(engine)], [*held(clean), computed(clean)]), f"{fault}: it is not gone"
    for index in engine.accumulate(range(ACCUMULATION)):
        engine.backward(engine(tokens=batch(index)), weight=0.0)
    before, outcome = held(engine), engine.step()
    assert (outcome.applied, outcome.reason, outcome.culprit) == (False, "empty", None)
    assert same(held(engine), before)


@check()
def stops_if_ranks_differ(trial: Trial) -> None:
    """In the learning rate or the position in the data: all stop, and nothing is updated."""
    for differs in ("lr", "data_cursor"):
        engine = trial.start()
        before = held(engine)
        engine.backward(engine(tokens=batch(0)))
        engine.data_cursor += differs == "data_cursor" and trial.rank == 1
        with pytest.raises(DivergenceError, match=f"(?s){differs}.*rank 1"):
            engine.step(lr=2e-3 if differs == "lr" and trial.rank == 1 else 1e-3)
        assert same(held(engine), before), differs
        with pytest.raises(DivergenceError):
            engine.backward(engine(tokens=batch(0)))


NAME = "blocks.0.up.weight"  # its first element lies in rank 0's shard


def infinite(grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad.view(-1)[0] = torch.inf
    return grad


def write_infinity(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.view(-1)[0] = torch.inf


@check(  # under FSDP2 a parameter is a DTensor between forwards
    variants={"module": {}, "parameter": {}, "accumulated": {}},
    unless=lambda case: case.engine == "fsdp2" and case.variant != "module",
)
def blames_no_rank_for_a_late_hook_of_another(trial: Trial) -> str:
    """A hook that the user adds to rank 1 writes Inf: into the gradient of an output, a parameter's, or the sum."""
    engine, kind = trial.start(), trial.case.variant
    parameter = dict(engine.module.named_parameters())[NAME]
    module = engine.module.get_submodule(NAME.rpartition(".")[0])
    for number in engine.accumulate(range(2)):
        if number == 1 and trial.rank == 1:
            if kind == "module":
                module.register_full_backward_pre_hook(lambda _, grads: (infinite(grads[0]),))
            elif kind == "parameter":
                parameter.register_hook(infinite)
            else:
                parameter.register_post_accumulate_grad_hook(write_infinity)
        engine.backward(engine(tokens=batch(2 * number + trial.rank)))
    culprit: Any = engine.step().culprit
    if kind == "accumulated" and engine.name != "ddp":  # the gradient may have been taken before the hook
        assert culprit is None or culprit.rank == 1 or "owner of the shard" in str(culprit), culprit
        return str(culprit)
    if kind == "accumulated":  # the hook runs after the engine's, right before the sum over the ranks
        assert (culprit.phase, culprit.tensor, culprit.rank) == ("reduced gradient", NAME, 0)
        assert "; owner of the shard: rank 0" in str(culprit)
        assert "on rank" not in str(culprit)
        return str(culprit)
    assert (culprit.phase, culprit.rank, culprit.micro_batch) == ("local gradient", 1, 1)
    assert kind == "module" or (culprit.tensor, culprit.start, culprit.stop) == (NAME, 0, 1)
    assert "on rank 1, micro-batch 1" in str(culprit)
    return str(culprit)


@check(variants={"module": {}, "root": {}})
def explains_where_a_bad_number_began(trial: Trial) -> str:
    """The origin is rank 1's, every rank learns it, and the search changes nothing else."""
    found: list[Any] = []
    for explains in (True, False):
        engine = planted.start(trial.case.variant, engine=trial.case.engine, zero_stage=trial.case.stage)
        engine.explain_skips = explains
        outcomes = planted.train(engine)
        found.append((planted.culprit_of(outcomes), planted.bits(engine, outcomes)))
    (culprit, bits), (unexplained, others) = found
    assert unexplained.origin is None
    assert bits == others
    assert (culprit.rank, culprit.micro_batch) == planted.BAD[1:]
    is_searched = trial.case.variant == "module" or trial.case.engine in ("native", "ddp")
    want = {"module": ("output", "square"), "root": ("input gradient", "root")}[trial.case.variant]
    assert (culprit.origin.place, culprit.origin.module) == (want if is_searched else ("", ""))
    return str(culprit)


class Normalized(nn.Module):
    """A norm inside a block and one after it; ``table`` is a constant, and ``seen`` is written with every input."""

    table: Tensor
    seen: Tensor

    def __init__(self, make_norm: Callable[..., nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), make_norm(4), nn.Tanh())])
        self.norm = make_norm(4, **({"momentum": None} if make_norm is nn.BatchNorm1d else {}))
        self.register_buffer("table", torch.linspace(0.5, 1.5, 4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.copy_(x.detach()[0, 0])
        for block in self.blocks:
            x = block(x)
        return self.norm(x) * self.table


def start_normalized(make_norm: Callable[..., nn.Module] = nn.BatchNorm1d, **options: Any) -> Any:
    torch.manual_seed(0)
    defaults = {"optimizer": dtrain.AdamW(lr=1e-2, compile=False), "precision": "fp32", "zero_stage": 0}
    return dtrain.initialize(Normalized(make_norm), **defaults | options)


def inputs(engine: StepEngine, index: int, factor: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(engine.attempted_steps * 100 + engine.rank * 10 + index)
    return torch.randn(8, 4, generator=generator) * factor


def step_normalized(engine: StepEngine, *factors: float) -> dtrain.StepOutcome:
    """A step with one micro-batch for each factor of its inputs."""
    for index, factor in engine.accumulate(enumerate(factors)):
        engine.backward(engine(inputs(engine, index, factor)).float().square().mean())
    return engine.step()


def statistics(engine: StepEngine) -> list[list[float]]:
    norms = (module for module in engine.module.modules() if isinstance(module, nn.BatchNorm1d))
    return [buffer.flatten().tolist() for norm in norms for buffer in norm.buffers()]


@check(ranks=(2, 1))
def keeps_running_statistics_of_applied_steps_only(trial: Trial) -> None:
    """A bad number on rank 0 only, in the first micro-batch; the others' statistics stay too."""
    engine = start_normalized(engine=trial.case.engine, zero_stage=trial.case.stage, audit=1)
    assert step_normalized(engine, 1.0, 1.0).applied
    before = statistics(engine)
    outcome = step_normalized(engine, math.nan if trial.rank == 0 else 1.0, 1.0)
    assert (outcome.applied, outcome.reason) == (False, "nonfinite_loss")
    assert statistics(engine) == before
    assert step_normalized(engine, 1.0, 1.0).applied
    after = statistics(engine)
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert after[2] == [4.0], "two forwards of each applied step"
    with engine.eval():
        assert engine(inputs(engine, 0)).isfinite().all()

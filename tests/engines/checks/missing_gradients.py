"""Parameters without a gradient in a step are left alone, as torch leaves them: by all engines, in all states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import dtrain
from dtrain.config.optim import SGD, Adam, AdamW, AdamWBF16, Lion
from tests.engines.checks.optimizers import COMPACT, MUON, lacks, optimizers_of_torch
from tests.engines.helpers import digest, state_digests
from tests.engines.matrix import Case, Trial, check
from tests.helpers.momentum import Momentum, trained_by

DIM = 24
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": AdamW(lr=0.01, weight_decay=0.3)},
    "adam": {"optimizer": Adam(lr=0.01, weight_decay=0.1)},
    "sgd": {"optimizer": SGD(lr=0.01, momentum=0.9, weight_decay=0.1)},
    "lion": {"optimizer": Lion(lr=1e-3, weight_decay=0.3)},
    "muon": {"optimizer": replace(MUON, splits={}, weight_decay=0.3)},
    "radam": {"optimizer": dtrain.TorchOptimizer(torch.optim.RAdam, lr=0.01, weight_decay=0.1)},
    "nadam": {"optimizer": dtrain.TorchOptimizer(torch.optim.NAdam, lr=0.01, weight_decay=0.1)},
}
STATES: dict[str, dict[str, Any]] = {
    **{name: OPTIMIZERS[name] for name in ("adamw", "muon", "nadam")},
    "adamw-bf16": {"optimizer": AdamWBF16(lr=0.01, weight_decay=0.3)},
    "momentum": {"optimizer": Momentum(lr=0.05, weight_decay=0.1, reduced=True, init=0.25)},
    **COMPACT,
}
"""Those whose states differ in kind."""


class Heads(nn.Module):
    """A trunk, alternating heads, a block that is dropped at times, and a module that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.heads = nn.ModuleDict({key: nn.Linear(DIM, 60) for key in "xyz"})  # three ranks cut them
        self.never = nn.Linear(DIM, DIM)

    def forward(self, inputs: Tensor, use: str) -> Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        if use[1:]:
            hidden = hidden + torch.tanh(self.blocks[int(use[1])](hidden))
        return (self.heads[use[0]](hidden).float() - 1).square().mean()


def build() -> Heads:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Heads()


def micro_batch(step: int, index: int, *, varies: bool) -> tuple[Tensor, str]:
    """Input and use: over the micro-batches of a step, some parameters are used by all, some by none.

    If it ``varies``, some are used by one of them.
    """
    generator = torch.Generator().manual_seed(1000 * step + index)
    uses = ("x0", "x", "y1", "x1", "y")
    return torch.randn(32, DIM, generator=generator), uses[(step + varies * index * (step % 3)) % len(uses)]


def varies_in(case: Case) -> bool:
    """Whether the ranks may use different modules: not if each forward or backward is a collective."""
    return case.stage < (2 if case.engine in ("fsdp2", "deepspeed") else 3)


def start(trial: Trial, **options: Any) -> Any:
    with trained_by():
        return trial.engine(build(), **{"max_grad_norm": None, **trial.options, **options})


def train(engine: Any, steps: Sequence[int], num_micro_batches: int = 2, *, varies: bool) -> None:
    for step in steps:
        for index in engine.accumulate(range(engine.rank, num_micro_batches, engine.world_size)):
            inputs, use = micro_batch(step, index, varies=varies)
            engine.backward(engine(inputs, use), weight=1.0 + index)
        assert engine.step().applied


def plain(record: Any, num_steps: int, *, varies: bool, divisor: float = 3.0) -> dict[str, Tensor]:
    """The masters after the same training in plain torch, on two micro-batches a step; gradients are divided late."""
    model = build()
    optimizers = optimizers_of_torch(record, dict(model.named_parameters()))
    for step in range(num_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for index in range(2):
            inputs, use = micro_batch(step, index, varies=varies)
            (model(inputs, use) * (1.0 + index) / (3.0 / divisor)).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= divisor
        for optimizer in optimizers:
            optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def distance(masters: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    return max((masters[name] - expected).abs().max().item() for name, expected in want.items())


@check(ranks=(2, 1), variants=OPTIMIZERS, unless=lacks)
def follows_torch_where_gradients_are_missing(trial: Trial) -> None:
    engine = start(trial)
    varies = varies_in(trial.case)
    train(engine, range(50), varies=varies)
    masters, record = engine.master_state(), trial.options["optimizer"]
    if not masters:  # on another rank
        return
    want, limit = plain(record, 50, varies=varies), 1e-6
    if trial.case.variant == "muon":  # Newton-Schulz, in BF16, amplifies the last bits of a gradient
        limit = 4 * distance(plain(record, 50, varies=varies, divisor=1.0), want)
        assert limit < 2e-3
    assert distance(masters, want) <= limit


@check(precisions=("fp32", "bf16"), ranks=(2, 1), variants=STATES, unless=lacks)
def leaves_every_bit_alone_without_a_gradient(trial: Trial) -> None:
    engine = start(trial, ema_decay=0.9)
    train(engine, range(5), varies=False)  # so that all states that move have moved
    for use, moved in (
        ("y1", ("heads.y", "blocks.1", "trunk")),
        ("x", ("heads.x", "trunk")),
        ("z", ("heads.z", "trunk")),
    ):
        before = state_digests(engine)
        for index in engine.accumulate([trial.rank]):
            own = use if trial.rank == 0 or not varies_in(trial.case) else use[0]  # the block is used on one rank
            engine.backward(engine(micro_batch(9, index, varies=False)[0], own))
        assert engine.step().applied
        changed = {key for key, value in state_digests(engine).items() if value != before[key]}
        assert changed == {key for key in before if key.split(":")[1].startswith(moved)}, use


BITS = {**STATES, "compiled": {"optimizer": AdamW(compile=True)}}


@check(
    engines=("native",),
    precisions=("bf16",),
    ranks=(2, 3, 1),
    variants=BITS,
    equals=lambda case: Case("native", 0, case.precision, 1, case.variant),
    unless=lacks,
)
def has_the_same_bits_where_gradients_are_missing(trial: Trial) -> dict[str, str]:
    engine = start(trial, reproducible=True, ema_decay=0.9)
    train(engine, range(7), 6, varies=False)
    return state_digests(engine)


@check(
    engines=("native",),
    stages=(0, 1, 2),
    precisions=("bf16",),
    ranks=(2, 3, 1),
    variants={name: BITS[name] for name in ("adamw", "nadam", "compact")},
    equals=lambda case: Case("native", 0, case.precision, 1, case.variant),
)
def has_the_same_bits_where_one_rank_has_a_gradient(trial: Trial) -> dict[str, str]:
    engine = start(trial, reproducible=True, ema_decay=0.9)
    train(engine, range(7), 6, varies=True)
    return state_digests(engine)


SOURCES = (
    Case("native", 3, ranks=2),
    Case("ddp", 0, ranks=1),
    Case("fsdp2", 2, ranks=2),
    Case("deepspeed", 1, ranks=2),
)
RESUMED = {name: OPTIMIZERS[name] for name in ("adamw", "radam")}


def train_and_save(trial: Trial) -> dict[str, int]:
    engine = start(trial)
    train(engine, range(20), varies=False)
    engine.save(trial.folder / "saved")
    return dict(engine._run.missed_updates)


@check(ranks=(2, 1), variants=RESUMED, sources=SOURCES, source=train_and_save)
def goes_on_from_what_was_missed(trial: Trial) -> None:
    engine = start(trial)
    engine.load(trial.folder / "saved")
    assert engine._run.missed_updates == trial.saved
    assert trial.saved["never.bias"] == 20
    assert 0 < trial.saved["heads.y.weight"] < 20
    train(engine, range(20, 40), varies=False)
    if masters := engine.master_state():
        assert distance(masters, plain(trial.options["optimizer"], 40, varies=False)) <= 1e-6


@check(ranks=(2, 1))
def a_skipped_step_and_a_dummy_count_for_nothing(trial: Trial) -> None:
    engine = start(trial)
    train(engine, range(4), varies=False)
    before, missed = state_digests(engine), dict(engine._run.missed_updates)
    engine.backward(engine(micro_batch(0, 0, varies=False)[0], "x") * math.inf)
    assert not engine.step().applied
    assert (state_digests(engine), engine._run.missed_updates) == (before, missed)
    for weight in engine.accumulate([1.0, 0.0]):  # the dummy uses another head
        engine.backward(engine(micro_batch(0, 0, varies=False)[0], "x" if weight else "z"), weight=weight)
    assert engine.step().applied
    assert engine._run.missed_updates["heads.z.weight"] == missed["heads.z.weight"] + 1
    assert digest(dict(engine.states.full_state("master"))["heads.z.weight"]) == before["master:heads.z.weight"]


@check(ranks=(2, 1))
def zero_is_a_gradient_if_asked_for(trial: Trial) -> None:
    engine = start(trial, missing_grad="zero", optimizer=SGD(lr=0.5, momentum=0, weight_decay=0.5))
    before = {name: tensor.clone() for name, tensor in engine.states.full_state("master")}
    train(engine, [1], varies=False)
    assert not engine._run.missed_updates
    after = dict(engine.states.full_state("master"))
    torch.testing.assert_close(after["never.weight"], before["never.weight"] * 0.75)

"""Loops of the fuzz, by plain FP32 torch in one process and by an engine on its ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dtrain
from tests.corpus.fuzz.models import Model, micro_batch, trained

MOMENTUM, WEIGHT_DECAY, EPS, BETAS, EMA = 0.9, 0.1, 1e-2, (0.9, 0.95), 0.8
WARMUP, TOTAL = 2, 6
WRITTEN = 0.9  # factor of a written weight


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        weights: of the micro-batches of all ranks in the order of their global index; 0 for a dummy.
        uses: which expert each takes, in turn.
        bad: index of a micro-batch with a bad number, and where it is: in the ``loss`` or the ``gradient``.
        before: what the loop does before: "", ``eval``, ``write`` (in ``modify_weights``), ``write in place``,
            ``rollback`` (save, train on, load), ``average`` (an evaluation with the moving average).
        factors: of the learning rate and of the clipping threshold in this step; None overrides nothing.
    """

    weights: tuple[int, ...] = (1, 1)
    uses: tuple[int, ...] = (0,)
    bad: tuple[int, str] | None = None
    before: str = ""
    overrides: tuple[float, float] | None = None


@dataclass(frozen=True)
class Loop:
    """A training; ``name`` of the schedule and of the optimizer as in ``dtrain``'s keys."""

    steps: tuple[Step, ...] = (Step(),)
    optimizer: str = "sgd"
    schedule: str = "constant"
    clip: float | None = None
    loss_scale: float | None = None
    ema: bool = False
    lr: float = 0.05

    def micro_batches(self, model: Model, number: int) -> list[tuple[Mapping[str, Any], int]]:
        """All ranks' micro-batches of a step with their weights."""
        step = self.steps[number]
        bad = dict([step.bad]) if step.bad is not None else {}
        return [
            (micro_batch(model, 100 * number + index, step.uses[index % len(step.uses)], bad.get(index, "")), weight)
            for index, weight in enumerate(step.weights)
        ]


@dataclass
class Trained:
    """What a training has come to.

    Attributes:
        outcomes: of each step whether it was applied, the loss, the norm and the learning rate.
        masters: after each step, by name; on other ranks than 0 empty.
        averages: the moving averages at the end.
        evaluation: the loss of an evaluation at the end.
    """

    outcomes: list[tuple[bool, float, float, float]] = field(default_factory=list)
    masters: list[dict[str, Tensor]] = field(default_factory=list)
    averages: dict[str, Tensor] = field(default_factory=dict)
    evaluation: float = math.nan


def schedule_factor(name: str, applied: int) -> float:
    if name == "constant":
        return 1.0
    if applied < WARMUP:
        return (applied + 1) / WARMUP
    progress = min((applied - WARMUP) / (TOTAL - WARMUP), 1.0)
    falls = progress if name == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return 1 - 0.9 * falls


@lru_cache(maxsize=2)
def plain(model: Model, loop: Loop) -> Trained:
    """Trains by plain torch in FP32."""
    module, found = model.build().float(), Trained()
    named = dict(trained(module))
    groups = [{"params": [p], "weight_decay": WEIGHT_DECAY * (p.dim() > 1)} for p in named.values()]
    if loop.optimizer == "sgd":
        optimizer: Any = torch.optim.SGD(groups, lr=loop.lr, momentum=MOMENTUM)
    else:
        optimizer = torch.optim.AdamW(groups, lr=loop.lr, betas=BETAS, eps=EPS)
    averages = {name: p.detach().clone() for name, p in named.items()}
    applied = 0
    for number, step in enumerate(loop.steps):
        if step.before.startswith("write"):
            with torch.no_grad():
                for name, p in named.items():
                    p.mul_(WRITTEN)
                    averages[name] = averages[name] if applied else p.detach().clone()
        optimizer.zero_grad()
        total, losses = sum(step.weights), []
        for inputs, weight in loop.micro_batches(model, number):
            if weight:
                loss = module(**inputs)
                losses.append(weight * loss.item() / total)
                (loss * weight / total).backward()
        gradients = [p.grad for p in named.values() if p.grad is not None]
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
        lr_factor, clip_factor = step.overrides or (schedule_factor(loop.schedule, applied), 1.0)
        lr = loop.lr * lr_factor
        is_applied = math.isfinite(sum(losses)) and math.isfinite(norm)
        if is_applied:
            if loop.clip is not None:
                for gradient in gradients:
                    gradient.mul_(min(1.0, loop.clip * clip_factor / (norm + 1e-6)))
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            applied += 1
            for name, p in named.items():
                if p.grad is not None:
                    averages[name] += (1 - EMA) * (p.detach() - averages[name])
        found.outcomes.append((is_applied, sum(losses), norm, lr))
        found.masters.append({name: p.detach().clone() for name, p in named.items()})
    found.averages = averages if loop.ema else {}
    with torch.no_grad():
        found.evaluation = float(module(**micro_batch(model, 0, 0, "")))
    return found


def start(model: Model, loop: Loop, precision: str, seed: int, engine: str, stage: int, **options: Any) -> Any:
    """The engine; ``seed`` decides the weights."""
    kinds = {"constant": dtrain.Constant, "linear": dtrain.Linear, "cosine": dtrain.Cosine}
    span = {} if loop.schedule == "constant" else {"warmup_steps": WARMUP, "total_steps": TOTAL, "min_ratio": 0.1}
    if loop.optimizer == "sgd":
        # weight decay is decoupled in neither: torch's SGD adds it to the gradient too
        optimizer: Any = dtrain.SGD(lr=loop.lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    else:
        optimizer = dtrain.AdamW(lr=loop.lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    policy: Any = precision
    if precision == "fp8":
        policy = dtrain.PrecisionPolicy.named("fp8", float8=dtrain.Float8(emulate=True))
    return dtrain.initialize(
        model.build(seed),
        optimizer=optimizer,
        schedule=kinds[loop.schedule](**{"warmup_steps": 0, **span}),
        engine=engine,
        zero_stage=stage,
        precision=policy,
        loss_scale="auto" if loop.loss_scale is None else loop.loss_scale,
        max_grad_norm=loop.clip,
        ema_decay=EMA if loop.ema else None,
        seed=0,
        **options,
    )


def by_engine(engine: Any, model: Model, loop: Loop, steps: Sequence[int], folder: Path) -> Trained:
    """Trains the numbered steps by an engine; all ranks call."""
    found = Trained()
    for number in steps:
        step = loop.steps[number]
        _before(engine, model, loop, number, folder / f"rollback-{number}")
        options = {}
        if step.overrides is not None:
            options = {"lr": loop.lr * step.overrides[0]}
            if loop.clip is not None:
                options["max_grad_norm"] = loop.clip * step.overrides[1]
        outcome = _step(engine, loop.micro_batches(model, number), **options)
        found.outcomes.append((outcome.applied, outcome.loss, outcome.grad_norm, outcome.lr))
        found.masters.append(engine.master_state())
    if loop.ema:
        with engine.ema():
            found.averages = engine.master_state()
    with engine.eval():
        found.evaluation = float(engine(**micro_batch(model, 0, 0, "")))
    return found


def _step(engine: Any, micro_batches: list[tuple[Mapping[str, Any], int]], **options: Any) -> dtrain.StepOutcome:
    for inputs, weight in engine.accumulate(micro_batches[engine.rank :: engine.world_size]):
        engine.backward(engine(**inputs), weight=weight)
    return engine.step(**options)  # type: ignore[no-any-return]


def _before(engine: Any, model: Model, loop: Loop, number: int, folder: Path) -> None:
    before = loop.steps[number].before
    if before in ("eval", "average"):
        with engine.ema() if before == "average" and loop.ema else nullcontext(), engine.eval():
            engine(**micro_batch(model, number, 0, ""))
    elif before == "write":
        with engine.modify_weights():
            for _, parameter in trained(engine.module):
                parameter.mul_(WRITTEN)
    elif before == "write in place":
        with torch.no_grad():
            for _, parameter in trained(engine.module):
                parameter.mul_(WRITTEN)
    elif before == "rollback":
        engine.save(folder)
        _step(engine, [({**inputs, "bad": ""}, weight) for inputs, weight in loop.micro_batches(model, number)])
        engine.load(folder)

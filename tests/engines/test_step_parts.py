"""Each part of a step can be left out: the step still trains, and only what that part promises fails."""

from __future__ import annotations

import inspect
import io
import logging
import math
import sys
import textwrap
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.distributed.logging import logger
from dtrain.distributed.progress import Phase
from dtrain.engine.adapters.native import NativeEngine
from dtrain.engine.blocks.compiled import CompiledBlocks
from dtrain.engine.parts import order
from dtrain.engine.parts.order import EngineParts
from dtrain.engine.step import StepEngine
from dtrain.errors import CheckpointError, ContractError, CorruptionError
from dtrain.parameters.model_states import MASTER
from dtrain.precision.regions import trace_regions
from tests.engines import float8_model
from tests.helpers.bit_flips import flip_bit
from tests.helpers.ranks import run_ranks
from tests.measure.classes import classes_of

NAMES = [field.name for field in fields(EngineParts)]
NEEDED_BY = {"forwards": {"replay", "shadow"}, "phases": {"busy"}}
"""Parts without which another one has nothing to work on: kept forwards, time in phases."""


class Model(nn.Module):
    """A norm with running statistics between two Linears; ``drift`` is added once, so that two passes differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(8))
        self.drift = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.drift *= 2.0
        return self.last(self.norm(self.first(x) + self.drift)) * self.table


def without_part(without: str) -> Any:
    """Context in which engines are built without that part."""

    def in_order(parts: EngineParts) -> list[Any]:
        return [getattr(parts, name) for name in NAMES if name != without and getattr(parts, name) is not None]

    return patch.object(EngineParts, "in_order", in_order)


def start(without: str, **options: Any) -> Any:
    """Returns an engine of two ranks without that part."""
    torch.manual_seed(0)
    with without_part(without):
        settings: dict[str, Any] = {"precision": "fp32", "audit": 1, "seed": 3, "zero_stage": 1} | options
        engine = dtrain.initialize(Model(), optimizer=dtrain.AdamW(lr=0.1), **settings)
    assert isinstance(engine, StepEngine)
    return engine


def step(engine: Any, factor: float = 1.0, **options: Any) -> dtrain.StepOutcome:
    generator = torch.Generator().manual_seed(10 * engine.attempted_steps + engine.rank)
    engine.backward(engine(torch.randn(4, 8, generator=generator) * factor).float().square().mean())
    outcome: dtrain.StepOutcome = engine.step(**options)
    return outcome


def raises(error: type[Exception], action: Callable[[], Any]) -> bool:
    try:
        action()
    except error:
        return True
    return False


def masters(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.states.full_state(MASTER)}


# -- what each part promises: True if it holds -------------------------------------------------------------------------


def phases(without: str) -> bool:
    engine = start(without)
    seen: list[Phase] = []
    engine.module.last.register_forward_hook(lambda *_: seen.append(engine.comm.schedule.progress.phase))
    step(engine)
    return seen == [Phase.FORWARD] and engine.comm.schedule.progress.phase == Phase.DATA


class _FailedSave:
    has_failed = True

    def raise_failure(self) -> None:
        raise CheckpointError("the disk is full")


def checkpointer(without: str) -> bool:
    engine = start(without)
    engine._between.parts.checkpointer._saver = _FailedSave()
    step(engine)
    return raises(CheckpointError, lambda: step(engine))


def gradients(without: str) -> bool:
    engine = start(without)
    step(engine)
    return engine.module.first.weight.grad is not None


def written(without: str) -> bool:
    engine = start(without, precision="bf16", audit=0)
    step(engine)
    before = masters(engine)
    with torch.no_grad():
        engine.module.first.weight.mul_(2.0)
    step(engine, lr=0.0)
    after = masters(engine)
    return not torch.equal(before["first.weight"], after["first.weight"])


def statistics(without: str) -> bool:
    engine = start(without)
    assert not step(engine, math.nan).applied
    return bool(engine.module.norm.running_mean.isfinite().all())


def buffers(without: str) -> bool:
    engine = start(without, audit=0)
    if engine.rank == 0:
        flip_bit(engine.module.table, 0, 20)
    engine.copy_buffers()  # a flipped bit is no write, so it stays where it is
    return bool(engine.comm.exchange_text(str(float(engine.module.table[0])))[1] == "1.0")


def observer(without: str) -> bool:
    engine = start(without, precision="bf16")
    with torch.no_grad():
        engine.module.first.weight.data = engine.module.first.weight.data.float()
    return raises(ContractError, lambda: engine(torch.ones(4, 8)))


def forwards(without: str) -> bool:
    engine = start(without)
    engine.explain_skips = True
    culprit = step(engine, math.nan).culprit
    return culprit is not None and culprit.origin is not None


def samples(without: str) -> bool:
    engine = start(without)
    with engine.measure_precision() as measurement:
        step(engine)
    return measurement.report() is not None


def missed(without: str) -> bool:
    engine = start(without)
    engine.backward(engine.module.last(torch.ones(1, 8)).mean())
    engine.step()
    return "first.weight" in engine._run.missed_updates


def audit(without: str) -> bool:
    engine = start(without)
    step(engine)
    for shard in engine.states.local_shards("exp_avg"):
        if engine.rank == 1:
            flip_bit(shard.data, 0, 20)
        break
    return raises(CorruptionError, lambda: step(engine))


def replay(without: str) -> bool:
    engine = start(without, audit=dtrain.Audit(every=0, replay_every=1))
    engine.module.drift = 1.0
    return raises(CorruptionError, lambda: step(engine))


def shadow(without: str) -> bool:
    policy = dtrain.PrecisionPolicy.named("fp8", float8=dtrain.Float8(shadow_every=1))
    with without_part(without):
        engine = float8_model.start("native", 1, policy)
    float8_model.train_step(engine, 2)
    return engine.float8_gap is not None


def compiled(without: str) -> bool:
    """The first step says into how many graphs the blocks were compiled; here none was."""
    build = order.build_parts

    def with_compiled(*args: Any) -> EngineParts:
        parts = build(*args)
        return replace(parts, compiled=CompiledBlocks(parts.checkpointer._comm, measures=False))

    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logger.addHandler(handler)
    try:
        with patch("dtrain.engine.step.build_parts", with_compiled):
            engine = start(without)
        step(engine)
    finally:
        logger.removeHandler(handler)
        trace_regions(enabled=False)
    return any("no block is compiled" in part for part in engine.comm.exchange_text(text.getvalue()))


def busy(without: str) -> bool:
    engine = start(without)
    engine.busy.every = 2
    for _ in range(2):
        step(engine)
    return engine.busy.latest is not None


PROMISES: dict[str, Callable[[str], bool]] = {
    "phases": phases,
    "checkpointer": checkpointer,
    "gradients": gradients,
    "written": written,
    "statistics": statistics,
    "buffers": buffers,
    "observer": observer,
    "forwards": forwards,
    "samples": samples,
    "missed": missed,
    "audit": audit,
    "replay": replay,
    "shadow": shadow,
    "compiled": compiled,
    "busy": busy,
}


def kept_without(rank: int, world: int) -> dict[str, tuple[list[float], dict[str, bool]]]:
    """Returns the losses of three steps, and which promises hold, for each part that is left out, and for none."""
    found = {}
    for name in ("", *NAMES):
        engine = start(name)
        losses = [step(engine).loss for _ in range(3)]
        found[name] = losses, {promise: check(name) for promise, check in PROMISES.items()}
    return found


@pytest.mark.processes
def test_a_part_can_be_left_out_and_only_its_promise_fails() -> None:
    assert set(PROMISES) == set(NAMES)
    for found in run_ranks(2, kept_without):
        losses, kept = found.pop("")
        assert all(kept.values()), "control"
        assert len(set(losses)) == 3, "it trains"
        for name, (own, holds) in found.items():
            assert own == losses, name
            assert {other for other, is_kept in holds.items() if not is_kept} == {name} | NEEDED_BY.get(name, set())


@pytest.mark.parametrize("field", NAMES)
def test_a_part_does_not_hold_the_engine(field: str) -> None:
    engine = dtrain.initialize(Model(), precision="fp32")
    assert isinstance(engine, StepEngine)
    part = getattr(engine._between.parts, field)
    assert all(value is not engine for value in vars(part).values()) if part is not None else field == "compiled"


def test_the_step_fits_on_a_page() -> None:
    """A class of the chain has at most 25 methods and 15 attributes of its own, ``step`` about 25 lines."""
    source = inspect.getsource(sys.modules[StepEngine.__module__])
    assert len(source.splitlines()) <= 300
    for cls in (cls for cls in NativeEngine.__mro__ if cls.__module__.startswith("dtrain.")):
        ((_, methods, attributes),) = classes_of(textwrap.dedent(inspect.getsource(cls)))
        assert len(methods) <= 25, cls
        assert len(attributes) <= 15, cls
    for method in (StepEngine.step, StepEngine.backward, StepEngine.__call__):
        text = inspect.getsource(method)
        assert len(text.splitlines()) <= 33, method
        assert not [name for name in NAMES if f".{name}." in text], "it names no part"

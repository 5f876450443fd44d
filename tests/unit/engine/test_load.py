"""An engine's load: refused before anything is overwritten, failed on all ranks together, or whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from dtrain.checkpoint import CheckpointReader, ReadTarget, open_newest
from dtrain.config.precision import Float8
from dtrain.errors import CheckpointError, UsageError
from dtrain.precision.policy import PrecisionPolicy
from tests.helpers.checkpoints import ALONE
from tests.helpers.one_rank import build, masters, start, train_step, unchanged
from tests.helpers.ranks import run_ranks


def with_frozen(values: torch.Tensor) -> nn.Module:
    model = build()
    model.frozen = nn.Parameter(values, requires_grad=False)
    return model


def saved_by(path: Path, model: nn.Module | None = None, **options: Any) -> Path:
    engine = start(model or with_frozen(torch.full((5,), 0.1)), **options)
    train_step(engine)
    return Path(engine.save(path))


@pytest.mark.parametrize(("saved", "loads"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_frozen_weights_load_exactly_and_narrow_as_at_the_start(tmp_path: Path, saved: str, loads: str) -> None:
    path = saved_by(tmp_path, precision=saved)
    engine = start(with_frozen(torch.zeros(5)), precision=loads)
    engine.load(path)
    dtype = torch.float32 if loads == "fp32" else torch.bfloat16
    assert engine.module.frozen.dtype == dtype
    assert torch.equal(engine.module.frozen, torch.full((5,), 0.1, dtype=torch.bfloat16).to(dtype))
    assert train_step(engine).applied


def test_frozen_tensor_that_differs_after_the_cast_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved_by(tmp_path, precision="bf16")
    engine = start(with_frozen(torch.zeros(5)), precision="fp32")
    copy = torch.Tensor.copy_

    def forget(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return self if self.shape == (5,) and source.dtype == torch.bfloat16 else copy(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", forget)
    with pytest.raises(CheckpointError, match="frozen 'frozen' differs from what was saved"):
        engine.load(path)


@pytest.mark.parametrize("kind", ["buffer", "frozen"])
def test_other_dtype_is_refused_before_anything_is_overwritten(tmp_path: Path, kind: str) -> None:
    def model(dtype: torch.dtype) -> nn.Module:
        built = build()
        tensor = torch.arange(3).to(dtype)
        if kind == "buffer":
            built.register_buffer("counts", tensor)
        else:
            built.counts = nn.Parameter(tensor, requires_grad=False)
        return built

    path = saved_by(tmp_path, model(torch.int32))
    engine = start(model(torch.float32))
    before = masters(engine)
    with pytest.raises(CheckpointError, match=rf"{kind} 'counts' was saved as torch.int32, the model's is torch.fl"):
        engine.load(path)
    assert unchanged(engine, before)
    assert train_step(engine).applied, "the engine is as it was"


def fails_on_one(rank: int, world: int, folder: str) -> list[str]:
    engine = start(with_frozen(torch.full((5,), 0.1)))
    train_step(engine)
    path = engine.save(folder)
    read_into = CheckpointReader.read_into

    def broken(self: CheckpointReader, targets: Iterable[ReadTarget]) -> None:
        wanted = list(targets)
        if rank == world - 1 and any(target.kind == "frozen" for target in wanted):
            raise OSError(5, "Input/output error")
        read_into(self, wanted)

    messages = []
    with mock.patch.object(CheckpointReader, "read_into", broken):
        for act in (lambda: engine.load(path), lambda: train_step(engine), lambda: engine.save(folder)):
            with pytest.raises((CheckpointError, UsageError)) as failure:
                act()
            messages.append(str(failure.value))
    engine.load(path)
    assert train_step(engine).applied
    return messages


@pytest.mark.processes
def test_load_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    for messages in run_ranks(2, fails_on_one, str(tmp_path)):
        assert "failed on rank 1: Input/output error" in messages[0]
        assert "engine.backward after an engine.load that failed half-way" in messages[1]
        assert "engine.save after an engine.load that failed half-way" in messages[2]


def test_checkpoint_has_the_hash_of_its_config_without_secrets(tmp_path: Path) -> None:
    engine = start()
    train_step(engine)
    engine.save(tmp_path, config={"b": 1, "api_key": "hidden"})
    state = open_newest(tmp_path, ALONE).state
    assert state["config"] == {"b": 1, "api_key": "***"}
    assert state["config_hash"] == hashlib.sha256(b'{"api_key":"***","b":1}').hexdigest()


def test_load_warns_of_another_update(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = start()
    plan = engine.states.plan  # what is recorded; the update stays what it is
    engine.states.plan = replace(plan, record=replace(plan.record, compile=True))
    train_step(engine)
    start().load(engine.save(tmp_path))
    assert "was saved with optim.compile=true, this run has false" in caplog.text


RULED = PrecisionPolicy.named("fp32", rules={"2": "bf16"})


def float8(**options: Any) -> PrecisionPolicy:
    return PrecisionPolicy.named("fp8", float8=Float8(**options))


@pytest.mark.parametrize(
    ("saved", "loads", "message"),
    [
        (RULED, RULED, ""),
        (RULED, "fp32", "was saved with '2' in bf16 (now fp32): 1 modules compute in another format"),
        (float8(), float8(num_rows=64), ""),
        (float8(), float8(grad_format="e4m3"), "saved with float8 grad_format=e5m2 (now e4m3): FP8 products"),
        (float8(), float8(recipe="rowwise"), "float8 recipe=tensorwise (now rowwise), grad_format=e5m2 (now e4m3): "),
    ],
)
def test_load_warns_of_other_formats(tmp_path: Path, caplog: Any, saved: Any, loads: Any, message: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 4))

    start(model(), precision=loads).load(saved_by(tmp_path, model(), precision=saved))
    assert message in caplog.text
    assert bool(message) is ("was saved with" in caplog.text)

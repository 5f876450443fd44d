"""AdamW's hyper-parameters, and the choice and the compilation of an update."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from dtrain.config.optim import SGD, AdamW, AdamWBF16, Lion
from dtrain.errors import ConfigError
from dtrain.optim import compiled, rules
from dtrain.optim.rules import on_device, rule_of
from tests.helpers.arena import DECAYED, PLAIN, SLOWER, Arena


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -1.0}, "AdamW.lr=-1.0 is too small; it must be at least 0"),
        ({"lr": float("nan")}, "AdamW.lr=nan is not a finite number"),
        ({"lr": "1e-3"}, "AdamW.lr='1e-3' is not a number"),
        ({"lr": torch.tensor(1e-3)}, "AdamW.lr=tensor.* is not a number"),
        ({"eps": -1e-8}, "AdamW.eps=-1e-08 is too small"),
        ({"weight_decay": -0.1}, "AdamW.weight_decay=-0.1 is too small"),
        ({"betas": 0.9}, "AdamW.betas=0.9 is not a list of 2 numbers"),
        ({"name": "lion"}, "AdamW.name=lion is not one of adamw"),
        ({"betas": (0.9, 1.0)}, "must be two numbers in"),
        ({"betas": (-0.1, 0.9)}, "must be two numbers in"),
        ({"betas": (0.9,)}, "must be two numbers in"),
        ({"compile": "always"}, "AdamW.compile=always is not one of auto, true, false"),
    ],
)
def test_invalid_hyper_parameters_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdamW(**fields)


@pytest.mark.parametrize("record", [AdamW, AdamWBF16, SGD, Lion])
def test_whether_to_compile_is_decided_by_device(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert on_device(record(), cpu).compile is False
    assert on_device(record(compile=True), cpu).compile is True
    for exists in (True, False):
        monkeypatch.setattr(rules, "has_compiler", lambda device, exists=exists: exists)
        assert on_device(record(), cuda).compile is exists
    with pytest.raises(ValueError, match="call on_device first"):
        rule_of(record())


def test_a_record_without_the_choice_is_left_alone() -> None:
    record = object()
    assert on_device(record, torch.device("cpu")) is record


@pytest.mark.compile
def test_one_graph_for_each_replica_dtype_and_one_for_the_coefficients() -> None:
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for dtype in (torch.bfloat16, torch.float32):
        for classes in ([DECAYED, PLAIN], [SLOWER] * 7, [DECAYED] * 700):
            record = AdamW(lr=0.1, betas=(0.5, 0.9), eps=0.1 * len(classes), compile=True)
            arena = Arena(record, classes, dtype=dtype)
            arena.steps(arena.optimizer([1]))
    assert counters["stats"]["unique_graphs"] == 3


def test_a_compiler_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no working C++ compiler\nand a long story")

    monkeypatch.setattr(compiled, "_compiled", lambda formula: (fail, fail))
    with pytest.raises(
        ConfigError, match=r"cannot be compiled on cpu \(RuntimeError: no working C\+\+ compiler\).*Lion\(compile"
    ):
        Arena(Lion(compile=True), [DECAYED]).optimizer()


@pytest.mark.compile
def test_the_kernel_and_the_compile_time_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dtrain"):
        for record in (AdamW(compile=False), Lion(compile=False), AdamW(compile=True)):
            Arena(record, [DECAYED]).optimizer()
    assert "AdamW by torch's fused kernel; optim.compile=true" in caplog.messages[0]
    assert "Lion by tensor code; optim.compile=true" in caplog.messages[1]
    assert "AdamW compiled in" in caplog.messages[2]

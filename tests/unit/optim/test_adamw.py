"""AdamW's hyper-parameters, and the choice and the compilation of an update."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch

from dtrain.config.optim import SGD, AdamW, AdamWBF16, Lion
from dtrain.errors import ConfigError
from dtrain.optim import compiled, rules
from dtrain.optim.adamw import AdamWRule
from dtrain.optim.rule import Rule, StateSpec
from dtrain.optim.rules import on_device, rule_of
from tests.helpers.arena import DECAYED, PLAIN, SLOWER, Arena
from tests.helpers.momentum import Momentum, MomentumRule


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -1.0}, "AdamW.lr=-1.0 is too small; it must be at least 0"),
        ({"lr": float("nan")}, "AdamW.lr=nan is not a finite number"),
        ({"lr": torch.tensor(1e-3)}, "AdamW.lr=tensor.* is not a number"),
        ({"betas": 0.9}, "AdamW.betas=0.9 is not a list of 2 numbers"),
        ({"betas": (0.9, 1.0)}, "must be two numbers in"),
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
    assert on_device("no record", cpu) == "no record"


@pytest.mark.compile
def test_one_graph_for_any_classes_and_one_for_the_coefficients(caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    with caplog.at_level(logging.INFO, logger="dtrain"):
        for classes in ([DECAYED, PLAIN], [SLOWER] * 7, [DECAYED] * 700):
            record = AdamW(lr=0.1, betas=(0.5, 0.9), eps=0.1 * len(classes), compile=True)
            arena = Arena(record, classes)
            arena.steps(arena.optimizer([1]))
    assert counters["stats"]["unique_graphs"] == 2
    assert "AdamW compiled in" in caplog.messages[0]


def test_a_compiler_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = mock.Mock(side_effect=RuntimeError("no working C++ compiler\nand a long story"))
    monkeypatch.setattr(compiled, "_compiled", lambda formula: (fail, fail))
    message = r"cannot be compiled on cpu \(RuntimeError: no working C\+\+ compiler\).*Lion\(compile"
    with pytest.raises(ConfigError, match=message):
        Arena(Lion(compile=True), [DECAYED]).optimizer()


def test_a_record_finds_its_rule() -> None:
    rule: Rule = rule_of(AdamW(compile=False))
    assert isinstance(rule, AdamWRule)
    assert (rule.is_compiled, rule.state_bytes) == (False, 8)
    assert [spec.name for spec in rule.states] == ["exp_avg", "exp_avg_sq"]
    with pytest.raises(ConfigError, match="optimizer is Momentum; expected one of Adam, AdamW, AdamWBF16"):
        rule_of(Momentum())
    state = StateSpec("ema", torch.bfloat16, 0.5).like(torch.nn.Parameter(torch.zeros(3, 2)))
    assert (state.dtype, state.shape, state.requires_grad) == (torch.bfloat16, (3, 2), False)
    assert (state == 0.5).all()
    assert MomentumRule(Momentum(reduced=True)).state_bytes == 2

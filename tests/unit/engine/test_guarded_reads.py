"""Reads of weights after calls that end in unusual ways; the usual ones are in tests/engines/checks/reads.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dtrain
from tests.helpers.one_rank import X, build, start, train_step


def showing(**options: Any) -> Any:
    engine = start(precision="bf16", **options)
    engine.guard_reads(shows_masters=True)
    return engine


def weight_of(engine: Any) -> Tensor:
    return engine.module[0].weight.detach().clone()  # type: ignore[no-any-return]


@pytest.mark.parametrize("call", [lambda engine: engine(X), lambda engine: engine.module(X)], ids=["engine", "module"])
def test_an_interrupted_forward_leaves_nothing_open(call: Callable[[Any], Any]) -> None:
    """torch calls the hooks after a forward for an ``Exception`` only."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    engine = showing()
    hook = engine.module[2].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        call(engine)
    hook.remove()
    assert train_step(engine).applied
    assert weight_of(engine).dtype == torch.float32
    assert torch.equal(weight_of(engine), engine.master_state()["0.weight"])
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32, "autocast is off"


def test_averages_that_were_read_go_with_an_exception() -> None:
    engine = showing(optimizer=dtrain.AdamW(lr=0.1), ema_decay=0.5)
    for _ in range(3):
        train_step(engine)
    averages = []

    def validate() -> None:
        with engine.ema():
            averages.append(weight_of(engine))
            raise ValueError("of a validation")

    with pytest.raises(ValueError, match="of a validation"):
        validate()
    assert torch.equal(weight_of(engine), engine.master_state()["0.weight"])
    assert not torch.equal(weight_of(engine), averages[0])


@pytest.mark.compile
def test_a_model_compiled_in_place_is_one_graph() -> None:
    model = build()
    model.compile(backend="aot_eager", fullgraph=True)
    engine = showing(model=model)
    assert all(train_step(engine).applied for _ in range(3))

"""Backwards and gradients that a script of plain PyTorch may have, under engines of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtrain.errors import UsageError
from tests.helpers.one_rank import X, loss_of, start, train_step

ENGINES = [("native", 2), ("native", 3), ("fsdp2", 2), ("ddp", 0)]


@pytest.mark.parametrize("option", ["retain_graph", "create_graph", "inputs", "gradient"])
def test_options_of_a_backward_are_refused_before_it(option: str) -> None:
    engine = start()
    loss = loss_of(engine)
    with pytest.raises(UsageError, match=rf"engine.backward\({option}=...\)"):
        engine.backward(loss, **{option: True})
    engine.backward(loss, retain_graph=False, create_graph=None)
    assert engine.step().applied


@pytest.mark.parametrize(("name", "stage"), ENGINES)
def test_one_graph_in_two_micro_batches_is_refused_by_name(name: str, stage: int) -> None:
    engine = start(engine=name, zero_stage=stage)
    loss = loss_of(engine)
    with engine.micro_batch(last=False):
        engine.backward(loss * 1)
    message = r"micro-batch 1 is of a graph that another engine\.backward has freed"
    with pytest.raises(UsageError, match=message), engine.micro_batch(last=True):
        engine.backward(loss * 2)


@pytest.mark.parametrize(("name", "stage"), ENGINES)
def test_another_engine_between_two_micro_batches_leaves_what_shows(name: str, stage: int) -> None:
    def gradients(engine: Any) -> list[Any]:
        return [parameter.grad for parameter in engine.module.parameters()]

    options = {"engine": name, "zero_stage": stage}
    d, g, alone = (start(**options) for _ in range(3))
    for engine in (d, alone):
        for index, micro in enumerate(engine.accumulate([X, 2 * X])):
            engine.backward(loss_of(engine, micro))
            if engine is d and not index:
                before = gradients(d)
                assert all(grad is not None for grad in before)
                g.backward(d(g(X).expand(3, 4)).mean())
                assert all(one is other for one, other in zip(before, gradients(d), strict=True))
                g.step()
        assert engine.step().applied
    want = alone.master_state()
    assert all(torch.equal(weight, want[key]) for key, weight in d.master_state().items())


def test_a_loss_that_is_refused_leaves_what_shows() -> None:
    engine = start()
    for index, micro in enumerate(engine.accumulate([X, X])):
        if index:
            before = engine.module[0].weight.grad
            with pytest.raises(UsageError, match="the loss has no graph"):
                engine.backward(torch.ones(()))
            assert engine.module[0].weight.grad is before is not None
        engine.backward(loss_of(engine, micro))
    engine.module[0].weight.grad = None
    with pytest.raises(UsageError, match="grad was set to None"):
        engine.step()
    assert engine.step().applied


def test_an_optimizer_of_torch_beside_the_engine_is_an_error() -> None:
    engine = start()
    train_step(engine)
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
    optimizer.zero_grad()
    optimizer.step()  # no gradients: nothing
    engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match="grad is given to"):
        optimizer.step()

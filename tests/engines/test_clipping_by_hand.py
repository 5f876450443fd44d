"""``clip_grad_norm_`` of torch on parameters of an engine warns, and works as ever on others."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tests.helpers.one_rank import start


@contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


@pytest.mark.parametrize(
    ("name", "message"), [("native", "no gradient, so it has no"), ("ddp", "not averaged yet")], ids=["native", "ddp"]
)
def test_clipping_by_hand_warns_once_per_engine_and_clips_others(name: str, message: str) -> None:
    engine, other = start(engine=name), start()
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    with recorded() as found:
        for _ in range(2):
            clip_grad_norm_(engine.module.parameters(), 1.0)
    assert [message in str(warning.message) for warning in found] == [True]
    assert (found[0].category, found[0].filename) == (UserWarning, __file__)
    with recorded() as found:
        clip_grad_norm_(other.module[0].weight, 1.0)
    assert len(found) == 1
    plain_model = nn.Linear(2, 2)
    plain_model(torch.full((1, 2), 100.0)).sum().backward()
    with recorded() as found:
        clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)  # no gradient, and no engine
        norm = clip_grad_norm_([*plain_model.parameters(), *engine.module.parameters()], 1.0)
    assert not found
    assert norm > 100
    assert torch.isclose(torch.cat([p.grad.flatten() for p in plain_model.parameters()]).norm(), torch.tensor(1.0))

"""A session whose steps are replayed from graphs trains as one whose steps are not."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import dtrain
from dtrain.errors import ConfigError
from dtrain.train.session import StepWatch
from tests.helpers.recorded_graph import graphs_on_cpu

KEYS = ["data=friedman", "model=mlp", "precision=bf16", "optim.compile=false", "train.steps=12", "train.log_every=1"]
KEYS += ["train.global_batch_size=64", "train.micro_batch_size=32"]


class _WatchedForward(StepWatch):
    def forward(self, micro: object) -> nullcontext[None]:
        return nullcontext()


def test_a_session_trains_from_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = graphs_on_cpu(monkeypatch)
    found = []
    for graph in ("false", "true"):
        session = dtrain.Session.open(overrides=[*KEYS, f"engine.graph={graph}"])
        outcomes = [session.step() for _ in range(6)]
        outcomes.append(session.step(watch=_WatchedForward()))  # eagerly: it sees the forward
        outcomes += [session.step() for _ in range(2)]
        found.append((repr(outcomes), session.engine.data_cursor, session.validate(), session.engine.master_state()))
    (*want, states), (*got, others) = found
    assert got == want
    assert all(torch.equal(states[name], others[name]) for name in states)
    assert [graph.num_replays for graph in graphs] == [5, 5]


def test_a_session_on_a_cpu_refuses_graphs() -> None:
    with pytest.raises(ConfigError, match=r"engine.graph=true: it needs a GPU, and this rank trains on cpu"):
        dtrain.Session.open(overrides=[*KEYS, "engine.graph=true"])

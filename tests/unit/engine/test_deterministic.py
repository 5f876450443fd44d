"""``reproducible=True`` switches deterministic kernels on before the first product on a GPU."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dtrain
from dtrain.config.model import ModelConfig
from dtrain.config.precision import Float8
from dtrain.errors import ConfigError
from dtrain.models import build_model

initialize = importlib.import_module("dtrain.engine.initialize")


@pytest.fixture(autouse=True)
def workspace() -> Iterator[None]:
    """Restores the variable of the process."""
    workspace = os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    yield
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if workspace is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace


def test_the_products_that_are_timed_are_deterministic_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads the variable once, in the first product on a GPU, and would refuse all later ones."""
    seen = []
    decide = initialize.decide_float8

    def decide_float8(*args: Any, **kwargs: Any) -> Any:
        seen.append((os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.are_deterministic_algorithms_enabled()))
        return decide(*args, **kwargs)

    monkeypatch.setattr(initialize, "decide_float8", decide_float8)
    policy = dtrain.PrecisionPolicy.named("fp8", float8=Float8(choice="all"))
    model = build_model(ModelConfig(num_layers=1, hidden_dim=32, num_heads=2, max_seq_len=8), 64, seed=0)
    dtrain.initialize(model, precision=policy, reproducible=True, seed=0)
    assert seen == [(":4096:8", True)]


class _ProductsFail(TorchDispatchMode):
    """Refuses products as torch does on a GPU."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self._reason = reason

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            raise RuntimeError(self._reason)
        return func(*args, **(kwargs or {}))


def test_a_process_whose_cublas_is_not_deterministic_is_refused() -> None:
    late = _ProductsFail("... you must set an environment variable ...: CUBLAS_WORKSPACE_CONFIG=:4096:8 ...")
    with late, pytest.raises(ConfigError, match=r"Set it in the environment of the process"):
        dtrain.initialize(nn.Linear(8, 8), precision="fp32", reproducible=True, seed=0)
    assert not torch.are_deterministic_algorithms_enabled(), "a refused engine changed the process"
    with _ProductsFail("no kernel image"), pytest.raises(RuntimeError, match="no kernel image"):
        dtrain.initialize(nn.Linear(8, 8), precision="fp32", reproducible=True, seed=0)

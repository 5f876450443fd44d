"""Random numbers keyed by what is computed, and deterministic kernels from the first product on a GPU on."""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dtrain
from dtrain.config.precision import Float8
from dtrain.engine.rng import keyed_rng, rng_key
from dtrain.errors import ConfigError
from tests.helpers.one_rank import start

CPU = torch.device("cpu")


def test_keys_of_a_run_all_differ_and_equal_those_of_earlier_versions() -> None:
    """Resuming an old run draws the numbers it would have drawn."""
    keys = {rng_key(seed, step, index) for seed in range(8) for step in range(64) for index in range(64)}
    assert len(keys) == 8 * 64 * 64
    assert all(0 <= key < 2**63 for key in keys)
    assert (rng_key(0, 0, 0), rng_key(11, 5, 3)) == (1195769770526638388, 8979783157863330958)


def test_one_key_gives_one_sequence_and_the_callers_state_is_restored_after_an_error_too() -> None:
    draws = []
    for seed, key in ((1, 99), (2, 99), (2, 100)):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        with keyed_rng(CPU, key):
            draws.append(torch.rand(8))
        with pytest.raises(IndexError), keyed_rng(CPU, key):
            torch.rand(3)[5]
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*draws[:2])
    assert not torch.equal(draws[0], draws[2])


def masks(seed: int, noise: int = 0) -> list[torch.Tensor]:
    """The dropout masks of two steps with two micro-batches of two forwards each, such as two views of one sample."""
    engine = start(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)), seed=seed)
    seen = []
    for _ in range(2):
        for _ in engine.accumulate(range(2)):
            torch.rand(noise)
            outputs = [engine(torch.ones(64, 1)) for _ in range(2)]
            seen += [output.detach() != 0 for output in outputs]
            engine.backward((outputs[0] + outputs[1]).mean())
        engine.step()
    return seen


def test_a_forward_is_keyed_by_seed_step_micro_batch_and_number_only() -> None:
    first = masks(3)
    assert all(torch.equal(a, b) for a, b in zip(first, masks(3, noise=7), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, masks(4), strict=True))
    assert len({tuple(mask.flatten().tolist()) for mask in first}) == 8


initialize = importlib.import_module("dtrain.engine.initialize")


@pytest.fixture(autouse=True)
def workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the variable of the process, also where it was not set."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")


def test_the_products_that_are_timed_are_deterministic_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads the variable once, in the first product on a GPU, and would refuse all later ones."""
    seen = []
    decide = initialize.decide_float8

    def decide_float8(*args: Any, **kwargs: Any) -> Any:
        seen.append((os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.are_deterministic_algorithms_enabled()))
        return decide(*args, **kwargs)

    monkeypatch.setattr(initialize, "decide_float8", decide_float8)
    policy = dtrain.PrecisionPolicy.named("fp8", float8=Float8(choice="all"))
    start(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), precision=policy, reproducible=True)
    assert seen == [(":4096:8", True)]


class _ProductsFail(TorchDispatchMode):
    """Refuses products as torch does on a GPU."""

    reason = "... you must set an environment variable ...: CUBLAS_WORKSPACE_CONFIG=:4096:8 ..."

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            raise RuntimeError(self.reason)
        return func(*args, **(kwargs or {}))


def test_a_process_whose_cublas_is_not_deterministic_is_refused() -> None:
    fail = _ProductsFail()
    with fail, pytest.raises(ConfigError, match=r"Set it in the environment of the process"):
        start(reproducible=True)
    assert not torch.are_deterministic_algorithms_enabled(), "a refused engine changed the process"
    fail.reason = "no kernel image"
    with fail, pytest.raises(RuntimeError, match="no kernel image"):
        start(reproducible=True)


def test_ranks_compare_the_flash_attention_that_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(initialize, "_require_equal_configs", lambda comm, text: texts.append(text))
    start()
    monkeypatch.setattr(initialize, "current_flash_attention_impl", lambda: "FA3")
    start()
    assert [json.loads(text)["versions"]["flash_attention"] for text in texts] == [None, "FA3"]

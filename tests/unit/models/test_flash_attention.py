"""FlashAttention 3 in a reproducible training: taken by all ranks or by none, after a proof, and never with dropout."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from dtrain.cli.resolve import compose
from dtrain.config.schema import RunConfig
from dtrain.engine.deterministic import deterministic_kernels
from dtrain.models import attention, flash_attention
from dtrain.models.attention import AttentionShape
from dtrain.models.flash_attention import choose_attention, flash_attention_3_problem
from dtrain.train.setup import torch_settings_restored

CONFIG: RunConfig = compose(["experiment=smoke", "engine.reproducible=true"])
SHAPE = AttentionShape(4, 2, 8, 0.0)


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """An H100 with a package FlashAttention 3, whose gradients are those of PyTorch."""
    activated = mock.Mock(return_value=mock.Mock())
    activated.gradients = mock.Mock(side_effect=lambda *_: [torch.ones(3), torch.ones(3), torch.ones(3)])
    real = torch.nn.attention._registry._FLASH_ATTENTION_IMPLS
    monkeypatch.setitem(real, "FA3", activated)
    monkeypatch.setattr(flash_attention, "find_spec", lambda name: object())
    monkeypatch.setattr(flash_attention, "_gradients", activated.gradients)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    yield activated
    restore_flash_attention_impl(_raise_warn=False)


def choose(config: RunConfig, caplog: Any, *, dtype: torch.dtype = torch.bfloat16, others: tuple[str, ...] = ()) -> str:
    """Lets rank 0 of several choose, and returns what it says."""
    told = [json.dumps({"value": problem}) for problem in others]
    comm: Any = SimpleNamespace(device=torch.device("cuda", 0), rank=0, exchange_text=lambda text: [text, *told])
    caplog.clear()
    with caplog.at_level(logging.INFO):
        choose_attention(config, comm, dtype)
    return str(caplog.text)


def test_all_ranks_take_it_or_none(package: mock.Mock, caplog: Any) -> None:
    assert "attention by FlashAttention 3" in choose(CONFIG, caplog, others=("",))
    assert current_flash_attention_impl() == "FA3"
    assert package.gradients.call_args.args == (
        AttentionShape(2, 2, 32, 0.0),
        torch.device("cuda", 0),
        torch.bfloat16,
        64,
    )
    said = choose(CONFIG, caplog, others=("", "no package"))
    assert "without FlashAttention 3 (rank 2: no package)" in said
    assert "about 15 % of a step" in said
    assert current_flash_attention_impl() is None


def test_what_needs_no_determinism_takes_what_pytorch_takes(package: mock.Mock, caplog: Any) -> None:
    plain = compose(["experiment=smoke"])
    assert choose(plain, caplog) == choose(compose(["experiment=regression", "engine.reproducible=true"]), caplog) == ""
    comm: Any = SimpleNamespace(device=torch.device("cpu"))
    choose_attention(CONFIG, comm, torch.bfloat16)
    package.assert_not_called()


def test_each_reason_is_named(package: mock.Mock, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def with_model(**keys: Any) -> RunConfig:
        return replace(CONFIG, model=replace(CONFIG.model, **keys))

    assert "and the model has 0.1" in choose(with_model(dropout=0.1), caplog), "its operator refuses dropout"
    assert "not in float32" in choose(CONFIG, caplog, dtype=torch.float32)
    assert "not 12)" in choose(with_model(hidden_dim=24), caplog)
    assert "model.factory=mine:build" in choose(with_model(factory="mine:build"), caplog)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert "this one has 8.0" in choose(CONFIG, caplog)
    monkeypatch.undo()
    assert flash_attention_3_problem((9, 0)) == "no package has a module flash_attn_interface: install FlashAttention 3"
    package.assert_not_called()
    register_flash_attention_impl("other", register_fn=package)
    activate_flash_attention_impl("other")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(flash_attention, "find_spec", lambda name: object())
    assert "this process has activated other" in choose(CONFIG, caplog)
    assert current_flash_attention_impl() == "other"


ONES, NEAR, FAR = torch.ones(3), torch.ones(3) * 1.001, torch.ones(3) * 1.1


@pytest.mark.parametrize(
    ("second", "third", "reason"),
    [
        ([NEAR, NEAR, NEAR], [NEAR, NEAR, NEAR], ""),
        ([ONES, ONES, ONES], [ONES, NEAR, ONES], "two equal backwards gave other bits of the gradient of k"),
        ([ONES, ONES, FAR], [ONES, ONES, FAR], "its gradient of v is 10.0% away from PyTorch's"),
        ([ONES, ONES, ONES * torch.nan], [ONES, ONES, ONES * torch.nan], "two equal backwards"),
        (RuntimeError("head dimension 64 was not compiled"), None, "head dimension 64 was not compiled"),
    ],
)
def test_a_kernel_that_fails_its_proof_is_not_taken(
    second: Any, third: Any, reason: str, package: mock.Mock, caplog: Any
) -> None:
    package.gradients.side_effect = [[ONES, ONES, ONES], second, third]
    said = choose(CONFIG, caplog)
    assert reason in said
    assert (current_flash_attention_impl() == "FA3") == (not reason)
    assert not torch.are_deterministic_algorithms_enabled()


def test_gradients_of_one_kernel_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    device, seed = torch.device("cpu"), torch.initial_seed()
    before = torch.get_rng_state()
    with deterministic_kernels():
        first, second = (flash_attention._gradients(SHAPE, device, torch.float32, 16) for _ in range(2))
    assert [x.shape for x in first] == [(1, 16, 4, 8), (1, 16, 2, 8), (1, 16, 2, 8)]
    pairs: list[tuple[Tensor, Tensor]] = list(zip(first, second, strict=True))
    assert all(torch.equal(*pair) and pair[0].norm() > 0 for pair in pairs)
    monkeypatch.setattr(attention, "_document_by_document", mock.Mock(side_effect=RuntimeError("no packed documents")))
    with pytest.raises(RuntimeError, match="no packed documents"):
        flash_attention._gradients(SHAPE, device, torch.float32, 16)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.initial_seed() == seed


def test_the_next_job_of_a_sweep_finds_what_the_first_has_found(package: mock.Mock) -> None:
    with torch_settings_restored():
        activate_flash_attention_impl("FA3")
    assert current_flash_attention_impl() is None
    activate_flash_attention_impl("FA3")
    with torch_settings_restored():
        restore_flash_attention_impl()
    assert current_flash_attention_impl() == "FA3"

"""Models that select by values, which a plan does not have."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.planning.record.fake_step import _tell_of_selection
from tests.helpers.net import Net
from tests.unit.planning.planned_runs import planned_run

_SELECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda values, mask: values[mask],
    "broadcast": lambda values, mask: torch.masked_select(values, mask[:1]),
    "unique": lambda values, mask: values.unique(),
}


def run_selecting(net: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean of the scores that are selected."""
    scores: Tensor = net.select(net.embedding(tokens)[..., 0], targets != -100)
    net.selected = scores.numel()
    return scores.float().mean()


def build(config: Any, vocab_size: int) -> nn.Module:
    return Net(run_selecting, embedding=nn.Embedding(vocab_size, 1), select=_SELECTIONS[config.args["selection"]])


def selected_by(name: str) -> int:
    keys = (f"model.factory={__name__}:build", f"model.args.selection={name}", "model.max_seq_len=16")
    with planned_run(*keys, "train.micro_batch_size=2", "precision=fp32").engine() as (engine, step):
        step()
        return int(engine.module.selected)


@pytest.mark.parametrize("name", ["index", "broadcast"])
def test_a_mask_selects_all_elements_and_the_user_is_told_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    _tell_of_selection.cache_clear()
    with caplog.at_level(logging.WARNING, logger="dtrain"):
        assert [selected_by(name) for _ in range(2)] == [2 * 16] * 2
    assert [message[:44] for message in caplog.messages] == ["the model selects elements by their values, "]


def test_another_size_that_depends_on_values_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the size of the result of aten\._unique2\.default depends on them"):
        selected_by("unique")

"""Models that take what the data gives, and those that do not."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from dtrain.config.model import GPT2_FACTORY, ModelConfig
from dtrain.data import Dataset, SampleSource
from dtrain.data.text import ByteCodec
from dtrain.data.token_samples import ShardWindows
from dtrain.errors import ConfigError
from dtrain.models import build_model
from dtrain.train.setup import check_inputs
from tests.helpers.token_shards import MemoryShards


class Plain(nn.Module):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return tokens.float().mean()


class Open(nn.Module):
    def forward(self, tokens: Tensor, **inputs: Any) -> Tensor:
        return tokens.float().mean()


def dataset(*, masks: bool) -> Dataset:
    source: SampleSource = ShardWindows(MemoryShards([10] * 9), 8, masks)  # type: ignore[arg-type]
    return Dataset(source, source, "", "", 300, ByteCodec())


def test_a_model_without_positions_is_refused_where_the_data_has_them() -> None:
    with pytest.raises(ConfigError) as caught:
        check_inputs(Plain(), dataset(masks=True))
    assert str(caught.value) == (
        "the data keeps the documents of a sample apart by positions, but Plain.forward takes only (tokens, targets); "
        "add positions to forward, or train it on data=tokens data.documents=cross"
    )
    check_inputs(Plain(), dataset(masks=False))
    check_inputs(Open(), dataset(masks=True))


@pytest.mark.parametrize("factory", [ModelConfig.factory, GPT2_FACTORY])
def test_the_built_in_models_take_positions(factory: str) -> None:
    model = build_model(ModelConfig(num_layers=1, hidden_dim=16, num_heads=2, max_seq_len=8, factory=factory), 9, 0)
    check_inputs(model, dataset(masks=True))

"""Models that take what the data gives, and those that do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from dtrain.config.model import GPT2_FACTORY, HF_FACTORY, ModelConfig
from dtrain.data import Dataset, SampleSource
from dtrain.data.text import ByteCodec
from dtrain.data.token_samples import ShardWindows
from dtrain.data.tokenizer import TokenizerFile
from dtrain.errors import ConfigError
from dtrain.models import build_model
from dtrain.tasks import Language
from dtrain.train.setup import check_inputs, check_tokenizer
from tests.helpers.corpora import write_tokenizer
from tests.helpers.token_shards import MemoryShards


class Plain(nn.Module):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return tokens.float().mean()


class Open(nn.Module):
    def forward(self, tokens: Tensor, **inputs: Any) -> Tensor:
        return tokens.float().mean()


def dataset(*, masks: bool) -> Dataset:
    source: SampleSource = ShardWindows(MemoryShards([10] * 9), 8, masks)  # type: ignore[arg-type]
    return Dataset(source, source, "", "", Language(300, ByteCodec()))


def test_a_model_without_positions_is_refused_where_the_data_has_them() -> None:
    with pytest.raises(ConfigError) as caught:
        check_inputs(Plain(), dataset(masks=True))
    assert str(caught.value) == (
        "the data keeps the documents of a sample apart by positions, but Plain.forward takes only (tokens, targets); "
        "add positions to forward, or train it on data=tokens data.documents=cross"
    )
    check_inputs(Plain(), dataset(masks=False))
    check_inputs(Open(), dataset(masks=True))
    for factory in (ModelConfig.factory, GPT2_FACTORY):
        config = ModelConfig(num_layers=1, hidden_dim=16, num_heads=2, max_seq_len=8, factory=factory)
        check_inputs(build_model(config, 9, 0), dataset(masks=True))


def test_tokens_of_another_tokenizer_than_the_models_are_refused(tmp_path: Path) -> None:
    own, same, other = (tmp_path / name for name in ("own", "same", "other"))
    for folder in (own, same, other):
        folder.mkdir()
        write_tokenizer(folder / "tokenizer.json")
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    content = json.loads((same / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 512, "content": "<|more|>"})
    (same / "tokenizer.json").write_text(json.dumps(content))

    def data(folder: Path) -> Dataset:
        file = TokenizerFile(folder)
        return replace(dataset(masks=False), task=Language(300, file), tokenizer_file=file.path)

    hf = ModelConfig(factory=HF_FACTORY, path=str(own))
    check_tokenizer(hf, data(own))
    check_tokenizer(hf, data(same))  # a token more
    with pytest.raises(ConfigError, match=r"^2 tokens of the data differ from those of model\.path: token \d+ is '"):
        check_tokenizer(hf, data(other))
    with pytest.raises(ConfigError, match=r"the tokens of the data are bytes, but .*own/tokenizer\.json; choose data"):
        check_tokenizer(hf, dataset(masks=False))
    check_tokenizer(replace(hf, weights="random"), dataset(masks=False))
    check_tokenizer(replace(hf, path=str(tmp_path)), dataset(masks=False))  # which has no tokenizer


def test_a_model_of_transformers_that_sees_other_documents_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "opt", "hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 1, "ffn_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2, "vocab_size": 99}))
    model = build_model(ModelConfig(factory=HF_FACTORY, path=str(tmp_path), weights="random"), 9, 0)
    check_inputs(model, dataset(masks=False))
    with pytest.raises(ConfigError, match="model_type opt cannot keep packed documents apart"):
        check_inputs(model, dataset(masks=True))

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from dtrain.config.data import TokensDataConfig
from dtrain.data import Dataset, load_dataset, token_samples, tokens
from dtrain.data.packing import pack_documents, write_plan
from dtrain.errors import ConfigError
from dtrain.tasks import IGNORE_INDEX
from tests.helpers.token_shards import MemoryShards

SEQ_LEN = 16
SHARDS = {
    "web": MemoryShards([40, 3, 9, 30, 12] * 40),
    "code": MemoryShards([100, 7, 25] * 10),
    "short": MemoryShards([9]),
    "two": MemoryShards([2 * SEQ_LEN + 1]),
    "other": MemoryShards([50] * 20, vocab_size=300),
}


@pytest.fixture(autouse=True)
def shards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, MemoryShards]:
    """Folders by name in the working directory."""
    found = dict(SHARDS)
    monkeypatch.setattr(tokens.TokenShards, "open", lambda folder, vocab_size: found[folder.name])
    monkeypatch.chdir(tmp_path)
    return found


def load(**keys: Any) -> Dataset:
    return load_dataset(TokensDataConfig(**keys), SEQ_LEN)


def pack(name: str) -> None:
    shards = SHARDS[name]
    write_plan(Path(name), pack_documents(shards.document_ends[:], SEQ_LEN), SEQ_LEN, shards.fingerprint)


@pytest.mark.parametrize("keys", [{}, {"documents": "cross"}, {"pack": "best_fit"}])
def test_a_share_of_the_samples_is_held_out(keys: dict[str, str]) -> None:
    pack("web")
    data = load(path="web", validation_percent=10, **keys)
    num_samples = data.train.num_samples + data.validation.num_samples
    assert data.validation.num_samples == num_samples // 10
    batch = data.train.batch(np.arange(3))
    assert ("positions" in batch) == (keys.get("documents") != "cross")
    if "pack" not in keys:
        sides = [side.batch(np.arange(side.num_samples))["tokens"][:, 0] for side in (data.train, data.validation)]
        assert sorted(torch.cat(sides).tolist()) == list(range(1, num_samples * SEQ_LEN, SEQ_LEN))


def test_the_description_counts_targets() -> None:
    pack("web")
    web = SHARDS["web"]
    data = load(path="web")
    num_samples = (web.num_tokens - 1) // SEQ_LEN
    sides = [side.batch(np.arange(side.num_samples))["targets"] for side in (data.train, data.validation)]
    share = sum(int((targets != IGNORE_INDEX).sum()) for targets in sides) / num_samples / SEQ_LEN
    counts = f"web (3,760 tokens, 200 documents, {num_samples} samples, {100 * share:.2f} % of the targets count)"
    assert data.description == f"data=tokens: {counts}; 5 % of the samples held out for validation"
    assert "100.00 % of the targets count" in load(path="web", documents="cross").description
    apart = "; validation on code/ (1,320 tokens, 30 documents, 82 samples, 97.79 % of the targets count)"
    assert load(path="web", validation_path="code/").description.endswith(apart)


def test_a_mixture_takes_its_shares_also_in_validation() -> None:
    data = load(mixture={"web": 3.0, "code": 1.0}, validation_percent=20)
    assert "75 % from web (" in data.description
    assert ", 25 % from code (" in data.description
    num_samples = [(SHARDS[name].num_tokens - 1) // SEQ_LEN for name in ("web", "code")]
    held_out = [number // 5 for number in num_samples]
    assert held_out == [46, 16]
    assert data.validation.num_samples == 46 + 15  # as 3 to 1
    assert data.train.num_samples == sum(num_samples) - sum(held_out)


def test_the_fingerprint_is_of_all_that_decides_the_samples(shards: dict[str, MemoryShards]) -> None:
    pack("web")
    changes: list[dict[str, Any]] = [{}, {"documents": "cross"}, {"pack": "best_fit"}, {"validation_percent": 6.0}]
    changes += [{"validation_path": "code"}, {"validation_path": "two"}, {"path": "code"}]
    mixtures = [{"path": "", "mixture": {"web": 1.0, "code": weight}} for weight in (1.0, 2.0)]
    choices = [{"path": "web", **keys} for keys in [*changes, *mixtures]]
    fingerprints = [load(**keys).fingerprint for keys in choices]
    assert len(set(fingerprints)) == len(choices)
    assert fingerprints == [load(**keys).fingerprint for keys in choices]
    shards["elsewhere"] = shards["web"]
    assert load(path="elsewhere").fingerprint == fingerprints[0]


def test_the_mean_context_is_that_of_attention_and_few_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(path="web", documents="cross").mean_context is None
    data = load(path="web", validation_percent=0)
    positions = data.train.batch(np.arange(data.train.num_samples))["positions"]
    begins = [*(positions.flatten() == 0).nonzero().flatten().tolist(), positions.numel()]
    lengths = [end - begin for begin, end in pairwise(begins)]
    assert data.mean_context == pytest.approx(sum(n * n for n in lengths) / sum(lengths))
    monkeypatch.setattr(token_samples, "_TOKENS_OF_CONTEXT", 5 * SEQ_LEN)
    sizes: list[int] = []
    kind = token_samples.ShardWindows
    batch = kind.batch
    monkeypatch.setattr(kind, "batch", lambda self, ids: sizes.append(len(ids)) or batch(self, ids))
    load(path="web")
    assert sizes == [1] * 5


def test_the_codec_opens_the_tokenizer_late(monkeypatch: Any, shards: dict[str, MemoryShards], tmp_path: Path) -> None:
    codec = load(path="web").codec
    assert codec.end_id == 0
    assert codec.decode([3, 14]) == "3 14"
    file = tmp_path / "tokenizer.json"
    file.write_text("not yet read")
    shards["web"] = MemoryShards([40] * 40, tokenizer_file=file)
    codec = load(path="web").codec
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "TokenizerFile", opened := Mock())
        assert codec.decode([104, 105]) is opened.return_value.decode.return_value
    opened.assert_called_once_with(file)


def refusal(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**keys)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_mistakes_are_refused_by_name(shards: dict[str, MemoryShards]) -> None:
    short = "short holds 9 tokens, which give no sample of model.max_seq_len=16; add text or lower model.max_seq_len"
    assert refusal(path="short") == short
    shards["one"] = MemoryShards([SEQ_LEN + 1])
    assert refusal(path="one").startswith("one gives one sample, but training and validation need one each")
    load(path="two")
    load(path="one", validation_path="two")
    assert "is trained on; name another folder" in refusal(path="web", validation_path="web")
    assert "is trained on; name another folder" in refusal(mixture={"web": 1.0, "code": 1.0}, validation_path="code")
    assert refusal(path="web", pack="best_fit").endswith("; run dtrain data pack web seq_len=16")
    small = "data.mixture gives code the weight 1e-06 of 1, less than one sample in 10,000"
    assert refusal(mixture={"web": 1.0, "code": 1e-6}).startswith(small)
    other = "other has a vocabulary of 300, but web 70000; their tokens mean other text"
    assert refusal(mixture={"web": 1.0, "other": 1.0}).startswith(other)
    assert refusal(path="web", validation_path="other").startswith(other)
    for name in ("own", "another"):  # as their manifests state; the files may be gone
        shards[name] = MemoryShards([50] * 9, tokenizer_sha256=name)
    assert refusal(mixture={"own": 1.0, "another": 1.0}).startswith("another has a tokenizer of sha256 another, but ")
    assert refusal(path="own", validation_path="web").startswith("web has a tokenizer of sha256 None, but own ")

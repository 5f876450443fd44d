from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dtrain.config.data import TokensDataConfig
from dtrain.data import load_dataset
from dtrain.errors import ConfigError
from dtrain.tools.data.cli import main
from tests.helpers.token_files import write_shards


def test_a_plan_is_written_and_trained_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = np.random.default_rng(0).integers(1, 90, size=200)
    documents = [np.full(length, length) for length in lengths]
    write_shards(tmp_path / "tokens", [documents[:120], documents[120:]], 1000)
    config = TokensDataConfig(path=str(tmp_path / "tokens"), pack="best_fit")
    with pytest.raises(ConfigError, match=r"run dtrain data pack \S+tokens seq_len=64"):
        load_dataset(config, 64)
    assert main(["pack", str(tmp_path / "tokens"), "seq_len=64"]) == 0
    assert " % filled, from " in capsys.readouterr().out
    data = load_dataset(config, 64)
    counted = 0
    for source in (data.train, data.validation):
        batch = source.batch(np.arange(source.num_samples))
        counted += int((batch["targets"] != -100).sum())
        # every document has one token, its own length: nothing of a neighbor is a target
        same = (batch["targets"] == batch["tokens"]) | (batch["targets"] == -100)
        assert bool(same.all())
    assert counted == (lengths - 1).sum()


def test_nothing_to_pack(tmp_path: Path) -> None:
    write_shards(tmp_path, [[np.array([3]), np.array([4])]], 1000)
    with pytest.raises(ConfigError, match="has no document of two tokens or more"):
        main(["pack", str(tmp_path), "seq_len=64"])

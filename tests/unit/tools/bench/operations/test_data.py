"""`dtrain bench data`: every case on a small corpus, and the equality of what its cases of learning compute."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dtrain.__main__ import main
from dtrain.config.model import ModelConfig
from dtrain.data.text import Document
from dtrain.errors import BenchError
from dtrain.models import build_model
from dtrain.tasks import IGNORE_INDEX
from dtrain.tools.bench.operations import data
from dtrain.tools.bench.records import OperationResults, read_results
from dtrain.tools.bench.report.document import describe
from tests.helpers.token_shards import MemoryShards


@pytest.mark.processes
def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [Document("a.py", b"def f(x):\n    return x + 1\n" * 400), Document("b.py", b"import sys, os\n" * 400)]
    monkeypatch.setattr(data, "stdlib_documents", lambda: documents)
    sizes = ["bench.vocab_size=300", "bench.median_length=40", "bench.documents=9", "bench.micro_batch_size=2"]
    arguments = [*sizes, "bench.rounds=2", "bench.reads=2", "bench.device=cpu", f"bench.out={tmp_path / 'r.json'}"]
    model = ["model.max_seq_len=32", "model.hidden_dim=16", "model.num_layers=1", "model.num_heads=2"]
    assert main(["bench", "data", *arguments, *model]) == 0
    results = read_results(tmp_path / "r.json")
    assert isinstance(results, OperationResults)
    workloads: dict[str, list[str]] = {}
    for timing in results.timings:
        workloads.setdefault(timing.workload, []).append(timing.case)
        assert len(timing.ms) == 2
        assert min(timing.ms) > 0
    assert workloads == {
        "tokenize": ["library alone", "dtrain data tokenize"],
        "read": ["windows", "windows, just opened", "best_fit", "best_fit, just opened"],
        "learn": ["padded to 32", "padded to the longest", "packed"],
    }
    tokens = {timing.workload: timing.tokens for timing in results.timings}
    assert tokens["read"] == 2 * 2 * 32
    assert len({timing.tokens for timing in results.timings if timing.workload == "learn"}) == 1
    assert capsys.readouterr().out.strip().endswith(describe(results).markdown())


def test_padded_and_packed_batches_have_the_same_loss() -> None:
    lengths = [3, 9, 39, 2, 17, 5, 5, 30, 12, 7, 4, 8]
    cases = data.learning_cases(MemoryShards(lengths), np.cumsum(lengths[:10]), 16, batch_size=2)
    assert list(cases) == ["padded to 16", "padded to the longest", "packed"]
    assert len(cases["packed"]) < len(cases["padded to 16"])
    model = build_model(ModelConfig(num_layers=1, hidden_dim=16, num_heads=2, max_seq_len=16), 200, 0)
    losses = []
    for batches in cases.values():
        counts = [int((batch["targets"] != IGNORE_INDEX).sum()) for batch in batches]
        assert sum(counts) == sum(length - 1 for length in lengths[:10])
        total = sum(model(**batch).loss.item() * count for batch, count in zip(batches, counts, strict=True))
        losses.append(total / sum(counts))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


@pytest.mark.processes
def test_a_command_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"dtrain data info .* ended with exit code 2: .*manifest"):
        data._dtrain("data", "info", str(tmp_path))

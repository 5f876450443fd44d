"""`dtrain bench float8` from end to end at a tiny width, and its models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dtrain.__main__ import main
from dtrain.config.model import ModelConfig
from dtrain.errors import ConfigError
from dtrain.tools.bench.operations.float8_products import ALL_THREE, product_shapes
from dtrain.tools.bench.records import Float8Results, read_results
from dtrain.tools.bench.report.document import describe
from dtrain.tools.bench.report.statistics import final_loss
from dtrain.tools.bench.training.float8 import model_of

TINY = ["model.num_layers=1", "model.hidden_dim=32", "model.num_heads=2", "model.max_seq_len=16", "bench.device=cpu"]
SHORT = ["bench.micro_batch_size=2", "bench.warmup_steps=0", "bench.rounds=2", "bench.steps=2"]
PRODUCTS = ["output", "input gradient", "weight gradient", ALL_THREE]


@pytest.mark.processes
def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    arguments = [*TINY, *SHORT, "bench.widths=[48]", "bench.recipes=[tensorwise]", f"bench.out={tmp_path / 'r.json'}"]
    try:
        assert main(["bench", "float8", *arguments]) == 0
    finally:
        torch.set_num_threads(threads)
    results = read_results(tmp_path / "r.json")
    assert isinstance(results, Float8Results)
    assert results.emulated
    assert results.tokens_per_rank == 32
    (width,) = results.widths
    assert width.hidden_dim == 48
    embedding = 320 * 48  # shared with the head; bytes, padded
    assert width.cases[0].footprint.num_parameters == embedding + 4 * 48 * 48 + 3 * 48 * 128 + 3 * 48
    bf16, fp8 = width.cases
    assert (bf16.case.name, fp8.case.name) == ("bf16", "fp8 tensorwise")
    assert [len(timed.step_ms) for timed in fp8.rounds] == [2, 2]
    # The weights and data are the same, the products are not.
    assert final_loss(fp8) == pytest.approx(final_loss(bf16), rel=0.02)
    assert final_loss(fp8) != final_loss(bf16)
    assert not bf16.footprint.linears
    formats = {linear.name: linear.format for linear in fp8.footprint.linears}
    assert formats["blocks.0.ffn.down"] == "fp8"
    assert formats["head"] != "fp8", "the last product stays in BF16 by default"
    assert all(linear.reason for linear in fp8.footprint.linears)
    shapes = product_shapes(fp8.footprint.linears)
    assert [product.product for product in width.products] == PRODUCTS * len(shapes)
    assert all(len(ms) == 2 and min(ms) > 0 for product in width.products for ms in product.ms.values())
    out = capsys.readouterr().out.strip()
    assert out == describe(results).markdown()
    assert "the times say nothing" in out
    (tmp_path / "doc.md").write_text("# Title\n")
    assert main(["bench", "report", str(tmp_path / "r.json"), f"bench.docs={tmp_path / 'doc.md'}"]) == 0
    assert describe(results).summary() in (tmp_path / "doc.md").read_text()


def test_a_wider_model_has_more_heads_of_equal_size() -> None:
    model = ModelConfig(hidden_dim=2048, num_heads=32, num_kv_heads=8, ffn_dim=8192)
    assert model_of(model, 2048) == model
    wider = model_of(model, 3072)
    assert (wider.hidden_dim, wider.num_heads, wider.num_kv_heads, wider.ffn_dim) == (3072, 48, 12, 12288)
    assert model_of(ModelConfig(), 128) == ModelConfig(hidden_dim=128, num_heads=2)
    with pytest.raises(ConfigError, match=r"bench\.widths: 100 is not a multiple of 64, the size of a head"):
        model_of(model, 100)

"""Part d: its plan, FLOPs against numbers by hand, its page, and one run on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import BENCH_ENGINE
from dtrain.config.model import VOCAB_MULTIPLE
from dtrain.tools.accept.part import PartRequest
from dtrain.tools.accept.parts import bf16
from dtrain.tools.accept.parts.bf16 import DEEPSPEED, DTRAIN, FSDP2, PLAIN, conclusions, plan, section, utilization
from dtrain.tools.accept.parts.case_worker import CaseJob
from dtrain.tools.accept.parts.interleaved import Record
from dtrain.tools.accept.parts.models import MODELS, count_flops
from tests.unit.tools.accept.parts.made import record


def results_of(*records: Record) -> dict[str, object]:
    return {"runs": [vars(found) for found in records], "left_out": {}}


def test_models_are_those_of_the_configuration_but_for_heads_and_vocabulary() -> None:
    for name, key in (("1.2B", "llama-1b"), ("3B", "llama-3b")):
        config = read_suite([f"model={key}"], BENCH_ENGINE)
        assert config is not None
        expected, own = config.model, MODELS[name]
        for field in ("name", "num_layers", "hidden_dim", "ffn_dim", "rope_theta", "tie_embeddings"):
            assert getattr(own, field) == getattr(expected, field), field
        assert own.hidden_dim // own.num_heads == 128
        assert own.num_kv_heads is not None
        assert expected.num_kv_heads is not None
        # as many key and value features
        assert own.num_kv_heads * 128 == expected.num_kv_heads * expected.hidden_dim // expected.num_heads
        assert own.vocab_size is not None
        assert own.vocab_size % VOCAB_MULTIPLE == 0


def test_flops_of_a_token_by_hand() -> None:
    # a layer of 3B: queries and output 3072 x 3072 each, keys and values 3072 x 1024 each, feed-forward 3 x 3072 x 8192
    layer = 2 * 3072 * 3072 + 2 * 3072 * 1024 + 3 * 3072 * 8192
    matmuls = 28 * layer + 3072 * 128_256
    attention = 28 * 3072 * 4096
    flops = count_flops(MODELS["3B"])
    assert flops.causal == 6 * matmuls + 6 * attention
    assert flops.full == 6 * matmuls + 12 * attention


def test_utilization_counts_tokens_of_the_published_peak() -> None:
    # 2 x 4096 tokens in 125 ms: 65,536 tokens/s
    found = record(DTRAIN, "1.2B", 0, 2, [120.0, 125.0, 130.0])
    assert found.tokens_per_s == pytest.approx(65_536)
    causal, full = utilization(found)
    flops = count_flops(MODELS["1.2B"])
    assert causal == pytest.approx(flops.causal * 65_536 / 989.4e12)
    assert full == pytest.approx(flops.full * 65_536 / 989.4e12)
    assert utilization(record(DTRAIN, "1.2B", 0, 2, [125.0], device="a new GPU")) == (None, None)


def test_the_plan_begins_with_the_pair_that_the_target_names_and_alternates() -> None:
    runs = plan(small=False)
    assert [run.label for run in runs[:4]] == [f"{DTRAIN}, 1.2B", f"{FSDP2}, 1.2B"] * 2
    # no two equal runs, and the numbers of a case count up
    for label in {run.label for run in runs}:
        assert [run.number for run in runs if run.label == label] == list(range(sum(r.label == label for r in runs)))
    assert {run.model for run in runs} == {"1.2B", "3B"}
    assert {run.case.engine for run in runs} == {"native", "fsdp2_no_reshard", "deepspeed_2", "plain"}
    for run in [*runs, *plan(small=True)]:
        assert set(run.options) <= set(CaseJob.__dataclass_fields__)
        assert run.options.get("is_compiled", False) is not run.name.endswith(", eager")
    assert {run.model for run in plan(small=True)} == {"tiny"}


def test_the_page_names_target_and_speed_up_and_what_was_not_measured() -> None:
    results = results_of(
        record(DTRAIN, "1.2B", 0, 2, [100.0]),
        record(FSDP2, "1.2B", 0, 2, [120.0]),
        record(DTRAIN, "1.2B", 1, 2, [100.0]),
        record(FSDP2, "1.2B", 1, 2, [130.0]),
        record(f"{DEEPSPEED}, eager", "1.2B", 0, 1, [75.0]),
        Record(PLAIN, "1.2B", 0, 9.0, None, "does not fit"),
    )
    (line,) = conclusions(results)
    for text in ("1.25 x FSDP2 (target 1.15)", "1.50 x DeepSpeed, eager (target 1.3)", "plain AMP not measured"):
        assert text in line
    assert "MFU 68.1% causal, 74.7% full (target 57% causal)" in line  # 81,920 tokens/s of 8.22 and 9.02 GFLOP
    text = "\n".join(section(results))
    assert "| FSDP2 " in text
    assert "1.25 (1.20 to 1.30)" in text
    assert "60.0" in text  # GiB
    assert conclusions({}) == ["G1: not measured."]
    assert section({}) == ["G1: not measured.", ""]


@pytest.mark.processes
def test_a_run_on_a_cpu_trains_each_case_while_there_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = plan(small=True)
    monkeypatch.setattr(bf16, "plan", lambda small: [run for run in whole if run.name == "dtrain, eager"])
    results = bf16.run(PartRequest("cpu", 12.0, True, str(tmp_path)))
    assert results["failures"] == []
    first = results["runs"][0]["figures"]
    assert first["num_parameters"] > 100_000
    assert len(first["window_ms"]) == 2
    assert len(first["losses"]) == 5
    assert first["losses"][-1] < first["losses"][0]  # four batches again and again
    assert "G1, tiny, dtrain, eager" in results["conclusions"][0]

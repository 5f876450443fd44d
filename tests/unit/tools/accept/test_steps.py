"""The runs of training steps: their order and sizes, FLOPs against numbers by hand, comparisons, and the page."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import BENCH_ENGINE
from dtrain.config.dump import from_plain
from dtrain.config.model import VOCAB_MULTIPLE
from dtrain.tools.accept import steps
from dtrain.tools.accept.job import CUT, FAILED, LATE
from dtrain.tools.accept.models import MODELS, count_flops
from dtrain.tools.accept.parts.step import CaseFigures, CaseJob
from dtrain.tools.accept.steps import CHUNKED, DEEPSPEED, DTRAIN, EAGER, FSDP2, PLAIN, TENSORWISE
from tests.unit.tools.accept.made import ended, record, step

LINEARS = [
    {
        "name": f"blocks.{number}", "out_features": out, "in_features": 2048, "format": kind,
        "reason": f"timed {fp8 / bf16:.2f} of BF16", "bf16_ms": bf16, "float8_ms": fp8,
    }
    for number in range(2)
    for out, kind, bf16, fp8 in ((3072, "bf16", 0.4, 0.41), (16384, "fp8", 2.0, 1.3))
]  # fmt: skip


# -- jobs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [steps.ORDER, steps.SMALL_ORDER])
def test_the_order_has_known_cases_whose_numbers_count_up(order: tuple[tuple[str, str, int], ...]) -> None:
    numbers: dict[tuple[str, str], list[int]] = {}
    for model, name, number in order:
        assert model in MODELS
        numbers.setdefault((model, name), []).append(number)
        job = steps.step_job(model, name, number, device="cuda", threads=4, size=2)
        case = from_plain(CaseJob, job.options["job"])
        assert (case.rank_job.case.name, case.is_text) == (name, number > 0)
        assert case.is_compiled is (name not in (EAGER, "recompute=selective", "recompute=full", "offload=cpu"))
        assert (case.rank_job.case.recipe is None) == (case.rank_job.case.precision == "bf16")
        assert (case.rank_job.config["model"]["loss_chunk"] == "auto") is (name == CHUNKED)
        (found,) = steps.records_of([ended(job.name, job.part)])
        assert (found.model, found.name, found.number) == (model, name, number)
    assert all(own == list(range(len(own))) for own in numbers.values())
    assert {name for _, name in numbers} >= {DTRAIN, FSDP2, DEEPSPEED, PLAIN, TENSORWISE, EAGER}


def test_graphs_are_compiled_on_few_layers() -> None:
    job = steps.step_job("1.2B", FSDP2, 0, device="cpu", threads=4, size=2, layers=2)
    case = from_plain(CaseJob, job.options["job"])
    assert (job.part, case.is_compiled, case.rank_job.config["model"]["num_layers"]) == ("compiled", True, 2)


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


@pytest.mark.parametrize(
    ("gib", "expected"), [(79.6, [3, 6, 2, 1]), (141, [6, 12, 4, 3]), (40, [1, 2, 1, 1]), (20, [1, 1, 1, 1])]
)
def test_sequences_grow_with_the_memory_that_model_states_leave(gib: float, expected: list[int]) -> None:
    cases = (("1.2B", DTRAIN), ("1.2B", CHUNKED), ("1.2B", EAGER), ("3B", DTRAIN))
    assert [steps.size_of(model, name, gib) for model, name in cases] == expected
    assert steps.size_of("tiny", DTRAIN, 0.0) == 2


def test_a_run_is_repeated_with_half_the_sequences_only_if_it_was_out_of_memory() -> None:
    job = steps.step_job("1.2B", DTRAIN, 0, device="cuda", threads=4, size=3)
    assert job.again is not None
    failed = ended(job.name, "steps", status=FAILED, error="exit code 1: OutOfMemoryError: CUDA out of memory.")
    smaller = job.again(job, failed)
    assert smaller is not None
    case = from_plain(CaseJob, smaller.options["job"])
    assert (smaller.name, case.micro_batch, case.rank_job.config["bench"]["micro_batch_size"]) == (job.name, 1, 1)
    assert job.again(smaller, failed) is None
    tail = ["RuntimeError: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"]
    again = steps.step_job("1.2B", DTRAIN, 0, device="cuda", threads=4, size=2)
    assert job.again(again, dataclasses.replace(failed, error="exit code 1", tail=tail)) is not None
    assert job.again(again, dataclasses.replace(failed, error="was ended by SIGSEGV: no output")) is None


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.tools.bench.peers.find_spec", lambda name: None)
    assert steps.missing_package(DEEPSPEED) == "package deepspeed is not installed"
    assert [steps.missing_package(name) for name in (DTRAIN, FSDP2, PLAIN)] == ["", "", ""]


# -- records -----------------------------------------------------------------------------------------------------------


def test_made_figures_are_those_of_a_run() -> None:
    figures = record("1.2B", DTRAIN).figures or {}
    assert set(figures) == {field.name for field in dataclasses.fields(CaseFigures)}


def test_flops_of_a_token_by_hand() -> None:
    # a layer of 3B: queries and output 3072 x 3072 each, keys and values 3072 x 1024 each, feed-forward 3 x 3072 x 8192
    layer = 2 * 3072 * 3072 + 2 * 3072 * 1024 + 3 * 3072 * 8192
    matmuls = 28 * layer + 3072 * 128_256
    attention = 28 * 3072 * 4096
    flops = count_flops(MODELS["3B"])
    assert flops.causal == 6 * matmuls + 6 * attention
    assert flops.full == 6 * matmuls + 12 * attention


def test_utilization_counts_tokens_of_the_published_peak() -> None:
    # 2 x 4096 tokens in 125 ms: 65,536 tokens/s, of 4 and 5 GFLOP
    found = record("1.2B", DTRAIN, 0, [130.0, 125.0, 120.0])
    assert found.tokens_per_s == pytest.approx(65_536)
    assert found.utilization == pytest.approx((65_536 * 4e9 / 989.4e12, 65_536 * 5e9 / 989.4e12))
    assert record("1.2B", DTRAIN, device="a new GPU").utilization is None


def test_speed_ups_pair_runs_by_their_number_and_count_tokens() -> None:
    own = [record("1.2B", DTRAIN, number, ms, micro_batch=4) for number, ms in ((0, 100.0), (1, 110.0), (2, 90.0))]
    other = [record("1.2B", FSDP2, number, ms) for number, ms in ((1, 99.0), (0, 75.0))]
    # twice the sequences in a step
    assert steps.speed_ups(own, other) == pytest.approx([1.5, 1.8])
    assert steps.speed_ups(own, []) == []
    groups = steps.by_case([*own, *other])
    assert steps.speed_up(groups, "1.2B", DTRAIN, FSDP2) == pytest.approx(1.65)
    assert steps.speed_up(groups, "3B", DTRAIN, FSDP2) is None


def test_losses_are_compared_between_runs_of_the_same_steps_on_text() -> None:
    fp8 = record("1.2B", TENSORWISE, 1, losses=[9.0] * 6 + [6.03, 5.05])
    same = record("1.2B", DTRAIN, 1, losses=[9.0] * 6 + [6.0, 5.0])
    others = [
        record("1.2B", DTRAIN, 0, losses=[9.0] * 8),  # random tokens
        record("1.2B", DTRAIN, 1, micro_batch=1, losses=[9.0] * 8),
        record("1.2B", DTRAIN, 2, losses=[9.0, 8.0]),
    ]
    assert steps.loss_difference([fp8], others) is None
    # two of eight
    assert steps.loss_difference([fp8], [*others, same]) == pytest.approx(11.08 / 11.0 - 1)
    random = record("1.2B", TENSORWISE, 0, losses=[9.0] * 8)
    assert steps.loss_difference([random], [*others, same]) is None
    lost = record("1.2B", TENSORWISE, 1, losses=[9.0] * 6 + [None, 5.0])
    assert steps.loss_difference([lost], [same]) is None


# -- the page ----------------------------------------------------------------------------------------------------------


def test_a_run_of_dtrain_that_fails_is_a_failure_and_others_are_left_out() -> None:
    found = [
        ended(f"1.2B, {name}, run 1", "steps", status=status, error=f"why {status}")
        for name, status in ((DTRAIN, FAILED), (TENSORWISE, LATE), (CHUNKED, CUT), (FSDP2, FAILED), (PLAIN, LATE))
    ]
    report = steps.report([*found, step("1.2B", DTRAIN, 1)])
    assert report.failures == ["1.2B, dtrain, run 1: why failed", "1.2B, FP8 tensorwise, run 1: why late"]
    assert report.left_out == {
        "1.2B, dtrain, chunked loss, run 1": "why cut short",
        "1.2B, FSDP2, run 1": "why failed",
        "1.2B, plain AMP, run 1": "why late",
    }
    assert len(report.conclusions) == 1


def test_conclusions_have_power_limit_and_clock_beside_each_rate() -> None:
    fp8: dict[str, Any] = {"losses": [8.0, 7.0, 6.0, 5.005], "linears": LINEARS, "emulates_float8": True}
    lines = steps.report(
        [
            step("1.2B", FSDP2, 0, 130.0, device="a new GPU"),
            step("1.2B", DTRAIN, 1, 100.0),
            step("1.2B", TENSORWISE, 1, 80.0, state={"power_limit_w": None, "sm_clock_mhz": 1230.0}, **fp8),
            step("1.2B", FSDP2, 1, 120.0, device="a new GPU"),
        ]
    ).conclusions
    assert lines == [
        "1.2B, FSDP2: 120.0 ms a step of 2, 68.3k tokens/s; 0.833 x dtrain",
        "1.2B, dtrain: 100.0 ms a step of 2, 81.9k tokens/s; MFU 33.1% causal, 41.4% full at 700 W, 1755 MHz",
        "1.2B, FP8 tensorwise: 80.0 ms a step of 2, 102k tokens/s; MFU 41.4% causal, 51.7% full at unknown W, "
        "1230 MHz; 1.250 x dtrain; 2 of 4 Linears in FP8, emulated in FP32, so the time means nothing; "
        "loss +0.10% from BF16's",
    ]


def test_the_section_has_all_columns_the_warnings_and_the_choice_of_each_linear() -> None:
    formula = {"compute": 2 * 2**30, "master": 4 * 2**30}
    states: dict[str, Any] = {"formula": formula, "model_states": formula}
    text = "\n".join(
        steps.report(
            [
                step("1.2B", DTRAIN, 1, [100.0, 101.0, 99.0], formula=formula, model_states={**formula, "gone": 1}),
                step("1.2B", TENSORWISE, 1, 80.0, linears=LINEARS, warnings=["cut"]),
                step("1.2B", EAGER, 0, 150.0, fitted=[3, 4], failed=5, activations=20 * 2**30),
                step("1.2B", "offload=cpu", 0, 300.0, host_kinds=["master"], losses=[8.0, None], **states),
            ]
        ).section
    )
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n\n")[0].splitlines()
    )
    cells = [dict(zip(header, row, strict=True)) for row in rows]
    assert cells[0] == {
        "model": "1.2B", "case": "dtrain", "sequences": "2", "ms a step": "100.0 (99.0 to 101.0)",
        "tokens/s": "81.9k", "MFU causal, full": "33.1%, 41.4%", "W, MHz": "700 W, 1755 MHz", "speed": "",
        "loss": "8.000 to 5.000", "peak GiB": "60.00", "reserved": "64.00", "activations GiB": "",
        "states GiB, of the formula": "6.000, 1.0000", "set-up, first step s": "5.0, 12.5", "graphs, breaks": "1, 0",
    }  # fmt: skip
    assert [row["speed"] for row in cells[1:]] == ["1.250 (1.250 to 1.250)", "", "0.500 (0.500 to 0.500)"]
    assert cells[2]["activations GiB"] == "20.00"
    assert cells[2]["loss"] == "8.000 to 5.000 (random)"
    assert (cells[3]["loss"], cells[3]["states GiB, of the formula"]) == ("not finite (random)", "2.000, 1.0000")
    assert "Largest micro-batch, 1.2B, eager: 4 sequences fit, 5 does not." in text
    assert "\ndtrain warned:\n\n- FP8 tensorwise, 1.2B: cut\n" in text
    assert steps.choice_rows(record("1.2B", TENSORWISE, linears=LINEARS)) == [
        ("3072 x 2048", "2", "0.400", "0.410", "1.02", "bf16", "timed 1.02 of BF16"),
        ("16384 x 2048", "2", "2.000", "1.300", "0.65", "fp8", "timed 0.65 of BF16"),
    ]
    assert "| 16384 x 2048 | 2       | 2.000 " in text
    assert steps.report([]).section == ["No run has figures."]

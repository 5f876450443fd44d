"""The suites whose cases have figures of their own: each once on a CPU, their arithmetic by hand, what they survive."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtrain.__main__ import main
from dtrain.config.commands import SUITES
from dtrain.config.model import ModelConfig
from dtrain.config.tool_schema import ProductsBenchConfig
from dtrain.measure.bench.operations import products
from dtrain.measure.bench.records import TableResults, read_results
from dtrain.measure.bench.report.document import describe
from dtrain.measure.bench.training import host, memory, profile
from dtrain.measure.bench.training.part_times import PartTimes
from dtrain.measure.bench.training.trace import read_events
from dtrain.tools.tables import Table

TINY = ["model.num_layers=1", "model.hidden_dim=32", "model.num_heads=2", "model.max_seq_len=16", "model.vocab_size=64"]


def bench(folder: Path, suite: str, *words: str, code: int = 0) -> TableResults:
    """The results of a suite on a CPU, which are also what a report on their file shows."""
    out, document = folder / "r.json", folder / "doc.md"
    assert main(["bench", suite, *TINY, "bench.device=cpu", f"bench.out={out}", *words]) == code
    results = read_results(out)
    assert isinstance(results, TableResults)
    document.write_text("# Title\n")
    assert main(["bench", "report", str(out), f"bench.docs={document}"]) == 0
    assert describe(results).summary() in document.read_text()
    return results


def test_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "repeated_ms", lambda operation, device, *, budget_s: [9.0, 2.0, 1.0])
    results = bench(tmp_path, "products", "bench.squares=[100]", "bench.rows=32", "bench.copied=1000")
    (first, *rows), by_label = results.rows, {row["label"]: row for row in results.rows}
    assert (first["format"], first["label"], first["tflops"]) == ("bf16", "square", pytest.approx(0.001))  # in 2 ms
    assert by_label["copy, read + write"]["gb_per_s"] == pytest.approx(8000 / 2 / 1e6)
    # of 2 sequences and 2 heads of 16: two products forward, five backward, half of each
    assert by_label["attention"]["tflops"] == pytest.approx(7 * 2 * 2 * 16 * 16 * 16 / 2 / 1e9)
    assert by_label["head"]["shape"] == "32 x 64 x 32"
    assert [row["format"] for row in rows if row["label"] == "square"] == ["fp8", "fp32"]
    assert results.left_out == {}
    assert results.conclusions[0].startswith("highest matrix rates, TFLOP/s: fp32 0.001, bf16 0.001, fp8 0.001")


@pytest.mark.parametrize("name", list(products._FLOAT8))
def test_float8_operands_are_as_torch_wants_them_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own checks of shapes and strides run on meta tensors."""
    given: list[Any] = []
    real: Any = torch.nn.functional.scaled_mm
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", lambda *a, **how: given.extend(a) or real(*a, **how))
    operation, nbytes, flops = products.multiplication(name, (32, 256, 640), torch.device("meta"))
    output: Any = operation()
    assert (output.shape, output.dtype, nbytes, flops) == ((32, 256), torch.bfloat16, 0, 2 * 32 * 256 * 640)
    if name == "fp8 blockwise":
        assert (given[2].shape, given[2].stride()) == ((32, 5), (1, 32))
        assert (given[4].shape, given[4].stride()) == ((8, 2), (1, 8)), "padded to a multiple of 4"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(torch.OutOfMemoryError("CUDA out of memory"), "out of memory"), (RuntimeError("no such\nformat"), "no such")],
)
def test_a_product_that_cannot_run_costs_no_other(error: Exception, reason: str, monkeypatch: Any) -> None:
    def fail(name: str, shape: tuple[int, ...], device: torch.device) -> products.Operation:
        if name == "bf16":
            raise error
        return lambda: None, 0, 1

    monkeypatch.setattr(products, "multiplication", fail)
    suite = SUITES["products"].primary.schema
    config = suite(ProductsBenchConfig(["bf16", "fp32"], [8], copied=4, device="cpu"), ModelConfig())
    *_, last = products.run_products_suite(config, "dtrain bench products")
    assert last.left_out["bf16 square 8 x 8 x 8"] == reason
    assert [row["format"] for row in last.rows if row["label"] == "square"] == ["fp32"]
    limited = suite(ProductsBenchConfig(["fp32"], [8, 16], copied=4, device="cpu", limit_s=1e-9))
    *_, last = products.run_products_suite(limited, "dtrain bench products")
    assert (len(last.rows), last.left_out["fp32 square 16 x 16 x 16"]) == (1, "no time left")


def test_engines_hold_what_the_formula_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = bench(tmp_path, "memory", "bench.precisions=[bf16]", "model.hidden_dim=64")
    assert [row["stage"] for row in results.rows] == [0, 1, 2, 3]
    for row in results.rows:
        assert 1.0 <= row["ratio"] < 1.05
        held = sum(row["memory"][kind] for kind in row["formula"])
        assert held / sum(row["formula"].values()) == pytest.approx(row["ratio"])
    states = memory._states
    monkeypatch.setattr(memory, "_states", lambda config, name, stage, device: states(config, name, 1 // stage, device))
    results = bench(tmp_path, "memory", "bench.precisions=[bf16]", "bench.stages=[0,1]", code=1)
    assert results.failures == ["states, bf16, stage 0: ZeroDivisionError: integer division or modulo by zero"]
    assert len(results.rows) == 1


def test_a_step_of_a_small_model(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    results = bench(tmp_path, "profile", "bench.steps=2", f"bench.keep_trace={traces}", "model.loss_chunk=8")
    (row,) = results.rows
    ms, phase = row["ms_by_class"], row["optimizer"]
    assert min(ms["matmul"], ms["attention"], ms["optimizer"]) > 0
    assert sum(ms.values()) <= row["wall_ms"] * 1.01
    assert 0 < phase["num_launches"] < row["num_launches"]
    assert len(row["step_ms"]) == len(phase["ms"]) == len(phase["host_ms"]) == 2
    assert phase["bytes"] / row["num_parameters"] == pytest.approx(34, rel=0.1)
    assert "optimizer phase" in results.conclusions[0]
    assert read_events(json.loads((traces / "bf16.json").read_text()))
    states = {"master": 4000, "moments": 8000, "compute": 2000, "buffers": 17}
    assert [profile._moved_bytes({**states, "main_grad": 1000 * size}) for size in (2, 4)] == [30_000, 34_000]
    assert profile.copy_share([9.0, 10.0, 11.0], 30e9, 3333.0) == pytest.approx(0.9, abs=1e-3)  # 30 GB in 10 ms


def test_without_memory_the_micro_batch_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def fail(config: object, precision: object, micro_batch: int, device: object) -> None:
        tried.append(micro_batch)
        raise torch.OutOfMemoryError("CUDA out of memory") if micro_batch < 9 else RuntimeError("no kernel")

    monkeypatch.setattr(profile, "_profile", fail)
    results = bench(tmp_path, "profile", "bench.micro_batch_size=6")
    assert (tried, list(results.left_out), results.failures) == ([6, 3, 1], ["bf16"], [])
    results = bench(tmp_path, "profile", "bench.micro_batch_size=9", "bench.precisions=[bf16,fp8]", code=1)
    assert results.failures == ["bf16: RuntimeError: no kernel"]
    assert results.left_out == {"fp8": "no FP8 Tensor Cores"}


@pytest.mark.processes
def test_host_time_by_part_of_the_slowest_rank(tmp_path: Path, warm_ranks: None) -> None:
    words = ["bench.ranks=2", "bench.precisions=[bf16]", "bench.rounds=1", "bench.steps=1", "bench.warmup_steps=2"]
    results = bench(tmp_path, "host", *words)
    assert [(row["precision"], row["stage"]) for row in results.rows] == [("bf16", 2), ("bf16", 3)]
    for figures in (row["figures"] for row in results.rows):
        ms = {name: value for name, value in figures.items() if isinstance(value, float)}
        parts = [f"engine: {part}" for part in host._ORDER]
        assert min(ms[name] for name in parts) > 0
        assert sum(ms[name] for name in parts) == pytest.approx(ms["engine: step"])
        bare = ms["plain: forward"] + ms["plain: backward"]
        assert ms["added"] == pytest.approx(ms["engine: step"] - bare)
        assert ms["plain: update"] > 0
        assert figures["engine: operations"] > 50
        assert "engine: idle" not in figures, "a CPU has no device that idles"
    stage_2, stage_3 = (row["figures"]["calls added"] for row in results.rows)
    assert 500 < stage_2 < stage_3, "it gathers each block twice"
    (table,) = results.tables
    assert table.columns == ("ms", "bf16, stage 2", "bf16, stage 3")
    assert ["calls added", str(stage_2), str(stage_3)] in [list(line) for line in table.rows]


@pytest.mark.processes
def test_a_host_case_that_fails_costs_no_other(tmp_path: Path, warm_ranks: None) -> None:
    words = ["bench.precisions=[tf32,fp32]", "bench.stages=[2]", "bench.rounds=1", "bench.warmup_steps=1"]
    results = bench(tmp_path, "host", *words, code=1)
    assert [row["precision"] for row in results.rows] == ["fp32"]
    assert [line.split(":")[0] for line in results.failures] == ["tf32, stage 2"], "a CPU has no TF32"


def test_a_part_counts_without_the_parts_inside_it() -> None:
    times = PartTimes(torch.device("cpu"), iter(range(100)).__next__)
    work = SimpleNamespace(outer=lambda: work.inner() or work.inner(), inner=lambda: None)
    times.watch(work, "outer", "outer")
    times.watch(work, "inner", "inner", within="outer")
    work.inner()  # not within
    assert times.take() == {}
    work.outer()  # begins at 0; each inner one takes a second, and the outer one three around them
    with pytest.raises(ZeroDivisionError), times.inside("failed"):
        _ = 1 / 0
    assert times.take() == {"outer": 3000, "inner": 2000, "failed": 1000}
    work.inner()
    assert times.take() == {}, "the failed part has ended"


def test_calls_of_dtrain_count_and_those_that_measure_do_not() -> None:
    def work() -> None:
        Table("", ("a",), []).markdown()  # and a generator that it joins
        PartTimes(torch.device("cpu")).take()
        json.dumps({})

    before = sys.getprofile()
    assert host.calls_of(lambda: None) == 0
    assert 1 <= host.calls_of(work) <= 12
    assert host.calls_of(lambda: [work(), work()]) == 2 * host.calls_of(work)
    assert sys.getprofile() is before

"""The cases of the blocks suite, and its table."""

from __future__ import annotations

from dataclasses import replace

import torch

from dtrain.cli.resolve import read_suite
from dtrain.config.blocks import Blocks
from dtrain.config.commands import BENCH_BLOCKS, BENCH_ENGINE
from dtrain.config.dump import config_to_dict
from dtrain.tools.bench.records import BenchmarkCase, RankJob
from dtrain.tools.bench.report.blocks import blocks_table
from dtrain.tools.bench.training.suites import blocks_cases
from dtrain.tools.bench.training.worker import run_config
from tests.unit.tools.bench.made import case_result, row


def test_each_case_has_its_keys_of_the_model() -> None:
    config = read_suite(["bench.precision=fp32", "model.blocks=[blocks.0]"], BENCH_BLOCKS)
    assert config is not None
    cases = blocks_cases(config, torch.device("cpu"))
    assert [(case.name, case.precision) for case in cases] == [(name, "fp32") for name in config.bench.cases]
    models = [run_config(RankJob(case, 0, "store", config_to_dict(config))).model for case in cases]
    assert [(model.recompute, model.compile) for model in models] == [
        *(("none", "none"), ("selective", "none"), ("full", "none"), ("none", "blocks"), ("selective", "blocks"))
    ]
    assert all(model.block_options.blocks == ["blocks.0"] for model in models)


def test_the_engine_suite_gives_the_keys_of_the_model_to_dtrain() -> None:
    config = read_suite(["model.recompute=selective", "model.compile=blocks"], BENCH_ENGINE)
    assert config is not None
    case = BenchmarkCase("native", "native", 2, "bf16", 2)
    model = run_config(RankJob(case, 0, "store", config_to_dict(config))).model
    assert (model.recompute, model.compile) == ("selective", "blocks")


def test_table_compares_with_the_blocks_as_they_are() -> None:
    none = case_result(BenchmarkCase("none", "native", 1, "bf16", 2, blocks=Blocks()), [[100.0], [200.0]])
    both = replace(none.case, name="compile+full")
    compiled = case_result(both, [[90.0], [220.0]])
    held = [(none, 4 * 2**20, None), (compiled, 2**20, 1)]
    results = [
        replace(
            result,
            footprint=replace(result.footprint, activations=nbytes, graphs=graphs),
            rounds=[replace(timed, cpu_ms=[2.0 + nbytes / 2**20]) for timed in result.rounds],
        )
        for result, nbytes, graphs in held
    ]
    assert row(blocks_table(results), "compile+full") == {
        "case": "compile+full",
        "ranks": "1",
        "step ms": "155.0 (90.0 to 220.0)",
        "step / none": "1.000 (0.900 to 1.100)",
        "CPU / none": "0.500 (0.500 to 0.500)",
        "activations MiB (/ none)": "1.00 (0.250)",
        "graphs": "1",
        "first step s": "1.5",
    }
    alone = row(blocks_table(results[1:]), "compile+full")
    assert (alone["step / none"], alone["activations MiB (/ none)"]) == ("", "1.00")

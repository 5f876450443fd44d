"""Part f: the search of the largest micro-batch, its page, and one run on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtrain.tools.accept.part import PartRequest
from dtrain.tools.accept.parts import memory, memory_keys
from dtrain.tools.accept.parts.interleaved import CaseRun, InterleavedRuns, Record
from dtrain.tools.accept.parts.memory import conclusions, largest_micro_batch, section
from tests.unit.tools.accept.parts.made import record

NAME = "dtrain, eager"
STATES = [
    {
        "precision": "bf16",
        "stage": stage,
        "num_parameters": 1000,
        "memory": {"master": 4000 + extra, "moments": 8000, "buffers": 99},
        "formula": {"master": 4000, "moments": 8000},
        "ratio": (12_000 + extra) / 12_000,
        "allocated": 13_000,
    }
    for stage, extra in ((0, 0), (1, 120))
]


def step(number: int = 0, **figures: Any) -> Record:
    return record(NAME, "1.2B", number, 2, [300.0], **figures)


def test_the_largest_micro_batch_lies_between_what_fits_and_what_does_not() -> None:
    assert largest_micro_batch([step(fitted=[4, 5], failed=6)]) == (5, 6)
    assert largest_micro_batch([step(fitted=[], failed=5), step(1, failed=4), step(2, fitted=[3])]) == (3, 4)
    assert largest_micro_batch([step(fitted=[4])]) == (4, None)
    assert largest_micro_batch([Record(NAME, "1.2B", 0, 1.0, None, "failed")]) == (0, None)


def test_a_predicted_micro_batch_that_does_not_fit_is_followed_by_smaller_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def run_case(runs: InterleavedRuns, run: CaseRun) -> None:
        first = run.options["first_attempt"]
        tried.append(first)
        fits = first is not None and first <= 3
        found = step(run.number, fitted=[first] if fits else [], failed=None if fits else first or 5)
        runs.results["runs"].append(vars(found))

    monkeypatch.setattr(InterleavedRuns, "_run_case", run_case)
    runs = InterleavedRuns(PartRequest("cuda", 1000.0, False, str(tmp_path)))
    runs.run([memory._step_run("1.2B", 0, small=False)])
    memory._search_below(runs, "1.2B")
    assert tried == [None, 4, 3]
    assert largest_micro_batch(runs.records) == (3, 4)


def test_the_page_has_states_step_and_loss_head() -> None:
    head = {"micro_batch": 2, "peak": 12 * 2**30, "gradients": 11 * 2**30, "full_logits": 4 * 2**30}
    results = {"runs": [vars(step(fitted=[4], failed=5))], "states": STATES, "head": head}
    assert conclusions(results) == [
        "G5: model states at most 1.010 of the formula, at stage 1 in bf16 (target 1.02).",
        "Largest micro-batch in BF16, 1.2B, eager: 4 sequences of 4,096 (5 does not).",
        "G6: the loss head takes 12.00 GiB at 2 sequences, beside its gradients 25.0% of full FP32 logits (target 5%), "
        "20% of the peak of a step.",
    ]
    text = "\n".join(section(results))
    assert "4.00 (6.2%)" in text  # reserved but unused
    assert "1.0100" in text
    assert section({}) == conclusions({}) == ["G5, G6: not measured."]


def test_the_page_has_what_recomputation_and_offload_save_and_cost() -> None:
    formula = {"compute": 2 * 2**30, "master": 4 * 2**30}
    states: dict[str, Any] = {"formula": formula, "model_states": formula}
    keys = {"recompute=selective": (330.0, 8), "recompute=full": (390.0, 1)}
    records = [
        step(fitted=[4], activations=20 * 2**30, **states),
        *(record(name, "1.2B", 0, 2, [ms], activations=n * 2**30, **states) for name, (ms, n) in keys.items()),
        record("offload=cpu", "1.2B", 0, 2, [600.0], host_kinds=["master"], at_rest=2 * 2**30, **states),
    ]
    results = {"runs": [vars(found) for found in records]}
    assert conclusions(results)[1:] == [
        "Recomputation, 1.2B, 2 sequences: activations 20.00 GiB; recompute=selective 8.00 GiB at 1.10 x the step; "
        "recompute=full 1.00 GiB at 1.30 x the step.",
        "G5, offload=cpu, 1.2B: 2.00 GiB of states on the device, 1.000 of the formula, at 2.00 x the step.",
    ]
    assert "2.00 GiB = 1.000 x 2.00 GiB" in "\n".join(section(results))
    assert largest_micro_batch(records) == (4, None)
    assert memory_keys.failures(records, 1.02) == []
    (line,) = memory_keys.failures([record("offload=cpu", "1.2B", 0, 2, [600.0], **states)], 0.99)
    assert line == "offload=cpu: model states on the device are 1.000 of the formula"
    assert memory_keys.section(records[1:2]) == []


@pytest.mark.processes
def test_a_run_on_a_cpu_holds_what_the_formula_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PRECISIONS", ("bf16",))
    planned = memory_keys.plan("tiny", small=True)
    monkeypatch.setattr(memory_keys, "plan", lambda name, small: planned[1:2])
    results = memory.run(PartRequest("cpu", 60.0, True, str(tmp_path)))
    assert results["failures"] == []
    assert [found["stage"] for found in results["states"]] == [0, 1, 2, 3]
    assert all(1.0 <= found["ratio"] < 1.02 for found in results["states"])
    assert results["runs"][0]["figures"]["fitted"] == [1, 2]
    eager, full = (run["figures"]["activations"] for run in results["runs"])
    assert 0 < full < eager / 2
    assert results["conclusions"][-1].startswith("Recomputation, tiny, 2 sequences: activations ")
    assert results["left_out"] == {"peaks, fragments, loss head": "memory is measured on a GPU"}

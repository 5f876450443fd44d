"""One run of a case in this process: the order of its steps, and the models that it builds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx

from dtrain.config.dump import from_plain
from dtrain.tools.accept import steps
from dtrain.tools.accept.models import MODELS, count_flops
from dtrain.tools.accept.parts import step
from dtrain.tools.accept.parts.case_model import build_on, compile_blocks
from dtrain.tools.accept.parts.step import CaseJob, measure
from dtrain.tools.bench.training.worker import run_config
from tests.unit.tools.accept.made import request

CPU = torch.device("cpu")


def job(name: str, number: int = 0, **changes: Any) -> CaseJob:
    planned = steps.step_job("tiny", name, number, device="cpu", threads=1, size=2)
    return replace(from_plain(CaseJob, planned.options["job"]), warmup=1, windows=1, steps=1, **changes)


def test_a_model_is_built_on_the_device_with_tied_and_scaled_weights() -> None:
    model = build_on(CPU, MODELS["tiny"], seed=3)
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    assert model.get_parameter("embed.weight").std().item() == pytest.approx(0.02, rel=0.05)
    assert model.get_parameter("blocks.0.ffn.down.weight").std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.05)
    assert model.get_parameter("blocks.1.ffn_norm.weight").eq(1).all()
    again = build_on(CPU, MODELS["tiny"], seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_blocks_of_dtrain_are_compiled_by_the_key_without_a_graph_break(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counters.clear()  # a case has a process of its own
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, inputs: graph)  # traced, and run as it is
    figures = measure(job(steps.TENSORWISE, is_compiled=True))
    assert [linear.format for linear in figures.linears].count("fp8") == 8
    assert (figures.graphs, figures.graph_breaks, figures.warnings) == (1, 0, [])
    assert figures.activations
    assert figures.emulates_float8


def test_blocks_are_compiled_in_place_or_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped: list[nn.Module] = []

    def compile_module(module: nn.Module, **options: object) -> nn.Module:
        wrapped.append(module)
        assert options == {"dynamic": False}
        return nn.Sequential(module)

    monkeypatch.setattr(torch, "compile", compile_module)
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: wrapped.append(self))
    model = build_on(CPU, MODELS["tiny"], seed=0)
    blocks = list(model.get_submodule("blocks").children())
    compile_blocks(model, wraps=False)
    assert list(model.get_submodule("blocks").children()) == wrapped == blocks
    wrapped.clear()
    compile_blocks(model, wraps=True)
    assert wrapped == blocks
    assert [type(block) for block in model.get_submodule("blocks").children()] == [nn.Sequential] * 2


def test_a_peer_and_dtrain_start_from_the_same_weights_and_tokens(tmp_path: Path) -> None:
    plain = measure(job(steps.PLAIN))
    planned = steps.step_job("tiny", steps.DTRAIN, 0, device="cpu", threads=1, size=2)
    (results,) = step.run(request(tmp_path, **planned.options))
    own = results["figures"]
    assert own["losses"][:2] == pytest.approx(plain.losses, rel=2e-3)
    # a step before two windows of three, as planned for a CPU
    assert (own["micro_batch"], len(own["losses"]), len(own["window_ms"])) == (2, 7, 2)
    flops = count_flops(MODELS["tiny"])
    assert (own["flops_causal"], own["flops_full"], own["state"]) == (flops.causal, flops.full, None)
    assert plain.formula is None
    held, formula = steps.device_states(own)
    assert formula <= held < 1.02 * formula
    assert own["num_parameters"] == plain.num_parameters


def test_larger_micro_batches_are_tried_until_one_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    resize = step.Batches.resize

    def limited(self: step.Batches, micro_batch: int, num_steps: int) -> None:
        if micro_batch > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        resize(self, micro_batch, num_steps)

    monkeypatch.setattr(step.Batches, "resize", limited)
    figures = measure(job(steps.EAGER, attempts=4))
    assert (figures.micro_batch, figures.fitted, figures.failed) == (2, [3, 4], 5)


def test_runs_after_the_first_train_on_text() -> None:
    found = {}
    for number in (0, 1):
        own = job(steps.DTRAIN, number)
        batches = step.Batches(run_config(own.rank_job), CPU, is_text=own.is_text)
        batches.resize(2, 12)
        found[number] = list(itertools.islice(batches, 12))
        assert all(torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1]) for batch in found[number])
        assert {batch["tokens"].shape for batch in found[number]} == {(2, MODELS["tiny"].max_seq_len)}
    random, text = (torch.stack([batch["tokens"] for batch in found[number]]) for number in (0, 1))
    # four batches again and again, of all tokens; text of bytes does not repeat
    assert (len(random.unique(dim=0)), len(text.unique(dim=0))) == (4, 12)
    assert random.max() > 500
    assert text.max() < 256

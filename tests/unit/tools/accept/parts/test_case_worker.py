"""One run of a case in this process: the order of its steps, and the models that it builds."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx

from dtrain.config.schema import RunConfig
from dtrain.tools.accept.part import PartRequest
from dtrain.tools.accept.parts import case_worker
from dtrain.tools.accept.parts.case_model import build_on, compile_blocks
from dtrain.tools.accept.parts.case_worker import CaseJob, measure
from dtrain.tools.accept.parts.interleaved import dtrain_case, suite_config
from dtrain.tools.accept.parts.models import MODELS
from dtrain.tools.bench.records import BenchmarkCase, RankJob
from dtrain.tools.bench.training.worker import RankTraining, prepare_training

CPU = torch.device("cpu")


def job(case: BenchmarkCase, folder: Path, **options: object) -> CaseJob:
    config = suite_config(PartRequest("cpu", 1.0, True, str(folder)), MODELS["tiny"], 2)
    return CaseJob(RankJob(case, 0, str(folder / "store"), config), [2], warmup=1, steps=1, **options)  # type: ignore[arg-type]


def test_a_model_is_built_on_the_device_with_tied_and_scaled_weights() -> None:
    model = build_on(CPU, MODELS["tiny"], seed=3)
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    assert model.get_parameter("embed.weight").std().item() == pytest.approx(0.02, rel=0.05)
    assert model.get_parameter("blocks.0.ffn.down.weight").std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.05)
    assert model.get_parameter("blocks.1.ffn_norm.weight").eq(1).all()
    again = build_on(CPU, MODELS["tiny"], seed=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_blocks_of_dtrain_are_compiled_by_the_key_without_a_graph_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    counters.clear()  # a case has a process of its own
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, inputs: graph)  # traced, and run as it is
    figures = measure(job(dtrain_case("fp8", "fp8", recipe="tensorwise"), tmp_path, is_compiled=True))
    assert [linear.format for linear in figures.linears].count("fp8") == 8
    assert (figures.graphs, figures.graph_breaks, figures.warnings) == (1, 0, [])
    assert figures.activations


def test_the_micro_batch_is_chosen_by_an_eager_engine_that_is_gone_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[weakref.ref[nn.Module]] = []
    compiled: list[str] = []

    def prepare(rank_job: RankJob, config: RunConfig, model: nn.Module, *rest: Any) -> RankTraining:
        assert all(earlier() is None for earlier in models)
        models.append(weakref.ref(model))
        compiled.append(config.model.compile)
        return prepare_training(replace(rank_job, case=own), replace(config, model=MODELS["tiny"]), model, *rest)

    monkeypatch.setattr(case_worker, "prepare_training", prepare)
    own = dtrain_case("dtrain")
    chosen = measure(replace(job(own, tmp_path, is_compiled=True), micro_batches=[4, 2]))
    assert (chosen.micro_batch, compiled) == (4, ["none", "blocks"])
    models.clear()
    given = measure(replace(job(own, tmp_path), micro_batches=[4]))
    assert chosen.losses == given.losses


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
    plain = measure(job(BenchmarkCase("plain", "plain", 1, "bf16"), tmp_path))
    own = measure(job(dtrain_case("dtrain"), tmp_path))
    assert own.losses == pytest.approx(plain.losses, rel=2e-3)
    assert (own.micro_batch, len(own.losses), len(own.window_ms)) == (2, 2, 1)
    assert plain.formula is None
    assert own.formula is not None
    assert own.num_parameters == plain.num_parameters

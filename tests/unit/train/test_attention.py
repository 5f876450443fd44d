"""A run on GPUs logs and stores the attention kernel, and warns of what slows a GPU down."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from dtrain.checkpoint.format.integrity import load_manifest
from dtrain.cli.resolve import compose
from dtrain.config.model import HF_FACTORY, ModelConfig
from dtrain.distributed.logging import logger
from dtrain.telemetry.gpu import GPUState
from dtrain.train import attention, run
from dtrain.train.attention import compare_attention, describe_gpus, kernel_of
from dtrain.train.run import run_training
from dtrain.train.trainer import TrainResult
from tests.helpers.launch import summary
from tests.helpers.ranks import run_ranks

GPU = torch.device("cuda", 0)
REPRODUCIBLE = ["experiment=smoke", "engine.reproducible=true"]


def engine_of(others: list[Mapping[str, Any]]) -> Any:
    """Returns rank 0's engine on a GPU; the ranks after it look at ``others``."""
    told = [json.dumps({"value": other}) for other in others]
    comm = SimpleNamespace(rank=0, exchange_text=lambda text: [text, *told])
    policy = SimpleNamespace(compute_dtype=torch.bfloat16, name="bf16")
    return SimpleNamespace(device=GPU, rank=0, comm=comm, policy=policy)


def test_a_start_names_the_kernel_and_warns_of_what_is_slow(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    dataset: Any = SimpleNamespace(mean_context=None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(attention, "attention_kernel", lambda device, dtype, **sizes: f"cuDNN {sizes}")
    monkeypatch.setattr(attention, "describe_cudnn", {(9, 0): ("9.19.0, /opt/libcudnn.so.9", ["an old one"])}.get)
    monkeypatch.setattr(attention, "describe_state", lambda index: GPUState(500, 700))
    sizes = {"batch": 1, "dropout": 0.0, "heads": 2, "kv_heads": 2, "head_dim": 32, "seq_len": 64}
    other = {"kernel": "math", "cudnn": "", "limit": 700.0, "problems": ["an old one", ""]}
    with caplog.at_level(logging.INFO):
        facts = describe_gpus(compose(REPRODUCIBLE), engine_of([other]), dataset)
    assert facts == {"attention": f"cuDNN {sizes}", "cudnn": "9.19.0", "power_limit_w": 500}
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == f"attention: cuDNN {sizes}; cuDNN 9.19.0, /opt/libcudnn.so.9"
    assert told[1] == "rank 0 and on 1 more: an old one"
    assert told[2].startswith("rank 0: the GPU's power limit is 500 W and the card's default 700 W")
    assert told[3] == f"rank 1: attention by math, by cuDNN {sizes} on rank 0: the bits differ"
    caplog.clear()
    cpu: Any = SimpleNamespace(device=torch.device("cpu"))
    assert describe_gpus(compose(REPRODUCIBLE), cpu, dataset) == {}
    assert not caplog.records


def test_packed_documents_take_one_kernel_for_all_or_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    config, packed = compose(["experiment=smoke"]), SimpleNamespace(mean_context=12.0)
    found: list[Any] = []

    def has_varlen(queries: torch.Tensor, keys: torch.Tensor, dropout: float) -> bool:
        found.append((queries.shape, keys.shape, queries.dtype, dropout))
        return dropout == 0.0

    def kernel(model: ModelConfig, device: torch.device = GPU) -> str | None:
        return kernel_of(replace(config, model=model), device, torch.bfloat16, packed)  # type: ignore[arg-type]

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **options: empty(*shape, **options))
    monkeypatch.setattr(attention, "has_varlen_kernel", has_varlen)
    monkeypatch.setattr(attention, "attention_kernel", lambda *_, **sizes: "cuDNN")
    assert kernel(replace(config.model, num_kv_heads=1)) == "FlashAttention 2"
    assert found == [((1, 1, 2, 32), (1, 1, 1, 32), torch.bfloat16, 0.0)]
    assert kernel(replace(config.model, dropout=0.5)) == "cuDNN"
    monkeypatch.setattr(attention, "attention_shape", lambda model: (2, 2, 32, 0.0))
    assert kernel(ModelConfig(factory=HF_FACTORY, path="/model")) is None
    assert kernel(config.model, torch.device("cpu")) is None


def test_a_summary_has_both_conventions_and_the_state_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    state = GPUState(700, 700, 700, 1755, temperature_c=61)
    monkeypatch.setattr(run, "describe_state", lambda index: state)
    config, engine = compose(["experiment=smoke"]), engine_of([])
    vars(engine).update(
        attempted_steps=10, applied_steps=10, world_size=2, name="native", num_parameters=1, memory=dict,
        memory_formula=dict, contract=SimpleNamespace(to_dict=dict),
    )  # fmt: skip
    result: Any = SimpleNamespace(spec=TrainResult, finished=True, tokens=1, train_loss=1.0, val_losses={})
    result.timing = SimpleNamespace(steps=5, seconds=2.0, tokens_per_s=1.0)
    tokens = 5 * config.train.global_batch_size * 64
    share = tokens / 2 / 2.0 / 989.4e12
    found = run._summarize(config, engine, result, {64: (10**9, 2 * 10**9)}, 1.0)
    assert (found.mfu, found.mfu_full) == pytest.approx((1e9 * share, 2e9 * share))
    assert found.gpu == asdict(state)
    engine.rank = 1
    assert run._summarize(config, engine, result, None, 1.0).gpu is None, "rank 0 writes it"


def _run_by(rank: int, world: int, run_dir: str, kernel: str, steps: int) -> list[str]:
    """Runs as if attention were computed by ``kernel``, and returns the warnings."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    keys = [*REPRODUCIBLE, "precision=fp32", "optim.compile=false", "schedule=constant", "train.sample_tokens=0"]
    keys += [f"run_dir={run_dir}", f"train.steps={steps}", "train.save_every=1", "report=false"]
    facts = {"attention": kernel, "cudnn": "9.19.0"}
    with (
        mock.patch.object(run, "describe_gpus", return_value=facts),
        mock.patch.object(attention, "kernel_of", return_value=kernel),
        mock.patch.object(run, "configure_logging", side_effect=lambda rank: logger.addHandler(handler)),
    ):
        assert run_training(compose([*keys, "schedule.warmup_steps=0"])) == 0
    logger.removeHandler(handler)
    return told


@pytest.mark.processes
def test_a_run_keeps_its_kernel_and_a_resume_by_another_is_told(tmp_path: Path) -> None:
    assert run_ranks(1, _run_by, str(tmp_path), "FlashAttention 3", 1) == [[]]
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert (environment["attention"], environment["cudnn"]) == ("FlashAttention 3", "9.19.0")
    extra = load_manifest(tmp_path / "checkpoints" / "step-00000001").state["extra"]
    assert extra["attention"] == "FlashAttention 3"
    assert run_ranks(1, _run_by, str(tmp_path), "FlashAttention 3", 2) == [[]]
    ((told,),) = run_ranks(1, _run_by, str(tmp_path), "FlashAttention 2", 3)
    assert told.startswith("the checkpoint's steps took attention by FlashAttention 3, and this run takes FlashAttent")
    assert summary(tmp_path)["gpu"] is None, "on a CPU"


def test_only_a_reproducible_run_is_compared(caplog: Any) -> None:
    engine = engine_of([])
    engine.device = torch.device("cpu")
    for keys, extra in ((REPRODUCIBLE, {}), (["experiment=smoke"], {"attention": "cuDNN"})):
        compare_attention(extra, compose(keys), engine, None)  # type: ignore[arg-type]
    assert not caplog.records
    compare_attention({"attention": "cuDNN"}, compose(REPRODUCIBLE), engine, SimpleNamespace(mean_context=None))  # type: ignore[arg-type]
    assert "took attention by cuDNN, and this run takes a kernel that is not known" in caplog.text

"""Whole steps as CUDA graphs: the bits of eager steps, random numbers and skips included."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import dtrain
from dtrain.config.model import ModelConfig
from dtrain.engine.graphs.step import WARM_UP
from dtrain.models import build_model
from tests.gpu.device import DEVICE, ON_CPU, needs_gpu
from tests.helpers.recorded_graph import graphs_on_cpu

pytestmark = pytest.mark.usefixtures("one_rank_of_nccl")

VOCAB, STEPS = 300, WARM_UP + 7
CONFIG = ModelConfig(num_layers=2, hidden_dim=128, num_heads=4, max_seq_len=64)


@pytest.fixture(autouse=True)
def recorded_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_CPU:
        graphs_on_cpu(monkeypatch)


def make_engine(*, dropout: float = 0.0, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "optimizer": dtrain.AdamW(lr=1e-3, compile=not ON_CPU),
        "schedule": dtrain.Cosine(total_steps=STEPS, warmup_steps=4),
        "engine": dtrain.Native(zero_stage=options.pop("zero_stage", 2), graph=True),
        "max_grad_norm": 0.5,
        "ema_decay": 0.9,
        "seed": 0,
    }
    model: torch.nn.Module = build_model(CONFIG, VOCAB, seed=0)
    if dropout:
        torch.manual_seed(0)
        layers = torch.nn.Embedding(VOCAB, 64), torch.nn.Dropout(dropout), torch.nn.Linear(64, 64)
        model = torch.nn.Sequential(*layers)
    return dtrain.initialize(model.to(DEVICE), **settings | options)


def batches(num_micro_batches: int = 2) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    size = (4, CONFIG.max_seq_len)
    return [[torch.randint(VOCAB, size, generator=generator) for _ in range(num_micro_batches)] for _ in range(STEPS)]


def train(engine: Any, data: list[list[torch.Tensor]], *, replays: bool, scale: dict[int, float]) -> list[Any]:
    """Returns the outcome of each step; ``scale`` multiplies the loss of some, through the batch."""

    def forward(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = micro["tokens"]
        if isinstance(engine.module, torch.nn.Sequential):
            return engine(tokens).square().mean() * micro["scale"]  # type: ignore[no-any-return]
        return engine(tokens, tokens).loss * micro["scale"]  # type: ignore[no-any-return]

    step = engine.graphed_step(forward)
    found = []
    for number, batch in enumerate(data):
        factor = torch.full((), scale.get(number, 1.0))
        micros = [{"tokens": tokens, "scale": factor} for tokens in batch]
        if replays:
            found.append(step(micros, [1.0, 2.0]))
            continue
        for micro, weight in zip(engine.accumulate(micros), (1.0, 2.0), strict=True):
            on_device = {name: tensor.to(DEVICE) for name, tensor in micro.items()}
            engine.backward(forward(on_device), weight=weight)
        found.append(engine.step())
    return found


CASES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    **{f"stage {stage}": {"precision": "bf16", "zero_stage": stage} for stage in (0, 3)},
    "fp16": {"precision": "fp16", "loss_scale": dtrain.LossScale("dynamic", init=2.0**10, growth_interval=2)},
    "fp8": {"precision": "fp8"},
    "dropout": {"precision": "bf16", "dropout": 0.3},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_gpu("dropout")) if "drop" in name else name for name in CASES]
)
def test_replayed_steps_have_the_bits_of_eager_ones(name: str) -> None:
    scale = {WARM_UP: 1e30, WARM_UP + 3: float("nan")} if name == "fp16" else {}
    engines = [make_engine(**CASES[name]) for _ in range(2)]
    eager, replayed = (
        train(engine, batches(), replays=replays, scale=scale)
        for engine, replays in zip(engines, (False, True), strict=True)
    )
    assert repr(replayed) == repr(eager)
    states = [engine.master_state() for engine in engines]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert [number for number, outcome in enumerate(eager) if not outcome.applied] == list(scale)


@needs_gpu("a recorded graph runs its operations on the host")
def test_the_host_does_less_in_a_replayed_step() -> None:
    taken = []
    for replays in (False, True):
        engine = make_engine(precision="bf16")
        step = engine.graphed_step(lambda micro, engine=engine: engine(micro, micro).loss)
        data = batches()
        with pytest.MonkeyPatch.context() as patch:
            if not replays:
                patch.setattr("dtrain.engine.graphs.step.WARM_UP", len(data))
            for batch in data[:-2]:
                step(batch)
            torch.cuda.synchronize()
            begin = time.process_time()
            for batch in data[-2:]:
                step(batch)
            taken.append(time.process_time() - begin)
    assert taken[1] < taken[0] / 2

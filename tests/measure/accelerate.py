"""Measures what a step through ``dtrain.integrations.accelerate.Accelerator`` costs beside dtrain's own loop.

``python -m tests.measure.accelerate [STAGE] [PRECISION]`` takes about a minute. The steps run in turn on
one thread; times are of the processor, so that other processes count little.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import dtrain
from dtrain.config.model import ModelConfig
from dtrain.integrations.accelerate import Accelerator
from dtrain.models import build_model
from tests.helpers.many_ranks import seconds

VOCAB = 512
CONFIG = ModelConfig(num_layers=4, hidden_dim=128, num_heads=4, max_seq_len=128)
_ROUNDS, _WARM_UP = 60, 5


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCAB, (4, 129), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def bridged(options: dict[str, Any]) -> tuple[Callable[[], None], Any, Accelerator]:
    """Returns a step in the shape of accelerate's examples, the prepared model and the Accelerator."""
    accelerator = Accelerator(cpu=True, **options)
    model = build_model(CONFIG, VOCAB, seed=0)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    data = batch()

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(**data).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return step, model, accelerator


def main(stage: str = "2", precision: str = "fp32") -> None:
    torch.set_num_threads(1)
    options: dict[str, Any] = {"engine": dtrain.Native(zero_stage=int(stage)), "precision": precision}
    bridge, model, accelerator = bridged(options)
    record, seed = model.engine.options.optimizer, model.engine.seed
    engine, data = (
        dtrain.initialize(build_model(CONFIG, VOCAB, seed=0), optimizer=record, seed=seed, **options),
        batch(),
    )

    def loop() -> None:
        for micro in engine.accumulate([data]):
            engine.backward(engine(**micro).loss)
        engine.step()

    cases = {"bridge": bridge, "loop": loop}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(_WARM_UP + _ROUNDS):
        for name, step in cases.items():
            times[name].append(seconds(step))
    masters = accelerator.get_state_dict(model)
    assert all(torch.equal(masters[name], value) for name, value in engine.master_state().items()), "other weights"
    pairs = list(zip(times["bridge"], times["loop"], strict=True))[_WARM_UP:]
    ratio, ms = median(mine / own for mine, own in pairs), 1e3 * median(own for _, own in pairs)
    print(f"zero_stage={stage} precision={precision}: loop {ms:.1f} ms a step, median of the paired ratios {ratio:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])

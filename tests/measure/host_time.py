"""Measures what the engine adds to a model's own forward and backward, where kernels take no time, and writes JSON.

``python -m tests.measure.host_time OUT.json`` takes some two minutes. The model has 24 blocks and is so
narrow that nearly all time is the host's: Python, and torch's way to a kernel. The plain loop of the same model and the
engine's step run in turn in one process; times are of the processor, for one thread, so that other processes and waits
for other ranks count little. Operations do not depend on the machine.

The added milliseconds hold everything that the engine does: on a CPU also an update and a copy per buffer or parameter.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import dtrain
from dtrain.config.model import ModelConfig
from dtrain.models import build_model
from tests.helpers.op_dtypes import operations_of
from tests.helpers.ranks import run_ranks
from tests.measure.results import load_now, printed, write

CONFIG = ModelConfig(num_layers=24, hidden_dim=32, num_heads=1, max_seq_len=4)
VOCAB = 64
CASES = [(precision, stage, 1) for precision in ("fp32", "bf16") for stage in range(4)]
CASES += [(precision, stage, 2) for precision in ("fp32", "bf16") for stage in (2, 3)]
PHASES = ("forward", "backward", "step")
_WARMUP = 24  # steps; by then every buffer that is used in turn has been used
_ROUNDS, _STEPS = 10, 4  # fewer steps in all than the 100 after which the first audit is due

Step = Callable[[], list[float]]
"""Runs one step; returns the processor's milliseconds of each phase. A plain loop has no third one."""


def plain_step(
    model: nn.Module, tokens: Tensor, autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Step:
    """Returns the forward and backward of a loop without an engine."""
    parameters = list(model.parameters())

    def step() -> list[float]:
        start = time.thread_time()
        with autocast():
            loss = model(tokens, tokens).loss
        middle = time.thread_time()
        loss.backward()
        end = time.thread_time()
        for parameter in parameters:
            parameter.grad = None
        return [(middle - start) * 1e3, (end - middle) * 1e3]

    return step


def engine_step(engine: Any, tokens: Tensor) -> Step:
    def step() -> list[float]:
        start = time.thread_time()
        loss = engine(tokens, tokens).loss
        middle = time.thread_time()
        engine.backward(loss)
        end = time.thread_time()
        engine.step()
        return [(middle - start) * 1e3, (end - middle) * 1e3, (time.thread_time() - end) * 1e3]

    return step


def measure(rank: int, world: int, precision: str, stage: int) -> dict[str, Any]:
    torch.manual_seed(0)
    tokens = torch.zeros(1, CONFIG.max_seq_len, dtype=torch.int64)
    engine = dtrain.initialize(
        build_model(CONFIG, VOCAB, seed=0),
        optimizer=dtrain.AdamW(compile=False),
        engine=dtrain.Native(zero_stage=stage),
        precision=precision,
        max_grad_norm=1.0,
        seed=0,
    )
    is_mixed = precision == "bf16"
    autocast = (lambda: torch.autocast("cpu", torch.bfloat16)) if is_mixed else nullcontext
    steps = {
        "plain": plain_step(build_model(CONFIG, VOCAB, seed=0), tokens, autocast),
        "engine": engine_step(engine, tokens),
    }
    taken: dict[str, list[list[float]]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(_WARMUP):
            step()
    gc.collect()
    for _ in range(_ROUNDS):
        for name, step in steps.items():
            engine.comm.barrier()
            taken[name] += [step() for _ in range(_STEPS)]
    operations = [operations_of(step) for step in steps.values()]
    plain, own = (dict(zip(PHASES, map(median, zip(*taken[name], strict=True)), strict=False)) for name in steps)
    return {
        "precision": precision,
        "zero_stage": stage,
        "ranks": world,
        "plain_ms": _rounded(plain),
        "engine_ms": _rounded(own),
        "added_ms": round(median(map(sum, taken["engine"])) - median(map(sum, taken["plain"])), 2),
        "added_operations": operations[1] - operations[0],
    }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in values.items()}


def main() -> None:
    load = load_now()
    measured = (run_ranks(ranks, measure, precision, stage)[0] for precision, stage, ranks in CASES)
    model = {"num_layers": CONFIG.num_layers, "hidden_dim": CONFIG.hidden_dim, "tokens": CONFIG.max_seq_len}
    write(load, model=model, cases=printed(measured))


if __name__ == "__main__":
    main()

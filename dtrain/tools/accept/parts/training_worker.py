"""The process of one engine in part a: trains its cases one after the other and writes each curve as a line of JSON.

A line ``{"begin": ...}`` comes before each case, so that the starter knows which one a crash belongs to.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dtrain.config.data import StdlibDataConfig
from dtrain.config.dump import from_plain
from dtrain.config.model import ModelConfig
from dtrain.config.optim import OptimConfig
from dtrain.config.precision import LossScale, PrecisionConfig
from dtrain.config.schedule import Cosine
from dtrain.config.schema import GROUP_OPTIONS, RunConfig, TrainConfig
from dtrain.data import Dataset, load_dataset
from dtrain.distributed.logging import configure_logging
from dtrain.distributed.setup import choose_device, connect, ensure_process_group
from dtrain.errors import ConfigError
from dtrain.models import build_model
from dtrain.tools.ranks import failure_reason, open_result, read_job
from dtrain.train.setup import make_engine, make_loader, torch_settings_restored
from dtrain.train.validation import to_device

STEPS = 20
_FP16_SCALE = 1024.0  # constant: a dynamic scale would begin with skipped steps


@dataclass(frozen=True)
class TrainingCase:
    """One engine in one precision at one stage."""

    engine: str
    zero_stage: int
    precision: str

    @property
    def name(self) -> str:
        return f"{self.engine} {self.precision}, stage {self.zero_stage}"


@dataclass(frozen=True)
class TrainingJob:
    """The job of one process: ``cases`` in order, only the first begun after ``seconds``; lines go to ``output``."""

    cases: list[dict[str, Any]]
    device: str
    small: bool
    seconds: float
    output: str


def main() -> int:
    """Runs the job; the exit code is 1 if the device does not answer any more."""
    job = from_plain(TrainingJob, json.loads(read_job()))
    deadline = time.monotonic() + job.seconds
    open_result().close()
    configure_logging(0)
    device = choose_device(job.device, 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        ensure_process_group(device)
    datasets: dict[int, Dataset] = {}
    with Path(job.output).open("a", encoding="utf-8") as output:

        def write(line: dict[str, Any]) -> None:
            output.write(json.dumps(line) + "\n")
            output.flush()

        for number, values in enumerate(job.cases):
            if number and time.monotonic() > deadline:  # the process has started, so one case runs
                break
            case = from_plain(TrainingCase, values)
            write({"begin": asdict(case)})
            result = _attempt(case, device, datasets, small=job.small)
            write(asdict(case) | result)
            if "error" in result and not _answers(device):
                return 1
    return 0


def _attempt(case: TrainingCase, device: torch.device, datasets: dict[int, Dataset], *, small: bool) -> dict[str, Any]:
    """Returns the curve of a case, or the reason under ``error`` or ``unsupported``."""
    begin = time.monotonic()
    try:
        with torch_settings_restored():
            result: dict[str, Any] = _train(run_config(case, small=small), device, datasets)
    except ConfigError as error:
        result = {"unsupported": failure_reason(error)}
    except Exception as error:  # any error of a library is a result, and the other cases still run
        traceback.print_exc()
        result = {"error": failure_reason(error)}
    gc.collect()  # an engine has cycles through its hooks
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result | {"seconds": time.monotonic() - begin}


def run_config(case: TrainingCase, *, small: bool) -> RunConfig:
    """Returns the default model and data; ``small`` takes shorter sequences and fewer of them."""
    model = replace(ModelConfig(), max_seq_len=64) if small else ModelConfig()
    loss_scale = LossScale("static", init=_FP16_SCALE) if case.precision == "fp16" else LossScale()
    return RunConfig(
        train=TrainConfig(steps=STEPS, micro_batch_size=2, global_batch_size=4 if small else 8),
        engine=GROUP_OPTIONS["engine"][case.engine](zero_stage=case.zero_stage),
        precision=PrecisionConfig(name=case.precision, loss_scale=loss_scale),
        model=model,
        data=StdlibDataConfig(),
        optim=OptimConfig(lr=3e-4),
        schedule=Cosine(warmup_steps=5),
    )


def _train(config: RunConfig, device: torch.device, datasets: dict[int, Dataset]) -> dict[str, Any]:
    length = config.model.max_seq_len
    dataset = datasets.setdefault(length, datasets.get(length) or load_dataset(config.data, length))
    model = build_model(config.model, dataset.task, config.seed)
    engine = make_engine(config, model, connect(device))
    loader = make_loader(config, dataset, engine)
    outcomes = []
    for _ in range(config.train.steps):
        for micro_batch in engine.accumulate(next(loader)):
            engine.backward(engine(**to_device(micro_batch, device)))
        outcomes.append(engine.step())
    skipped = [f"step {step}: {outcome.reason}" for step, outcome in enumerate(outcomes, 1) if not outcome.applied]
    return {"losses": [outcome.loss for outcome in outcomes], "skipped": skipped}


def _answers(device: torch.device) -> bool:
    """Whether the device still works: an illegal access fails every later call of its process."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a library thread that fails at exit must not look like a failed case

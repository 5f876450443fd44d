"""The curves of one engine: trains the default model in each case, one after the other, in one process.

The results name the case that has begun, so that the command knows which one a crash belongs to.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
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
from dtrain.distributed.startup.setup import choose_device, connect, ensure_process_group
from dtrain.errors import AcceptError, ConfigError
from dtrain.measure.accept.curves import STEPS, TrainingCase
from dtrain.measure.accept.job import Request
from dtrain.models import build_model
from dtrain.tools.processes import failure_reason
from dtrain.train.setup import make_engine, make_loader, torch_settings_restored
from dtrain.train.validation import to_device

_FP16_SCALE = 1024.0  # constant: a dynamic scale would begin with skipped steps


def run(request: Request) -> Iterator[dict[str, Any]]:
    """Trains ``options["cases"]`` in order on ``options["device"]``; the first is begun whatever the time is.

    Raises:
        AcceptError: the device does not answer any more.
    """
    deadline = time.monotonic() + request.seconds
    device = choose_device(request.options["device"], 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        ensure_process_group(device)
    datasets: dict[int, Dataset] = {}
    results: dict[str, Any] = {"rows": [], "begun": None, "planned": list(request.options["cases"])}
    for number, values in enumerate(request.options["cases"]):
        if number and time.monotonic() > deadline:
            break
        yield results | {"begun": values}
        found = _attempt(from_plain(TrainingCase, values), device, datasets, small=request.small)
        results["rows"].append(values | found)
        yield results
        if "error" in found and not _answers(device):
            raise AcceptError(f"the device does not answer after {from_plain(TrainingCase, values).name}")


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
    """Returns the default model and data; ``small`` takes a narrower model, and fewer and shorter sequences."""
    model = replace(ModelConfig(), num_layers=2, hidden_dim=128, max_seq_len=64) if small else ModelConfig()
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

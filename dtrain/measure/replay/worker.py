"""One rank of ``dtrain replay``: trains up to a step, and writes down everything about that one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dtrain.config.dump import config_from_dict, from_plain
from dtrain.config.schema import RunConfig
from dtrain.data import Dataset
from dtrain.data.sampling import micro_batch_indices
from dtrain.distributed.logging import logger
from dtrain.distributed.startup.setup import connect
from dtrain.engine.outcome import StepOutcome
from dtrain.engine.step import StepEngine
from dtrain.errors import CheckpointError, ConfigError, NonFiniteError
from dtrain.measure.replay.records import (
    GRADIENTS,
    GradientRecord,
    MicroBatchRecord,
    ReplayedStep,
    ReplayResult,
    micro_batch_file,
)
from dtrain.measure.worker import Rank
from dtrain.parameters.model_states import MAIN_GRAD
from dtrain.precision.forward import find_loss
from dtrain.precision.histogram import Histogram
from dtrain.precision.module_values import Measured, ModuleRecorder, TensorRecord
from dtrain.telemetry.metrics import finite, write_json
from dtrain.telemetry.throughput import device_name
from dtrain.train.session import MicroBatch, Session, StepWatch, open_data
from dtrain.train.setup import set_threads, torch_settings_restored


def replay_steps(rank: Rank) -> ReplayResult:
    """Trains up to the step of ``rank.job``; see ``dtrain.measure.replay.run.replay``."""
    job, config = rank.job, config_from_dict(rank.job["config"])
    with torch_settings_restored():
        comm = connect(rank.torch_device(), timeout_s=rank.timeout_s)
        set_threads(config, comm)
        dataset = open_data(config, comm)
        _check_data(dataset, job["data_fingerprint"], config)
        session = Session.open(config, comm, dataset=dataset, contract=job["contract"])
        engine = session.engine
        assert isinstance(engine, StepEngine)
        checkpoint = _load(engine, job["checkpoints"], job["step"])
        steps = [_replayed(number, session.step()) for number in range(engine.attempted_steps + 1, job["step"])]
        engine.explain_skips = True
        recorder = _StepRecorder(session, engine, Path(job["folder"]))
        try:
            outcome = session.step(watch=recorder)
        except NonFiniteError as error:  # the skip that ended the run
            if not isinstance(error.outcome, StepOutcome):
                raise
            outcome = error.outcome
        return ReplayResult(
            checkpoint,
            [*steps, _replayed(engine.attempted_steps, outcome)],
            None if outcome.culprit is None else asdict(outcome.culprit),
            recorder.micro_batches,
            recorder.gradients,
            device_name(engine.device),
        )


def _load(engine: StepEngine, checkpoints: Sequence[str], step: int) -> str | None:
    """Loads the first checkpoint that verifies; returns its path, or None to begin from the seed."""
    for path in checkpoints:
        try:
            # by its path: a directory's damaged checkpoints would be renamed, and the run stays as it is
            engine.load(path)
            return path
        except CheckpointError as error:
            logger.warning("%s is not used: %s", path, error)
    if checkpoints:
        logger.warning("no checkpoint before step %d verifies: replaying from the seed", step)
    return None


class _StepRecorder(StepWatch):
    """Writes everything about the next step to ``folder``.

    Attributes:
        micro_batches: of all ranks, in the order of their global index, once their backward is done.
        gradients: on the first rank.
    """

    def __init__(self, session: Session, engine: StepEngine, folder: Path) -> None:
        self.micro_batches: list[MicroBatchRecord] = []
        self.gradients: list[GradientRecord] = []
        self._session = session
        self._engine = engine
        self._folder = folder
        self._cursor = session.loader.cursor
        self._modules = ModuleRecorder(engine.module)

    def forward(self, micro: MicroBatch) -> AbstractContextManager[object]:
        self._modules = ModuleRecorder(self._engine.module)
        return self._modules.recording()

    @contextmanager
    def backward(self, micro: MicroBatch, output: Any, weight: float) -> Iterator[None]:
        self._modules.drop_graph()
        loss = find_loss(output)
        value = float("nan") if loss is None else loss.item()
        yield
        record = self._record(micro, value, weight)
        self._write_micro_batch(record, micro)
        self.micro_batches.append(record)

    @contextmanager
    def update(self) -> Iterator[None]:
        engine = self._engine
        texts = engine.comm.exchange_text(json.dumps([asdict(record) for record in self.micro_batches]))
        records = [from_plain(MicroBatchRecord, values) for text in texts for values in json.loads(text)]
        self.micro_batches = sorted(records, key=lambda record: record.index)
        engine.finish_gradients()
        divisor = engine.loss_scale.scale * sum(record.weight for record in records)
        tensors = {}
        for name, values in engine.states.full_state(MAIN_GRAD):
            if engine.rank == 0:
                tensors[name] = (values.detach() / divisor).cpu().contiguous()
        self.gradients = [_gradient_record(name, gradient) for name, gradient in tensors.items()]
        if engine.rank == 0:
            save_file(tensors, self._folder / f"{GRADIENTS}.safetensors")
            write_json(self._folder / f"{GRADIENTS}.json", [asdict(record) for record in self.gradients], indent=1)
        yield

    def _record(self, micro: MicroBatch, loss: float, weight: float) -> MicroBatchRecord:
        engine, config, dataset = self._engine, self._session.config, self._session.dataset
        number, source = len(self.micro_batches), dataset.train
        size = config.train.micro_batch_size
        ids = source.order(config.seed, micro_batch_indices(self._cursor, number, engine.rank, engine.world_size, size))
        texts = dataset.task.describe(dict(micro))
        if any(files := list(map(source.file, ids.tolist()))):
            texts = [": ".join(filter(None, pair)) for pair in zip(files, texts, strict=True)]
        samples = ids % source.num_samples  # an id may hold a draw too
        index = number * engine.world_size + engine.rank
        return MicroBatchRecord(index, samples.tolist(), finite(loss), weight, texts, self._first_nonfinite())

    def _first_nonfinite(self) -> str:
        """Returns the first tensor of the forward that is not finite, masks apart; empty if there is none."""
        record, _ = self._modules.first_nonfinite()
        return f"{record.side} of '{record.module}' ({record.class_name})" if record else ""

    def _write_micro_batch(self, record: MicroBatchRecord, micro: MicroBatch) -> None:
        """Writes the inputs and sample ids as safetensors; the record and the modules' ranges as JSON."""
        path, modules = self._folder / micro_batch_file(record.index), self._modules
        inputs = {name: value.cpu().clone(memory_format=torch.contiguous_format) for name, value in micro.items()}
        save_file({**inputs, "sample_ids": torch.tensor(record.samples)}, path.with_suffix(".safetensors"))
        weights = {
            module: [asdict(measured.read(key)) for key, measured in own]
            for module, own in modules.weights.items()
            if own
        }
        tensors = [_plain(item) for item in modules.records]
        content = {**asdict(record), "tensors": tensors, "weights": weights, "failures": modules.failures}
        write_json(path.with_suffix(".json"), content, indent=1)


def _plain(record: TensorRecord) -> dict[str, Any]:
    """Returns a tensor at a module's boundary, in the order of the forward; its gradient is scaled."""
    gradient = None if record.gradient is None else asdict(record.gradient.read("gradient"))
    values = asdict(record.forward.read(record.name))
    return {"module": record.module, "class": record.class_name, "side": record.side, **values, "gradient": gradient}


def _gradient_record(name: str, gradient: Tensor) -> GradientRecord:
    values = Measured.of(gradient).read(name)
    norm = finite(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)))
    counts = (values.numel, values.min, values.max, values.num_inf, values.num_nan)
    return GradientRecord(name, *counts, norm, dict(Histogram.of(gradient).to_dict()))


def _check_data(dataset: Dataset, expected: str | None, config: RunConfig) -> None:
    if expected is not None and dataset.fingerprint != expected:
        keys = [key for key in ("files", "path", "validation_path") if getattr(config.data, key, None)]
        named = " and ".join(f"data.{key}={getattr(config.data, key)}" for key in keys)
        named = named or f"data={config.data.name} of this Python"
        raise ConfigError(
            f"the data differs from the run's (sha256 {dataset.fingerprint[:12]}, expected {expected[:12]}), so its "
            f"steps cannot be replayed; put the same files back under {named}"
        )


def _replayed(step: int, outcome: StepOutcome) -> ReplayedStep:
    names = ("loss", "grad_norm", "loss_scale", "lr", "applied", "reason")
    return ReplayedStep(step, *(finite(getattr(outcome, name)) for name in names))

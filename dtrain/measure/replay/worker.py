"""One rank of ``dtrain replay``: trains up to a step, and writes down everything about that one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtrain.config.dump import config_from_dict, from_plain
from dtrain.config.schema import RunConfig
from dtrain.data import Dataset
from dtrain.data.sampling import micro_batch_indices
from dtrain.distributed.logging import logger
from dtrain.distributed.startup.setup import connect
from dtrain.engine.outcome import StepOutcome
from dtrain.engine.step import StepEngine
from dtrain.errors import CheckpointError, ConfigError, NonFiniteError
from dtrain.measure.replay.dump import first_nonfinite, write_gradients, write_micro_batch
from dtrain.measure.replay.records import GradientRecord, MicroBatchRecord, ReplayedStep, ReplayResult
from dtrain.measure.worker import Rank
from dtrain.parameters.model_states import MAIN_GRAD
from dtrain.precision.forward import find_loss
from dtrain.precision.module_values import ModuleRecorder
from dtrain.telemetry.metrics import finite
from dtrain.telemetry.throughput import device_name
from dtrain.train.session import MicroBatch, Session, StepWatch, open_data
from dtrain.train.setup import set_threads, torch_settings_restored


def replay_steps(rank: Rank) -> ReplayResult:
    """Trains up to the step of ``rank.job``; see :func:`dtrain.measure.replay.run.replay`."""
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
        write_micro_batch(self._folder, record, micro, self._modules)
        self.micro_batches.append(record)

    @contextmanager
    def update(self) -> Iterator[None]:
        engine = self._engine
        texts = engine.comm.exchange_text(json.dumps([asdict(record) for record in self.micro_batches]))
        records = [from_plain(MicroBatchRecord, values) for text in texts for values in json.loads(text)]
        self.micro_batches = sorted(records, key=lambda record: record.index)
        engine.finish_gradients()
        divisor = engine.loss_scale.scale * sum(record.weight for record in records)
        gradients = engine.states.full_state(MAIN_GRAD)
        self.gradients = write_gradients(self._folder, gradients, divisor, writes=engine.rank == 0)
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
        return MicroBatchRecord(index, samples.tolist(), finite(loss), weight, texts, first_nonfinite(self._modules))


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

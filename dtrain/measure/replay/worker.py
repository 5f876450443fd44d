"""One rank of ``dtrain replay``: trains up to a step, and writes down everything about that one."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from dtrain.config.dump import config_from_dict, from_plain
from dtrain.config.schema import RunConfig
from dtrain.data import Dataset, load_dataset
from dtrain.data.growing import GrowingBatches
from dtrain.data.sampling import micro_batch_indices
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.logging import configure_logging, logger
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.distributed.startup.setup import choose_device, connect, connect_by_file, disconnect
from dtrain.engine.outcome import Culprit, StepOutcome
from dtrain.engine.step import StepEngine
from dtrain.errors import CheckpointError, ConfigError, NonFiniteError
from dtrain.measure.replay.dump import first_nonfinite, write_gradients, write_micro_batch
from dtrain.measure.replay.records import (
    GradientRecord,
    MicroBatchRecord,
    ReplayedStep,
    ReplayJob,
    ReplayResult,
)
from dtrain.models import build_model
from dtrain.parameters.model_states import MAIN_GRAD
from dtrain.precision.forward import find_loss
from dtrain.precision.module_values import ModuleRecorder
from dtrain.telemetry.metrics import finite
from dtrain.telemetry.throughput import device_name
from dtrain.tools.processes import failure_reason, open_result, read_job
from dtrain.train.session import micro_batch_weight
from dtrain.train.setup import (
    check_inputs,
    check_patterns,
    make_engine,
    make_loader,
    set_threads,
    torch_settings_restored,
)
from dtrain.train.validation import to_device


def main() -> int:
    """Runs the job; the result is JSON, or the reason of a failure."""
    job = from_plain(ReplayJob, json.loads(read_job()))
    result = open_result()
    try:
        json.dump(asdict(run_job(job)), result)
    except Exception as error:  # any error of a library is the reason of the failure
        traceback.print_exc()
        result.write(failure_reason(error))
        return 1
    finally:
        result.close()
    return 0


def run_job(job: ReplayJob) -> ReplayResult:
    """Replays the steps in this process."""
    config = config_from_dict(job.config)
    with _connected(job, config) as comm:
        set_threads(config, comm)
        replayer = _Replayer(job, config, comm)
        checkpoint = replayer.load()
        steps = [replayer.step() for _ in range(replayer.engine.attempted_steps + 1, job.step)]
        return replayer.last_step(checkpoint, steps)


@contextmanager
def _connected(job: ReplayJob, config: RunConfig) -> Iterator[Communicator]:
    configure_logging(job.rank)
    device = choose_device(config.launch.device, job.rank)
    if job.ranks > 1:
        LaunchEnv(job.rank, job.ranks, job.rank, job.ranks).export()  # libraries read these variables
    connect_by_file(job.store, job.rank, job.ranks, device, config.launch.timeout_s)
    threads = torch.get_num_threads()
    failed = True
    try:
        with torch_settings_restored():
            comm = connect(device, timeout_s=config.launch.timeout_s)
            yield comm
            comm.release()
        failed = False
    finally:
        torch.set_num_threads(threads)
        disconnect(failed=failed)


class _Replayer:
    """The engine, the data and the position of a replay."""

    def __init__(self, job: ReplayJob, config: RunConfig, comm: Communicator) -> None:
        self._job = job
        self._config = config
        self._dataset = load_dataset(config.data, config.model.max_seq_len)
        _check_data(self._dataset, job, config)
        model = build_model(config.model, self._dataset.task, config.seed)
        check_patterns(config, model)
        check_inputs(model, self._dataset)
        engine = make_engine(config, model, comm, job.contract)
        assert isinstance(engine, StepEngine)
        self.engine = engine
        self._loader: GrowingBatches | None = None

    def load(self) -> str | None:
        """Loads the first checkpoint that verifies; returns its path, or None to begin from the seed."""
        loaded = None
        for path in self._job.checkpoints:
            try:
                # by its path: a directory's damaged checkpoints would be renamed, and the run stays as it is
                self.engine.load(path)
                loaded = path
                break
            except CheckpointError as error:
                logger.warning("%s is not used: %s", path, error)
        if self._job.checkpoints and loaded is None:
            logger.warning("no checkpoint before step %d verifies: replaying from the seed", self._job.step)
        self._loader = make_loader(self._config, self._dataset, self.engine)
        return loaded

    def step(self) -> ReplayedStep:
        """Trains one step."""
        assert self._loader is not None
        engine = self.engine
        for micro in engine.accumulate(next(self._loader)):
            engine.backward(engine(**to_device(micro, engine.device)), weight=self._weight(micro))
        outcome = engine.step()
        engine.data_cursor = self._loader.cursor
        return _replayed(engine.attempted_steps, outcome)

    def _weight(self, micro: dict[str, Tensor]) -> float:
        return micro_batch_weight(micro, self._config.train.micro_batch_size * self._config.targets_per_sample)

    def last_step(self, checkpoint: str | None, steps: list[ReplayedStep]) -> ReplayResult:
        """Trains the step that was asked for, and writes down everything about it."""
        assert self._loader is not None
        engine, folder = self.engine, Path(self._job.folder)
        engine.explain_skips = True
        cursor = self._loader.cursor
        own: list[MicroBatchRecord] = []
        for number, micro in enumerate(engine.accumulate(next(self._loader))):
            recorder, weight = ModuleRecorder(engine.module), self._weight(micro)
            with recorder.recording():
                output = engine(**to_device(micro, engine.device))
            recorder.drop_graph()
            loss = find_loss(output)
            engine.backward(output, weight=weight)
            record = self._record(
                cursor, number, float("nan") if loss is None else loss.item(), weight, recorder, micro
            )
            write_micro_batch(folder, record, micro, recorder)
            own.append(record)
        texts = engine.comm.exchange_text(json.dumps([asdict(record) for record in own]))
        records = [from_plain(MicroBatchRecord, values) for text in texts for values in json.loads(text)]
        gradients = self._write_gradients(folder, sum(record.weight for record in records))
        outcome, culprit = self._vote()
        return ReplayResult(
            checkpoint,
            [*steps, _replayed(engine.attempted_steps, outcome)],
            None if culprit is None else asdict(culprit),
            sorted(records, key=lambda record: record.index),
            gradients,
            device_name(engine.device),
        )

    def _record(
        self,
        cursor: int,
        number: int,
        loss: float,
        weight: float,
        recorder: ModuleRecorder,
        micro: dict[str, Tensor],
    ) -> MicroBatchRecord:
        engine, source, size = self.engine, self._dataset.train, self._config.train.micro_batch_size
        indices = micro_batch_indices(cursor, number, engine.rank, engine.world_size, size)
        ids = source.order(self._config.seed, indices)
        texts = self._dataset.task.describe(micro)
        if any(files := list(map(source.file, ids.tolist()))):
            texts = [": ".join(filter(None, pair)) for pair in zip(files, texts, strict=True)]
        samples = ids % source.num_samples  # an id may hold a draw too
        index = number * engine.world_size + engine.rank
        return MicroBatchRecord(index, samples.tolist(), finite(loss), weight, texts, first_nonfinite(recorder))

    def _write_gradients(self, folder: Path, sum_weights: float) -> list[GradientRecord]:
        engine = self.engine
        engine.finish_gradients()
        divisor = engine.loss_scale.scale * sum_weights
        return write_gradients(folder, engine.states.full_state(MAIN_GRAD), divisor, writes=engine.rank == 0)

    def _vote(self) -> tuple[StepOutcome, Culprit | None]:
        try:
            outcome = self.engine.step()
            return outcome, outcome.culprit
        except NonFiniteError as error:  # the skip that ended the run
            if not isinstance(error.outcome, StepOutcome):
                raise
            return error.outcome, error.outcome.culprit


def _check_data(dataset: Dataset, job: ReplayJob, config: RunConfig) -> None:
    expected = job.data_fingerprint
    if expected is not None and dataset.fingerprint != expected:
        keys = [key for key in ("files", "path", "validation_path") if getattr(config.data, key, None)]
        named = " and ".join(f"data.{key}={getattr(config.data, key)}" for key in keys)
        named = named or f"data={config.data.name} of this Python"
        raise ConfigError(
            f"the data differs from the run's (sha256 {dataset.fingerprint[:12]}, expected {expected[:12]}), so its "
            f"steps cannot be replayed; put the same files back under {named}"
        )


def _replayed(step: int, outcome: StepOutcome) -> ReplayedStep:
    return ReplayedStep(
        step,
        finite(outcome.loss),
        finite(outcome.grad_norm),
        outcome.loss_scale,
        outcome.lr,
        outcome.applied,
        outcome.reason,
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the result is written; a library thread that fails at exit must not abort this rank

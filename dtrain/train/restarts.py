"""Refuses to restart a run that fails again and again without a newer checkpoint.

The count is a file in the run directory, so it holds for whatever restarts the run: a launcher, a batch system, a loop
in a shell, or a person. The file is there while the run trains and after a failure; a run that ends well removes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dtrain.checkpoint.directory import committed_checkpoints, step_of
from dtrain.config.schema import RunConfig
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.consensus import describe, on_rank_0
from dtrain.distributed.logging import logger
from dtrain.errors import ConfigError, RestartError
from dtrain.redaction.redact import redact_text
from dtrain.supervision.watcher import find_hangs
from dtrain.telemetry.metrics import FAILURES, RESTARTS_FILE, write_json
from dtrain.train.run_dir import RunDir, decide_on_rank_0, redacted


@dataclass(frozen=True)
class Attempts:
    """Content of the file.

    Attributes:
        step: of the newest checkpoint when the first of these attempts began.
        attempts: number of attempts since then, the one under way included.
        config: hash of their configuration; another one may not fail.
        hangs: number of hangs of this run that were known when the last attempt began.
        failure: how the last attempt ended, without secrets; empty if it could not say.
    """

    step: int
    attempts: int
    config: str
    hangs: int
    failure: str = ""

    @staticmethod
    def read(path: Path) -> Attempts | None:
        """Returns None if there is no such file, or if it cannot be understood."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            read = Attempts(**values)
            valid = all(isinstance(value, type(getattr(_NONE, name))) for name, value in asdict(read).items())
        except (OSError, ValueError, TypeError):
            return None
        return read if valid else None

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))


_NONE = Attempts(0, 0, "", 0)


@contextmanager
def counted_attempt(config: RunConfig, comm: Communicator, run_dir: RunDir) -> Iterator[None]:
    """Counts this attempt until the block ends without a failure; a collective, and rank 0 counts.

    Raises:
        RestartError: on every rank: this would be one restart too many.
        StorageError: on every rank: the count cannot be written, because the disk is full or faulty.
        ConfigError: on every rank: it cannot be written for another reason.
    """
    if not config.supervise.restarts:
        yield
        return
    path = run_dir.path / RESTARTS_FILE
    before = Attempts.read(path) if comm.rank == 0 else None

    def begin() -> dict[str, Any]:
        return asdict(_begin(config, run_dir, before))

    attempt = Attempts(**on_rank_0(comm, "", begin, RestartError, expected=(RestartError,)))
    decide_on_rank_0(comm, lambda: attempt.write(path))
    try:
        yield
    except BaseException as error:
        if comm.rank == 0:
            with suppress(OSError):  # the error that ends this run comes first
                _end_failed(path, before, error)
        raise
    if comm.rank == 0:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s could not be removed, so the next start counts as a restart: %s", path, describe(error))


def _begin(config: RunConfig, run_dir: RunDir, before: Attempts | None) -> Attempts:
    """Returns the count with this attempt."""
    steps = [step_of(path) for path in committed_checkpoints(run_dir.checkpoints)]
    newest = max(steps, default=0)
    hangs = find_hangs(run_dir.path / FAILURES)
    settings = _hash(config)
    if before is None or newest > before.step or settings != before.config:
        return Attempts(newest, 1, settings, len(hangs))
    allowed = config.supervise.restarts
    if before.attempts > allowed:
        reason = before.failure or "it ended without a message, such as by SIGKILL"
        if len(hangs) > before.hangs:
            reason = f"it hung, see {hangs[-1]}"
        raise RestartError(
            f"{run_dir.path} is not started again: {before.attempts} attempts in a row failed without a checkpoint "
            f"newer than step {before.step} (supervise.restarts={allowed}); the last failure: {reason}; mend the cause "
            f"and remove {RESTARTS_FILE} there, change the configuration, or raise supervise.restarts (0: no limit)"
        )
    return Attempts(before.step, before.attempts + 1, settings, len(hangs))


def _end_failed(path: Path, before: Attempts | None, error: BaseException) -> None:
    """Keeps the reason of the failure; a refused configuration is no attempt."""
    if not isinstance(error, ConfigError):
        now = Attempts.read(path)
        if now is not None:
            text = describe(error) if isinstance(error, Exception) else type(error).__name__
            line = redact_text(text).partition("\n")[0]  # before the cut: nobody knows half a secret again
            replace(now, failure=line[:500]).write(path)
    elif before is None:
        path.unlink(missing_ok=True)
    else:
        before.write(path)


def _hash(config: RunConfig) -> str:
    values = {key: value for key, value in redacted(config).items() if key not in ("run_dir", "resume", "supervise")}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

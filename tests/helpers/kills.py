"""A model factory whose process is sent a signal, at a named call or some time after it, and runs that are killed so.

``tests.helpers.mishap`` injects other faults at a few functions; this module signals any ranks at any function.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from dtrain.cli.resolve import compose
from dtrain.config.model import ModelConfig
from dtrain.config.schema import RunConfig
from dtrain.errors import DtrainError
from dtrain.models import transformer
from dtrain.train.run import run_training
from tests.helpers.launch import LAUNCHER, SMALL, Record, checkpoints, newest_step, record_of
from tests.helpers.mishap import find
from tests.helpers.ranks import RankFailure, run_ranks

FACTORY = "model.factory=tests.helpers.kills:build"
CHECKPOINT = "dtrain.checkpoint"
FIRST_SAVE = f"{CHECKPOINT}.async_saver:save"
WORLDS = pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
_KILL = "DTRAIN_TEST_KILL"


@dataclass(frozen=True)
class Kill:
    """A signal to some ranks, SIGKILL unless told otherwise.

    Attributes:
        ranks: the ranks that are killed.
        place: ``package.module:function`` or ``package.module:Class.function``; empty: when the model is built.
        count: number of the call, from 1; the kill precedes its work, but half of the bytes of a ``write`` are written.
        after_s: seconds from that call to the kill.
        signal: name of the signal.
        again_s: seconds to a second signal; 0: none.
        mark: file that gets the time of the last signal; empty: none.
        hold: function whose calls sleep for a minute once the first signal is sent; empty: none.
    """

    ranks: tuple[int, ...]
    place: str = ""
    count: int = 1
    after_s: float = 0.0
    signal: str = "SIGKILL"
    again_s: float = 0.0
    mark: str = ""
    hold: str = ""

    def env(self) -> dict[str, str]:
        """Returns the environment of a process that may be killed."""
        return {_KILL: json.dumps(asdict(self))}


def build(config: ModelConfig, vocab_size: int) -> nn.Module:
    """The default model."""
    if _KILL in os.environ:
        kill = Kill(**json.loads(os.environ[_KILL]))
        if (dist.get_rank() if dist.is_initialized() else 0) in kill.ranks:
            _install(kill)
    return transformer.build(config, vocab_size)


def _end(kill: Kill, sent: threading.Event) -> None:
    for wait_s in (kill.after_s, kill.again_s) if kill.again_s else (kill.after_s,):
        time.sleep(wait_s)
        sent.set()
        if kill.mark:
            Path(kill.mark).write_text(str(time.monotonic()), encoding="ascii")
        os.kill(os.getpid(), signal.Signals[kill.signal])


def _wrap(place: str, before: Callable[..., None]) -> None:
    """Lets ``before`` run ahead of each call of a function, with its arguments."""
    owner, name = find(place)
    real: Callable[..., Any] = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        return real(*args, **kwargs)

    setattr(owner, name, wrapped)


def _install(kill: Kill) -> None:
    sent = threading.Event()

    def happen() -> None:
        if kill.after_s or kill.again_s:
            threading.Thread(target=_end, args=(kill, sent), daemon=True).start()
        else:
            _end(kill, sent)

    if kill.hold:
        _wrap(kill.hold, lambda *args: time.sleep(60) if sent.is_set() else None)
    if not kill.place:
        happen()
        return
    calls = 0

    def count(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == kill.count:
            if kill.place.endswith(":write"):
                os.write(args[0], args[1][: len(args[1]) // 2])
            happen()

    _wrap(kill.place, count)


# -- runs --------------------------------------------------------------------------------------------------------------

STEPS = 32
SETTINGS = (
    *SMALL,
    FACTORY,
    f"train.steps={STEPS}",
    "train.global_batch_size=2",
    "train.save_every=2",
    "train.eval_every=10",
    "supervise.enabled=false",
    "supervise.restarts=0",  # it is killed on purpose, often without a newer checkpoint
)


def train_rank(rank: int, world: int, config: RunConfig, env: dict[str, str], log: str) -> int:
    for name in LAUNCHER:
        os.environ.pop(name, None)
    os.environ.update(env)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), 2)
    try:
        code = run_training(config)
    except DtrainError as error:
        print(f"dtrain: {error}", file=os.fdopen(2, "w", closefd=False), flush=True)
        code = error.exit_code
    Path(f"{log}.ended-{rank}").touch()
    return code


@dataclass
class Run:
    """A run that is started repeatedly.

    Attributes:
        run_dir: its directory.
        world: number of ranks.
        data: override that names its data.
    """

    run_dir: Path
    world: int
    data: str

    def start(self, kill: Kill | None = None) -> bool:
        """Starts the run and waits for all of its ranks; returns whether they were killed."""
        log = Path(f"{self.run_dir}.log")
        config = compose([f"run_dir={self.run_dir}", *SETTINGS, self.data])
        env = kill.env() if kill else {}
        codes, failure = [], ""
        try:
            codes = run_ranks(self.world, train_rank, config, env, str(log), grace=10.0)
        except RankFailure as error:
            failure = str(error)
        marks = [Path(f"{log}.ended-{rank}") for rank in range(self.world)]
        ended = {rank for rank, mark in enumerate(marks) if mark.exists()}
        for mark in marks:
            mark.unlink(missing_ok=True)
        if not failure:
            assert codes == [0] * self.world, log.read_text(encoding="utf-8")[-3000:]
            return False
        assert kill is not None, failure
        assert f"--- rank {kill.ranks[0]}:\nthe process died without a result" in failure
        survivors = set(range(self.world)) - set(kill.ranks)
        assert ended >= survivors, f"ranks {survivors - ended} did not end after the kill"
        self._check_visible_checkpoints(log)
        return True

    def _check_visible_checkpoints(self, log: Path) -> None:
        """Visible checkpoints verify, and the newest is no older than the last one reported."""
        reported = re.findall(r"saved \S+step-(\d+) ", log.read_text(encoding="utf-8")) if log.exists() else []
        assert newest_step(self.run_dir) >= int(reported[-1] if reported else 0)

    def assert_equals(self, uninterrupted: Record) -> None:
        """Asserts that the run finished without leftovers and equals the uninterrupted run."""
        # the last killed process leaves its lease; a start that finds the run finished takes none
        *older, before, last = (name for name in checkpoints(self.run_dir) if not name.startswith("lease-"))
        assert (before, last) == (f"step-{STEPS - 2:08d}", f"step-{STEPS:08d}")
        # each of the last saves that was killed after its commit leaves one checkpoint too many: a complete one is not
        # saved again, and only a save that finishes deletes old ones
        assert older == [f"step-{STEPS - 2 - 2 * back:08d}" for back in range(len(older), 0, -1)]
        assert len(older) <= 3
        assert record_of(self.run_dir) == uninterrupted


class Records(dict[int, Record]):
    """Record of the uninterrupted run by world size; computed when first used."""

    def __init__(self, folder: Path, data: str) -> None:
        super().__init__()
        self._folder, self._data = folder, data

    def __missing__(self, world: int) -> Record:
        run = Run(self._folder / str(world), world, self._data)
        assert not run.start()
        record = self.setdefault(world, record_of(run.run_dir))
        assert record.step == STEPS
        return record

"""A model factory that injects a fault at a chosen function and records the samples that are trained on.

The product has no hooks for tests: ``model.factory=tests.helpers.mishap:build`` builds the default model and wraps one
function of this process, as environment variables tell it to.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from dtrain.config.model import ModelConfig
from dtrain.engine.adapters.native import NativeEngine
from dtrain.models import transformer

FACTORY = "model.factory=tests.helpers.mishap:build"
_MISHAP = "DTRAIN_TEST_MISHAP"
_SAMPLES = "DTRAIN_TEST_SAMPLES"

FUNCTIONS = {
    "forward": "dtrain.models.transformer:Attention.forward",
    "vote": "dtrain.engine.adapters.native:NativeEngine._vote",
    "update": "dtrain.optim.flat:FlatUpdate.update",
    "metrics": "dtrain.telemetry.metrics:MetricsFile._append",
    "write": "dtrain.checkpoint.storage:write",
}


@dataclass(frozen=True)
class Mishap:
    """A fault at the ``count``-th call (from 1, in each process) of a function, before the call does its work.

    Of a ``write`` and of ``metrics`` half the bytes are written first.
    """

    place: str  # key of FUNCTIONS, or such a path; empty: when the model is built
    count: int
    action: str = "SIGKILL"  # a signal that the process sends itself, "raise", or "stop and fail" (SIGTERM, then EIO)
    rank: int | None = None  # the one with the fault; None: all
    mark: str = ""  # file that is made when the fault happens
    after_s: float = 0.0  # from the call to the fault, which then happens in another thread
    again_s: float = 0.0  # to the same fault once more; 0: none
    hold: str = ""  # path of a function whose calls sleep for a minute once the fault has happened

    def env(self) -> dict[str, str]:
        """Returns the environment of a process with this fault."""
        return {_MISHAP: json.dumps(asdict(self))}

    def happen(self) -> None:
        if self.mark:
            Path(f"{self.mark}-{_rank()}").touch()
        if self.action == "raise":
            raise RuntimeError("the model broke")
        if self.action == "stop and fail":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.kill(os.getpid(), signal.Signals[self.action])


def recording(file: Path) -> dict[str, str]:
    """Returns the environment of a process that appends ``step sample`` to ``file`` for each sample it trains on."""
    return {_SAMPLES: str(file)}


def sample_name(tokens: Tensor) -> str:
    """Returns a name of the sample with these tokens."""
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]


def build(config: ModelConfig, vocab_size: int) -> nn.Module:
    """The default model."""
    if _MISHAP in os.environ:
        _install(Mishap(**json.loads(os.environ[_MISHAP])))
    if _SAMPLES in os.environ:
        _record(Path(os.environ[_SAMPLES]))
    return transformer.build(config, vocab_size)


def _install(mishap: Mishap) -> None:
    happened = threading.Event()
    calls = 0

    def strike() -> None:
        for wait_s in (mishap.after_s, mishap.again_s) if mishap.again_s else (mishap.after_s,):
            time.sleep(wait_s)
            happened.set()
            mishap.happen()

    def begin() -> None:
        if mishap.after_s:
            threading.Thread(target=strike, daemon=True).start()
        else:
            strike()

    def hold(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if happened.is_set():
            time.sleep(60)
        return real(*args, **kwargs)

    def count(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == mishap.count and mishap.rank in (None, _rank()):
            if path.endswith("storage:write"):
                os.write(args[0], args[1][: len(args[1]) // 2])
            elif mishap.place == "metrics":
                args[0]._file.write('{"step": ')
                args[0]._file.flush()
            begin()
        return real(*args, **kwargs)

    path = FUNCTIONS.get(mishap.place, mishap.place)
    if mishap.hold:
        _wrap(mishap.hold, hold)
    if path:
        _wrap(path, count)
    elif mishap.rank in (None, _rank()):
        begin()


def _wrap(path: str, wrapper: Callable[..., Any]) -> None:
    """Lets ``wrapper`` run in place of the function ``module:path.to.it``, which it gets first."""
    module, _, inside = path.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = inside.split(".")
    for part in outer:
        owner = getattr(owner, part)
    real: Callable[..., Any] = getattr(owner, name)
    # a function, so that it becomes a method of the class that it is put in
    setattr(owner, name, lambda *args, **kwargs: wrapper(real, *args, **kwargs))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _record(file: Path) -> None:
    real = NativeEngine.__call__

    def call(engine: NativeEngine, *args: Any, **kwargs: Any) -> Any:
        if not engine._batch.is_evaluating:
            with file.open("a", encoding="utf-8") as lines:
                lines.write("".join(f"{engine.attempted_steps} {sample_name(row)}\n" for row in kwargs["tokens"]))
        return real(engine, *args, **kwargs)

    NativeEngine.__call__ = call  # type: ignore[method-assign]

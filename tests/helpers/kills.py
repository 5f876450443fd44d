"""A model factory whose process is sent a signal, at a named call or some time after it.

``tests.helpers.mishap`` injects other faults at a few functions; this module signals any ranks at any function.
"""

from __future__ import annotations

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
from torch import nn

from dtrain.config.model import ModelConfig
from dtrain.models import transformer
from tests.helpers.mishap import find

FACTORY = "model.factory=tests.helpers.kills:build"
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

"""A model factory whose process is killed by SIGKILL, at a named call or some time after it.

``tests.helpers.mishap`` injects other faults at a few functions; this module kills any ranks at any function.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from dtrain.config.schema import ModelConfig
from dtrain.models import transformer
from tests.helpers.mishap import find

FACTORY = "model.factory=tests.helpers.kills:build"
_KILL = "DTRAIN_TEST_KILL"


@dataclass(frozen=True)
class Kill:
    """A SIGKILL of some ranks.

    Attributes:
        ranks: the ranks that are killed.
        place: ``package.module:function`` or ``package.module:Class.function``; empty: when the model is built.
        count: number of the call, from 1; the kill precedes its work, but half of the bytes of a ``write`` are written.
        after_s: seconds from that call to the kill.
    """

    ranks: tuple[int, ...]
    place: str = ""
    count: int = 1
    after_s: float = 0.0

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


def _die(after_s: float) -> None:
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def _install(kill: Kill) -> None:
    def happen() -> None:
        if kill.after_s:
            threading.Thread(target=_die, args=(kill.after_s,), daemon=True).start()
        else:
            _die(0)

    if not kill.place:
        happen()
        return
    owner, name = find(kill.place)
    real: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == kill.count:
            if name == "write":
                os.write(args[0], args[1][: len(args[1]) // 2])
            happen()
        return real(*args, **kwargs)

    setattr(owner, name, wrapped)

"""``dtrain replay RUN step=N``. torch is imported after the arguments are read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain.distributed.logging import configure_logging
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.errors import ConfigError, nearest

_USAGE = """usage: dtrain replay RUN step=N [ranks=K] [out=FOLDER] [code=NAMES]

  RUN         a run directory: its config.yaml, metrics.jsonl, failures/ and checkpoints/ are read, and nothing in it
              is changed
  step=N      the step to reproduce, as metrics.jsonl counts: the first is 1
  ranks=K     processes on this machine (1); they share the steps' micro-batches, however many ranks the run had
  code=NAMES  the model factory or optimizer class of your own that the run uses (package.module:name, by comma): what
              a run directory names is imported only if you name it too
  out=FOLDER  where everything about the step is written (runs/replay-RUN-step-N); must not exist, or be empty

Trains again from the newest checkpoint before the step that verifies, else from the seed, with the run's data, model,
precision, schedule and random numbers. With engine.reproducible=true the steps are the same bit for bit on any number
of ranks; every loss is compared with the logged one. Stops after step N, applied or skipped, and writes its batch, the
losses of its micro-batches, the ranges of what every module took and returned and of their gradients, and a histogram
of each parameter's gradient.

Exit code 0: replayed; 1: the run is reproducible, but the replay differs from it, or it failed; 2: bad usage."""
_KEYS = ("step", "ranks", "out", "code")


@dataclass(frozen=True)
class ReplayArguments:
    """The command line; ``out`` None: the default folder."""

    run: Path
    step: int
    ranks: int = 1
    out: Path | None = None
    code: tuple[str, ...] = ()


def main(argv: Sequence[str]) -> int:
    """Replays a step; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    arguments = parse(argv)
    if LaunchEnv.read().launched:
        raise ConfigError("dtrain replay starts its own ranks; start it once, without a launcher, and set ranks=")
    configure_logging(0)
    from dtrain.measure.replay.report import show_report
    from dtrain.measure.replay.run import replay
    from dtrain.measure.replay.source import read_run, require_named

    begin = time.monotonic()
    source = read_run(arguments.run, arguments.step)
    require_named(source, arguments.code)
    report, out = replay(source, arguments.ranks, arguments.out)
    show_report(report, out, time.monotonic() - begin)
    return 0 if report.agrees else 1


def parse(argv: Sequence[str]) -> ReplayArguments:
    """Reads the command line.

    Raises:
        ConfigError: no run directory or several, an unknown key, or a value that is no number of 1 or more.
    """
    paths = [word for word in argv if "=" not in word]
    values = dict(word.split("=", 1) for word in argv if "=" in word)
    for key in values:
        if key not in _KEYS:
            raise ConfigError(
                f"dtrain replay takes {', '.join(_KEYS)}; got '{key}'{nearest(key, _KEYS)}. All other settings are the "
                f"run's own"
            )
    if len(paths) != 1:
        raise ConfigError(f"dtrain replay takes one run directory, got {len(paths)}: dtrain replay runs/mine step=37")
    if "step" not in values:
        raise ConfigError(f"dtrain replay needs the step to reproduce: dtrain replay {paths[0]} step=37")
    out = values.get("out")
    if out == "":
        raise ConfigError("out is empty; name a folder, or leave it out")
    return ReplayArguments(
        Path(paths[0]),
        _number("step", values["step"]),
        _number("ranks", values.get("ranks", "1")),
        None if out is None else Path(out),
        tuple(name for name in values.get("code", "").split(",") if name),
    )


def _number(key: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise ConfigError(f"{key}={text} must be a whole number of 1 or more")
    return int(text)

"""``dtrain simulate``: steps of any number of ranks, by the engine's own schedule and a model of the network."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.errors import ConfigError, nearest
from dtrain.measure.planned_run import whole_number

if TYPE_CHECKING:
    from dtrain.cli.resolve import Job
    from dtrain.measure.simulate.points import Assumptions

_OWN = """\
  device=NAME         a GPU that need not be here (default h100-80gb), or cpu with step_ms=
  ranks=N,N,...       ranks of the job (default 8,64,512)
  network=NAME|FILE   ib-400g (default), ib-200g, efa, ethernet, nvlink, or the results of dtrain bench collectives
  scaling=weak        micro-batches of a rank stay as on the fewest ranks; strong: the global batch stays
  efficiency=0.7      part of the published rate that products reach
  step_ms=MS          measured computation of one rank in a step, instead of the published rates
  overlap_slowdown=X  by which a transfer slows the computation beside it (default 1.189)
  spread=X            deviation of the GPUs' speeds; a step takes as long as its slowest rank (default 0.015)
  gradients=engine    or ring, ring-fp32: reduce-scatters where the engine uses all-to-all
  write_gbps=10       GB/s that a node writes to storage
  json=FILE           writes the same as JSON
  picture=FILE.png    weak and strong scaling"""
_USAGE = f"""usage: dtrain simulate [key=value ...]

Shows what a step, a start and a checkpoint take on many ranks. The real model and engine run on tensors without values,
as one of N ranks. Each operation takes its time at published rates, and each collective its time by a model of the
network. Nothing is measured, and no such ranks are needed.

All take the keys of dtrain train (dtrain train --help), and:

{_OWN}

  dtrain simulate model=llama-8b engine.zero_stage=3 precision=bf16 train.micro_batch_size=1 ranks=8,64,512
  dtrain simulate model=llama-8b engine.zero_stage=3 engine.shard_size=64 precision=bf16 ranks=1024

docs/scaling.md says what is assumed."""
_HELP = frozenset(("-h", "--help"))
_KEYS = re.findall(r"^  (\w+)=", _OWN, re.MULTILINE)
_BOUNDS = {
    "efficiency": (1e-6, 1.0),
    "step_ms": (1e-6, math.inf),
    "overlap_slowdown": (1.0, math.inf),
    "spread": (0.0, 1.0),
    "write_gbps": (1e-6, math.inf),
}


def main(argv: Sequence[str]) -> int:
    """Runs ``dtrain simulate``; returns the exit code."""
    if not _HELP.isdisjoint(argv):
        print(_USAGE)
        return 0
    keys = {key: value for key, equals, value in (word.partition("=") for word in argv) if equals and key in _KEYS}
    words = [word for word in argv if word.partition("=")[0] not in keys]
    ranks = _ranks(keys.get("ranks", "8,64,512"))
    for key in ("json", "picture"):
        if key in keys and not (folder := Path(keys[key]).parent).is_dir():
            raise ConfigError(f"{key}={keys[key]}: the folder {folder} does not exist; create it or give another path")
    jobs = _read_jobs(words, ranks[-1])
    if len(jobs) > 1:
        raise ConfigError("dtrain simulate takes several numbers of ranks (ranks=8,64), but one run; remove --multirun")
    for job in jobs:
        from dtrain.measure.planned_run import planned_run
        from dtrain.measure.simulate.points import simulate
        from dtrain.measure.simulate.report import show_points, to_json

        assumed = _assumptions(keys)
        run = planned_run(job.config, {"device": keys.get("device", "h100-80gb"), "ranks": str(ranks[0])})
        is_strong = _one_of(keys, "scaling", "weak", "strong") == "strong"
        points = simulate(run, ranks, assumed, is_strong=is_strong)
        show_points(run, points, assumed, is_strong=is_strong)
        if "json" in keys:
            text = json.dumps(to_json(run, points, assumed, is_strong=is_strong), indent=1)
            Path(keys["json"]).write_text(text + "\n", encoding="utf-8")
        if "picture" in keys:
            from dtrain.measure.simulate.picture import draw

            other = simulate(run, ranks, assumed, is_strong=not is_strong)
            draw(Path(keys["picture"]), run, {is_strong: points, not is_strong: other}, assumed)
    return 0


def _ranks(text: str) -> list[int]:
    try:
        return sorted({whole_number("ranks", count) for count in text.split(",")})
    except ConfigError:
        raise ConfigError(f"ranks={text} must be whole numbers from 1, separated by commas: ranks=8,64") from None


def _read_jobs(words: Sequence[str], most: int) -> list[Job]:
    """Returns the runs; an error about an unknown key suggests the keys of this command too."""
    from dtrain.cli.resolve import read_jobs

    try:
        return read_jobs(words, "simulate", most)
    except ConfigError as error:
        found = re.match(r"unknown key '([^']+)'(?:; did you mean '([^']+)')?", str(error))
        hint = nearest(found[1], [*_KEYS, *filter(None, found.groups()[1:])]) if found else ""
        if found is None or not hint.startswith("; did"):
            raise
        raise ConfigError(f"unknown key '{found[1]}'{hint}") from None


def _assumptions(keys: Mapping[str, str]) -> Assumptions:
    from dtrain.measure.simulate.points import ENGINE, RING, RING_FP32, Assumptions

    numbers = {key: _number(key, keys[key]) for key in _BOUNDS if key in keys}
    gradients = _one_of(keys, "gradients", ENGINE, RING, RING_FP32)
    network = keys.get("network", Assumptions.network)
    return Assumptions(network, gradients=gradients, **numbers)


def _number(key: str, text: str) -> float:
    least, most = _BOUNDS[key]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise ConfigError(f"{key}={text} must be a number from {least:g}" + (f" to {most:g}" if most == 1 else ""))
    return value


def _one_of(keys: Mapping[str, str], key: str, *choices: str) -> str:
    value = keys.get(key, choices[0])
    if value not in choices:
        raise ConfigError(f"{key}={value} must be {' or '.join(choices)}")
    return value

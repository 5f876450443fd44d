"""``dtrain plan``: what a run would do and need, before it is started."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.errors import ConfigError, nearest

if TYPE_CHECKING:
    from dtrain.cli.resolve import Job
    from dtrain.config.schema import RunConfig
    from dtrain.planning.planned_run import PlannedRun
    from dtrain.planning.time.prediction import Assumptions

_OWN = """\
  device=NAME         here (default; of scale h100-80gb), cpu, or a GPU that need not be here: h100-80gb, l4-24gb, ...
  ranks=N             ranks of the job; default: those that this command would start; of scale several: 8,64,512
  network=NAME|FILE   time, scale: ib-400g (default), ib-200g, efa, ethernet, nvlink, or what dtrain bench collectives
                      bench.out=FILE has measured between such ranks

Of time, and of scale:

  efficiency=0.7      part of the published rate that products reach
  step_ms=MS          measured computation of one rank in a step, instead of the published rates; time measures it here
  overlap_slowdown=X  by which a transfer slows the computation beside it (default 1.189)
  spread=X            deviation of the GPUs' speeds; a step takes as long as its slowest rank (default 0.015)
  gradients=engine    or ring, ring-fp32: reduce-scatters where the engine uses all-to-all

Of scale:

  scaling=weak        micro-batches of a rank stay as on the fewest ranks; strong: the global batch stays
  write_gbps=10       GB/s that a node writes to storage
  json=FILE           writes the same as JSON
  picture=FILE.png    weak and strong scaling

Options:

  --against RUN       memory: beside what the run in this folder has measured; takes its configuration from there
  --all               shapes, precision: a row for each module; without it equal blocks share a row
  --no-measure        shapes: print the rules only, and time nothing"""
_USAGE = f"""usage: dtrain plan memory|time|shapes|precision|scale [option ...] [key=value ...]

  memory     bytes of a rank by kind, whether they fit, the largest micro-batch that does, and what would help
  time       how long a step takes and what it consists of; what faster products would bring
  shapes     every product of a step: its dimensions, the rules it breaks, its arithmetic intensity
  precision  the format of each module of the model, with the reason
  scale      a step, a start, the memory and a checkpoint on many ranks; dtrain simulate is another name

All take the keys of dtrain train (dtrain train --help). memory, time, shapes and scale also take:

{_OWN}

  dtrain plan memory model=llama-8b device=h100-80gb ranks=64 engine.zero_stage=3
  dtrain plan time ranks=8 network=network.json
  dtrain plan shapes model.hidden_dim=500
  dtrain plan precision precision=fp8 model=llama-1b 'precision.rules={{"blocks.0.*": bf16}}'
  dtrain plan scale model=llama-8b engine.zero_stage=3 precision=bf16 train.micro_batch_size=1 ranks=8,64,512

The real model and engine run on tensors without values, as one of the ranks, of which none is needed. Only time makes
weights, and trains some steps on this device, if it is the planned one. Nothing is sent; only json= and picture= write.
Tables are drawn on a terminal and Markdown elsewhere. docs/planning.md says what is assumed."""
_HELP = frozenset(("-h", "--help"))
_ALL, _AGAINST, _NO_MEASURE = "--all", "--against", "--no-measure"
_OPTIONS = {"memory": (_AGAINST,), "time": (), "shapes": (_ALL, _NO_MEASURE), "precision": (_ALL,), "scale": ()}
_BOUNDS = {
    "efficiency": (1e-6, 1.0),
    "step_ms": (1e-6, math.inf),
    "overlap_slowdown": (1.0, math.inf),
    "spread": (0.0, 1.0),
    "write_gbps": (1e-6, math.inf),
}
_RUN_KEYS = ("device", "ranks")
_TIME_KEYS = (*_RUN_KEYS, "network", "efficiency", "step_ms", "overlap_slowdown", "spread", "gradients")
_KEYS = {
    "memory": _RUN_KEYS,
    "time": _TIME_KEYS,
    "shapes": _RUN_KEYS,
    "precision": (),
    "scale": (*_TIME_KEYS, "scaling", "write_gbps", "json", "picture"),
}


def main(argv: Sequence[str]) -> int:
    """Runs ``dtrain plan``; returns the exit code."""
    plan, *words = list(argv) or ["--help"]
    if plan in _HELP:
        print(_USAGE)
        return 0
    if plan not in _KEYS:
        raise ConfigError(f"dtrain plan cannot plan '{plan}'{nearest(plan, _KEYS)}")
    given, others = _parse(plan, words)
    if _AGAINST in given:
        return _compare(Path(given.pop(_AGAINST)), [*others, *given])
    jobs = _read_jobs(others, plan, asked_ranks(given)[-1] if "ranks" in given or plan == "scale" else None)
    if len(jobs) > 1:
        raise ConfigError(f"dtrain plan {plan} shows one run; remove --multirun")
    for job in jobs:  # empty if Hydra printed its own output, such as --help
        _show(plan, job.config, given)
    if not _HELP.isdisjoint(words):
        print(f"\nOf dtrain plan itself:\n\n{_OWN}")
    return 0


def _parse(plan: str, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the plan's own options and keys of ``words``, and those that are left for ``dtrain train``."""
    given: dict[str, str] = {}
    others = []
    rest = iter(words)
    for word in rest:
        key, equals, value = word.partition("=")
        if word in (_ALL, _AGAINST, _NO_MEASURE):
            if word not in _OPTIONS[plan]:
                raise ConfigError(f"dtrain plan {plan} has no option {word}; see dtrain plan --help")
            given[word] = next(rest, "") if word == _AGAINST else ""
            if word == _AGAINST and not given[word]:
                raise ConfigError(f"{_AGAINST} needs the folder of a run, such as {_AGAINST} runs/mine")
        elif equals and key in _KEYS[plan]:
            given[key] = value
        elif key == "shard_size":
            raise ConfigError(f"{word} is a key of the engine: write engine.shard_size={value}")
        else:
            others.append(word)
    return given, others


def _read_jobs(words: Sequence[str], plan: str, most: int | None) -> list[Job]:
    """Returns the runs; an error about an unknown key suggests the keys of this command too."""
    from dtrain.cli.resolve import read_jobs

    try:
        return read_jobs(words, f"plan {plan}", most)
    except ConfigError as error:
        found = re.match(r"unknown key '([^']+)'(?:; did you mean '([^']+)')?", str(error))
        hint = nearest(found[1], [*_KEYS[plan], *filter(None, found.groups()[1:])]) if found else ""
        if found is None or not hint.startswith("; did"):
            raise
        raise ConfigError(f"unknown key '{found[1]}'{hint}") from None


def _show(plan: str, config: RunConfig, given: Mapping[str, str]) -> None:
    if plan == "precision":
        from dtrain.planning.precision import show_plan

        show_plan(config, folded=_ALL not in given)
    elif plan == "scale":
        _show_scale(config, given)
    elif plan == "memory":
        from dtrain.planning.memory.show import show_memory

        show_memory(planned_run(config, given))
    elif plan == "time":
        _show_time(config, given)
    else:
        from dtrain.planning.shapes.show import show_shapes

        show_shapes(planned_run(config, given), measure=_NO_MEASURE not in given, folded=_ALL not in given)


def _show_time(config: RunConfig, given: Mapping[str, str]) -> None:
    from dtrain.planning.record.ranks import NCCL
    from dtrain.planning.time.prediction import NO_NETWORK
    from dtrain.planning.time.show import show_time

    run = planned_run(config, given)
    # of CPU ranks no network is assumed, and they are measured side by side, so the slowest is known
    own = {"network": NO_NETWORK, "spread": "0"} if run.transport != NCCL else {}
    show_time(run, _assumptions({**own, **given}))


def _show_scale(config: RunConfig, given: Mapping[str, str]) -> None:
    from dtrain.planning.scale import draw, scale, show_points, to_json

    ranks = asked_ranks(given)
    for key in ("json", "picture"):
        if key in given and not (folder := Path(given[key]).parent).is_dir():
            raise ConfigError(f"{key}={given[key]}: the folder {folder} does not exist; create it or give another path")
    assumed = _assumptions(given)
    is_strong = _one_of(given, "scaling", "weak", "strong") == "strong"
    run = planned_run(config, {"device": given.get("device", "h100-80gb"), "ranks": str(ranks[0])})
    points = scale(run, ranks, assumed, is_strong=is_strong)
    show_points(run, points, assumed, is_strong=is_strong)
    if "json" in given:
        text = json.dumps(to_json(run, points, assumed, is_strong=is_strong), indent=1)
        Path(given["json"]).write_text(text + "\n", encoding="utf-8")
    if "picture" in given:
        other = scale(run, ranks, assumed, is_strong=not is_strong)
        draw(Path(given["picture"]), run, {is_strong: points, not is_strong: other}, assumed)


def _compare(folder: Path, others: Sequence[str]) -> int:
    """Compares the plan of a run with its receipt; ``others`` are words that it does not take."""
    if others:
        raise ConfigError(f"{_AGAINST} takes the configuration of the run; remove {others[0]}")
    import yaml

    from dtrain.config.dump import config_from_dict
    from dtrain.planning.devices import find_device
    from dtrain.planning.memory.show import show_against
    from dtrain.planning.planned_run import PlannedRun
    from dtrain.telemetry.metrics import CONFIG_FILE
    from dtrain.train.receipt import Receipt

    receipt = Receipt.read(folder)
    config = config_from_dict(yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8")))
    device = find_device(receipt.device, receipt.num_ranks)
    show_against(receipt, PlannedRun.of(config, device, receipt.num_ranks))
    return 0


# -- the planned run ---------------------------------------------------------------------------------------------------


def asked_ranks(given: Mapping[str, str]) -> list[int]:
    """Returns the values of ``ranks=``, ascending; without it those of a scale."""
    text = given.get("ranks", "8,64,512")
    counts = text.split(",")
    if not all(count.isdecimal() and int(count) for count in counts):
        raise ConfigError(f"ranks={text} must be a whole number from 1; dtrain plan scale takes several: ranks=8,64")
    return sorted({*map(int, counts)})


def planned_run(config: RunConfig, given: Mapping[str, str]) -> PlannedRun:
    """Returns the run of ``config`` on the device and the ranks that ``given`` names: ``device=``, ``ranks=``."""
    from dtrain.distributed.startup.launch_env import LaunchEnv
    from dtrain.distributed.startup.setup import choose_device, processes_to_start
    from dtrain.planning.devices import HERE, find_device
    from dtrain.planning.planned_run import PlannedRun
    from dtrain.train.run import check_run
    from dtrain.train.setup import check_precision

    name = given.get("device", "cpu" if config.launch.device == "cpu" else HERE)
    ranks = LaunchEnv.read().world_size * processes_to_start(config.launch.num_processes, config.launch.device)
    if "ranks" in given:
        ranks, *others = asked_ranks(given)
        if others:
            raise ConfigError(f"ranks={given['ranks']} are several; give one, or use dtrain plan scale")
    device = find_device(name, ranks)
    check_run(config)
    if device.is_here:
        check_precision(config, choose_device(device.type, 0))
    if len(config.batch_growth.phases) > 1:
        largest = config.batch_growth.largest
        sizes = f"train.global_batch_size={largest.global_batch_size} train.seq_len={largest.seq_len}"
        print(f"planned at the largest batch: {sizes}\n")
        config = config.at_largest_batch()
    return PlannedRun.of(_with_whole_batch(config, ranks), device, ranks)


def _with_whole_batch(config: RunConfig, ranks: int) -> RunConfig:
    """Returns ``config`` with a global batch that the ranks can share."""
    train = config.train
    unit = train.micro_batch_size * ranks
    whole = -(-train.global_batch_size // unit) * unit
    if whole == train.global_batch_size:
        return config
    shared = f"{ranks} ranks cannot share {train.global_batch_size} in equal parts"
    print(f"planned with train.global_batch_size={whole}: {shared}\n")
    return replace(config, train=replace(train, global_batch_size=whole))


def _assumptions(given: Mapping[str, str]) -> Assumptions:
    from dtrain.planning.time.prediction import ENGINE, RING, RING_FP32, Assumptions

    numbers = {key: _number(key, given[key]) for key in _BOUNDS if key in given}
    gradients = _one_of(given, "gradients", ENGINE, RING, RING_FP32)
    return Assumptions(given.get("network", Assumptions.network), gradients=gradients, **numbers)


def _number(key: str, text: str) -> float:
    least, most = _BOUNDS[key]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise ConfigError(f"{key}={text} must be a number from {least:g}" + (f" to {most:g}" if most == 1 else ""))
    return value


def _one_of(given: Mapping[str, str], key: str, *choices: str) -> str:
    value = given.get(key, choices[0])
    if value not in choices:
        raise ConfigError(f"{key}={value} must be {' or '.join(choices)}")
    return value

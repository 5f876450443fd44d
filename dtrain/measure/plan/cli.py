"""``dtrain plan``: what a run would do and need, before it is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.errors import ConfigError, nearest
from dtrain.measure.planned_run import asked_ranks, planned_run

if TYPE_CHECKING:
    from dtrain.config.schema import RunConfig

_OWN = """\
  device=NAME    here (default), cpu, or a GPU that need not be here: h100-80gb, a100-40gb, h200-141gb, l4-24gb, ...
  ranks=N        ranks of the job; default: those that this command would start
  network=FILE   time: what dtrain bench collectives bench.out=FILE has measured between such ranks

Options:

  --against RUN  memory: beside what the run in this folder has measured; takes its configuration from there
  --all          shapes, precision: a row for each module; without it equal blocks share a row
  --no-measure   shapes: print the rules only, and time nothing"""
_USAGE = f"""usage: dtrain plan memory|shapes|time|precision [option ...] [key=value ...]

  memory     bytes of a rank by kind, whether they fit, the largest micro-batch that does, and what would help
  shapes     every product of a step: its dimensions, the rules it breaks, its arithmetic intensity
  time       how long a step takes on this device and what it consists of; what faster products would bring
  precision  the format of each module of the model, with the reason

All take the keys of dtrain train (dtrain train --help). memory, shapes and time also take:

{_OWN}

  dtrain plan memory model=llama-8b device=h100-80gb ranks=64 engine.zero_stage=3
  dtrain plan shapes model.hidden_dim=500
  dtrain plan time ranks=8 network=network.json
  dtrain plan precision precision=fp8 model=llama-1b 'precision.rules={{"blocks.0.*": bf16}}'

Nothing is written or sent. Only time makes weights, and trains some steps on this device if it is the planned one.
Tables are drawn on a terminal and Markdown elsewhere."""
_HELP = frozenset(("-h", "--help"))
_ALL, _AGAINST, _NO_MEASURE = "--all", "--against", "--no-measure"
_OPTIONS = {"memory": (_AGAINST,), "shapes": (_ALL, _NO_MEASURE), "time": (), "precision": (_ALL,)}
_RUN_KEYS = ("device", "ranks")
_KEYS = {"memory": _RUN_KEYS, "shapes": _RUN_KEYS, "time": (*_RUN_KEYS, "network"), "precision": ()}


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
    from dtrain.cli.resolve import read_jobs

    jobs = read_jobs(others, f"plan {plan}", asked_ranks(given))
    if len(jobs) > 1:
        raise ConfigError(f"dtrain plan {plan} shows one run; remove --multirun")
    for job in jobs:  # empty if Hydra printed its own output, such as --help
        _show(plan, job.config, given)
    if not _HELP.isdisjoint(words):
        print(f"\nOf dtrain plan itself:\n\n{_OWN}")
    return 0


def _parse(plan: str, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the plan's own options and keys of ``words``, and those that are left for ``dtrain train``.

    Raises:
        ConfigError: an option of another plan, or ``--against`` without a folder.
    """
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


def _show(plan: str, config: RunConfig, given: Mapping[str, str]) -> None:
    if plan == "precision":
        from dtrain.measure.plan.precision import show_plan

        show_plan(config, folded=_ALL not in given)
        return
    run = planned_run(config, given)
    if plan == "memory":
        from dtrain.measure.plan.memory import show_memory

        show_memory(run)
    elif plan == "time":
        from dtrain.measure.plan.time import show_time

        show_time(run, Path(given["network"]) if "network" in given else None)
    else:
        from dtrain.measure.plan.shapes import show_shapes

        show_shapes(run, measure=_NO_MEASURE not in given, folded=_ALL not in given)


def _compare(folder: Path, others: Sequence[str]) -> int:
    """Compares the plan of a run with its receipt.

    Raises:
        ConfigError: there are ``others``, or the folder holds no run with a receipt.
    """
    if others:
        raise ConfigError(f"{_AGAINST} takes the configuration of the run; remove {others[0]}")
    import yaml

    from dtrain.config.dump import config_from_dict
    from dtrain.measure.plan.memory import show_against
    from dtrain.planning.devices import find_device
    from dtrain.telemetry.metrics import CONFIG_FILE
    from dtrain.train.memory.receipt import Receipt
    from dtrain.train.planned import PlannedRun

    receipt = Receipt.read(folder)
    config = config_from_dict(yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8")))
    device = find_device(receipt.device, receipt.num_ranks)
    show_against(receipt, PlannedRun.of(config, device, receipt.num_ranks))
    return 0

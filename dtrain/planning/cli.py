"""``dtrain plan``: what a run would do and need, before it is started. Help and mistakes do not wait for torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dtrain.errors import ConfigError, nearest

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
  precision  the format of each module of the model, with the reason, and the speed that FP8 is expected to bring
  scale      a step, a start, the memory and a checkpoint on many ranks; dtrain simulate is another name

All take the keys of dtrain train (dtrain train --help); precision also takes device=, the others also take:

{_OWN}

  dtrain plan memory model=llama-8b device=h100-80gb ranks=64 engine.zero_stage=3
  dtrain plan time ranks=8 network=network.json
  dtrain plan shapes model.hidden_dim=500
  dtrain plan precision precision=fp8 model=llama-1b 'precision.rules={{"blocks.0.*": bf16}}'
  dtrain plan scale model=llama-8b engine.zero_stage=3 precision=bf16 train.micro_batch_size=1 ranks=8,64,512

The real model and engine run on tensors without values, as one of the ranks, of which none is needed. Only time makes
weights, and trains some steps on this device, if it is the planned one. Nothing is sent; only json= and picture= write.
Tables are drawn on a terminal and Markdown elsewhere. docs/scale/planning.md says what is assumed."""
_HELP = frozenset(("-h", "--help"))

_PLANS = ("memory", "time", "shapes", "precision", "scale")
_RUN, _TIME, _SCALE = ("memory", "time", "shapes", "scale"), ("time", "scale"), ("scale",)
_ANY = (str, lambda _: True, "")
_OWN_KEYS: dict[str, tuple[Sequence[str], Callable[[str], Any], Callable[[Any], bool], str]] = {
    "device=": (_PLANS, *_ANY),
    "ranks=": (
        _RUN,
        lambda text: [int(count) * count.isdecimal() for count in text.split(",")],
        lambda counts: min(counts) > 0,
        "must be a whole number from 1; dtrain plan scale takes several: ranks=8,64",
    ),
    "network=": (_TIME, *_ANY),
    "efficiency=": (_TIME, float, lambda value: 1e-6 <= value <= 1, "must be a number from 1e-06 to 1"),
    "step_ms=": (_TIME, float, lambda value: value >= 1e-6, "must be a number from 1e-06"),
    "overlap_slowdown=": (_TIME, float, lambda value: value >= 1, "must be a number from 1"),
    "spread=": (_TIME, float, lambda value: 0 <= value <= 1, "must be a number from 0 to 1"),
    "gradients=": (_TIME, str, ("engine", "ring", "ring-fp32").__contains__, "must be engine or ring or ring-fp32"),
    "scaling=": (_SCALE, str, ("weak", "strong").__contains__, "must be weak or strong"),
    "write_gbps=": (_SCALE, float, lambda value: value >= 1e-6, "must be a number from 1e-06"),
    "json=": (_SCALE, *_ANY),
    "picture=": (_SCALE, *_ANY),
    "--against": (("memory",), str, bool, "needs the folder of a run, such as --against runs/mine"),
    "--all": (("shapes", "precision"), *_ANY),
    "--no-measure": (("shapes",), *_ANY),
}
"""Keys and options of the plan itself: the plans that take one, what reads and what checks its value, and its error."""


def main(argv: Sequence[str]) -> int:
    """Runs ``dtrain plan``; returns the exit code."""
    plan, *words = list(argv) or ["--help"]
    if plan in _HELP:
        print(_USAGE)
        return 0
    if plan not in _PLANS:
        raise ConfigError(f"dtrain plan cannot plan '{plan}'{nearest(plan, _PLANS)}")
    own = ("device=h100-80gb", "ranks=8,64,512") if plan == "scale" else ()
    given, others = _parse(plan, [*own, *words])
    if folder := given.pop("--against", None):
        if unused := [*others, *given]:
            raise ConfigError(f"--against takes the configuration of the run; remove {unused[0]}")
        from dtrain.planning.plans import show_receipt  # brings torch

        show_receipt(Path(folder))
        return 0
    ranks = given.get("ranks", [])
    if len(set(ranks)) > 1 and plan != "scale":
        raise ConfigError(f"ranks={','.join(map(str, ranks))} are several; give one, or use dtrain plan scale")
    from dtrain.cli.resolve import read_jobs

    try:
        jobs = read_jobs(others, f"plan {plan}", max(ranks, default=None))
    except ConfigError as error:
        raise _suggesting_own_keys(error, plan) from None
    if len(jobs) > 1:
        raise ConfigError(f"dtrain plan {plan} shows one run; remove --multirun")
    if jobs:  # else Hydra has printed its own output, such as --help
        from dtrain.planning.plans import show

        for part in jobs[0].config.parts[: None if plan == "memory" else 1]:
            print("\n" * (part is not jobs[0].config), end="")
            show(plan, part, given)
    if not _HELP.isdisjoint(words):
        print(f"\nOf dtrain plan itself:\n\n{_OWN}")
    return 0


def _parse(plan: str, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the values of the plan's own keys and options in ``words``, and the words for ``dtrain train``."""
    given: dict[str, Any] = {}
    others = []
    rest = iter(words)
    for word in rest:
        key, equals, text = word.partition("=")
        plans, read, is_valid, must = _OWN_KEYS.get(key + equals, ((), *_ANY))
        if plan in plans:
            with suppress(ValueError):
                if is_valid(value := read(next(rest, "") if key == "--against" else text)):
                    given[key] = value
                    continue
            raise ConfigError(f"{word} {must}")
        if plans and not equals:
            raise ConfigError(f"dtrain plan {plan} has no option {word}; see dtrain plan --help")
        if key == "shard_size":
            raise ConfigError(f"{word} is a key of the engine: write engine.shard_size={text}")
        others.append(word)
    return given, others


def _suggesting_own_keys(error: ConfigError, plan: str) -> ConfigError:
    """Returns ``error``; if a key is unknown, with the nearest of the plan's own keys and of the one it suggests."""
    found = re.match(r"unknown key '([^']+)'(?:; did you mean '([^']+)')?", str(error))
    own = [key[:-1] for key, (plans, *_) in _OWN_KEYS.items() if plan in plans and key.endswith("=")]
    hint = nearest(found[1], filter(None, (*own, found[2]))) if found else ""
    return ConfigError(f"unknown key '{found[1]}'{hint}") if found and hint.startswith("; did") else error

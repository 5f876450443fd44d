"""``dtrain plan precision``."""

from __future__ import annotations

from collections.abc import Sequence

from dtrain.errors import ConfigError, nearest

_USAGE = """usage: dtrain plan precision [--all] [key=value ...]

  precision  prints the format of each module of the model, with the reason; takes the keys of dtrain train:
             dtrain plan precision precision=fp8 model=llama-1b 'precision.rules={"blocks.0.*": bf16}'
  --all      prints a row for each module; without it equal blocks share a row

The model is built without weights if possible. Nothing is written, timed or sent. Tables are drawn on a terminal and
Markdown elsewhere."""
_PLANS = ("precision",)
_ALL = "--all"


def main(argv: Sequence[str]) -> int:
    """Runs ``dtrain plan``; returns the exit code."""
    plan, *words = list(argv) or ["--help"]
    if plan in ("-h", "--help"):
        print(_USAGE)
        return 0
    if plan not in _PLANS:
        raise ConfigError(f"dtrain plan cannot plan '{plan}'{nearest(plan, _PLANS)}")
    from dtrain.cli.resolve import read_jobs

    jobs = read_jobs([word for word in words if word != _ALL], "plan precision [--all]")
    if len(jobs) > 1:
        raise ConfigError("dtrain plan precision shows one run; remove --multirun")
    for job in jobs:  # empty if Hydra printed its own output, such as --help
        from dtrain.tools.plan.precision import show_plan

        show_plan(job.config, folded=_ALL not in words)
    return 0

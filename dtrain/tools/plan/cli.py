"""``dtrain plan precision``."""

from __future__ import annotations

from collections.abc import Sequence

from dtrain.errors import ConfigError, nearest

_USAGE = """usage: dtrain plan precision [--all] [key=value ...]

  precision  in which format each module of the model computes, and why; takes the keys of dtrain train:
             dtrain plan precision precision=fp8 model=llama-1b 'precision.rules={"blocks.0.*": bf16}'
  --all      a row for each module; without it equal blocks share one

The model gets no weights where it can be built without. Nothing is written, timed or sent. On a terminal the tables
are drawn; elsewhere they are Markdown."""
_PLANS = ("precision",)
_ALL = "--all"
_HELP_NAME = "hydra.help.app_name='dtrain plan precision [--all]'"


def main(argv: Sequence[str]) -> int:
    """Prints what was asked for; returns the exit code.

    Raises:
        ConfigError: another word than ``precision``; as ``dtrain train`` for its keys; or several runs.
    """
    plan, *words = list(argv) or ["--help"]
    if plan in ("-h", "--help"):
        print(_USAGE)
        return 0
    if plan not in _PLANS:
        raise ConfigError(f"dtrain plan cannot plan '{plan}'{nearest(plan, _PLANS)}")
    from dtrain.cli.resolve import read_jobs

    jobs = read_jobs([_HELP_NAME, *(word for word in words if word != _ALL)])
    if len(jobs) > 1:
        raise ConfigError("dtrain plan precision shows one run; remove --multirun")
    for job in jobs:  # none where Hydra has answered by itself
        from dtrain.tools.plan.precision import show_plan

        show_plan(job.config, folded=_ALL not in words)
    return 0

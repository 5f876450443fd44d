"""The command line: ``dtrain VERB ...``, also as ``python -m dtrain VERB ...``.

A run takes ``key=value`` (Hydra), a tool takes arguments (argparse). Verbs import what they need when they are called,
so that help and misspelled names are answered at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from types import TracebackType

from dtrain.distributed.startup.launch_env import LaunchEnv, follow_launcher
from dtrain.errors import ConfigError, DtrainError, nearest
from dtrain.local_paths import require_local
from dtrain.redaction.redact import redact_text
from dtrain.version import version

_RANK_0_PRINTS_FIRST_S = 5.0


def _train(argv: list[str]) -> int:
    from dtrain.cli.resolve import read_jobs
    from dtrain.train.jobs import run_jobs

    follow_launcher()
    try:
        jobs = read_jobs(argv)
    except ConfigError as error:
        if _rank() != 0:
            # all ranks read the same command line, and a launcher ends the others as soon as one rank has left: rank 0
            # must have had the time to print the mistake
            time.sleep(_RANK_0_PRINTS_FIRST_S)
        return _fail(error)
    if not jobs:  # Hydra has printed its own output, such as --help
        return 0
    from dtrain.planning.plans import RunPlanner

    return run_jobs(jobs, argv, RunPlanner())


VERBS = {  # its meaning and an example
    "train": ("train a model", "precision=bf16 train.steps=1000"),
    "plan": ("show what a run would do", "precision precision=fp8 model=llama-1b"),
    "simulate": ("another name of plan scale: many ranks", "model=llama-8b ranks=8,512 network=ib-400g"),
    "parity": ("compare the engines with an FP32 oracle", "precision=bf16 parity.ranks=2"),
    "probe": ("try the number formats on your model, and advise", "model.factory=my_model:build steps=20"),
    "bench": ("measure speed and memory", "engine bench.ranks=2"),
    "watch": ("show a running or finished run", "runs/mine"),
    "accept": ("what works on a new GPU machine, and how fast", "goal=facts limit_s=340 out=runs/accept"),
    "checkpoint": ("list, verify, compare, prune, export, import", "verify runs/mine"),
    "data": ("text to token shards; check them; train a tokenizer", "tokenize --help"),
    "report": ("one HTML page of a run, or of several", "runs/mine"),
    "replay": ("reproduce a step of a run, and show where it went wrong", "runs/mine step=37"),
    "doctor": ("show what this machine and the engines can do", "engines"),
    "formats": ("show what each number format does to a number", "0.1 1e-8 70000"),
}


MEASURES = ("accept", "bench", "parity", "probe", "replay")
"""Verbs that train a model in order to measure something; the other verbs but ``train`` and ``plan`` read."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code.

    0: done; 2: bad configuration; 75: stopped by a signal after saving; 1: any other failure. An error that dtrain
    raises on purpose becomes one line on standard error; any other keeps its traceback. Both are without secrets.
    """
    if argv is None:  # this process is the command
        sys.excepthook = _print_without_secrets
        if {"-h", "--help"} & {*sys.argv}:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" ends it without a traceback
    verb, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if verb in ("-h", "--help"):
        print(_usage())
        return 0
    if verb == "--version":
        print(f"dtrain {version()}")
        return 0
    if verb == "experiment":
        name = "_".join(rest[:1]).replace("-", "_") or "NAME"
        return _fail(
            ConfigError(f"an experiment is a script: python docs/experiments/{name}.py; docs/experiments/README.md")
        )
    if verb not in VERBS:
        return _fail(ConfigError(f"unknown verb '{verb}'{nearest(verb, VERBS)}"))
    try:
        if verb == "train":
            return _train(rest)
        rest = [_with_home(word) for word in rest]
        if verb == "simulate":
            verb, rest = "plan", ["scale", *rest]
        module = "planning" if verb == "plan" else f"{'measure' if verb in MEASURES else 'tools'}.{verb}"
        run: Callable[[list[str]], int] = import_module(f"dtrain.{module}.cli").main
        return run(rest)
    except DtrainError as error:
        return _fail(error)


def _with_home(word: str) -> str:
    """Returns an argument of a tool, or ``key=value`` of one of its own keys, which have no dot, with ``~`` replaced.

    A shell replaces it at the start of a word only. URLs are refused.
    """
    key, equals, value = word.partition("=")
    require_local(word, "an argument")
    if not equals or "." in key:
        return os.path.expanduser(word)
    require_local(value, key)
    return f"{key}={os.path.expanduser(value)}"


def _usage() -> str:
    rows = [(name, *texts) for name, texts in VERBS.items()]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    lines = [f"  {name:{widths[0]}}  {meaning:{widths[1]}}  dtrain {name} {example}" for name, meaning, example in rows]
    listed = "\n".join(lines)
    notes = (
        "train, plan, simulate, parity, probe, bench, accept and data take key=value; the other verbs take arguments.\n"
        "More on a verb: dtrain VERB --help. Version: dtrain --version."
    )
    return f"usage: dtrain VERB ...\n\n{listed}\n\n{notes}"


def _fail(error: DtrainError) -> int:
    rank = _rank()
    prefix = f"rank {rank}: " if rank else ""
    print(redact_text(f"dtrain: {prefix}{error}"), file=sys.stderr, flush=True)
    return error.exit_code


def _print_without_secrets(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    print(redact_text(text), end="", file=sys.stderr, flush=True)


def _rank() -> int:
    """This rank, or 0 if the launcher's environment is inconsistent: then every process prints that error."""
    try:
        return LaunchEnv.read().rank
    except ConfigError:
        return 0


if __name__ == "__main__":
    sys.exit(main())

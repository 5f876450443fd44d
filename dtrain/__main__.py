"""The command line: ``dtrain VERB ...``, also as ``python -m dtrain VERB ...``.

Heavy imports wait inside the verbs, so that help and misspelt names answer at once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from dtrain.distributed.launch_env import LaunchEnv, follow_launcher
from dtrain.errors import ConfigError, DtrainError, nearest
from dtrain.version import version

_RANK_0_SPEAKS_S = 5.0


def train(argv: list[str]) -> int:
    """train a model: dtrain train precision=bf16 train.steps=1000"""
    from dtrain.cli.resolve import read_jobs, run_jobs

    follow_launcher()
    try:
        jobs = read_jobs(argv)
    except ConfigError as error:
        if _rank() != 0:
            # all ranks read the same command line and one voice is enough; but a launcher ends the others as soon as
            # one rank has left, so rank 0 must have had the time to speak
            time.sleep(_RANK_0_SPEAKS_S)
        return _fail(error)
    return run_jobs(jobs, argv)


def checkpoint(argv: list[str]) -> int:
    """look at checkpoints and move them: dtrain checkpoint list|verify|diff|prune|export|import PATH"""
    from dtrain.tools.checkpoint.cli import main as checkpoint_main

    return checkpoint_main(argv)


def bench(argv: list[str]) -> int:
    """measure speed and memory: dtrain bench engine|precision|optimizer|collectives|checkpoint|vote|report"""
    from dtrain.tools.bench.cli import main as bench_main

    return bench_main(argv)


def doctor(argv: list[str]) -> int:
    """what this machine can do, and what each engine can: dtrain doctor [engines]"""
    from dtrain.tools.doctor.cli import main as doctor_main

    return doctor_main(argv)


def parity(argv: list[str]) -> int:
    """hold the engines against an FP32 oracle: dtrain parity precision=bf16 model.factory=mine.net:build"""
    from dtrain.tools.parity.cli import main as parity_main

    return parity_main(argv)


def formats(argv: list[str]) -> int:
    """what each number format is and does to a number: dtrain formats [0.1 1e-8 70000|failures|picture]"""
    from dtrain.tools.formats.cli import main as formats_main

    return formats_main(argv)


def plan(argv: list[str]) -> int:
    """what a run will do, before it does: dtrain plan precision precision=fp8 model=llama-1b"""
    from dtrain.tools.plan.cli import main as plan_main

    return plan_main(argv)


VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "plan": plan,
    "checkpoint": checkpoint,
    "bench": bench,
    "parity": parity,
    "formats": formats,
    "doctor": doctor,
}
"""What ``dtrain`` can do; the docstring of each function is its line in the usage."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code.

    0: done; 2: bad configuration; 75: stopped by a signal after saving; 1: any other failure. An error that dtrain
    raises on purpose becomes one line on standard error; any other keeps its traceback.
    """
    verb, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if verb in ("-h", "--help"):
        print(_usage())
        return 0
    if verb == "--version":
        print(f"dtrain {version()}")
        return 0
    if verb not in VERBS:
        return _fail(ConfigError(f"unknown verb '{verb}'{nearest(verb, VERBS)}"))
    try:
        return VERBS[verb](rest)
    except DtrainError as error:
        return _fail(error)


def _usage() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:{width}}  {verb.__doc__}" for name, verb in VERBS.items())
    return f"usage: dtrain VERB ...\n\n{verbs}\n\nMore on a verb: dtrain train --help. Version: dtrain --version."


def _fail(error: DtrainError) -> int:
    rank = _rank()
    speaker = f"rank {rank}: " if rank else ""
    print(f"dtrain: {speaker}{error}", file=sys.stderr, flush=True)
    return error.exit_code


def _rank() -> int:
    """This rank, or 0 where the environment of the launcher makes no sense: then each process says so."""
    try:
        return LaunchEnv.read().rank
    except ConfigError:
        return 0


if __name__ == "__main__":
    sys.exit(main())

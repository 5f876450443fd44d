"""The process of a job: ``python -m dtrain.measure.accept.start IMPORTED [NAME=VALUE ...] MODULE [WORD ...]``.

It imports a module while it waits for a line of input, so that the next job is ready when the last one ends. Then it
does what ``NAME=VALUE ... python -m MODULE WORD ...`` does, and ends as soon as the command has ended.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from dtrain.tools.processes import failure_reason, read_job

_VARIABLE = re.compile(r"[A-Z_]+=")


def main(argv: Sequence[str]) -> int:
    """Runs the module; returns its exit code."""
    imported, *words = argv
    while _VARIABLE.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        os.environ[name] = value
    sys.argv = words
    try:
        if imported != "-":
            import_module(imported)
        if not read_job():  # the command has ended
            return 1
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(f"dtrain: {ending.code}", file=sys.stderr)
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except Exception as error:
        traceback.print_exc()
        print(f"dtrain: {failure_reason(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the results are written; a library that hangs or fails at exit must not spoil them

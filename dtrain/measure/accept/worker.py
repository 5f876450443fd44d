"""The process of a job, ``python -m dtrain.measure.accept.worker MODULE``; the first line of input is a ``Request``.

It imports the module while it waits for the line, so that the next job of a GPU is ready when the last one ends.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from dtrain.distributed.logging import configure_logging
from dtrain.measure.accept.job import Request
from dtrain.telemetry.metrics import write_json
from dtrain.tools.processes import failure_reason, read_job


def main(name: str) -> int:
    """Runs the job; the results file has what it found, and the reason if it failed."""
    try:
        module: Any = import_module(name)
        reason = ""
    except Exception as error:  # known only when the job comes, which says where to write it
        traceback.print_exc()
        reason = failure_reason(error)
    line = read_job()
    if not line:  # the command has ended
        return 1
    request = Request(**json.loads(line))
    configure_logging(0)
    results: dict[str, Any] = {}
    if not reason:
        try:
            for results in module.run(request):
                _write(request, module, results)
        except Exception as error:  # any error of a library becomes a result, and the other jobs still run
            traceback.print_exc()
            reason = failure_reason(error)
    if reason:
        write_json(Path(request.output), {**_with_texts(None if not results else module, results), "error": reason})
    return 1 if reason else 0


def _write(request: Request, module: Any, results: dict[str, Any]) -> None:
    write_json(Path(request.output), _with_texts(module, results))


def _with_texts(module: Any, results: dict[str, Any]) -> dict[str, Any]:
    """Adds the lines of the page. An error in their own text must not cost the figures."""
    found = dict(results)
    for name in ("conclusions", "section"):
        if not hasattr(module, name) or name in found:
            continue
        try:
            found[name] = getattr(module, name)(results)
        except Exception as error:
            traceback.print_exc()
            found[name] = [f"The {name} cannot be written: {failure_reason(error)}; accept.json has the results."]
    return found


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the results are written; a library that hangs or fails at exit must not spoil them

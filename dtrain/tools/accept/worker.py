"""The process of one part: reads ``{"module": ..., "request": ...}`` and writes the results of the part as JSON."""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module

from dtrain.distributed.logging import configure_logging
from dtrain.telemetry.metrics import finite
from dtrain.tools.accept.part import PartRequest
from dtrain.tools.ranks import failure_reason, open_result, read_job


def main() -> int:
    """Runs the part; the result is JSON, or the reason of a failure."""
    job = json.loads(read_job())
    result = open_result()
    configure_logging(0)
    try:
        request = PartRequest(**job["request"])
        json.dump(finite(import_module(job["module"]).run(request)), result)
    except Exception as error:  # any error of a library becomes a result, and the other parts still run
        traceback.print_exc()
        result.write(failure_reason(error))
        return 1
    finally:
        result.close()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the result is written; a library that hangs or fails at exit must not spoil it

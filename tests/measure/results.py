"""Writes what a measuring script has found."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtrain.telemetry.host import describe_host


def printed(cases: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the cases, each of which is printed once it is measured."""
    found = []
    for case in cases:
        found.append(case)
        print(case, flush=True)
    return found


def write(load: float, **results: Any) -> None:
    """Writes ``results``, this host and its ``load`` before, to the path of the command line."""
    found = {"host": asdict(describe_host()), "load": load, "cores": os.cpu_count(), **results}
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def load_now() -> float:
    return os.getloadavg()[0]

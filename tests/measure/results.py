"""Writes what a measuring script has found."""

from __future__ import annotations

import json
import os
import subprocess
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


def bench_collectives(folder: str, ranks: int) -> Path:
    """Returns the results of ``dtrain bench collectives``."""
    path = Path(folder, f"network-{ranks}.json")
    command = [sys.executable, "-m", "dtrain", "bench", "collectives", f"bench.out={path}", f"bench.ranks={ranks}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return path


def load_now() -> float:
    return os.getloadavg()[0]

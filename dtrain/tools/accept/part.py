"""The parts of the acceptance of a machine: the table, and the job and the partial results of one part.

A module of ``dtrain.tools.accept.parts`` has two functions::

    run(request: PartRequest) -> dict[str, Any]              figures, JSON-able; in a process of its own
    section(results: Mapping[str, Any]) -> list[str]         Markdown lines of the page; in the command's process

``run`` plans its cases by ``request.seconds``, in order of value, and calls :func:`save_partial` after each, so that a
kill loses one case. ``section`` takes such partial results too, and an empty record; numbers that are not finite have
become None. Three keys of the results mean the same in every part, and each may be absent:

    conclusions: list[str]          one line each, for the top of the page: what works, how fast, what to set
    failures:    list[str]          one line each: what does not hold on this machine; the exit code is then 1
    left_out:    dict[str, str]     name -> reason of a case that did not run: no time, not installed, no memory

The page takes the part's conclusions, failures and left-out cases from these keys; ``section`` returns the rest.
A part that was killed starts again with the same ``directory``, and may reuse the cases of :func:`load_partial`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.telemetry.metrics import write_json

PARTIAL = "partial.json"


@dataclass(frozen=True)
class PartRequest:
    """The job of a part's process.

    Attributes:
        device: ``cuda`` or ``cpu``.
        seconds: time from the start of ``run`` that the part may take.
        small: a CPU or a small GPU: use shapes at which every case takes a second.
        directory: the part's own, for scratch files and partial results.
        keep_trace: keep the raw trace of a profile there.
    """

    device: str
    seconds: float
    small: bool
    directory: str
    keep_trace: bool = False


@dataclass(frozen=True)
class Part:
    """A row of the table; ``minutes`` is the part's share of 25 minutes."""

    key: str
    title: str
    minutes: float
    module: str


PARTS = tuple(
    Part(key, title, minutes, f"dtrain.tools.accept.parts.{module}")
    for key, title, minutes, module in (
        ("a", "Training against the CPU's FP32 curve, and the GPU tests", 6.0, "training"),
        ("b", "Matrix rates and copy bandwidth", 1.0, "rates"),
        ("c", "Optimizer phase", 2.0, "optimizer"),
        ("d", "BF16 training speed", 6.5, "bf16"),
        ("e", "FP8 over BF16", 4.5, "float8"),
        ("f", "Memory", 3.5, "memory"),
        ("g", "Profile of a training step", 1.5, "profile"),
    )
)
"""The parts, which run in this order: the most valuable first."""


def save_partial(request: PartRequest, results: Mapping[str, Any]) -> None:
    """Writes what a part has so far, so that it stands in the page if the part is killed."""
    write_json(Path(request.directory) / PARTIAL, dict(results))


def load_partial(request: PartRequest) -> dict[str, Any]:
    """Returns what the part saved last, or an empty record."""
    path = Path(request.directory) / PARTIAL
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

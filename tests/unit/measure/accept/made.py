"""Ended jobs and requests made by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtrain.measure.accept.job import DONE, Ended, Request
from dtrain.measure.accept.steps import Record, records_of
from dtrain.telemetry.metrics import to_json

H100 = "NVIDIA H100 80GB HBM3"


def request(folder: Path, *, seconds: float = 60.0, small: bool = True, **options: Any) -> Request:
    """A job's request on the CPU."""
    return Request("cpu", small, str(folder / "job.partial.json"), str(folder), seconds, options)


def last(results: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The last results as their file has them: what a part adds after its last ``yield`` is lost."""
    text = "{}"
    for found in results:
        text = to_json(found)
    return dict(json.loads(text))


def ended(name: str, part: str, results: dict[str, Any] | None = None, **changes: Any) -> Ended:
    return Ended(**{"name": name, "part": part, "status": DONE, "seconds": 30.0, "results": results or {}} | changes)


def step(model: str, name: str, number: int = 0, window_ms: float | list[float] = 100.0, **figures: Any) -> Ended:
    """A done run on an H100 with 4 GFLOP a token whose other figures are plain."""
    plain = {
        "device": H100, "num_parameters": 1_235_814_400, "micro_batch": 2, "setup_s": 5.0, "first_step_s": 12.5,
        "model_states": {"master": 4 * 2**30, "moments": 8 * 2**30}, "formula": None, "host_kinds": [],
        "window_ms": window_ms if isinstance(window_ms, list) else [window_ms], "losses": [8.0, 7.0, 6.0, 5.0],
        "at_rest": 22 * 2**30, "peak_allocated": 60 * 2**30, "peak_reserved": 64 * 2**30, "available": 79 * 2**30,
        "flops_causal": 4e9, "flops_full": 5e9, "state": {"power_limit_w": 700.0, "sm_clock_mhz": 1755.0},
        "graphs": 1, "graph_breaks": 0, "warnings": [], "activations": None, "linears": [], "fitted": [],
        "failed": None, "emulates_float8": False,
    }  # fmt: skip
    return ended(f"{model}, {name}, run {number + 1}", "steps", {"figures": plain | figures})


def record(model: str, name: str, number: int = 0, window_ms: float | list[float] = 100.0, **figures: Any) -> Record:
    """The record of :func:`step`."""
    return records_of([step(model, name, number, window_ms, **figures)])[0]


def phase(name: str = "1.2B", num_parameters: int = 1_000_000_000, **changes: Any) -> dict[str, Any]:
    """The optimizer phase: 30 GB in 10 ms, while 2 GB are copied in 0.6 ms: 3,000 GB/s of 3,333."""
    trace = {"num_launches": 4, "num_copies": 1, "synchronizations": {}, "top": [{"name": "k", "calls": 3, "ms": 1.5}]}
    made = {
        "name": name, "num_parameters": num_parameters, "bytes_a_parameter": 34.0, "host_ms": [1.0],
        "ms": {"dtrain": [10.0, 9.0, 11.0], "torch": [22.0, 18.0, 33.0], "copy": [0.6, 0.6, 0.7]},
        "copy_bytes": 2_000_000_000, "trace": trace, "errors": [],
    }  # fmt: skip
    return made | changes

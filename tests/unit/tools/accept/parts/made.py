"""Records of runs made by hand."""

from __future__ import annotations

from typing import Any

from dtrain.tools.accept.parts.interleaved import Record

H100 = "NVIDIA H100 80GB HBM3"


def record(name: str, model: str, number: int, micro_batch: int, window_ms: list[float], **figures: Any) -> Record:
    """A record of a run on an H100 whose other figures are plain."""
    plain = {
        "device": H100,
        "num_parameters": 1_235_814_400,
        "micro_batch": micro_batch,
        "model_states": {"master": 4 * 2**30, "moments": 8 * 2**30},
        "formula": None,
        "setup_s": 5.0,
        "first_step_s": 12.5,
        "window_ms": window_ms,
        "losses": [8.0, 7.0, 6.0, 5.0],
        "at_rest": 22 * 2**30,
        "peak_allocated": 60 * 2**30,
        "peak_reserved": 64 * 2**30,
        "per_sequence": 0,
        "available": 79 * 2**30,
        "graphs": 1,
        "graph_breaks": 0,
        "warnings": [],
        "host_kinds": [],
        "activations": None,
        "linears": [],
        "fitted": [],
        "failed": None,
        "emulates_float8": False,
    }
    return Record(name, model, number, 30.0, plain | figures)

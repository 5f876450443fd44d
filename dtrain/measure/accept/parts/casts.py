"""The bits of the FP8 cast kernels against tensor code: all variants, of which an engine proves those that it needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dtrain.measure.accept.job import Request
from dtrain.precision.float8.cast import E4M3, E5M2
from dtrain.precision.float8.proof import check_quantize, check_weights
from dtrain.precision.hardware import triton_problem
from dtrain.tools.tables import plural

_SHAPES = {"aligned": (272, 208), "any": (259, 195), "rows aligned": (272, 195)}
_SOURCES = (torch.bfloat16, torch.float32)
_BOTH = (False, True)


def run(request: Request) -> Iterator[dict[str, Any]]:
    """Compares the kernels variant by variant; without a GPU there are none."""
    results: dict[str, Any] = {"equal": 0, "failures": [], "left_out": {}, "triton": None}
    if request.device != "cuda":
        results["left_out"]["cast kernels"] = "a CPU has none; the tests interpret them"
        yield results
        return
    import triton

    results["triton"] = triton.__version__
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    for rowwise in _BOTH:
        _note(results, check_weights(device, rowwise=rowwise))
        yield results
    variants = itertools.product(_SOURCES, (E4M3, E5M2), _SHAPES.values(), _BOTH, _BOTH, _BOTH)
    for source, dtype, shape, rowwise, both, turned in variants:
        _note(results, check_quantize(shape, source, dtype, device, rowwise=rowwise, both=both, turned=turned))
        yield results


def _note(results: dict[str, Any], wrong: str) -> None:
    if wrong:
        results["failures"].append(wrong)
    else:
        results["equal"] += 1


def conclusions(results: Mapping[str, Any]) -> list[str]:
    if results["triton"] is None:
        return ["FP8 casts: no kernels on a CPU"]
    wrong = len(results["failures"])
    problem = triton_problem(results["triton"])
    return [
        f"FP8 casts by Triton {results['triton']}: {plural(results['equal'], 'variant')} with the bits of tensor code, "
        f"{wrong} without{f'; this version {problem}' if problem else ''}"
    ]


def section(results: Mapping[str, Any]) -> list[str]:
    return [
        "Tiles with ties, subnormal numbers, zeros, Inf and NaN. Each variant is contiguous and transposed, aligned or "
        "not, with one scale or one for each row, with and without the transpose. An engine replaces a variant that "
        "fails by tensor code.",
        "",
        *conclusions(results),
    ]

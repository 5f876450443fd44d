"""First uses on a machine, each with its time or its error: imports, products, kernels, NCCL, compiler.

``python -m dtrain.measure.accept.first_uses device=cuda [out=FILE]``. It imports torch as its first step, because a
cold import is one of the costs. ``what=casts`` compares the bits of the FP8 cast kernels with tensor code instead: all
variants, of which an engine proves those that it needs.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from dtrain.telemetry.metrics import write_json
from dtrain.tools.processes import failure_reason
from dtrain.version import package_version

_PACKAGES = (
    "torch", "triton", "transformers", "deepspeed", "torchao", "hydra-core", "omegaconf", "pydantic", "numpy",
    "safetensors", "blake3", "rich", "jinja2", "matplotlib", "pillow", "pytest", "pytest-timeout", "pytest-xdist",
    "hypothesis", "ninja", "accelerate", "peft",
)  # fmt: skip
_TOOLS = ("nvidia-smi", "gcc", "g++", "clang", "nvcc", "ninja", "ncu", "git")
_VARIABLES = ("CUDA", "NCCL", "TORCH", "TRITON", "LD", "OMP", "CUBLAS", "PYTHONPATH")
OPTIONAL = ("import deepspeed", "scaled_mm, blocks of 128", "scaled_mm, lines of 128")
"""First uses whose failure is a fact and no failure."""

SAME_BITS = "the bits of tensor code"
_CAST_SHAPES = {"aligned": (272, 208), "any": (259, 195), "rows aligned": (272, 195)}


def main(argv: Sequence[str]) -> int:
    """Runs the steps; prints each, and writes all so far to the file; returns 1 if one failed that should work."""
    options = {"device": "cuda", "what": "uses", "out": "", **dict(word.split("=", 1) for word in argv)}
    steps = first_uses(options["device"]) if options["what"] == "uses" else casts(options["device"])
    results: dict[str, Any] = {"host": host(), "steps": []}
    for row in timed(steps):
        results["steps"].append(row)
        print(f"{row['step']}: {row['s']:.2f} s, {row['error'] or row['found']}", flush=True)
        if options["out"]:
            write_json(Path(options["out"]), results, indent=1)
    return int(any(row["error"] and row["step"] not in OPTIONAL for row in results["steps"]))


def timed(steps: Iterator[tuple[str, Callable[[], object]]]) -> Iterator[dict[str, Any]]:
    """Yields the result of each step; one that fails keeps its error, and the next ones run."""
    for name, step in steps:
        begin, found, error = time.perf_counter(), "", ""
        try:
            found = str(step())[:400]
        except Exception as failure:
            error = failure_reason(failure)
        yield {"step": name, "s": round(time.perf_counter() - begin, 3), "found": found, "error": error}


def first_uses(device_type: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields a function for each thing that training needs."""
    yield "import torch", lambda: import_module("torch").__version__
    yield "import dtrain's engine", lambda: import_module("dtrain.engine.adapters.native").__name__
    yield "import deepspeed", lambda: import_module("deepspeed").__version__
    import torch

    from dtrain.measure.accept.uses import ON_A_CPU, USES

    device = torch.device(device_type, 0)
    yield from ((name, partial(use, device)) for name, use in USES.items() if device_type == "cuda" or name in ON_A_CPU)


def casts(device_type: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields a comparison for each variant of the cast kernels; without a GPU there are none."""
    if device_type != "cuda":
        return
    import torch

    from dtrain.precision.float8.cast import E4M3, E5M2, Scaling
    from dtrain.precision.float8.proof import check_quantize, check_weights
    from dtrain.precision.hardware import triton_problem

    device, both = torch.device("cuda", 0), (False, True)

    def describe_triton() -> str:
        torch.cuda.set_device(device)
        version = str(import_module("triton").__version__)
        problem = triton_problem(version)
        return f"{version}{f': this version {problem}' if problem else ''}"

    def equal(check: Callable[[], str]) -> str:
        if wrong := check():
            raise ArithmeticError(wrong)
        return SAME_BITS

    yield "Triton", describe_triton
    for scaling in (Scaling.TENSOR, Scaling.ROWS, Scaling.SQUARES):
        yield f"weights, scales of {scaling.value}", partial(equal, partial(check_weights, device, scaling))
    sources = (torch.bfloat16, torch.float32)
    scalings = (Scaling.TENSOR, Scaling.ROWS, Scaling.LINES)
    for source, dtype, (label, shape), scaling, *flags in itertools.product(
        sources, (E4M3, E5M2), _CAST_SHAPES.items(), scalings, both, both
    ):
        options = dict(zip(("both", "turned"), flags, strict=True))
        variant = ", ".join(f"{key}={value}" for key, value in options.items())
        name = f"{source} to {dtype}, {label}, scales of {scaling.value}, {variant}"
        yield name, partial(equal, partial(check_quantize, shape, source, dtype, device, scaling, **options))


def host() -> dict[str, Any]:
    """Returns the facts of this host."""
    interfaces = Path("/sys/class/net")
    return {
        "python": sys.version.split()[0],
        "packages": {name: package_version(name) or "not installed" for name in _PACKAGES},
        "tools": {name: shutil.which(name) or "not found" for name in _TOOLS},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "home is writable": os.access(Path.home(), os.W_OK),
        "interfaces": sorted(path.name for path in interfaces.iterdir()) if interfaces.is_dir() else [],
        "environment": {key: value for key, value in os.environ.items() if key.split("_")[0] in _VARIABLES},
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

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
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

from dtrain.telemetry.metrics import write_json
from dtrain.tools.processes import failure_reason

_PACKAGES = (
    "torch", "triton", "transformers", "deepspeed", "torchao", "hydra-core", "omegaconf", "pydantic", "numpy",
    "safetensors", "blake3", "rich", "jinja2", "matplotlib", "pillow", "pytest", "pytest-timeout", "pytest-xdist",
    "hypothesis", "ninja", "accelerate", "peft",
)  # fmt: skip
_TOOLS = ("nvidia-smi", "gcc", "g++", "clang", "nvcc", "ninja", "ncu", "git")
_VARIABLES = ("CUDA", "NCCL", "TORCH", "TRITON", "LD", "OMP", "CUBLAS", "PYTHONPATH")
OPTIONAL = ("import deepspeed", "scaled_mm, blocks of 128")
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

    uses = _FirstUses(torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu"))
    if device_type == "cuda":
        yield "CUDA context", lambda: uses.ones(1).item()
        yield "device", uses.describe
        yield "compiler for kernels", uses.compiler
        yield "cuBLAS product", lambda: uses.ones(64, 64).mm(uses.ones(64, 64)).sum().item()
        yield "Triton kernel", uses.triton_kernel
        yield "scaled_mm, one scale", lambda: uses.scaled_mm(rowwise=False)
        yield "scaled_mm, a scale for each row", lambda: uses.scaled_mm(rowwise=True)
        yield "scaled_mm, blocks of 128", uses.scaled_mm_blocks
        yield "addmm to FP32, in place", uses.addmm
        yield "attention, grouped queries", uses.attention
    yield "process group of one rank", uses.process_group
    if device_type == "cuda":  # on a CPU it takes up to a minute
        yield "Inductor", uses.inductor


def casts(device_type: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yields a comparison for each variant of the cast kernels; without a GPU there are none."""
    if device_type != "cuda":
        return
    import torch

    from dtrain.precision.float8.cast import E4M3, E5M2
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
    for rowwise in both:
        yield f"weights, rowwise={rowwise}", partial(equal, partial(check_weights, device, rowwise=rowwise))
    sources = (torch.bfloat16, torch.float32)
    for source, dtype, (label, shape), *flags in itertools.product(
        sources, (E4M3, E5M2), _CAST_SHAPES.items(), both, both, both
    ):
        options = dict(zip(("rowwise", "both", "turned"), flags, strict=True))
        name = f"{source} to {dtype}, {label}, {', '.join(f'{key}={value}' for key, value in options.items())}"
        yield name, partial(equal, partial(check_quantize, shape, source, dtype, device, **options))


def host() -> dict[str, Any]:
    """Returns the facts of this host."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = package_version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    interfaces = Path("/sys/class/net")
    return {
        "python": sys.version.split()[0],
        "packages": packages,
        "tools": {name: shutil.which(name) or "not found" for name in _TOOLS},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "home is writable": os.access(Path.home(), os.W_OK),
        "interfaces": sorted(path.name for path in interfaces.iterdir()) if interfaces.is_dir() else [],
        "environment": {key: value for key, value in os.environ.items() if key.split("_")[0] in _VARIABLES},
    }


class _FirstUses:
    """One small use of each thing that training needs, with its result checked."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def ones(self, *shape: int) -> Any:
        import torch

        return torch.ones(shape, device=self._device)

    def describe(self) -> dict[str, Any]:
        import torch

        from dtrain.precision.hardware import has_float8_tensor_cores, rate
        from dtrain.telemetry.gpu import cublaslt_version, describe_state, loaded_library

        found = torch.cuda.get_device_properties(self._device)
        return {
            "name": found.name,
            "capability": f"{found.major}.{found.minor}",
            "GiB": round(found.total_memory / 2**30, 1),
            "state": describe_state(0).summary(),
            "CUDA": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),
            "cuDNN from": loaded_library("libcudnn.so"),
            "cublasLt": cublaslt_version(),
            "FP8 Tensor Cores": has_float8_tensor_cores(self._device),
            "published BF16 TFLOP/s": rate(found.name, "bf16"),
        }

    def compiler(self) -> str:
        from dtrain.precision.hardware import has_compiler

        if not has_compiler(self._device):
            raise RuntimeError("no C compiler, Triton or Python headers: dtrain's kernels are off; install gcc")
        return "found"

    def triton_kernel(self) -> str:
        import triton

        folder = Path(tempfile.mkdtemp(prefix="dtrain-triton-"))
        (folder / "dtrain_first_kernel.py").write_text(  # Triton reads the source of a kernel from its file
            "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef double(x, n, B: tl.constexpr):\n"
            "    i = tl.program_id(0) * B + tl.arange(0, B)\n"
            "    tl.store(x + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)\n"
        )
        sys.path.insert(0, str(folder))
        try:
            kernel = import_module("dtrain_first_kernel").double
        finally:
            sys.path.remove(str(folder))
        x = self.ones(1000)
        kernel[(4,)](x, 1000, B=256)
        _require(float(x.sum()), 2000.0)
        return f"Triton {triton.__version__}"

    def scaled_mm(self, *, rowwise: bool) -> str:
        import torch

        a, b = (torch.randn(256, 256, device=self._device).to(torch.float8_e4m3fn) for _ in range(2))
        scales = [self.ones(256, 1), self.ones(1, 256)] if rowwise else [torch.ones((), device=self._device)] * 2
        product = torch._scaled_mm(a, b.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16)
        _require(_error(product, a.float() @ b.float().t()), 0.0, 2e-2)
        return f"torch._scaled_mm, cuBLAS or CUTLASS, {tuple(product.shape)}"

    def scaled_mm_blocks(self) -> str:
        import torch
        import torch.nn.functional as F

        scaling: Any = F.ScalingType
        a, b = (torch.randn(256, 256, device=self._device).to(torch.float8_e4m3fn) for _ in range(2))
        by_row = self.ones(2, 256).t()  # [M, K / 128] with stride (1, M)
        by_block = self.ones(2, 4).t()  # [K / 128 padded to 4, N / 128] with stride (1, 4)
        scaled_mm: Any = F.scaled_mm
        kinds = scaling.BlockWise1x128, scaling.BlockWise128x128
        product = scaled_mm(a, b.t(), by_row, kinds[0], by_block, kinds[1], output_dtype=torch.bfloat16)
        _require(_error(product, a.float() @ b.float().t()), 0.0, 2e-2)
        return "torch.nn.functional.scaled_mm, 1 x 128 by 128 x 128"

    def addmm(self) -> str:
        import torch

        out = self.ones(256, 128)
        a, b = (torch.randn(n, 128, device=self._device).bfloat16() for n in (256, 128))
        want = 1 + a.float() @ b.float()
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        _require(_error(out, want), 0.0, 1e-3)
        return "BF16 operands, FP32 sums"

    def attention(self) -> str:
        import torch

        from dtrain.telemetry.gpu import attention_kernel

        options: dict[str, Any] = {"device": self._device, "dtype": torch.bfloat16, "requires_grad": True}
        q, k = (torch.randn(2, heads, 512, 128, **options) for heads in (16, 4))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        out.sum().backward()
        torch.cuda.synchronize(self._device)
        sizes = {"batch": 2, "heads": 16, "kv_heads": 4, "seq_len": 4096, "head_dim": 128}
        return f"kernel for 16 heads of 128 at 4,096 tokens: {attention_kernel(self._device, torch.bfloat16, **sizes)}"

    def process_group(self) -> str:
        import torch.distributed as dist

        backend = "nccl" if self._device.type == "cuda" else "gloo"
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        x = self.ones(4)
        dist.all_reduce(x)
        _require(float(x.sum()), 4.0)
        dist.destroy_process_group()
        return backend

    def inductor(self) -> str:
        import torch

        x = torch.randn(1000, device=self._device)
        compiled = torch.compile(lambda t: (t.sin() + 1).sum())
        _require(float(compiled(x)), float((x.sin() + 1).sum()), 1e-3)
        return "a fused sum"


def _error(got: Any, want: Any) -> float:
    return float((got.float() - want).norm() / want.norm())


def _require(got: float, want: float, tolerance: float = 0.0) -> None:
    if not abs(got - want) <= tolerance * max(1.0, abs(want)):
        raise ArithmeticError(f"the result is {got}; expected {want}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

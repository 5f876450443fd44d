"""First uses on a machine, each with its time or its error: imports, products, kernels, NCCL, compiler.

It imports torch as its first step, because a cold import is one of the costs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

from dtrain.measure.accept.job import Request
from dtrain.tools.processes import failure_reason
from dtrain.tools.tables import Table

_PACKAGES = [
    "torch",
    "triton",
    "transformers",
    "deepspeed",
    "torchao",
    "hydra-core",
    "omegaconf",
    "pydantic",
    "numpy",
    "safetensors",
    "blake3",
    "rich",
    "jinja2",
    "matplotlib",
    "pillow",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "ninja",
    "accelerate",
    "peft",
]
_TOOLS = ("nvidia-smi", "gcc", "g++", "clang", "nvcc", "ninja", "ncu", "git")
_VARIABLES = ("CUDA", "NCCL", "TORCH", "TRITON", "LD", "OMP", "CUBLAS", "PYTHONPATH")
_OPTIONAL = {"import deepspeed", "scaled_mm, blocks of 128"}
"""First uses whose failure is a fact and no failure."""


def run(request: Request) -> Iterator[dict[str, Any]]:
    """Yields after each step; a step that fails keeps its error, and the next ones run."""
    results: dict[str, Any] = {"steps": [], "host": _host()}
    yield results
    steps: dict[str, Callable[[], object]] = {
        "import torch": lambda: import_module("torch").__version__,
        "import dtrain's engine": lambda: import_module("dtrain.engine.adapters.native").__name__,
        "import deepspeed": lambda: import_module("deepspeed").__version__,
    }
    yield from _timed(steps, results)
    import torch

    device = torch.device("cuda", 0) if request.device == "cuda" else torch.device("cpu")
    first_uses = _FirstUses(device)
    if device.type == "cuda":
        steps = {
            "CUDA context": lambda: torch.zeros(1, device=device).item(),
            "device": first_uses.describe,
            "compiler for kernels": first_uses.compiler,
            "cuBLAS product": lambda: first_uses.ones(64, 64).mm(first_uses.ones(64, 64)).sum().item(),
            "Triton kernel": first_uses.triton_kernel,
            "scaled_mm, one scale": lambda: first_uses.scaled_mm(rowwise=False),
            "scaled_mm, a scale for each row": lambda: first_uses.scaled_mm(rowwise=True),
            "scaled_mm, blocks of 128": first_uses.scaled_mm_blocks,
            "addmm to FP32, in place": first_uses.addmm,
            "attention, grouped queries": first_uses.attention,
        }
        yield from _timed(steps, results)
    yield from _timed({"process group of one rank": first_uses.process_group}, results)
    if device.type == "cuda":  # on a CPU it takes up to a minute
        yield from _timed({"Inductor": first_uses.inductor}, results)


def _timed(steps: Mapping[str, Callable[[], object]], results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, step in steps.items():
        begin = time.perf_counter()
        row: dict[str, Any] = {"step": name, "s": 0.0, "found": "", "error": ""}
        try:
            row["found"] = str(step())[:400]
        except Exception as error:
            row["error"] = failure_reason(error)
        row["s"] = round(time.perf_counter() - begin, 3)
        results["steps"].append(row)
        results["failures"] = [
            f"{found['step']}: {found['error']}"
            for found in results["steps"]
            if found["error"] and found["step"] not in _OPTIONAL
        ]
        yield results


def _host() -> dict[str, Any]:
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = package_version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "python": sys.version.split()[0],
        "packages": packages,
        "tools": {name: shutil.which(name) or "not found" for name in _TOOLS},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "home is writable": os.access(Path.home(), os.W_OK),
        "interfaces": _interfaces(),
        "environment": {key: value for key, value in os.environ.items() if key.split("_")[0] in _VARIABLES},
    }


def _interfaces() -> list[str]:
    folder = Path("/sys/class/net")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


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


def conclusions(results: Mapping[str, Any]) -> list[str]:
    """Returns a line with the costs of first uses, and one for each that fails and need not work."""
    steps = results["steps"]
    lines = []
    if steps:
        costs = ", ".join(f"{row['step']} {row['s']:.1f} s" for row in steps if not row["error"] and row["s"] >= 0.05)
        lines.append(f"first uses: {costs or 'all within 0.05 s'}")
    lines += [f"{row['step']} fails: {row['error']}" for row in steps if row["error"] and row["step"] in _OPTIONAL]
    lines += [f"device: {row['found']}" for row in steps if row["step"] == "device" and not row["error"]]
    return lines


def section(results: Mapping[str, Any]) -> list[str]:
    """Returns the table of first uses, and the facts of the host."""
    rows = [
        (row["step"], f"{row['s']:.2f}", (row["error"] and f"FAILS: {row['error']}") or row["found"])
        for row in results["steps"]
    ]
    lines = [Table("First uses", ("first use", "s", "result"), rows).markdown()] if rows else []
    for name, value in results["host"].items():
        text = ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else value
        lines += ["", f"- {name}: {text}"] if name == "python" else [f"- {name}: {text}"]
    return lines


def driver_facts() -> dict[str, Any]:
    """Returns name, memory, driver, power limit and clock of the first visible GPU by nvidia-smi; empty without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if not visible or visible == "-1":
        return {}
    fields = ("name", "memory.total", "driver_version", "power.limit", "clocks.max.sm")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", visible]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")] if done.stdout.strip() else []
    if len(values) != len(fields):
        return {}
    numbers = [float(value) if value.replace(".", "", 1).isdigit() else None for value in values]
    memory = numbers[1]
    return {
        "name": values[0],
        "memory_gib": round(memory / 1024, 1) if memory else None,
        "driver": values[2],
        "power_limit_w": numbers[3],
        "max_sm_clock_mhz": numbers[4],
    }

"""One small use of each thing that training needs, with its result checked. It brings torch."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def describe(device: torch.device) -> dict[str, Any]:
    from dtrain.device import cublaslt_version, loaded_library
    from dtrain.precision.hardware import has_float8_tensor_cores, rate
    from dtrain.telemetry.gpu import describe_state

    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "GiB": round(found.total_memory / 2**30, 1),
        "state": describe_state(0).summary(),
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "cuDNN from": loaded_library("libcudnn.so"),
        "cublasLt": cublaslt_version(),
        "FP8 Tensor Cores": has_float8_tensor_cores(device),
        "published BF16 TFLOP/s": rate(found.name, "bf16"),
    }


def compiler(device: torch.device) -> str:
    from dtrain.precision.hardware import has_compiler

    if not has_compiler(device):
        raise RuntimeError("no C compiler, Triton or Python headers: dtrain's kernels are off; install gcc")
    return "found"


def triton_kernel(device: torch.device) -> str:
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
    x = torch.ones(1000, device=device)
    kernel[(4,)](x, 1000, B=256)
    require(float(x.sum()), 2000.0)
    return f"Triton {triton.__version__}"


def scaled_mm(device: torch.device, *, left: str, right: str) -> str:
    """Multiplies FP8 matrices with scales that differ; ``left`` and ``right`` are names of ``Scaling``."""
    from dtrain.precision.float8.cast import E4M3, Scaling, dequantize, quantize
    from dtrain.precision.float8.matmul import multiply

    scalings, generator = (Scaling[left], Scaling[right]), torch.Generator().manual_seed(0)
    a, b = (quantize(_uneven(generator).to(device), E4M3, scaling) for scaling in scalings)
    product = multiply(a, b, torch.bfloat16, emulate=False)
    require(_error(product, dequantize(a) @ dequantize(b).t()), 0.0, 2e-2)
    return f"torch.nn.functional.scaled_mm, scales of {' by '.join(str(one.value) for one in scalings)}"


def _uneven(generator: torch.Generator) -> Any:
    """Returns a matrix whose rows, lines of 128 and squares of 128 need scales that differ."""
    of_lines, of_squares = (torch.randint(-2, 3, (rows, 4), generator=generator) for rows in (256, 2))
    powers = of_lines + of_squares.repeat_interleave(128, 0)
    return torch.randn(256, 512, generator=generator) * torch.exp2(powers).repeat_interleave(128, 1)


def addmm(device: torch.device) -> str:
    out = torch.ones(256, 128, device=device)
    a, b = (torch.randn(n, 128, device=device).bfloat16() for n in (256, 128))
    want = 1 + a.float() @ b.float()
    torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    require(_error(out, want), 0.0, 1e-3)
    return "BF16 operands, FP32 sums"


def attention(device: torch.device) -> str:
    from dtrain.models.attention import attention_kernel

    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    q, k = (torch.randn(2, heads, 512, 128, **options) for heads in (16, 4))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    out.sum().backward()
    torch.cuda.synchronize(device)
    sizes = {"batch": 2, "heads": 16, "kv_heads": 4, "seq_len": 4096, "head_dim": 128}
    return f"kernel for 16 heads of 128 at 4,096 tokens: {attention_kernel(device, torch.bfloat16, **sizes)}"


def process_group(device: torch.device) -> str:
    backend = "nccl" if device.type == "cuda" else "gloo"
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    require(float(x.sum()), 4.0)
    dist.destroy_process_group()
    return backend


def inductor(device: torch.device) -> str:
    x = torch.randn(1000, device=device)
    compiled = torch.compile(lambda t: (t.sin() + 1).sum())
    require(float(compiled(x)), float((x.sin() + 1).sum()), 1e-3)
    return "a fused sum"


def _error(got: Any, want: Any) -> float:
    return float((got.float() - want).norm() / want.norm())


def require(got: float, want: float, tolerance: float = 0.0) -> None:
    if not abs(got - want) <= tolerance * max(1.0, abs(want)):
        raise ArithmeticError(f"the result is {got}; expected {want}")


USES: dict[str, Callable[[torch.device], object]] = {
    "CUDA context": lambda device: torch.ones(1, device=device).item(),
    "device": describe,
    "compiler for kernels": compiler,
    "cuBLAS product": lambda device: (ones := torch.ones(64, 64, device=device)).mm(ones).sum().item(),
    "Triton kernel": triton_kernel,
    "scaled_mm, one scale": partial(scaled_mm, left="TENSOR", right="TENSOR"),
    "scaled_mm, a scale for each row": partial(scaled_mm, left="ROWS", right="ROWS"),
    "scaled_mm, blocks of 128": partial(scaled_mm, left="LINES", right="SQUARES"),
    "scaled_mm, lines of 128": partial(scaled_mm, left="LINES", right="LINES"),
    "addmm to FP32, in place": addmm,
    "attention, grouped queries": attention,
    "process group of one rank": process_group,
    "Inductor": inductor,
}
ON_A_CPU = ("process group of one rank",)
"""Inductor also works on a CPU, but takes up to a minute."""

"""Which dtypes a device multiplies matrices in, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

_SIZES = {"cpu": (256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
_BUDGET_S = 0.4  # of the products of one size; the next size has eight times the operations
_REPEATS = 7


@dataclass(frozen=True)
class Speed:
    """A square matrix product.

    Attributes:
        name: of the dtype.
        size: rows of the largest matrices that took a reasonable time.
        gflops: 10^9 floating-point operations a second, median of a few products; None where it does not run.
        refusal: why not.
    """

    name: str
    size: int = 0
    gflops: float | None = None
    refusal: str = ""


def measure(device: torch.device) -> list[Speed]:
    """The speed of every dtype that dtrain knows or will know, on the threads that PyTorch has here."""
    makers: dict[str, Callable[[int], Callable[[], object]]] = {
        "fp32": partial(_plain, device, torch.float32, "highest"),
        "tf32": partial(_plain, device, torch.float32, "high"),
        "bf16": partial(_plain, device, torch.bfloat16, "highest"),
        "fp16": partial(_plain, device, torch.float16, "highest"),
        "fp8 (E4M3)": partial(_float8, device),
    }
    if device.type == "cpu" or torch.cuda.get_device_capability(device)[0] < 8:
        del makers["tf32"]  # it would run in FP32
    precision = torch.get_float32_matmul_precision()
    try:
        return [_measured(name, make, device) for name, make in makers.items()]
    finally:
        torch.set_float32_matmul_precision(precision)


def _plain(device: torch.device, dtype: torch.dtype, fp32_precision: str, size: int) -> Callable[[], Tensor]:
    torch.set_float32_matmul_precision(fp32_precision)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return lambda: a @ b


def _float8(device: torch.device, size: int) -> Callable[[], Tensor]:
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    # the second operand lies column by column, as the Tensor Cores want it
    return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _measured(name: str, make: Callable[[int], Callable[[], object]], device: torch.device) -> Speed:
    largest = Speed(name)
    for size in _SIZES[device.type]:
        try:
            product = make(size)
            _seconds(product, device)  # the first one sets up the library
            seconds = [_seconds(product, device)]
            while len(seconds) < _REPEATS and sum(seconds) < _BUDGET_S:
                seconds.append(_seconds(product, device))
        except (RuntimeError, NotImplementedError) as error:
            refused = Speed(name, refusal=str(error).splitlines()[0])
            return refused if largest.gflops is None else largest  # too large for the memory
        largest = Speed(name, size, 2 * size**3 / median(seconds) / 1e9)
        if 8 * min(seconds) > _BUDGET_S:
            break
    return largest


def _seconds(product: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    product()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start

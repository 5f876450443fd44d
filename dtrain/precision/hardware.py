"""Capabilities of the hardware: the table of GPUs, FP8 Tensor Cores, a compiler without known faults.

Importing this module does not import torch, so that ``dtrain formats`` answers at once.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

RATED = ("fp32", "tf32", "bf16", "fp16", "fp8")
"""Formats with published rates. E4M3 and E5M2 share one rate."""


class Variant(NamedTuple):
    """A size of a GPU's memory for which runs can be planned.

    Attributes:
        name: short name, such as ``h100-80gb``.
        mib: memory, as nvidia-smi shows it.
        gigabytes_s: bandwidth of the memory by the vendor's data sheet.
    """

    name: str
    mib: int
    gigabytes_s: float


@dataclass(frozen=True)
class GPU:
    """A GPU by the vendor's documents.

    Attributes:
        capability: CUDA compute capability.
        num_sms: streaming multiprocessors.
        rates: dense TFLOP/s by format, accumulated in FP32; half of the sparse rate if only that is published. ``fp32``
            is the rate without Tensor Cores. None means that the vendor's documents disagree. A format that the GPU
            does not support is absent.
        source: title of the document with the rates.
        url: its address.
        variants: by the exact name that torch reports. A slice of a GPU (MIG) has another name, and therefore no rate.
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    rates: Mapping[str, float | None]
    source: str
    url: str
    variants: Mapping[str, Variant | None]


_NVIDIA = "https://www.nvidia.com"
_RESOURCES = "https://resources.nvidia.com/en-us"
_SOLUTIONS = f"{_NVIDIA}/content/dam/en-zz/Solutions/Data-Center"
_PAGES = f"{_NVIDIA}/en-us/data-center"
_VOLTA = "https://images.nvidia.com/content/technologies/volta/pdf"

_V100 = ("V100 datasheet", f"{_VOLTA}/volta-v100-datasheet-update-us-1165301-r5.pdf")
_T4 = ("T4 datasheet", f"{_SOLUTIONS}/tesla-t4/t4-tensor-core-datasheet-951643.pdf")
_A10 = ("A10 datasheet", f"{_SOLUTIONS}/a10/pdf/a10-datasheet.pdf")
_A30 = ("A30 specifications", f"{_PAGES}/products/a30-gpu/")
_A40 = ("A40 specifications", f"{_PAGES}/a40/")
_A100 = ("A100 datasheet", f"{_SOLUTIONS}/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf")
_L4 = ("L4 specifications", f"{_PAGES}/l4/")
_L40 = ("L40 specifications", f"{_PAGES}/l40/")
_L40S = ("L40S specifications", f"{_PAGES}/l40s/")
_H100 = ("H100 datasheet", f"{_RESOURCES}-tensor-core/nvidia-tensor-core-gpu-datasheet")
_H200 = ("H200 specifications", f"{_PAGES}/h200/")
_HOPPER = ("H100 architecture paper", f"{_RESOURCES}-tensor-core/gtc22-whitepaper-hopper")
_B200 = ("Blackwell architecture brief", f"{_RESOURCES}-blackwell-architecture")

GPUS = (
    GPU("V100 PCIe", (7, 0), 80, {"fp32": 14.0, "fp16": 112.0}, *_V100, {
        "Tesla V100-PCIE-16GB": None, "Tesla V100-PCIE-32GB": None,
    }),
    GPU("V100 SXM2", (7, 0), 80, {"fp32": 15.7, "fp16": 125.0}, *_V100, {
        "Tesla V100-SXM2-16GB": Variant("v100-16gb", 16384, 900),
        "Tesla V100-SXM2-32GB": Variant("v100-32gb", 32768, 900),
    }),
    GPU("T4", (7, 5), 40, {"fp32": 8.1, "fp16": 65.0}, *_T4, {"Tesla T4": Variant("t4-16gb", 15360, 320)}),
    GPU("A10", (8, 6), 72, {"fp32": 31.2, "tf32": 62.5, "bf16": 125.0, "fp16": 125.0}, *_A10, {
        "NVIDIA A10": Variant("a10-24gb", 23028, 600),
    }),
    GPU("A30", (8, 0), 56, {"fp32": 10.3, "tf32": 82.0, "bf16": 165.0, "fp16": 165.0}, *_A30, {
        "NVIDIA A30": Variant("a30-24gb", 24576, 933),
    }),
    GPU("A40", (8, 6), 84, {"fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7}, *_A40, {
        "NVIDIA A40": Variant("a40-48gb", 46068, 696),
    }),
    GPU("A100", (8, 0), 108, {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}, *_A100, {
        "NVIDIA A100-SXM4-40GB": Variant("a100-40gb", 40960, 1555),
        "NVIDIA A100-SXM4-80GB": Variant("a100-80gb", 81920, 2039),
        "NVIDIA A100-PCIE-40GB": None, "NVIDIA A100 80GB PCIe": None,
    }),
    GPU("L4", (8, 9), 58, {"fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0, "fp8": 242.5}, *_L4, {
        "NVIDIA L4": Variant("l4-24gb", 23034, 300),
    }),
    GPU("L40", (8, 9), 142, {"fp32": 90.5, "tf32": 90.5, "bf16": 181.05, "fp16": 181.05, "fp8": 362.0}, *_L40, {
        "NVIDIA L40": None,
    }),
    GPU("L40S", (8, 9), 142, {"fp32": 91.6, "tf32": 183.0, "bf16": 362.05, "fp16": 362.05, "fp8": 733.0}, *_L40S, {
        "NVIDIA L40S": Variant("l40s-48gb", 46068, 864),
    }),
    GPU("H100 PCIe", (9, 0), 114, {"fp32": 51.0, "tf32": 378.0, "bf16": 756.0, "fp16": 756.0, "fp8": 1513.0}, *_H100, {
        "NVIDIA H100 PCIe": Variant("h100-pcie-80gb", 81559, 2000),
    }),
    GPU("H100 NVL", (9, 0), 132, {"fp32": 60.0, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5}, *_H100, {
        "NVIDIA H100 NVL": Variant("h100-nvl-94gb", 95830, 3900),
    }),
    GPU("H200 NVL", (9, 0), 132, {"fp32": 60.0, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5}, *_H200, {
        "NVIDIA H200 NVL": None,
    }),
    GPU(
        "H100 SXM, H200 SXM, GH200", (9, 0), 132,
        {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}, *_HOPPER, {
            "NVIDIA H100 80GB HBM3": Variant("h100-80gb", 81559, 3350),
            "NVIDIA H200": Variant("h200-141gb", 143771, 4800), "NVIDIA GH200 480GB": None,
        },
    ),
    GPU("B200", (10, 0), 148, {"fp32": None, "tf32": None, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0}, *_B200, {
        "NVIDIA B200": Variant("b200-180gb", 183359, 8000),
    }),
)  # fmt: skip

_TRITON_PROBLEMS = {
    "3.8": "may store garbage in the transpose of a clamped FP8 tile: triton issue 11111, pytorch issue 188841",
}
"""Known faults by major and minor version."""


def rate(device_name: str, format_name: str) -> float | None:
    """Returns the dense matmul TFLOP/s of a device in a format of ``RATED``, or None if it is unknown."""
    for gpu in GPUS:
        if device_name in gpu.variants:
            return gpu.rates.get(format_name)
    return None


def has_float8_tensor_cores(device: torch.device) -> bool:
    """Whether ``device`` multiplies FP8 matrices in hardware (Ada, Hopper and later)."""
    import torch

    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def has_bf16_products(device: torch.device) -> bool:
    """Whether ``device`` multiplies BF16 matrices in hardware (Ampere and later; CPUs with AMX or AVX-512 BF16)."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)[0] >= 8
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


@cache
def has_row_scales_on_cpu() -> bool:
    """Whether ``scaled_mm`` takes one scale per row on a CPU, which it did not before PyTorch 2.13."""
    import torch
    import torch.nn.functional as F

    values, scales = torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    kinds: Any = F.ScalingType
    scaled_mm: Any = F.scaled_mm
    try:
        scaled_mm(values, values.t(), scales, kinds.RowWise, scales.t(), kinds.RowWise)
    except (RuntimeError, ValueError):
        return False
    return True


def has_compiler(device: torch.device) -> bool:
    """Whether ``torch.compile`` finds what it needs: a compiler and Python's headers, and Triton on a GPU."""
    # the system's Python of a distribution names a folder without headers first
    folders = (sysconfig.get_path("include"), sysconfig.get_config_var("INCLUDEPY"))
    if not any(folder and Path(folder, "Python.h").exists() for folder in folders):
        return False
    if device.type == "cuda":  # Triton compiles C for each kernel's launch
        names = (os.environ.get("CC"), "gcc", "clang")
        return importlib.util.find_spec("triton") is not None and _finds_any(names)
    return _finds_any((os.environ.get("CXX") or os.environ.get("CC"), "c++", "g++", "clang++", "gcc", "clang"))


def triton_problem(version: str | None) -> str | None:
    """Returns what is known to be wrong with a version of Triton, or None; ``version`` is None without Triton."""
    for prefix, problem in _TRITON_PROBLEMS.items():
        if version is not None and version.split(".")[:2] == prefix.split("."):
            return problem
    return None


def _finds_any(names: Sequence[str | None]) -> bool:
    return any(name and shutil.which(name) for name in names)

"""Facts about the machine. A process of its own asks for them, so that the command holds no memory of the GPU."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from typing import Any

import torch

from dtrain.distributed.setup import choose_device
from dtrain.precision.hardware import RATED, rate
from dtrain.telemetry.host import describe_host
from dtrain.telemetry.throughput import device_name
from dtrain.tools.accept.part import PartRequest

_PACKAGES = ("triton", "torchao", "transformers")
_SMALL_GPU_GIB = 32  # less does not hold a 1.2B model with its optimizer states in all engines


def run(request: PartRequest) -> dict[str, Any]:
    """Returns host, device and versions; ``request.device`` may be ``auto``."""
    host = describe_host()
    device = choose_device(request.device, 0)
    memory_gib = host.memory_gib
    facts: dict[str, Any] = {"host": asdict(host), "host_summary": host.summary(), "device": device.type}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory_gib = properties.total_memory / 2**30
        facts |= {
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        }
    name = device_name(device)
    return facts | {
        "name": name,
        "memory_gib": round(memory_gib, 1),
        "small": device.type != "cuda" or memory_gib < _SMALL_GPU_GIB,
        "peak_tflops": {format_name: rate(name, format_name) for format_name in RATED},
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return package_version(package)
    except PackageNotFoundError:
        return None

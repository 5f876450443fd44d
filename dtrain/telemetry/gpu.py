"""Reads what decides a GPU's speed beside its model: limits and clocks, loaded libraries, the attention kernel.

Importing this module does not import torch. What cannot be read is None, because a description never fails.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_TIMEOUT_S = 10.0  # without persistence mode nvidia-smi takes seconds
_NUMBERS = {
    "power_limit_w": "power.limit",
    "default_power_limit_w": "power.default_limit",
    "max_power_limit_w": "power.max_limit",
    "sm_clock_mhz": "clocks.current.sm",
    "max_sm_clock_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.current.memory",
    "max_memory_clock_mhz": "clocks.max.memory",
    "temperature_c": "temperature.gpu",
}
_MIG = "mig.mode.current"


@dataclass(frozen=True)
class GPUState:
    """Limits and clocks of a GPU at one moment; None if nvidia-smi does not tell.

    Attributes:
        mig: "Enabled" or "Disabled"; None also for a GPU that cannot be sliced.
    """

    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    max_power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    max_memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    mig: str | None = None

    def summary(self) -> str:
        """Returns one line, such as ``power limit 700 W (default 700, at most 700), SM clock 1,755 of 1,980 MHz``."""
        bounds = [("default", self.default_power_limit_w), ("at most", self.max_power_limit_w)]
        known = ", ".join(f"{name} {watts:,.0f}" for name, watts in bounds if watts is not None)
        facts = [
            "" if self.power_limit_w is None else f"power limit {self.power_limit_w:,.0f} W",
            _clock("SM", self.sm_clock_mhz, self.max_sm_clock_mhz),
            _clock("memory", self.memory_clock_mhz, self.max_memory_clock_mhz),
            "" if self.temperature_c is None else f"{self.temperature_c:.0f} °C",
        ]
        if facts[0] and known:
            facts[0] += f" ({known})"
        return ", ".join(filter(None, facts)) or "unknown: nvidia-smi does not tell"


def _clock(name: str, now: float | None, limit: float | None) -> str:
    if now is None:
        return ""
    return f"{name} clock {now:,.0f}{'' if limit is None else f' of {limit:,.0f}'} MHz"


def describe_state(index: int) -> GPUState:
    """Asks nvidia-smi for the state of torch's GPU ``index``; takes at most 20 s, and usually much less."""
    command = ["nvidia-smi", f"--query-gpu={','.join([*_NUMBERS.values(), _MIG])}", "--format=csv,noheader,nounits"]
    for name in _names(index):
        try:
            done = subprocess.run(
                [*command, "-i", name], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except (OSError, ValueError, subprocess.SubprocessError):  # another name would not help
            break
        values = [value.strip() for value in done.stdout.strip().split(",")]
        if done.returncode == 0 and len(values) == len(_NUMBERS) + 1:
            numbers = {field: _number(value) for field, value in zip(_NUMBERS, values, strict=False)}
            return GPUState(**numbers, mig=values[-1] if values[-1] in ("Enabled", "Disabled") else None)
    return GPUState()


def _names(index: int) -> list[str]:
    """Returns what nvidia-smi may know torch's GPU by, the best name first.

    nvidia-smi counts all GPUs in the order of the bus, and torch those of CUDA_VISIBLE_DEVICES, the fastest first. Of a
    slice (MIG), CUDA may give an identifier that nvidia-smi does not know; the bus number is the whole GPU's.
    """
    import torch

    try:
        properties = torch.cuda.get_device_properties(index)
    except (AssertionError, RuntimeError):  # torch asserts that it was built with CUDA
        return []
    names = []
    if hasattr(properties, "uuid"):
        names.append(f"GPU-{str(properties.uuid).removeprefix('GPU-')}")
    if all(hasattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device")):
        domain, bus, device = (int(getattr(properties, f"pci_{part}_id")) for part in ("domain", "bus", "device"))
        names.append(f"{domain:08x}:{bus:02x}:{device:02x}.0")
    is_same_order = "CUDA_VISIBLE_DEVICES" not in os.environ
    return names or ([str(index)] if is_same_order else [])


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A], [Not Supported], [Unknown Error]
        return None


def attention_kernel(
    device: torch.device,
    dtype: torch.dtype,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    seq_len: int,
    head_dim: int,
) -> str:
    """Returns the kernel that causal ``scaled_dot_product_attention`` takes in training, without running it.

    PyTorch decides by device, dtype, shapes, strides and whether gradients are needed, so the operands have those of
    the built-in models.

    Returns:
        ``flash``, ``cudnn``, ``efficient`` or ``math``, or ``unknown: `` and the reason.
    """
    import torch

    try:
        from torch.nn.attention import SDPBackend

        with torch.enable_grad():
            shapes = ((batch, seq_len, count, head_dim) for count in (heads, kv_heads, kv_heads))
            operands = (torch.empty(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
            q, k, v = (operand.transpose(1, 2) for operand in operands)
            choice = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=kv_heads != heads)
        names = {kind.value: name for name, kind in SDPBackend.__members__.items()}
    except (RuntimeError, AssertionError, AttributeError, ImportError, TypeError) as error:
        return f"unknown: {(str(error).splitlines() or [type(error).__name__])[0]}"
    if choice not in names or choice < 0:
        return f"unknown: PyTorch chose {choice}, which names no kernel"
    return names[choice].removesuffix("_ATTENTION").lower()

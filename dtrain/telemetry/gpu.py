"""Reads what decides a GPU's speed beside its model: its limits and clocks.

Importing this module does not import torch. What cannot be read is None, because a description never fails.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import Any

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

    @classmethod
    def of(cls, values: Any) -> GPUState:
        """Returns the state in a file, without what is no number."""
        found = values if isinstance(values, dict) else {}
        return cls(**{name: found[name] for name in _NUMBERS if isinstance(found.get(name), (int, float))})

    @property
    def brief(self) -> str:
        """The text that a rate is printed with, such as ``power limit 700 W, SM clock 1,755 MHz, 41 °C``."""
        limit, clock, degrees = (
            "unknown" if value is None else f"{value:,.0f} {unit}"
            for value, unit in ((self.power_limit_w, "W"), (self.sm_clock_mhz, "MHz"), (self.temperature_c, "°C"))
        )
        return f"power limit {limit}, SM clock {clock}, {degrees if degrees != 'unknown' else 'temperature unknown'}"

    @property
    def problem(self) -> str:
        """A warning if the power limit is below the card's default, else an empty string."""
        limit, default = self.power_limit_w, self.default_power_limit_w
        if limit is None or default is None or limit >= default:
            return ""
        return (
            f"the GPU's power limit is {limit:,.0f} W and the card's default {default:,.0f} W, so it computes more "
            f"slowly; as root, nvidia-smi -pl {default:.0f} sets it back"
        )

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

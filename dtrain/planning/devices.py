"""Devices that a run can be planned for, without one of them at hand."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from dtrain.errors import ConfigError, nearest
from dtrain.precision.hardware import GPUS, rate

HERE = "here"
"""Name of this machine's own device."""

_HOPPER = (9, 0)


@dataclass(frozen=True)
class Device:
    """A device of one rank.

    Attributes:
        memory: bytes that a rank can have.
        model: name that torch reports, by which its published rates are found.
        capability: CUDA compute capability; (0, 0) for a CPU.
        num_sms: streaming multiprocessors; None if unknown, and for a CPU.
        bandwidth: published bytes a second to its memory; None if unknown.
    """

    name: str
    type: str
    memory: int
    model: str
    capability: tuple[int, int] = (0, 0)
    num_sms: int | None = None
    bandwidth: float | None = None
    is_here: bool = False

    def rate(self, format_name: str) -> float | None:
        """Returns the published FLOP/s of dense products in ``format_name``, or None if they are unknown."""
        teraflops = rate(self.model, format_name)
        return None if teraflops is None else teraflops * 1e12

    def ridge_point(self, format_name: str) -> float | None:
        """Returns the FLOPs per byte above which the published rate bounds a product, below it the bandwidth."""
        rate = self.rate(format_name)
        return None if rate is None or self.bandwidth is None else rate / self.bandwidth

    @property
    def tile(self) -> tuple[int, int]:
        """Tile of the output that a GPU's thread block is assumed to compute."""
        return 128, 256 if self.capability >= _HOPPER else 128


_GPUS = {
    variant.name: Device(
        variant.name, "cuda", variant.mib * 2**20, model, gpu.capability, gpu.num_sms, variant.gigabytes_s * 1e9
    )
    for gpu in GPUS
    for model, variant in gpu.variants.items()
    if variant is not None
}


def find_device(name: str, local_ranks: int = 1) -> Device:
    """Returns the device called ``name``: a GPU's short name, ``HERE``, or ``cpu`` for this machine's.

    The memory of its CPU is shared by ``local_ranks``. Raises ``ConfigError`` if the name is unknown.
    """
    if name in _GPUS:
        return _GPUS[name]
    if name == HERE and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        unlisted = Device(found.name, "cuda", found.total_memory, found.name)
        gpu = next((gpu for gpu in _GPUS.values() if gpu.model == found.name), unlisted)
        capability, num_sms = (found.major, found.minor), found.multi_processor_count
        return replace(gpu, memory=found.total_memory, capability=capability, num_sms=num_sms, is_here=True)
    if name in (HERE, "cpu"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device("cpu", "cpu", memory // local_ranks, "cpu", is_here=True)
    raise ConfigError(f"device={name} is not known{nearest(name, (HERE, 'cpu', *_GPUS))}")

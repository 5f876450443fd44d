"""Devices that a run can be planned for, without one of them at hand."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from dtrain.errors import ConfigError, nearest
from dtrain.precision.hardware import rate

HERE = "here"
"""Name of this machine's own device."""

_MIB = 2**20


@dataclass(frozen=True)
class Device:
    """A device of one rank.

    Attributes:
        name: short name, such as ``h100-80gb``.
        type: ``cuda`` or ``cpu``.
        memory: bytes that a rank can have.
        model: name that torch reports, by which its published rates are found.
        capability: CUDA compute capability; (0, 0) for a CPU.
        num_sms: streaming multiprocessors; None if unknown, and for a CPU.
        bandwidth: published bytes a second to its memory; None if unknown.
        is_here: whether it is this machine's.
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


def _gpu(name: str, mib: int, model: str, capability: tuple[int, int], num_sms: int, gigabytes_s: float) -> Device:
    return Device(name, "cuda", mib * _MIB, model, capability, num_sms, gigabytes_s * 1e9)


_GPUS = (  # memory as nvidia-smi shows it; multiprocessors and bandwidth of the vendor's data sheets
    _gpu("t4-16gb", 15360, "Tesla T4", (7, 5), 40, 320),
    _gpu("v100-16gb", 16384, "Tesla V100-SXM2-16GB", (7, 0), 80, 900),
    _gpu("v100-32gb", 32768, "Tesla V100-SXM2-32GB", (7, 0), 80, 900),
    _gpu("a10-24gb", 23028, "NVIDIA A10", (8, 6), 72, 600),
    _gpu("a30-24gb", 24576, "NVIDIA A30", (8, 0), 56, 933),
    _gpu("a40-48gb", 46068, "NVIDIA A40", (8, 6), 84, 696),
    _gpu("a100-40gb", 40960, "NVIDIA A100-SXM4-40GB", (8, 0), 108, 1555),
    _gpu("a100-80gb", 81920, "NVIDIA A100-SXM4-80GB", (8, 0), 108, 2039),
    _gpu("l4-24gb", 23034, "NVIDIA L4", (8, 9), 58, 300),
    _gpu("l40s-48gb", 46068, "NVIDIA L40S", (8, 9), 142, 864),
    _gpu("h100-80gb", 81559, "NVIDIA H100 80GB HBM3", (9, 0), 132, 3350),
    _gpu("h100-pcie-80gb", 81559, "NVIDIA H100 PCIe", (9, 0), 114, 2000),
    _gpu("h100-nvl-94gb", 95830, "NVIDIA H100 NVL", (9, 0), 132, 3900),
    _gpu("h200-141gb", 143771, "NVIDIA H200", (9, 0), 132, 4800),
    _gpu("b200-180gb", 183359, "NVIDIA B200", (10, 0), 148, 8000),
)


def find_device(name: str, local_ranks: int = 1) -> Device:
    """Returns the device called ``name``.

    Args:
        name: a GPU's short name, :data:`HERE`, or ``cpu`` for this machine's CPU.
        local_ranks: ranks that share this machine's memory, if it is the machine's CPU.

    Raises:
        ConfigError: the name is unknown.
    """
    known = {gpu.name: gpu for gpu in _GPUS}
    if name in known:
        return known[name]
    if name == HERE and torch.cuda.is_available():
        return _gpu_here()
    if name in (HERE, "cpu"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device("cpu", "cpu", memory // local_ranks, "cpu", is_here=True)
    raise ConfigError(f"device={name} is not known{nearest(name, (HERE, 'cpu', *known))}")


def _gpu_here() -> Device:
    properties = torch.cuda.get_device_properties(0)
    listed = next((gpu for gpu in _GPUS if gpu.model == properties.name), None)
    return Device(
        listed.name if listed is not None else properties.name,
        "cuda",
        properties.total_memory,
        properties.name,
        (properties.major, properties.minor),
        properties.multi_processor_count,
        None if listed is None else listed.bandwidth,
        is_here=True,
    )

"""Devices that a run can be planned for."""

from __future__ import annotations

import os

import pytest

from dtrain.errors import ConfigError
from dtrain.planning import devices
from dtrain.planning.devices import find_device
from dtrain.precision.hardware import GPUS


@pytest.mark.parametrize("device", devices._GPUS, ids=lambda device: device.name)
def test_every_listed_gpu_has_published_rates(device: devices.Device) -> None:
    assert any(device.model in gpu.device_names for gpu in GPUS)
    gigabytes = int(device.name.rsplit("-", 1)[1].removesuffix("gb"))
    assert 0.9 < device.memory / (gigabytes * 1e9) < 1.08
    assert device.rate("fp16")


def test_the_ranks_of_a_host_share_its_memory() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert find_device("cpu").memory == memory
    assert find_device("cpu", 4).memory == memory // 4


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"device=h100-80g is not known; did you mean 'h100-80gb'"):
        find_device("h100-80g")

from __future__ import annotations

import subprocess
from collections.abc import Callable
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dtrain.telemetry.gpu import GPUState, describe_state
from dtrain.telemetry.throughput import mfu_text

H100 = "700.00, 600.00, 710.00, 1755, 1980, 2619, 2620, 41, Disabled\n"
UUID = "ffc79498-8ff3-c2dc-3b0d-fafd804516ae"
BUS = {"pci_domain_id": 0, "pci_bus_id": 0x9B, "pci_device_id": 0}
Smi = Callable[[Callable[[str], tuple[int, str]]], list[list[str]]]


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Replaces nvidia-smi by a function of the GPU's name, and returns the list of commands that were started."""

    def replace(answer: Callable[[str], tuple[int, str]]) -> list[list[str]]:
        commands: list[list[str]] = []

        def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
            assert options["timeout"] == 10
            commands.append(command)
            return subprocess.CompletedProcess(command, *answer(command[command.index("-i") + 1]), "")

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return replace


def torch_gpu(monkeypatch: pytest.MonkeyPatch, **properties: object) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))


def test_a_state_has_each_value_under_its_name(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_gpu(monkeypatch, uuid=UUID, **BUS)
    commands = smi(lambda name: (0, H100))
    state = describe_state(0)
    assert state == GPUState(700, 600, 710, 1755, 1980, 2619, 2620, 41, "Disabled")
    limits = "power limit 700 W (default 600, at most 710)"
    assert state.summary() == f"{limits}, SM clock 1,755 of 1,980 MHz, memory clock 2,619 of 2,620 MHz, 41 °C"
    values = "power.limit power.default_limit power.max_limit clocks.current.sm clocks.max.sm clocks.current.memory "
    query = ",".join((values + "clocks.max.memory temperature.gpu mig.mode.current").split())
    options = f"--query-gpu={query} --format=csv,noheader,nounits -i GPU-{UUID}"
    assert commands == [["nvidia-smi", *options.split()]]
    smi(lambda name: (0, "[N/A], [Not Supported], N/A, 300, [Unknown Error], [N/A], [N/A], [N/A], [N/A]\n"))
    assert describe_state(0) == GPUState(sm_clock_mhz=300)
    assert describe_state(0).summary() == "SM clock 300 MHz"


@pytest.mark.parametrize(
    ("properties", "names"),
    [
        ({"uuid": UUID, **BUS}, [f"GPU-{UUID}", "00000000:9b:00.0"]),
        ({"uuid": f"GPU-{UUID}"}, [f"GPU-{UUID}"]),
        (BUS, ["00000000:9b:00.0"]),
        ({}, ["3"]),
    ],
)
def test_a_gpu_is_asked_for_by_all_names_until_one_is_known(
    properties: dict[str, object], names: list[str], smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    torch_gpu(monkeypatch, **properties)
    commands = smi(lambda name: (0, H100) if name == names[-1] else (6, "No devices were found\n"))
    assert describe_state(3).power_limit_w == 700
    assert [command[-1] for command in commands] == names


def test_nothing_is_asked_by_an_index_or_without_cuda(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    torch_gpu(monkeypatch)
    commands = smi(lambda name: (0, H100))
    assert describe_state(0) == GPUState()
    no_cuda = Mock(side_effect=AssertionError("Torch not compiled with CUDA enabled"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", no_cuda)
    assert describe_state(0) == GPUState()
    assert not commands


FAILURES = FileNotFoundError("nvidia-smi"), subprocess.TimeoutExpired("nvidia-smi", 10)


@pytest.mark.parametrize("answer", [(2, H100), (0, ""), (0, "700.00, Disabled\n"), (0, 2 * H100), *FAILURES], ids=repr)
def test_an_nvidia_smi_that_fails_is_no_state(answer: Any, smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_gpu(monkeypatch, uuid=UUID, **BUS)
    commands = smi(Mock(side_effect=cycle([answer])))
    assert describe_state(0) == GPUState()
    if isinstance(answer, Exception):
        assert len(commands) == 1, "not tried with the other name"
    assert describe_state(0).summary() == "unknown: nvidia-smi does not tell"


def test_a_rate_stands_beside_the_state_and_a_lowered_limit_is_a_warning() -> None:
    state = GPUState(500, 700, 700, 1755, temperature_c=61)
    assert mfu_text(0.412, 0.45, state) == (
        "41.2 % with causal attention, 45.0 % with full (power limit 500 W, SM clock 1,755 MHz, 61 °C)"
    )
    assert mfu_text(None, None, state) == "unknown"
    assert mfu_text(0.5, None, GPUState()) == "50.0 % (power limit unknown, SM clock unknown, temperature unknown)"
    assert state.problem == (
        "the GPU's power limit is 500 W and the card's default 700 W, so it computes more slowly; as root, "
        "nvidia-smi -pl 700 sets it back"
    )
    assert not any(GPUState(*watts).problem for watts in ((700, 700), (700, 600), (None, 700), (500, None)))
    assert GPUState.of({"power_limit_w": 500, "sm_clock_mhz": "fast", "other": 1}) == GPUState(500)
    assert GPUState.of(None) == GPUState.of([1]) == GPUState()

from __future__ import annotations

import subprocess
from collections.abc import Callable
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtrain.telemetry.gpu import GPUState, attention_kernel, describe_state

H100 = "700.00, 600.00, 710.00, 1755, 1980, 2619, 2620, 41, Disabled\n"
UUID = "ffc79498-8ff3-c2dc-3b0d-fafd804516ae"
BUS = {"pci_domain_id": 0, "pci_bus_id": 0x9B, "pci_device_id": 0}
CPU = torch.device("cpu")
SHAPE = {"batch": 2, "heads": 8, "kv_heads": 4, "seq_len": 16, "head_dim": 32}
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


@pytest.mark.parametrize(("backend", "kernel"), [(SDPBackend.FLASH_ATTENTION, "flash"), (SDPBackend.MATH, "math")])
def test_the_named_kernel_is_the_one_that_torch_chooses(backend: SDPBackend, kernel: str) -> None:
    with sdpa_kernel(backend):
        assert attention_kernel(CPU, torch.float32, **SHAPE) == kernel


def test_the_choice_is_asked_for_training_with_the_shapes_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Tensor, ...]] = []

    def choose(*operands: Tensor, is_causal: bool, enable_gqa: bool) -> int:
        assert (is_causal, enable_gqa, torch.is_grad_enabled()) == (True, True, True)
        asked.append(operands)
        return next(choices)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    known = dict(enumerate(("math", "flash", "efficient", "cudnn")))
    unknown = {number: f"unknown: PyTorch chose {number}, which names no kernel" for number in (-1, 99)}
    choices = iter(known | unknown)
    for kernel in (known | unknown).values():
        with torch.no_grad():
            assert attention_kernel(CPU, torch.float16, **SHAPE) == kernel
    assert [operand.shape for operand in asked[0]] == [(2, 8, 16, 32), (2, 4, 16, 32), (2, 4, 16, 32)]
    assert {(x.dtype, x.requires_grad, x.stride(1)) for x in asked[0]} == {(torch.float16, True, 32)}
    monkeypatch.setattr(torch, "_fused_sdp_choice", Mock(side_effect=RuntimeError("no such device\nmore")))
    assert attention_kernel(CPU, torch.float32, **SHAPE) == "unknown: no such device"
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert attention_kernel(CPU, torch.float32, **SHAPE).startswith("unknown: module 'torch' has no attribute")

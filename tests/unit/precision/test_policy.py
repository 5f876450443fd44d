"""Precision policies, the contracts they resolve to, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dtrain.errors import ConfigError, ContractError
from dtrain.precision.contract import resolve
from dtrain.precision.policy import PrecisionPolicy
from dtrain.precision.rules import fp32_class
from tests.helpers.zoo import make

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def reducing(name: str, asked: str, reduces_every_micro_batch: bool) -> PrecisionPolicy:
    return PrecisionPolicy.named(name).reducing(asked, reduces_every_micro_batch=reduces_every_micro_batch)


@pytest.mark.parametrize(("name", "compute"), [("fp32", FP32), ("tf32", FP32), ("bf16", BF16), ("fp16", FP16)])
def test_names(name: str, compute: torch.dtype) -> None:
    policy = PrecisionPolicy.named(name)
    assert (policy.compute_dtype, policy.reduce_dtype, policy.master_dtype) == (compute, None, FP32)
    assert (policy.tf32, policy.is_reduced_precision) == (name == "tf32", compute != FP32)
    assert set(resolve(policy, make("mlp").build(0)).replica_dtypes.values()) == {compute}


@pytest.mark.parametrize(
    ("name", "asked", "reduces_every_micro_batch", "expected"),
    [
        ("bf16", "auto", True, BF16),  # micro-batch gradients are BF16 anyway
        ("bf16", "auto", False, FP32),  # FP32 sums would be rounded
        ("bf16", "bf16", False, BF16),
        ("bf16", "fp32", True, FP32),
        ("fp16", "auto", True, FP16),
        ("fp16", "fp16", False, FP16),  # the loss scale keeps them in range
        ("fp16", "bf16", False, BF16),
        ("fp32", "auto", True, FP32),
        ("fp32", "bf16", True, BF16),
    ],
)
def test_dtype_during_reduction(name: str, asked: str, reduces_every_micro_batch: bool, expected: torch.dtype) -> None:
    policy = reducing(name, asked, reduces_every_micro_batch)
    assert policy.dtype_during_reduction(policy.compute_dtype) == expected
    assert policy.compute_dtype == FP32 or policy.dtype_during_reduction(FP32) == FP32, "FP32 modules stay FP32"
    again = policy.reducing("auto", reduces_every_micro_batch=reduces_every_micro_batch)
    assert again == policy, "what was decided stays"


def test_classes_kept_in_fp32() -> None:
    by_name: list[nn.Module] = [type(name, (nn.Module,), {})() for name in ("LlamaRMSNorm", "MixtralTopKRouter")]
    for module in (*by_name, nn.LayerNorm(4), nn.BatchNorm2d(4), nn.Softmax(-1), nn.CrossEntropyLoss()):
        assert fp32_class(module), module
    block = type("PreNorm", (nn.Sequential,), {})(nn.LayerNorm(4), nn.Linear(4, 4))  # it does something else too
    assert fp32_class(block) == fp32_class(nn.Linear(4, 4)) == ""


def test_frozen_parameters_that_are_no_floats_keep_their_dtype() -> None:
    model = nn.Linear(4, 4)
    for name, dtype in (("quantized", torch.int8), ("phase", torch.complex64)):
        model.register_parameter(name, nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False))
    dtypes = resolve(PrecisionPolicy.named("bf16"), model).replica_dtypes
    assert dtypes == {"weight": BF16, "bias": BF16, "quantized": torch.int8, "phase": torch.complex64}


def test_check_parameters_names_the_one_that_was_changed() -> None:
    model = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2))
    contract = resolve(PrecisionPolicy.named("bf16"), model)
    model[1].bfloat16()
    contract.check_parameters(dict(model.named_parameters()), dict(model.named_modules()))
    model[1].half()
    with pytest.raises(ContractError, match=r"'1\.weight' is torch\.float16, the contract says torch\.bf"):
        contract.check_parameters(dict(model.named_parameters()), dict(model.named_modules()))


def test_contract_to_dict_and_describe() -> None:
    policy = PrecisionPolicy.named("bf16").reducing("auto", reduces_every_micro_batch=True)
    contract = resolve(policy, make("mlp").build(0))
    contract_dict = contract.to_dict()
    kinds = ("precision", "master", "compute", "accumulate", "reduce", "output", "optimizer_state")
    assert [contract_dict[kind] for kind in kinds] == ["bf16", "fp32", "bf16", "fp32", "bf16", "fp32", "fp32"]
    assert contract_dict["replicas"] == {f"{i}.{name}": "bf16" for i in (0, 2, 4) for name in ("weight", "bias")}
    assert "parameters computed: 6 in bf16, 0 in fp32" in contract.describe()[-1]


@pytest.mark.parametrize(("amx", "avx512_bf16"), [(True, False), (False, True), (False, False)])
def test_auto_on_a_cpu(monkeypatch: pytest.MonkeyPatch, amx: bool, avx512_bf16: bool) -> None:
    name, reason = "fp32", "no BF16 matrix instructions"
    if amx or avx512_bf16:
        name, reason = "bf16", "multiplies BF16 matrices in hardware"
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    policy = PrecisionPolicy.named("auto", rules={"head": "fp32"}).on(CPU)
    assert (policy.name, policy.rules) == (name, (("head", "fp32"),))
    first = resolve(policy, make("transformer").build(0)).describe()[0]
    assert first.startswith(f"precision auto: {name}, because ")
    assert reason in first


@pytest.mark.parametrize(("capability", "name"), [((8, 0), "bf16"), ((7, 5), "fp16")])
def test_auto_on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    policy = PrecisionPolicy.named("auto").on(torch.device("cuda"))
    assert policy.name == name
    assert f"NVIDIA Test (compute capability {capability[0]}.{capability[1]})" in policy.reason


def test_tf32_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = PrecisionPolicy.named("tf32")
    with pytest.raises(ConfigError, match=r"precision=tf32 needs an NVIDIA GPU of Ampere or later, this is cpu"):
        policy.on(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match="Ampere"):
        policy.on(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert policy.on(torch.device("cuda")) is policy


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PrecisionPolicy.named("bf61"), "precision=bf61 is not one of .*; did you mean 'bf16'"),
        (lambda: reducing("bf16", "fp16", True), "reduce dtype float16 under compute dtype bfloat16: no loss scale"),
        (lambda: reducing("fp16", "bf16", True), "reduce dtype bfloat16 under compute dtype float16: .* three bits"),
        (lambda: PrecisionPolicy("x", torch.float64), "compute dtype must be .*float64"),
        (lambda: PrecisionPolicy("x", BF16, master_dtype=BF16), "master and output dtype are FP32"),
        (lambda: PrecisionPolicy("x", BF16, output_dtype=BF16), "master and output dtype are FP32"),
        (lambda: PrecisionPolicy("x", BF16, reduce_dtype=FP16), "reduce dtype float16 under compute dtype"),
        (lambda: PrecisionPolicy("x", BF16, reduce_dtype=torch.float64), "reduce dtype must be float32, bfloat16 or"),
    ],
)
def test_invalid_policies_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()

"""The dtype in which every operation of a model ran under an engine, against expectations written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.config.precision import Float8
from dtrain.precision.policy import PrecisionPolicy
from tests.helpers.op_dtypes import OpDtypes
from tests.helpers.ranks import run_ranks
from tests.helpers.zoo import make

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
OPS = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", ATTENTION, f"{ATTENTION}_backward"),
    *("native_layer_norm", "native_layer_norm_backward", "native_batch_norm", "native_batch_norm_backward"),
    *("_softmax", "_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "mse_loss"),
    *("embedding_dense_backward", "sum", "mean", "var", "cumsum", "logsumexp", "linalg_vector_norm"),
)
"""Matmuls, and operations that are always FP32. Elementwise operations and copies keep the dtype of their inputs."""

BF16, FP32 = {"bf16"}, {"fp32"}


def start(model: nn.Module, precision: str | PrecisionPolicy, engine: str = "native") -> Any:
    return dtrain.initialize(model, engine=engine, precision=precision, seed=0)


def recorded(engine: Any, loss: Callable[[], Tensor]) -> OpDtypes:
    """One forward and backward."""
    ops = OpDtypes(engine.module)
    with ops.recording():
        engine.backward(loss())
    assert engine.step().applied
    return ops


def recorded_zoo(name: str, precision: str) -> OpDtypes:
    entry = make(name)
    engine, micro = start(entry.build(0), precision), entry.batch(0)
    return recorded(engine, lambda: entry.loss(engine, micro))


CROSS_ENTROPY = {"_log_softmax": FP32, "nll_loss_forward": FP32}
ITS_BACKWARD = {"_log_softmax_backward_data": FP32, "nll_loss_backward": FP32}
# beside products' own gradients: "sum" is that of a bias, summed in FP32 and rounded to the dtype of the bias
EXPECTED: dict[str, tuple[dict[str, set[str]], dict[str, set[str]]]] = {
    "transformer": (
        {"addmm": BF16, ATTENTION: BF16, "native_layer_norm": FP32, **CROSS_ENTROPY, "mm": BF16},
        {
            **ITS_BACKWARD,
            **{"mm": BF16, "sum": BF16, f"{ATTENTION}_backward": {"bf16", "fp32"}},  # FP32: the log of its softmax
            **{"native_layer_norm_backward": FP32, "embedding_dense_backward": FP32},
        },
    ),
    "conv_batch_norm": (
        {"convolution": BF16, "addmm": BF16, "native_batch_norm": FP32, "mean": FP32, **CROSS_ENTROPY},
        {**ITS_BACKWARD, **{"mm": BF16, "sum": BF16, "convolution_backward": BF16, "native_batch_norm_backward": FP32}},
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_under_bf16_only_matmuls_are_bf16(name: str) -> None:
    forward, backward = EXPECTED[name]
    ops = recorded_zoo(name, "bf16")
    assert ops.table(OPS, forward=True) == forward
    assert ops.table(OPS, forward=False) == backward


@pytest.mark.parametrize("name", [*EXPECTED, "gru"])
def test_under_fp32_everything_is_fp32(name: str) -> None:
    assert {dtype for ran in recorded_zoo(name, "fp32").ran for dtype in (*ran.inputs, *ran.outputs)} == FP32


class Stack(nn.Module):
    """Four Linears; the third within a region, if so asked."""

    def __init__(self, *, region: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(16, 16) for _ in range(4))
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        if self.region:
            with dtrain.full_precision():
                x = self.third(x)
            assert x.dtype == torch.float32
        else:
            x = self.third(x)
        return self.last(x)


def products(model: nn.Module, precision: str | PrecisionPolicy, engine: str = "native") -> tuple[OpDtypes, Any]:
    """Returns the operand dtypes of the four Linears by name."""
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    trained = start(model, precision, engine)
    ops = recorded(trained, lambda: trained(x).square().mean())
    names = ("first", "second", "third", "last")
    return ops, [ops.dtypes(name, "mm", "addmm", "_scaled_mm_v2") for name in names]


def test_under_fp8_the_inner_products_take_fp8() -> None:
    policy = PrecisionPolicy.named("fp8", float8=Float8(emulate=False, choice="all"))
    ops, seen = products(Stack(), policy)
    scaled = {"e4m3", "fp32"}  # FP32: the scales
    assert seen == [BF16, scaled, scaled, BF16]
    backward = [ran for ran in ops.ran if ran.op == "_scaled_mm_v2" and ran.module is None]
    assert [ran.inputs for ran in backward] == [("e4m3", "e5m2", "fp32")] * 4
    assert {ran.outputs for ran in ops.ran if ran.op == "_scaled_mm_v2"} == {("bf16",)}


def test_rules_give_each_module_its_format() -> None:
    policy = PrecisionPolicy.named("bf16", rules={"first": "fp32", "second": "fp16", "third": "fp8"})
    _, seen = products(Stack(), policy)
    assert seen == [FP32, {"fp16"}, FP32, BF16], "the FP8 product is emulated"
    _, seen = products(Stack(), PrecisionPolicy.named("fp32", rules={"second": "bf16"}))
    assert seen == [FP32, BF16, FP32, FP32]


def check_region(rank: int = 0, world: int = 1, engine: str = "native") -> None:
    for precision in ("bf16", "fp8"):
        ops, seen = products(Stack(region=True), precision, engine)
        assert seen == [BF16, FP32 if precision == "fp8" else BF16, FP32, BF16]
        sums = {ran.inputs for ran in ops.ran if ran.op == "sum" and ran.module is None}
        assert sums == {("bf16",), ("fp32",)}, "its gradients are FP32 as well"
        casts = [ran for ran in ops.ran if ran.module == "third" and ran.outputs in (("e4m3",), ("e5m2",))]
        assert not casts, "an FP8 Linear is exempt there"


def test_a_region_overrules_a_rule_and_fp8() -> None:
    check_region()
    _, seen = products(Stack(region=True), PrecisionPolicy.named("bf16", rules={"third": "fp16", "last": "fp16"}))
    assert seen == [BF16, BF16, FP32, {"fp16"}]


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_region_of_torchs_engines(engine: str) -> None:
    run_ranks(1, check_region, engine)  # in another process: they make a process group

"""The choice of FP8 Linears, and FP8 options resolved on a device."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import dtrain
from dtrain.config.precision import Float8
from dtrain.errors import ConfigError
from dtrain.precision.float8 import choice, options, weights
from dtrain.precision.float8.cast import E4M3, E5M2
from dtrain.precision.float8.choice import Float8Candidate, decide_float8
from dtrain.precision.float8.options import PRODUCTS, Recipe, resolve_float8
from dtrain.precision.policy import PrecisionPolicy

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BY_SHAPE = resolve_float8(Float8(choice="all"), CPU)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, *capability: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


@pytest.mark.parametrize(
    ("out_features", "in_features", "is_float8", "reason"),
    [
        (256, 704, True, "[256, 704] are multiples of 16"),
        (16, 16, True, "[16, 16] are multiples of 16"),
        (15, 256, False, "[15, 256] has a dimension below 16"),
        (256, 8, False, "[256, 8] has a dimension below 16"),
        (250, 1000, True, "[250, 1000] is padded to [256, 1008]"),
        (256, 128 - 14, True, "[256, 114] is padded to [256, 128]"),  # 12.3 % more
        (256, 128 - 15, False, "[256, 113] would be padded to [256, 128], 13.3% more; at most 12.5% pay"),
        (17, 256, False, "[17, 256] would be padded to [32, 256], 88.2% more; at most 12.5% pay"),
    ],
)
def test_by_shape(out_features: int, in_features: int, is_float8: bool, reason: str) -> None:
    (decision,) = decide_float8([Float8Candidate("blocks.0.out", out_features, in_features)], BY_SHAPE, CPU)
    assert decision == choice.Float8Decision("blocks.0.out", is_float8, reason)


def test_timing_keeps_emulated_matmuls_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times each shape once; shapes that cannot be FP8 are not timed."""
    times, shapes = choice._times, []
    monkeypatch.setattr(choice, "_times", lambda product, *how: shapes.append(product.name) or times(product, *how))
    timed = resolve_float8(Float8(choice="timed", num_rows=32), CPU)
    sizes = {"a": (64, 64), "b": (8, 64), "c": (80, 72), "d": (64, 64)}
    products = [Float8Candidate(name, *size) for name, size in sizes.items()]
    state = torch.get_rng_state()
    a, b, c, d = decide_float8(products, timed, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert [decision.name for decision in (a, b, c, d)] == ["a", "b", "c", "d"]
    assert not any(decision.is_float8 for decision in (a, b, c, d))
    assert shapes == ["a", "c"]
    assert (a.bf16_ms, a.float8_ms, a.reason) == (d.bf16_ms, d.float8_ms, d.reason)
    assert (b.bf16_ms, b.reason) == (None, "[8, 64] has a dimension below 16")
    for decision in (a, c):
        assert 0 < decision.bf16_ms < decision.float8_ms
        ratio = decision.float8_ms / decision.bf16_ms
        assert decision.reason.startswith(f"timed {ratio:.2f} of BF16 (")
        assert decision.reason.endswith(" ms at 32 rows)")


@pytest.mark.parametrize(("float8_ms", "is_float8"), [(0.8, True), (0.97, True), (0.971, False), (1.1, False)])
def test_fp8_must_be_three_percent_faster(monkeypatch: pytest.MonkeyPatch, float8_ms: float, is_float8: bool) -> None:
    monkeypatch.setattr(choice, "_times", lambda *_: {(): 1.0, ("fprop",): 1.2, PRODUCTS: float8_ms})
    (decision,) = decide_float8([Float8Candidate("a", 64, 64)], resolve_float8(Float8(choice="timed"), CPU), CPU)
    assert decision.is_float8 is is_float8
    assert decision.reason == f"timed {float8_ms:.2f} of BF16 ({float8_ms:.3g} against 1 ms at 8192 rows)"


def test_a_product_that_does_not_gain_stays_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {(): 1.0, ("fprop", "dgrad"): 0.7, ("fprop",): 0.8, PRODUCTS: 0.75}
    monkeypatch.setattr(choice, "_times", lambda *_: dict(times))
    on = resolve_float8(Float8(choice="timed"), CPU)
    trained, frozen = decide_float8([Float8Candidate("a", 64, 64), Float8Candidate("b", 64, 64, False)], on, CPU)
    assert trained.products == frozen.products == ("fprop", "dgrad")
    assert trained.reason == "timed 0.70 of BF16 (0.7 against 1 ms at 8192 rows), wgrad in BF16"
    assert frozen.reason == "timed 0.70 of BF16 (0.7 against 1 ms at 8192 rows)"


@pytest.mark.parametrize("casts_each_time", [False, True])
def test_the_weight_cast_is_timed_if_the_engine_casts_each_time(monkeypatch: Any, casts_each_time: bool) -> None:
    cast: list[tuple[int, ...]] = []
    quantize = weights.quantize
    monkeypatch.setattr(weights, "quantize", lambda x, *a, **how: cast.append(tuple(x.shape)) or quantize(x, *a, **how))
    timed = resolve_float8(Float8(choice="timed", num_rows=16), CPU)
    decide_float8([Float8Candidate("a", 32, 48)], timed, CPU, casts_each_time=casts_each_time)
    runs = 2 + choice._ROUNDS
    variants = [set(one) for size in range(1, 4) for one in itertools.combinations(PRODUCTS, size)]
    assert len(variants) == 7
    each_time = [[(32, 48)] * ("fprop" in one) + [(48, 32)] * ("dgrad" in one) for one in variants]
    want = list(itertools.chain(*each_time)) * runs if casts_each_time else [(32, 48)] * len(variants)
    assert sorted(cast) == sorted(want)


def test_out_of_memory_in_timing_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_times", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(ConfigError, match=r"no memory to time 8192 rows of 'a' \[64, 64\] on cpu; set float8 num_rows"):
        decide_float8([Float8Candidate("a", 64, 64)], resolve_float8(Float8(choice="timed"), CPU), CPU)


@pytest.mark.parametrize(("minor", "emulate"), [(6, True), (9, False)])
def test_a_gpu_without_fp8_emulates(monkeypatch: pytest.MonkeyPatch, minor: int, emulate: bool) -> None:
    pretend_gpu(monkeypatch, 8, minor)
    on = resolve_float8(Float8(), GPU)
    assert (on.emulate, on.choice) == (emulate, "all" if emulate else "timed")
    assert resolve_float8(Float8(emulate=True), GPU).emulate is True
    if emulate:
        with pytest.raises(ConfigError, match=r"emulate=false needs FP8 Tensor Cores .* 8\.[06]; use emulate=auto"):
            resolve_float8(Float8(emulate=False), GPU)


def test_a_cpu_emulates_and_may_run_torchs_own_product() -> None:
    on = resolve_float8(Float8(), CPU)
    assert (on.emulate, on.choice, on.grad_format, on.compile) == (True, "all", "e5m2", False)
    assert resolve_float8(Float8(recipe="rowwise"), CPU).grad_format == "e4m3"
    assert resolve_float8(Float8(recipe="rowwise", grad_format="e5m2"), CPU).grad_format == "e5m2"
    assert resolve_float8(Float8(emulate=False, choice="all"), CPU).emulate is False
    assert resolve_float8(on, CPU) == on


def test_blocks_need_hopper_and_a_new_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, versions = Float8(recipe="blockwise"), {"12.8.4": False, "12.9.0": True, "13.0.0": True, None: True}
    pretend_gpu(monkeypatch, 9, 0)
    for version, is_new in versions.items():
        monkeypatch.setattr(options, "cublaslt_version", lambda version=version: version)
        if is_new:
            resolved = resolve_float8(blocks, GPU)
            assert (resolved.emulate, resolved.grad_format) == (False, "e4m3")
        else:
            assert resolve_float8(replace(blocks, emulate=True), GPU).emulate is True
            with pytest.raises(ConfigError, match=rf"cublasLt 12\.9 or later; torch .* runs with {version}; .*cu130"):
                resolve_float8(blocks, GPU)
    for major, minor in ((8, 9), (10, 0)):
        pretend_gpu(monkeypatch, major, minor)
        with pytest.raises(ConfigError, match=rf"needs compute capability 9\.0 .* has {major}\.{minor}; use"):
            resolve_float8(blocks, GPU)
    on_cpu = PrecisionPolicy.named("fp8", float8=replace(blocks, emulate=False))
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(3)])
    with pytest.raises(ConfigError, match="blockwise has no products on CPUs but emulated ones; use emulate=auto"):
        dtrain.initialize(model, precision=on_cpu)
    for wrong in ({"grad_format": "e5m2"}, {"fast_accumulation": True}):
        with pytest.raises(ConfigError, match="blockwise multiplies E4M3 by E4M3 and adds in FP32; leave out"):
            resolve_float8(replace(blocks, **wrong), CPU)
    sizes = [(1024, 1000), (1024, 100)]
    good, bad = decide_float8([Float8Candidate("a", *size) for size in sizes], resolve_float8(blocks, CPU), CPU)
    assert good.reason == "[1024, 1000] is padded to [1024, 1024]"
    assert bad.reason.startswith("[1024, 100] would be padded to [1024, 128]")


def test_a_cpu_without_row_scales_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "has_row_scales_on_cpu", lambda: False)
    assert resolve_float8(Float8(emulate=False), CPU).emulate is False
    assert resolve_float8(Float8(recipe="rowwise"), CPU).emulate is True
    with pytest.raises(ConfigError, match=r"recipe=rowwise needs .* which torch \d.* lacks; use emulate=auto"):
        resolve_float8(Float8(emulate=False, recipe="rowwise"), CPU)


@pytest.mark.parametrize("there", [False, True])
def test_kernels_cast_on_a_gpu_with_a_compiler(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    pretend_gpu(monkeypatch, 9, 0)
    assert resolve_float8(Float8(), GPU).emulate is False
    monkeypatch.setattr(options, "has_compiler", lambda device: there)
    assert resolve_float8(Float8(), GPU).compile is there
    assert resolve_float8(Float8(compile=False), GPU).compile is False
    lacking = {"cpu": CPU} | ({} if there else {"cuda:0": GPU})
    for name, device in lacking.items():
        with pytest.raises(ConfigError, match=rf"compile=true casts by Triton .* 8\.9 or later .*; {name} lacks one"):
            resolve_float8(Float8(compile=True), device)
    pretend_gpu(monkeypatch, 8, 0)  # Triton has no FP8 there
    assert resolve_float8(Float8(), GPU).compile is False


def test_recipe_follows_the_options() -> None:
    options = resolve_float8(Float8(emulate=False, fast_accumulation=True, compile=False), CPU)
    assert Recipe.of(options, torch.bfloat16) == Recipe("tensorwise", E5M2, torch.bfloat16, False, True)
    rowwise = Recipe.of(resolve_float8(Float8(recipe="rowwise"), CPU), torch.float32)
    assert rowwise == Recipe("rowwise", E4M3, torch.float32, True)

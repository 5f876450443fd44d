"""Products of a step, against torch's counter of FLOPs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.record.products import DGRAD, FPROP, WGRAD, MatrixProduct, products
from dtrain.planning.record.recorder import Signature, StepRecorder
from tests.unit.planning.planned_runs import planned_run

_CPU_ATTENTION = {  # torch's counter does not know the CPU's kernels
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda dy, q, k, v, *_, **__: sdpa_backward_flop_count(dy, q, k, v)
    ),
}


@contextmanager
def counted() -> Iterator[Callable[[], dict[str, int]]]:
    counter = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
    with counter:
        yield lambda: {str(op).split(".")[-1]: n for op, n in counter.get_flop_counts()["Global"].items()}


def by_op(found: list[MatrixProduct]) -> dict[str, int]:
    flops: Counter[str] = Counter()
    for product in found:
        flops[product.call.signature.name] += product.flops
    return dict(flops)


def of_run(run: PlannedRun) -> tuple[list[MatrixProduct], dict[str, int]]:
    recorder = StepRecorder()
    with run.engine(recorder) as (engine, step), counted() as flops:
        (recorded,) = recorder.record_steps(engine, step, [1])
        return products(recorded.calls), flops()


def of_module(model: nn.Module, *inputs: Tensor) -> tuple[list[MatrixProduct], dict[str, int]]:
    with FakeTensorMode(allow_non_fake_inputs=True), counted() as flops, StepRecorder(model) as recorder:
        model(*inputs).float().sum().backward()
    return products(recorder.calls), flops()


FLOAT8 = "precision=fp8 model.num_layers=2 precision.float8.emulate=true engine.zero_stage=3"


@pytest.mark.parametrize("keys", ["model.num_kv_heads=2", FLOAT8])
def test_flops_of_runs_equal_torchs(keys: str) -> None:
    found, expected = of_run(planned_run(*keys.split(), device="h100-80gb", ranks=4))
    assert by_op(found) == expected
    assert {product.part for product in found} == {FPROP, DGRAD, WGRAD}


class Attentions(nn.Module):
    """Attention by the fused kernel with grouped queries, by products of its own, and recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 64)
        self.inner = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh())
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 8)).transpose(1, 2).split((4, 2, 2), dim=1)
        fused = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(-2)
        weights = (x @ x.transpose(1, 2)).softmax(-1)
        inner: Any = checkpoint(self.inner, torch.baddbmm(fused, weights, x), use_reentrant=False)
        return self.out(inner).relu()


def test_flops_of_attention_variants_and_recomputation_equal_torchs() -> None:
    model = Attentions()
    found, expected = of_module(model, torch.randn(2, 16, 32, requires_grad=True))
    assert by_op(found) == expected
    inner = [(p.part, p.call.is_recomputed) for p in found if p.call.module == "inner.0"]
    assert inner == [(FPROP, False), (FPROP, True), (WGRAD, False), (DGRAD, False)]
    assert [(p.m, p.n, p.k) for p in found if p.call.module == "qkv"] == [(32, 64, 32), (32, 32, 64), (64, 32, 32)]
    assert [p.part for p in found if p.call.module == "qkv"] == [FPROP, DGRAD, WGRAD]


def test_flops_of_convolutions_equal_torchs() -> None:
    """Of one and two dimensions, with stride, and transposed; in the last, positions equal channels."""
    planes = (nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, stride=2, bias=False))
    model = nn.Sequential(*planes, nn.ConvTranspose2d(12, 6, 2, stride=2), nn.Flatten(2), nn.Conv1d(6, 5, 4))
    found, expected = of_module(model, torch.randn(2, 3, 10, 10))
    assert by_op(found) == expected
    first = [(p.part, p.m, p.n, p.k) for p in found if p.call.module == "0"]
    assert first == [(FPROP, 200, 8, 27), (WGRAD, 8, 27, 200)], "no gradient of the images is computed"
    grouped, _ = of_module(nn.Conv1d(8, 12, 3, groups=4, padding=1), torch.randn(2, 8, 10))
    assert [(p.part, p.m, p.n, p.k, p.batch) for p in grouped] == [(FPROP, 20, 3, 6, 4), (WGRAD, 3, 6, 20, 4)]
    assert {p.flops for p in grouped} == {2 * 4 * 20 * 3 * 6}, "fewer channels"


def test_weight_gradients_are_found_if_all_sizes_are_equal() -> None:
    found, _ = of_module(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(16, 16))
    expected = [("0", FPROP), ("0", WGRAD), ("1", FPROP), ("1", WGRAD), ("1", DGRAD)]
    assert Counter((p.call.module, p.part) for p in found) == Counter(expected)


def test_experts_of_a_grouped_product_are_counted_together() -> None:
    keys = ("model.factory=tests.helpers.planned_models:Experts", "model.hidden_dim=32", "precision=bf16")
    found, _ = of_run(planned_run(*keys, "train.micro_batch_size=2", "model.max_seq_len=64"))
    grouped = [p for p in found if p.is_grouped]
    sizes = [(p.part, p.m, p.n, p.k, p.batch) for p in grouped]
    assert sizes == [(FPROP, 128, 64, 32, 1), (WGRAD, 32, 64, 128, 1), (DGRAD, 128, 32, 64, 1)]
    assert {p.flops for p in grouped} == {2 * 128 * 64 * 32}


def test_tiles_and_waves() -> None:
    found = of_module(nn.Linear(64, 257, bias=False), torch.randn(130, 64))[0][0]
    assert found.efficiency((128, 128), 4) == (130 * 257 / (2 * 3 * 128 * 128), 6 / 8)
    assert found.nbytes == 4 * (130 * 64 + 64 * 257 + 130 * 257)


def test_operations_have_a_name_with_and_without_an_overload() -> None:
    flex_attention = torch.ops.higher_order.flex_attention
    for func, name in ((torch.ops.aten.addmm.out, "addmm"), (flex_attention, "flex_attention")):
        assert Signature(func, (), ()).name == name

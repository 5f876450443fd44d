"""``dtrain.full_precision()``: a region of a forward that computes in FP32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtrain
from dtrain.precision import autocast_ops
from dtrain.precision.regions import in_full_precision_region

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4).to(BF16)


def test_it_computes_in_fp32_and_ends(linear: nn.Linear) -> None:
    x = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=BF16):
        with pytest.raises(ZeroDivisionError), dtrain.full_precision():
            raise ZeroDivisionError
        assert torch.get_autocast_dtype("cpu") == BF16, "an error ends it"
        with dtrain.full_precision():
            inside = linear(x)
            assert in_full_precision_region("cpu")
            assert not in_full_precision_region("cuda")
            with dtrain.full_precision():
                assert linear(x).dtype == FP32
            assert linear(x).dtype == FP32, "the inner region ends, the outer does not"
        assert linear(x).dtype == BF16
        assert not in_full_precision_region("cpu")
    assert torch.equal(inside, x @ linear.weight.float().t() + linear.bias.float())


def test_without_autocast_it_does_nothing() -> None:
    before = [torch.get_autocast_dtype(name) for name in ("cpu", "cuda")]
    x = torch.ones(2, 2, dtype=BF16)
    with dtrain.full_precision():
        assert (x @ x).dtype == BF16
        assert not in_full_precision_region("cpu")
        assert [torch.get_autocast_dtype(name) for name in ("cpu", "cuda")] == before
    with torch.autocast("cpu", dtype=BF16), torch.autocast("cpu", enabled=False), dtrain.full_precision():
        assert (x @ x).dtype == BF16, "the user has switched it off"


@pytest.mark.parametrize(
    "module", [nn.GRU(4, 4), nn.MultiheadAttention(4, 2), nn.Conv1d(2, 2, 1), nn.Bilinear(4, 4, 4)], ids=repr
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_modules_of_other_kinds(module: nn.Module, dtype: torch.dtype) -> None:
    inputs = [torch.randn(3, 2, 4, dtype=dtype)] * {nn.MultiheadAttention: 3, nn.Bilinear: 2}.get(type(module), 1)
    with torch.autocast("cpu", dtype=BF16), autocast_ops.enabled("cpu"), dtrain.full_precision():
        output = module.to(BF16)(*inputs)
    output = output[0] if isinstance(output, tuple) else output
    assert output.dtype == FP32
    output.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == BF16 for p in module.parameters())


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_may_open_one(linear: nn.Linear) -> None:
    """Also around code that a compiler does not trace, such as an engine's hooks."""
    linear.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + 1
        with dtrain.full_precision():
            inside = linear(x)
        return inside, linear(inside)

    torch._dynamo.reset()
    compiled = torch.compile(forward, backend="eager")
    x = torch.randn(2, 4)
    for _ in range(2):
        with torch.autocast("cpu", dtype=BF16):
            found, want = compiled(x), forward(x)
            assert torch.get_autocast_dtype("cpu") == BF16
        assert [y.dtype for y in found] == [FP32, BF16]
        assert all(torch.equal(*pair) for pair in zip(found, want, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_region_in_a_checkpointed_function_is_one_when_it_runs_again(linear: nn.Linear, use_reentrant: bool) -> None:
    def forward(x: Tensor) -> Tensor:
        with dtrain.full_precision():
            return linear(x).sin()

    grads = []
    for checkpointed in (False, True):
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        linear.zero_grad()
        with torch.autocast("cpu", dtype=BF16):
            y = checkpoint(forward, x, use_reentrant=use_reentrant) if checkpointed else forward(x)
        assert y.dtype == FP32
        y.sum().backward()
        grads.append([x.grad, linear.weight.grad, linear.bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))

"""FP16 products on a CPU: exact where FP32 sums are exact, and no other operation is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.precision import fp16_products
from dtrain.precision.fp16_products import FP16Products

PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(5, 40), (40, 3)]),
    "addmm": (torch.addmm, [(3,), (5, 40), (40, 3)]),
    "bmm": (torch.bmm, [(2, 5, 40), (2, 40, 3)]),
    "baddbmm": (torch.baddbmm, [(2, 5, 3), (2, 5, 40), (2, 40, 3)]),
    "mv": (torch.mv, [(5, 40), (40,)]),
    "addmv": (torch.addmv, [(5,), (5, 40), (40,)]),
    "dot": (torch.dot, [(40,), (40,)]),
    "linear": (F.linear, [(2, 5, 40), (3, 40), (3,)]),
    "conv1d": (F.conv1d, [(2, 4, 9), (3, 4, 3), (3,)]),
    "conv2d": (F.conv2d, [(2, 4, 6, 6), (3, 4, 3, 3), (3,)]),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 3, 4, 4), (3, 4, 3, 3), (4,)]),
}


class Recorded(TorchDispatchMode):
    """Records every operation that runs, with the dtypes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, set[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        self.calls.append((func, {tensor.dtype for tensor in tensors}))
        return func(*args, **(kwargs or {}))


def whole_numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers whose products and sums FP32 represents exactly."""
    return torch.randint(-40, 41, shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize("name", PRODUCTS)
def test_forward_and_backward_round_the_exact_sum_once(name: str) -> None:
    function, shapes = PRODUCTS[name]
    inputs = [whole_numbers(shape, seed).requires_grad_() for seed, shape in enumerate(shapes)]
    exact = [value.detach().double().requires_grad_() for value in inputs]
    expected = function(*exact)
    with Recorded() as recorded, FP16Products():
        result = function(*inputs)
        gradient = whole_numbers(tuple(result.shape), 9)
        result.backward(gradient)
    expected.backward(gradient.double())
    assert result.dtype == torch.float16
    assert torch.equal(result, expected.half())
    for ours, theirs in zip(inputs, exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad.half())
    ran = {func: dtypes for func, dtypes in recorded.calls if func in fp16_products._PRODUCTS}
    assert ran
    assert all(torch.float16 not in dtypes for dtypes in ran.values())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_is_that_of_fp32_rounded(dropout: float) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, 8, 16, generator=generator).half().requires_grad_() for _ in range(3)]
    wide = [value.detach().float().requires_grad_() for value in inputs]

    def attend(values: list[Tensor]) -> Tensor:
        torch.manual_seed(1)
        return F.scaled_dot_product_attention(*values, is_causal=True, dropout_p=dropout)

    gradient = torch.randn(2, 2, 8, 16, generator=generator).half()
    expected = attend(wide)
    expected.backward(gradient.float())
    with Recorded() as recorded, FP16Products():
        result = attend(inputs)
        result.backward(gradient)
    products = fp16_products._PRODUCTS | fp16_products._ATTENTION
    assert not [func for func, dtypes in recorded.calls if func in products and torch.float16 in dtypes]
    # with dropout it is composed of products and a softmax, which stays real FP16
    torch.testing.assert_close(result, expected.half(), rtol=0.0, atol=4e-3 if dropout else 0.0)
    for ours, theirs in zip(inputs, wide, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        # backward reads the result, which is FP16
        torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=0.0, atol=4e-3)


def test_a_product_above_65504_is_infinite() -> None:
    x = torch.full((1, 1), 300.0, dtype=torch.float16)
    with FP16Products():
        assert torch.mm(x, x).item() == float("inf")


def test_other_operations_and_dtypes_are_left_alone() -> None:
    x = torch.tensor([[2048.0, 1.0]])
    with Recorded() as recorded, FP16Products():
        assert (x.half() + 1).tolist() == [[2048.0, 2.0]]  # 2,049 is no FP16 number
        torch.mm(x.bfloat16(), x.bfloat16().t())
    assert {torch.float16} in [dtypes for func, dtypes in recorded.calls if func is torch.ops.aten.add.Tensor]
    assert {torch.bfloat16} in [dtypes for func, dtypes in recorded.calls if func is torch.ops.aten.mm.default]

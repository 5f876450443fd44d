"""FP16 products on a CPU: exact where FP32 sums are exact, and no other operation is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.precision import fp16_products
from dtrain.precision.fp16_products import FP16Products
from tests.helpers.op_dtypes import OpDtypes

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


def names(overloads: Iterable[Any]) -> set[str]:
    return {overload.overloadpacket.__name__ for overload in overloads}


def whole_numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers whose products and sums FP32 represents exactly."""
    return torch.randint(-40, 41, shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize("name", PRODUCTS)
def test_forward_and_backward_round_the_exact_sum_once(name: str) -> None:
    function, shapes = PRODUCTS[name]
    inputs = [whole_numbers(shape, seed).requires_grad_() for seed, shape in enumerate(shapes)]
    exact = [value.detach().double().requires_grad_() for value in inputs]
    expected = function(*exact)
    with OpDtypes(torch.nn.Module()) as ops, FP16Products():
        result = function(*inputs)
        gradient = whole_numbers(tuple(result.shape), 9)
        result.backward(gradient)
    expected.backward(gradient.double())
    assert result.dtype == torch.float16
    assert torch.equal(result, expected.half())
    for ours, theirs in zip(inputs, exact, strict=True):
        assert torch.equal(ours.grad, theirs.grad.half())
    ran = [kernel.inputs for kernel in ops.ran if kernel.op in names(fp16_products._PRODUCTS)]
    assert ran
    assert all("fp16" not in inputs for inputs in ran)


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
    with OpDtypes(torch.nn.Module()) as ops, FP16Products():
        result = attend(inputs)
        result.backward(gradient)
    products = names(fp16_products._PRODUCTS | fp16_products._ATTENTION)
    assert not [kernel for kernel in ops.ran if kernel.op in products and "fp16" in kernel.inputs]
    # with dropout it is composed of products and a softmax, which stays real FP16
    torch.testing.assert_close(result, expected.half(), rtol=0.0, atol=4e-3 if dropout else 0.0)
    for ours, theirs in zip(inputs, wide, strict=True):
        # backward reads the result, which is FP16
        torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=0.0, atol=4e-3)


def test_a_product_above_65504_is_infinite() -> None:
    x = torch.full((1, 1), 300.0, dtype=torch.float16)
    with FP16Products():
        assert torch.mm(x, x).item() == float("inf")


def test_other_operations_and_dtypes_are_left_alone() -> None:
    x = torch.tensor([[2048.0, 1.0]])
    with OpDtypes(torch.nn.Module()) as ops, FP16Products():
        assert (x.half() + 1).tolist() == [[2048.0, 2.0]]  # 2,049 is no FP16 number
        torch.mm(x.bfloat16(), x.bfloat16().t())
    assert {("add", ("fp16",)), ("mm", ("bf16",))} <= {(kernel.op, kernel.inputs) for kernel in ops.ran}

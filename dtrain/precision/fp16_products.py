"""FP16 matrix products on a CPU, computed as GPUs compute them: exact products, FP32 sums, one rounding at the end.

CPUs without FP16 instructions multiply FP16 matrices at a hundredth of their FP32 rate. A product of two FP16 numbers
is exact in FP32, so an FP32 product of the same operands, rounded to FP16, is what Tensor Cores return, up to the order
of the sums. Everything else stays in real FP16.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_aten: Any = torch.ops.aten

_PRODUCTS = {
    *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
    *(_aten.mv.default, _aten.addmv.default, _aten.dot.default, _aten.linear.default),
    *(_aten.convolution.default, _aten.convolution_backward.default),
}
# the log of the sum of exponentials, their second result, is FP32 for FP16 inputs too
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


def fp16_products(device: torch.device, formats: Collection[str]) -> AbstractContextManager[object]:
    """Returns the context in which a CPU computes the products of modules in ``formats``; else one without effect."""
    return FP16Products() if device.type == "cpu" and "fp16" in formats else nullcontext()


class FP16Products(TorchDispatchMode):
    """Context in which matrix products, convolutions and attention of FP16 tensors on a CPU are computed in FP32.

    Their results are rounded to FP16, and overflow to Inf as in FP16. The backward of such an operation is covered if
    it runs inside the context too.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports torch's compiler at the first operation, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_attention = func in _ATTENTION
        if not (is_attention or func in _PRODUCTS) or not _has_fp16((args, kwargs)):
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map(_widen, (args, kwargs))
        results = func(*args, **kwargs)
        if is_attention and func is _aten._scaled_dot_product_flash_attention_for_cpu.default:
            return (results[0].half(), *results[1:])
        return pytree.tree_map(_narrow, results)


def _has_fp16(values: Any) -> bool:
    return any(map(_is_fp16_on_cpu, pytree.tree_leaves(values)))


def _is_fp16_on_cpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float16 and value.device.type == "cpu"


def _widen(value: Any) -> Any:
    return value.float() if _is_fp16_on_cpu(value) else value


def _narrow(value: Any) -> Any:
    return value.half() if isinstance(value, Tensor) else value

"""The FP8 weight of a Float8Linear: its quantized copies and how long they are cached."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from dtrain.errors import UsageError
from dtrain.precision.float8.cast import E4M3, Quantized, dequantize, quantize
from dtrain.precision.float8.matmul import operand
from dtrain.precision.float8.options import Recipe


class WeightSource(Protocol):
    """Provides the weight [N, K] of a Float8Linear as the right operand of its two matmuls with the weight."""

    def forward(self, weight: Tensor) -> tuple[Quantized, tuple[Tensor, ...]]:
        """Returns the operand for the output, and the tensors that autograd saves for :meth:`backward`.

        The operand is [N, K], as :func:`dtrain.precision.float8.matmul.operand` returns it, with its scale.
        """

    def backward(self, *saved: Tensor) -> Quantized:
        """Returns the operand for the input gradient: [K, N]; rowwise with a scale for each of its K rows."""

    def dequantized(self, weight: Tensor) -> Tensor:
        """Returns the weight in the dtype of ``weight``; gradients flow to ``weight``."""


class UncachedWeights:
    """Casts the weight in each forward and again in each backward; caches nothing.

    Use it for weights that are resharded between forward and backward: autograd saves the parameter, which the engine
    unshards again, and no FP8 copy.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def forward(self, weight: Tensor) -> tuple[Quantized, tuple[Tensor, ...]]:
        return self._cast_operand(weight.detach()), (weight,)

    def backward(self, *saved: Tensor) -> Quantized:
        (weight,) = saved
        return self._cast_operand(weight.detach().t())

    def _cast_operand(self, matrix: Tensor) -> Quantized:
        copy = quantize(matrix, E4M3, rowwise=self._recipe.rowwise, compiled=self._recipe.compile)
        return Quantized(operand(copy.values, emulate=self._recipe.emulate), copy.scale)

    def dequantized(self, weight: Tensor) -> Tensor:
        return weight


class QuantizedWeights(ABC):
    """A weight stored as quantized copies. Operands made from the copies are cached until :meth:`invalidate`.

    A forward may pass a weight other than the stored one (``torch.func.functional_call``), and a backward may run after
    :meth:`invalidate`. Operands for these are made on each call and not cached.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._operands: dict[tuple[int, bool], Tensor] = {}

    @abstractmethod
    def copies(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        """Returns the row-wise copy (for the output) and the column-wise copy (for the input gradient).

        Both are [N, K], row-major. With a tensorwise recipe they are the same. With a rowwise recipe the first has a
        scale for each of its N rows, and the second for each of its K columns, which are the rows of the transpose.
        """

    @abstractmethod
    def stored_copies(self) -> Sequence[Tensor]:
        """Returns the values of the copies that stay in place until :meth:`invalidate`."""

    @abstractmethod
    def dequantized(self, weight: Tensor) -> Tensor: ...

    def invalidate(self) -> None:
        """Drops what was derived from the copies: their values or their memory have changed."""
        self._operands.clear()

    def forward(self, weight: Tensor) -> tuple[Quantized, tuple[Tensor, ...]]:
        rowwise, columnwise = self.copies(weight)
        # backward saves the copy, not its operand: under emulation that is FP32, four times the bytes
        operand_values = self._operand(rowwise.values, transposed=False)
        return Quantized(operand_values, rowwise.scale), (columnwise.values, columnwise.scale)

    def backward(self, *saved: Tensor) -> Quantized:
        values, scale = saved
        return Quantized(self._operand(values, transposed=True), scale)

    def cached(self) -> list[Tensor]:
        """Returns the cached tensors that own their memory."""
        return [cached for (address, _), cached in self._operands.items() if cached.data_ptr() != address]

    def _operand(self, values: Tensor, *, transposed: bool) -> Tensor:
        emulate = self._recipe.emulate
        key = (values.data_ptr(), transposed and not emulate)  # the emulation transposes as a view
        cached = self._operands.get(key)
        if cached is None:
            # an address identifies stored copies only: other memory may be reused for another weight
            is_stored = any(copy.data_ptr() == key[0] for copy in self.stored_copies())
            if is_stored and key[1]:
                cached = self._stored_transpose(values)
            else:
                cached = operand(values, emulate=emulate, transposed=key[1])
            if is_stored:
                self._operands[key] = cached
        return cached.t() if transposed and emulate else cached

    def _stored_transpose(self, values: Tensor) -> Tensor:
        """Returns the operand for the input gradient from a stored copy; may cache those of other weights too."""
        return operand(values, emulate=False, transposed=True)

    def _cast(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        weight = weight.detach()
        rowwise = quantize(weight, E4M3, rowwise=self._recipe.rowwise, compiled=self._recipe.compile)
        if not self._recipe.rowwise:
            return rowwise, rowwise
        transposed = quantize(weight.t(), E4M3, rowwise=True, compiled=self._recipe.compile)
        return rowwise, Quantized(transposed.values.t().contiguous(), transposed.scale)


class CachedWeights(QuantizedWeights):
    """Casts the weight on first use and caches the copies until the weight is replaced or written to.

    Call :meth:`invalidate` after writes that PyTorch does not count (through ``.data``), and to free the copies.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._copies: tuple[Quantized, Quantized] | None = None
        self._weight: weakref.ref[Tensor] | None = None  # the weight that was cast
        self._state = (0, 0)  # its address and version counter when it was cast

    def copies(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        if weight.is_inference():  # inference tensors have no version counter
            return self._cast(weight)
        state = (weight.data_ptr(), weight._version)
        if self._copies is None or self._weight is None or self._weight() is not weight or self._state != state:
            self.invalidate()
            with torch.inference_mode(False):  # training reuses copies cast in evaluation
                self._copies = self._cast(weight)
            self._weight, self._state = weakref.ref(weight), state
        return self._copies

    def stored_copies(self) -> list[Tensor]:
        return [copy.values for copy in self._copies or ()]

    def dequantized(self, weight: Tensor) -> Tensor:
        return weight

    def cached(self) -> list[Tensor]:
        copies = {values.data_ptr(): values for values in self.stored_copies()}
        return [*copies.values(), *super().cached()]

    def invalidate(self) -> None:
        super().invalidate()
        self._copies = None


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor, scale: Tensor) -> Tensor:
        return dequantize(Quantized(values, scale)).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def dequantized(name: str, weight: Tensor, rowwise: Quantized) -> Tensor:
    """Dequantizes ``rowwise`` [N, K] to the dtype of ``weight``; gradients flow to ``weight``.

    The result is a read-only copy: writes to it are lost. Its methods that set hooks or freeze it raise
    :class:`dtrain.errors.UsageError`, which refers to the parameter ``name``.
    """
    result: Tensor = _Dequantize.apply(weight, rowwise.values, rowwise.scale)

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UsageError(
            f"the .weight of the FP8 replica of '{name}' is a read-only copy; set hooks on the parameter itself, "
            f"dict(model.named_parameters())['{name}'], and freeze it before dtrain.initialize"
        )

    for method in ("register_hook", "register_post_accumulate_grad_hook", "requires_grad_"):
        setattr(result, method, refuse)
    return result

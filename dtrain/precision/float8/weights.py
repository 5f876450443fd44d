"""Where a Float8Linear finds its weight in FP8, and what of it is kept."""

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
    """Gives a Float8Linear its weight [N, K] as the right operand of both products that need it."""

    def forward(self, weight: Tensor) -> tuple[Quantized, tuple[Tensor, ...]]:
        """For the output: [N, K] as :func:`dtrain.precision.float8.matmul.operand` makes it, and its scale.

        Also the tensors that autograd saves and gives to :meth:`backward`.
        """

    def backward(self, *saved: Tensor) -> Quantized:
        """For the gradient of the input: [K, N]; rowwise with a scale for each of its K rows."""

    def dequantized(self, weight: Tensor) -> Tensor:
        """The weight in the dtype of ``weight``, for whoever reads it as a tensor; gradients flow to ``weight``."""


class LocalWeights:
    """Casts the weight that the forward finds, and again in backward: it keeps nothing, and no FP8 is saved.

    For weights that come and go: what autograd saves is the parameter, which is freed and gathered as ever.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def forward(self, weight: Tensor) -> tuple[Quantized, tuple[Tensor, ...]]:
        """See :class:`WeightSource`."""
        own = quantize(weight.detach(), E4M3, rowwise=self._recipe.rowwise, compiled=self._recipe.compile)
        return Quantized(operand(own.values, emulate=self._recipe.emulate), own.scale), (weight,)

    def backward(self, *saved: Tensor) -> Quantized:
        """See :class:`WeightSource`."""
        (weight,) = saved
        own = quantize(weight.detach().t(), E4M3, rowwise=self._recipe.rowwise, compiled=self._recipe.compile)
        return Quantized(operand(own.values, emulate=self._recipe.emulate), own.scale)

    def dequantized(self, weight: Tensor) -> Tensor:
        """The parameter itself."""
        return weight


class QuantizedWeights(ABC):
    """A weight that is held in FP8. What products need of it beside is made once, and kept until :meth:`refresh`.

    A forward may bring another weight than the one that is held (``torch.func.functional_call``), and a backward may
    run after :meth:`refresh`: what these need is made for them, and not kept.

    Args:
        recipe: of the module.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._operands: dict[tuple[int, bool], Tensor] = {}

    @abstractmethod
    def copies(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        """The weight for the output, and for the gradient of the input; both [N, K], row-major.

        Tensorwise both are one. Rowwise the first has a scale for each of its N rows; the second one for each of its K
        columns, [K]: it becomes the rows of the transpose.
        """

    @abstractmethod
    def held(self) -> Sequence[Tensor]:
        """The values of the copies that last until :meth:`refresh`."""

    @abstractmethod
    def dequantized(self, weight: Tensor) -> Tensor:
        """See :class:`WeightSource`."""

    def refresh(self) -> None:
        """The copies have other values now, or other memory, or none."""
        self._operands.clear()

    def forward(self, weight: Tensor) -> tuple[Quantized, tuple[Tensor, ...]]:
        """See :class:`WeightSource`."""
        rows, columns = self.copies(weight)
        return Quantized(self._operand(rows.values, transposed=False), rows.scale), (columns.values, columns.scale)

    def backward(self, *saved: Tensor) -> Quantized:
        """See :class:`WeightSource`."""
        values, scale = saved
        return Quantized(self._operand(values, transposed=True), scale)

    def tensors(self) -> list[Tensor]:
        """What is kept now, each with memory of its own."""
        return [kept for (copy, _), kept in self._operands.items() if kept.data_ptr() != copy]

    def _operand(self, values: Tensor, *, transposed: bool) -> Tensor:
        emulate = self._recipe.emulate
        key = (values.data_ptr(), transposed and not emulate)  # decoded numbers are not copied to be transposed
        made = self._operands.get(key)
        if made is None:
            made = operand(values, emulate=emulate, transposed=key[1])
            if any(copy.data_ptr() == key[0] for copy in self.held()):  # the memory of others may be used again
                self._operands[key] = made
        return made.t() if transposed and emulate else made

    def _cast(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        weight = weight.detach()
        rows = quantize(weight, E4M3, rowwise=self._recipe.rowwise, compiled=self._recipe.compile)
        if not self._recipe.rowwise:
            return rows, rows
        columns = quantize(weight.t(), E4M3, rowwise=True, compiled=self._recipe.compile)
        return rows, Quantized(columns.values.t().contiguous(), columns.scale)


class KeptWeights(QuantizedWeights):
    """Casts the weight when it is first needed, and keeps that until the weight is another or has been written to.

    :meth:`refresh` is for writes that PyTorch does not count, through ``.data``, and to free what is kept.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._copies: tuple[Quantized, Quantized] | None = None
        self._weight: weakref.ref[Tensor] | None = None  # that was cast
        self._state = (0, 0)  # that it was in: where it lay, and how often it had been written to

    def copies(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        """See :class:`QuantizedWeights`."""
        if weight.is_inference():  # its writes are not counted
            return self._cast(weight)
        state = (weight.data_ptr(), weight._version)
        if self._copies is None or self._weight is None or self._weight() is not weight or self._state != state:
            self.refresh()
            with torch.inference_mode(False):  # training will need what an evaluation has cast
                self._copies = self._cast(weight)
            self._weight, self._state = weakref.ref(weight), state
        return self._copies

    def held(self) -> list[Tensor]:
        """See :class:`QuantizedWeights`."""
        return [copy.values for copy in self._copies or ()]

    def dequantized(self, weight: Tensor) -> Tensor:
        """The parameter itself."""
        return weight

    def tensors(self) -> list[Tensor]:
        """The copies as well."""
        copies = {values.data_ptr(): values for values in self.held()}
        return [*copies.values(), *super().tensors()]

    def refresh(self) -> None:
        """The weight has changed."""
        super().refresh()
        self._copies = None


class _Dequantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor, scale: Tensor) -> Tensor:
        return dequantize(Quantized(values, scale)).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def dequantized(name: str, weight: Tensor, rows: Quantized) -> Tensor:
    """What ``rows`` [N, K] stand for, in the dtype of ``weight``; gradients flow through it to ``weight``.

    For reading alone: it is made anew each time, so writes to it are lost, and its methods that set hooks or freeze
    raise :class:`dtrain.errors.UsageError` with the ``name`` of the parameter that these are for.
    """
    result: Tensor = _Dequantised.apply(weight, rows.values, rows.scale)

    def refuse(*_: object, **__: object) -> NoReturn:
        raise UsageError(
            f"what .weight gives of the FP8 replica of '{name}' is a copy for reading; set hooks on the parameter "
            f"itself, dict(model.named_parameters())['{name}'], and freeze it before dtrain.initialize"
        )

    for method in ("register_hook", "register_post_accumulate_grad_hook", "requires_grad_"):
        setattr(result, method, refuse)
    return result

"""The FP8 weight of a Float8Linear: its quantized copies, the operands made from them, and how long both are kept."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from dtrain.errors import ContractError, UsageError
from dtrain.precision.fake import address
from dtrain.precision.float8.cast import E4M3, Quantized, Scaling, dequantize, uses_kernels
from dtrain.precision.float8.matmul import operand
from dtrain.precision.float8.options import Recipe
from dtrain.precision.float8.proof import proves_weights, quantize

if TYPE_CHECKING:
    from dtrain.kernels.float8 import Transposes


class Cache(Enum):
    """Time for which a ``QuantizedWeight`` keeps the copies that it casts.

    Attributes:
        NEVER: it casts in each forward and again in each backward. For weights that are resharded between the two:
            autograd saves the parameter, which the engine unshards again, and no FP8 copy.
        UNTIL_WRITTEN: it casts on first use, and again if the weight is replaced or written to, or after
            ``QuantizedWeight.invalidate``, which writes need that PyTorch does not count (through ``.data``).
    """

    NEVER = "never"
    UNTIL_WRITTEN = "until written"


_numbers = count()
_by_number: weakref.WeakValueDictionary[int, QuantizedWeight] = weakref.WeakValueDictionary()


class TransposeSet:
    """Weights whose transposes are made together: on a GPU by one launch, when backward needs the first of them.

    So they take no memory in forward. The weights are bound together, to memory in which their distances stay.
    """

    def __init__(self) -> None:
        self.weights: list[QuantizedWeight] = []
        self._kernel: Transposes | None = None

    def prepare(self) -> None:
        """Makes the transposes of all weights, and caches them there."""
        copies = [weight._copies[-1].values for weight in self.weights]
        if self._kernel is None:
            from dtrain.kernels.float8 import Transposes  # it imports Triton, which only GPUs need

            self._kernel = Transposes(copies, self.weights[0].recipe.alignment)
        for weight, values, transpose in zip(self.weights, copies, self._kernel(copies[0]), strict=True):
            weight._operands[address(values), True] = transpose


@dataclass(frozen=True, eq=False)
class Bound:
    """The weight is stored in FP8 only: its engine casts it, and binds the copies with ``QuantizedWeight.bind``.

    Attributes:
        name: name of the weight.
        parameter: the model's parameter, which stands for the weight and has no values.
        scales: scales of the copies, which an update changes in place: as ``Scaling`` gives them for the weight, and
            row-wise [K] for a second copy; [N] alone if a row-wise copy serves both products: [Note: one copy].
        transposes: the weights whose transposes are made with that of this one.
        keeps_operands: whether operands are cached; else each product makes its own, and the copies take all memory.
    """

    name: str
    parameter: nn.Parameter
    scales: Sequence[Tensor]
    transposes: TransposeSet = field(default_factory=TransposeSet)
    keeps_operands: bool = True


class QuantizedWeight:
    """Provides the weight [N, K] of a Float8Linear as the right operand of its two matmuls with the weight.

    Operands are cached as long as the copies that they are made from, but no longer than until ``invalidate``. A
    forward may pass another weight than the module's own (``torch.func.functional_call``), and a backward may run after
    ``invalidate``. Operands of copies that are no longer held, or never were, are made on each call and not cached.

    [Note: one copy] The input gradient sums over the N rows of the weight: dx = g @ (scale * values), with a scale for
    each row, is (g * scale) @ values. So a row-wise copy serves both products if the gradient is multiplied by its
    scales before the cast. These are powers of two, so the product is exact, and the cast's error is relative to the
    largest share of a row of dx. A weight gradient would need the cast of g itself, so only frozen weights do this.

    Attributes:
        recipe: recipe of the Linear.
        cache: where the copies come from, and how long they are kept.
        recipe_key: ``Recipe.key``.
        key: 0-dim, in host memory; ``of_key`` finds the object by it.
    """

    def __init__(self, recipe: Recipe, cache: Cache | Bound = Cache.NEVER) -> None:
        self.cache = cache
        self.recipe = recipe
        self.recipe_key = recipe.key
        self._copies: Sequence[Quantized] = ()
        self._operands: dict[tuple[int, bool], Tensor] = {}
        self._cast_weight: weakref.ref[Tensor] | None = None  # the weight that was cast
        self._cast_state = (0, 0)  # its address and version counter when it was cast
        if isinstance(cache, Bound):
            cache.transposes.weights.append(self)
        number = next(_numbers)
        _by_number[number] = self
        self.key = torch.tensor(number, device="cpu")

    @staticmethod
    def of_key(key: Tensor) -> QuantizedWeight:
        return _by_number[int(key)]

    def _bound(self, weight: Tensor) -> Bound | None:
        """Returns what ``weight`` is bound to; None for a weight that is cast, such as a functional call's."""
        return self.cache if isinstance(self.cache, Bound) and weight is self.cache.parameter else None

    def tensors(self, weight: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns what ``forward`` takes for ``weight``, and what ``backward`` takes, which autograd saves.

        They are the weight itself, or the values and scale of its copies. A third tensor of ``backward``, [N], is what
        the gradient is multiplied by before its cast: [Note: one copy].
        """
        if self.cache is Cache.NEVER:
            return (weight,), (weight,)
        rowwise, columnwise = self.copies(weight)
        if rowwise is columnwise and self.recipe.scaling is Scaling.ROWS:  # [Note: one copy]
            return rowwise, (rowwise.values, rowwise.scale.new_ones(rowwise.values.shape[1]), rowwise.scale)
        # the copy, not its operand: under emulation that is FP32, four times the bytes
        return rowwise, columnwise

    def stored(self, weight: Tensor) -> list[Tensor]:
        """Returns the ``tensors`` of a ``Bound`` weight, which compiled code passes; empty if ``weight`` is cast."""
        return [*chain(*self.tensors(weight))] if self._bound(weight) else []

    def forward(self, *given: Tensor) -> Quantized:
        """Returns the operand [N, K] for the output; the copy or the weight itself if the product is not FP8."""
        if len(given) == 1:
            return self._cast_for("fprop", given[0].detach())
        return self._operand(Quantized(*given), transposed=False)

    def backward(self, *saved: Tensor) -> Quantized:
        """Returns the operand [K, N] for the input gradient; rowwise with a scale for each of its K rows."""
        if len(saved) == 1:
            return self._cast_for("dgrad", saved[0].detach().t())
        return self._operand(Quantized(*saved[:2]), transposed=True)

    def _operand(self, copy: Quantized, *, transposed: bool) -> Quantized:
        """Returns ``copy`` as the operand for the output, or ``transposed`` as that for the input gradient."""
        values, scale = copy.values, copy.scale.t() if transposed else copy.scale
        recipe, emulate = self.recipe, self.recipe.emulate
        if ("dgrad" if transposed else "fprop") not in recipe.products:
            return Quantized(values.t() if transposed else values, scale)
        key = (address(values), transposed and not emulate)  # the emulation transposes as a view
        found = self._operands.get(key)
        if found is None:
            bound = self.cache if isinstance(self.cache, Bound) else None
            # an address identifies stored copies only: other memory may be reused for another weight
            is_stored = any(address(copy.values) == key[0] for copy in self._copies)
            has_kernel = is_stored and key[1] and uses_kernels(values.device, compiled=recipe.compile)
            if bound and has_kernel and proves_weights(values, recipe.weight_scaling):
                bound.transposes.prepare()
            else:
                self._operands[key] = operand(values, emulate=emulate, transposed=key[1], alignment=recipe.alignment)
            is_kept = is_stored and (bound is None or bound.keeps_operands)
            found = self._operands[key] if is_kept else self._operands.pop(key)
        return Quantized(found.t() if transposed and emulate else found, scale)

    @property
    def gradient_factor(self) -> Tensor | None:
        """The scales [N] by which a gradient is multiplied before its cast, if it is: [Note: one copy]."""
        if self.recipe.scaling is Scaling.ROWS and isinstance(self.cache, Bound) and len(self.cache.scales) == 1:
            return self.cache.scales[0]
        return None

    def bind(self, copies: Sequence[Tensor]) -> None:
        """Reads a ``Bound`` weight from ``copies``, each [N, K], from now on; empty: the weight is sharded."""
        assert isinstance(self.cache, Bound)
        scales = self.cache.scales if copies else ()
        self._copies = [Quantized(values, scale) for values, scale in zip(copies, scales, strict=True)]
        self.invalidate()

    def invalidate(self) -> None:
        """Drops what was derived from the weight, or from bound copies: their values or their memory have changed."""
        self._operands.clear()
        if not isinstance(self.cache, Bound):
            self._copies = ()

    def cached(self) -> list[Tensor]:
        """Returns the cached tensors that own their memory; bound copies are their engine's."""
        own = () if isinstance(self.cache, Bound) else self._copies
        copies = {address(copy.values): copy.values for copy in own}
        operands = [cached for (start, _), cached in self._operands.items() if address(cached) != start]
        return [*copies.values(), *operands]

    def copies(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        """Returns the row-wise copy (for the output) and the column-wise copy (for the input gradient).

        Both are [N, K], row-major, and the same unless each row has a scale. Then the first has a scale for each of its
        N rows, and the second for each of its K columns, which are the rows of the transpose; or the first is both:
        [Note: one copy].
        """
        copies = self._copies
        if bound := self._bound(weight):
            if not copies:
                raise ContractError(f"'{bound.name}' is computed with while it is sharded; its group was not unsharded")
        elif self.cache is Cache.UNTIL_WRITTEN and not weight.is_inference():  # which has no version counter
            copies = self._kept_copies(weight)
        else:
            copies = self._cast(weight)
        return copies[0], copies[-1]

    def _kept_copies(self, weight: Tensor) -> Sequence[Quantized]:
        """Casts ``weight`` unless the copies are its own."""
        state = (address(weight), weight._version)
        cast_weight = None if self._cast_weight is None else self._cast_weight()
        if not self._copies or cast_weight is not weight or self._cast_state != state:
            self.invalidate()
            with torch.inference_mode(False):  # training reuses copies cast in evaluation
                self._copies = self._cast(weight)
            self._cast_weight, self._cast_state = weakref.ref(weight), state
        return self._copies

    def _cast(self, weight: Tensor) -> Sequence[Quantized]:
        rowwise = self._quantize(weight.detach())
        if self.recipe.weight_scaling is not Scaling.ROWS:
            return [rowwise]
        values, scale = self._quantize(weight.detach().t())
        return [rowwise, Quantized(values.t().contiguous(), scale)]

    def _cast_for(self, product: str, matrix: Tensor) -> Quantized:
        """Returns ``matrix`` as an operand of ``product``: itself, without a scale, if that is not FP8."""
        if product in self.recipe.products:
            return self._quantize(matrix)
        return Quantized(matrix, matrix.new_empty(0))

    def _quantize(self, matrix: Tensor) -> Quantized:
        return quantize(matrix, E4M3, self.recipe.weight_scaling, both=False, compiled=self.recipe.compile)[0]

    def represented(self, weight: Tensor) -> Tensor:
        """Returns what the copy for the output represents, in the dtype of ``weight``, to which gradients flow."""
        values: Tensor = _Dequantize.apply(weight, *self.copies(weight)[0])
        return values

    def dequantized(self, weight: Tensor) -> Tensor:
        """Returns the weight in the dtype of ``weight``; gradients flow to ``weight``.

        A bound weight is a read-only copy, as ``Float8Linear.weight`` says; while it is sharded it is NaN.
        """
        bound = self._bound(weight)
        if not bound or not self._copies or getattr(weight, "gives_masters", False):  # [Note: guarded parameters]
            return weight
        if torch.compiler.is_compiling():  # which traces no method that is replaced
            return torch.ops.dtrain.float8_dequantize(weight, *self._copies[0])  # type: ignore[no-any-return]
        result: Tensor = _Dequantize.apply(weight, *self._copies[0])
        for method in ("register_hook", "register_post_accumulate_grad_hook", "requires_grad_"):
            setattr(result, method, partial(_refuse, bound.name))
        return result


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor, scale: Tensor) -> Tensor:
        return dequantize(Quantized(values, scale)).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def _refuse(name: str, *_: object, **__: object) -> NoReturn:
    raise UsageError(
        f"the .weight of the FP8 replica of '{name}' is a read-only copy; set hooks on the parameter itself, "
        f"dict(model.named_parameters())['{name}'], and freeze it before dtrain.initialize"
    )

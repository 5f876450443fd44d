"""FP8 compute replicas: quantized copies in flat buffers, one byte an element, in memory and in all-gathers.

A weight with one scale, or one for each block, has one copy. With row-wise scaling it has two: one with a scale for
each row and one with a scale for each column, because the weight is the right operand of two products, which sum along
its rows and along its columns. Frozen weights have one copy with a scale for each row: [Note: one copy].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor, nn

from dtrain.errors import ContractError
from dtrain.precision.float8.linear import Float8Linear
from dtrain.precision.float8.options import Recipe
from dtrain.precision.float8.weights import Bound, QuantizedWeight, TransposeSet
from dtrain.sharding.float8_casts import ScaleTable
from dtrain.sharding.layout import FlatLayout
from dtrain.sharding.replicas import ParameterViews
from dtrain.sharding.storage_pool import FlatTensor


class Float8Views(ParameterViews):
    """Connects a model's FP8 Linears with the copies of an FP8 replica; the parameters stay NaN.

    Args:
        layout: layout of the flat buffer.
        parameters: the model's parameters by name.
        table: scales of the weights.
        recipe_of: returns the recipe of a Linear; its ``out_dtype`` is that of the parameters and their gradients.
        transposes: shared by replicas that stay in place; by default the replica has its own.
        keeps_operands: see ``Bound``.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Mapping[str, nn.Parameter],
        table: ScaleTable,
        recipe_of: Callable[[str], Recipe],
        transposes: TransposeSet | None = None,
        *,
        keeps_operands: bool = True,
    ) -> None:
        self.num_copies = table.num_copies
        shared = transposes or TransposeSet()
        self._weights = {}
        for name in (slot.spec.name for slot in layout.slots):
            transposes = shared if keeps_operands else TransposeSet()  # each is made when its product needs it
            bound = Bound(name, parameters[name], table.scales_of(name), transposes, keeps_operands)
            recipe = recipe_of(name.rpartition(".")[0])
            self._weights[name] = QuantizedWeight(recipe, bound)
        super().__init__(layout, parameters, recipe.out_dtype)

    def attach(self, model: nn.Module) -> None:
        for name, weight in self._weights.items():
            module = model.get_submodule(name.rpartition(".")[0])
            if not isinstance(module, Float8Linear):
                raise ContractError(f"the replica of '{name}' is FP8, and its module a {type(module).__name__}")
            module.quantized_weight = weight

    def bind(self, copies: Sequence[FlatTensor]) -> None:
        """Makes the Linears read ``copies``, each [numel]."""
        by_slot = zip(*(copy.views(self._layout.places) for copy in copies), strict=True)
        for weight, views in zip(self._weights.values(), by_slot, strict=True):
            weight.bind(views)

    def open_weights(self, names: Collection[str]) -> None:
        for name, weight in self._weights.items():
            if name in names:
                weight.bind(())  # else the Linear would show the copies, and not its parameter

    def unbind(self) -> None:
        super().unbind()
        for weight in self._weights.values():
            weight.bind(())

    def invalidate(self) -> None:
        for weight in self._weights.values():
            weight.invalidate()

    def cached(self) -> list[Tensor]:
        """Returns the operands of products, which are made once after each refresh."""
        return [tensor for weight in self._weights.values() for tensor in weight.cached()]

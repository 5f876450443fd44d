"""FP8 compute replicas: copies of FP8 numbers in flat buffers, one byte an element, also where they travel.

One copy a weight where it has one scale. Where each row and each column has its own, two: in the first each row has
one scale, in the second each column, because the weight is the right operand of two products, whose sums run along
its rows and along its columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from dtrain.errors import ContractError
from dtrain.precision.float8.cast import Quantized
from dtrain.precision.float8.linear import Float8Linear
from dtrain.precision.float8.options import Recipe
from dtrain.precision.float8.weights import QuantizedWeights, dequantized
from dtrain.sharding.float8_scales import ScaleTable
from dtrain.sharding.layout import FlatLayout
from dtrain.sharding.replicas import ParameterViews, slot_views


class ReplicaWeights(QuantizedWeights):
    """Where a Linear finds its weight: in the copies that it was shown.

    Args:
        recipe: of the Linear.
        name: of the weight.
        parameter: that stands for it.
        scales: of the copies: 0-dim, or [N] and [K].
    """

    def __init__(self, recipe: Recipe, name: str, parameter: nn.Parameter, scales: Sequence[Tensor]) -> None:
        super().__init__(recipe)
        self._name = name
        self._parameter = parameter
        self._scales = scales
        self._copies: list[Tensor] = []

    def bind(self, copies: Sequence[Tensor]) -> None:
        """The weight lies in ``copies``, each [N, K], from now on; nowhere, if there are none."""
        self._copies = list(copies)
        self.refresh()

    def copies(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        """See :class:`dtrain.precision.float8.weights.QuantizedWeights`; of another weight, its own numbers."""
        if weight is not self._parameter:
            return self._cast(weight)
        if not self._copies:
            raise ContractError(f"'{self._name}' is computed with while it is sharded; its group was not gathered")
        found = [Quantized(values, scale) for values, scale in zip(self._copies, self._scales, strict=True)]
        return found[0], found[-1]

    def held(self) -> Sequence[Tensor]:
        """See :class:`dtrain.precision.float8.weights.QuantizedWeights`."""
        return self._copies

    def dequantized(self, weight: Tensor) -> Tensor:
        """See :class:`dtrain.precision.float8.weights.WeightSource`; NaN, as the parameter is, where it is sharded."""
        if weight is not self._parameter or not self._copies:
            return weight
        return dequantized(self._name, weight, self.copies(weight)[0])


class Float8Views(ParameterViews):
    """How a model sees an FP8 replica: its Linears find the copies; the parameters stay NaN, so nobody reads them.

    Args:
        layout: of the flat buffer.
        parameters: by name.
        table: of the scales.
        recipe: of the Linears; its ``out_dtype`` is that of the parameters and their gradients.
    """

    def __init__(
        self, layout: FlatLayout, parameters: Mapping[str, nn.Parameter], table: ScaleTable, recipe: Recipe
    ) -> None:
        self.num_copies = table.num_copies
        self._sources = {}
        for slot in layout.slots:
            name = slot.spec.name
            scales = [table.of_copy(table.scale, name, copy) for copy in range(table.num_copies)]
            self._sources[name] = ReplicaWeights(
                recipe, name, parameters[name], scales if table.rowwise else [scales[0][0]]
            )
        super().__init__(layout, parameters, recipe.out_dtype)
        self._versions = [parameter._version for parameter in self._parameters]

    def check(self) -> None:
        """Asserts also that nobody has written to a parameter, which holds no weight.

        Raises:
            ContractError: naming the parameter.
        """
        super().check()
        for parameter, slot, version in zip(self._parameters, self._layout.slots, self._versions, strict=True):
            if parameter._version != version:
                raise ContractError(
                    f"parameter '{slot.spec.name}' was written to; it stands for an FP8 replica, which follows its "
                    f"FP32 master. Set weights before dtrain.initialize, or load a checkpoint with engine.load"
                )

    def attach(self, model: nn.Module) -> None:
        """Hands each Linear its source."""
        for name, source in self._sources.items():
            module = model.get_submodule(name.rpartition(".")[0])
            if not isinstance(module, Float8Linear):
                raise ContractError(f"the replica of '{name}' is FP8, and its module a {type(module).__name__}")
            module.source = source

    def bind(self, copies: Sequence[Tensor]) -> None:
        """The values are in ``copies``, each [numel], from now on."""
        by_slot = zip(*(slot_views(copy, self._layout) for copy in copies), strict=True)
        for source, views in zip(self._sources.values(), by_slot, strict=True):
            source.bind(views)

    def unbind(self) -> None:
        """There are no values from now on."""
        super().unbind()
        for source in self._sources.values():
            source.bind(())

    def invalidate(self) -> None:
        """What was kept of the old values is dropped."""
        for source in self._sources.values():
            source.refresh()

    def cached(self) -> list[Tensor]:
        """Operands of products, made once after each refresh."""
        return [tensor for source in self._sources.values() for tensor in source.tensors()]

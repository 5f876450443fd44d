"""FP8 compute replicas: quantized copies in flat buffers, one byte an element, in memory and in all-gathers.

A weight with one scale has one copy. With row-wise scaling it has two: one with a scale for each row and one with a
scale for each column, because the weight is the right operand of two products, which sum along its rows and along its
columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from dtrain.errors import ContractError
from dtrain.precision.float8.cast import Quantized, uses_kernels
from dtrain.precision.float8.linear import Float8Linear
from dtrain.precision.float8.matmul import ALIGNMENT
from dtrain.precision.float8.options import Recipe
from dtrain.precision.float8.weights import QuantizedWeights, dequantized
from dtrain.sharding.float8_casts import ScaleTable
from dtrain.sharding.layout import FlatLayout
from dtrain.sharding.replicas import ParameterViews, slot_views

if TYPE_CHECKING:
    from dtrain.kernels.float8 import Transposes


class TransposeSet:
    """Weights whose transposes are made together: on a GPU by one launch, when backward needs the first of them.

    So they take no memory in forward. The weights are bound together, to memory in which their distances stay.
    """

    def __init__(self) -> None:
        self._sources: list[ReplicaWeights] = []
        self._kernel: Transposes | None = None

    def add(self, source: ReplicaWeights) -> None:
        self._sources.append(source)

    def prepare(self) -> None:
        """Makes the transposes of all weights."""
        copies = [source.stored_copies()[-1] for source in self._sources]
        if self._kernel is None:
            from dtrain.kernels.float8 import Transposes  # it imports Triton, which only GPUs need

            self._kernel = Transposes(copies, ALIGNMENT)
        for source, transpose in zip(self._sources, self._kernel(copies[0]), strict=True):
            source.cache_transpose(transpose)


class ReplicaWeights(QuantizedWeights):
    """Weight source of a Linear that reads the copies which were bound.

    Args:
        recipe: recipe of the Linear.
        name: name of the weight.
        parameter: the model's parameter that stands for the weight.
        scales: scales of the copies, which an update changes in place: 0-dim, or [N] and [K].
        transposes: the weights whose transposes are made with that of this one.
    """

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        parameter: nn.Parameter,
        scales: Sequence[Tensor],
        transposes: TransposeSet,
    ) -> None:
        super().__init__(recipe)
        self._name = name
        self._parameter = parameter
        self._scales = scales
        self._copies: list[Tensor] = []
        self._transposes = transposes
        transposes.add(self)

    def bind(self, copies: Sequence[Tensor]) -> None:
        """Reads the weight from ``copies``, each [N, K], from now on; empty: the weight is sharded."""
        self._copies = list(copies)
        self.invalidate()

    def copies(self, weight: Tensor) -> tuple[Quantized, Quantized]:
        if weight is not self._parameter:  # such as a functional call's: it has no replica
            return self._cast(weight)
        if not self._copies:
            raise ContractError(f"'{self._name}' is computed with while it is sharded; its group was not unsharded")
        # a weight with one scale has one copy, which serves as both operands
        found = [Quantized(values, scale) for values, scale in zip(self._copies, self._scales, strict=True)]
        return found[0], found[-1]

    def stored_copies(self) -> Sequence[Tensor]:
        return self._copies

    def cache_transpose(self, transpose: Tensor) -> None:
        """Caches the operand for the input gradient, made from the last copy."""
        self._operands[self._copies[-1].data_ptr(), True] = transpose

    def _stored_transpose(self, values: Tensor) -> Tensor:
        if not uses_kernels(values.device, compiled=self._recipe.compile):
            return super()._stored_transpose(values)
        self._transposes.prepare()
        return self._operands[values.data_ptr(), True]

    def dequantized(self, weight: Tensor) -> Tensor:
        if weight is not self._parameter or not self._copies:  # NaN, as the parameter, while it is sharded
            return weight
        return dequantized(self._name, weight, self.copies(weight)[0])


class Float8Views(ParameterViews):
    """Connects a model's FP8 Linears with the copies of an FP8 replica; the parameters stay NaN.

    Args:
        layout: layout of the flat buffer.
        parameters: the model's parameters by name.
        table: scales of the weights.
        recipe: recipe of the Linears; its ``out_dtype`` is that of the parameters and their gradients.
        transposes: shared by replicas that stay in place; by default the replica has its own.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Mapping[str, nn.Parameter],
        table: ScaleTable,
        recipe: Recipe,
        transposes: TransposeSet | None = None,
    ) -> None:
        transposes = transposes or TransposeSet()
        self.num_copies = table.num_copies
        self._sources = {}
        for slot in layout.slots:
            name = slot.spec.name
            scales = [table.of_copy(table.scale, name, copy) for copy in range(table.num_copies)]
            self._sources[name] = ReplicaWeights(
                recipe, name, parameters[name], scales if table.rowwise else [scales[0][0]], transposes
            )
        # after the sources, which the constructor unbinds
        super().__init__(layout, parameters, recipe.out_dtype)
        self._versions = [parameter._version for parameter in self._parameters]

    def check(self) -> None:
        """Asserts also that no parameter was written to, because it holds no weight.

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
        for name, source in self._sources.items():
            module = model.get_submodule(name.rpartition(".")[0])
            if not isinstance(module, Float8Linear):
                raise ContractError(f"the replica of '{name}' is FP8, and its module a {type(module).__name__}")
            module.source = source

    def bind(self, copies: Sequence[Tensor]) -> None:
        """Makes the Linears read ``copies``, each [numel]."""
        by_slot = zip(*(slot_views(copy, self._layout) for copy in copies), strict=True)
        for source, views in zip(self._sources.values(), by_slot, strict=True):
            source.bind(views)

    def unbind(self) -> None:
        super().unbind()
        for source in self._sources.values():
            source.bind(())

    def invalidate(self) -> None:
        for source in self._sources.values():
            source.invalidate()

    def cached(self) -> list[Tensor]:
        """Returns the operands of products, which are made once after each refresh."""
        return [tensor for source in self._sources.values() for tensor in source.cached()]

"""Parameters that every rank holds whole beside the sharded ones: few and small, mostly norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from dtrain.distributed.communicator import Communicator
from dtrain.parameters.compute_shard import COMPUTE, ComputeShard
from dtrain.parameters.local_shards import LocalShard, check_in_place
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.parameters.user_hooks import hook_last
from dtrain.sharding.gradients import FlatGradient, LocalSending
from dtrain.sharding.layout import ParamSpec, flat_layouts
from dtrain.sharding.placement import Placement
from dtrain.sharding.replicas import slot_views

OnGradient = Callable[[str, Tensor], Weight | None]
"""Records the gradient of the named parameter as it leaves backward; returns its weight, None if it is not taken."""


class ReplicatedParameters:
    """FP32 masters in one flat buffer; a parameter that computes in FP32 is a view of its master.

    Gradients accumulate on each rank in FP32, and their sums are all-reduced once a step.

    Args:
        parameters: by name.
        dtypes: compute dtype of each parameter.
        update_classes: number of its update class, by parameter name.
        on_gradient: called once for each gradient of each micro-batch.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        dtypes: Mapping[str, torch.dtype],
        update_classes: Mapping[str, int],
        comm: Communicator,
        on_gradient: OnGradient,
    ) -> None:
        self._on_gradient = on_gradient
        specs = [ParamSpec(name, tuple(p.shape), dtypes[name], update_classes[name]) for name, p in parameters.items()]
        self._low_precision: dict[str, tuple[nn.Parameter, Tensor]] = {}  # with their masters
        self._values: list[tuple[str, nn.Parameter, Tensor]] = []  # the values of each parameter as they lie here
        self._gradients: list[FlatGradient] = []
        self._slots: list[tuple[FlatGradient, int]] = []  # of each parameter
        self.main_grads: list[Tensor] = []
        self.local_shards: list[LocalShard] = []
        for layout in flat_layouts("replicated", specs, comm.world_size):
            master = torch.zeros(layout.real_numel, device=comm.device)
            # shared memory on CPU: the ranks read each other's gradients
            main_grad = comm.allocate(layout.numel, torch.float32)
            segment = Placement.REPLICATE.segment(layout, comm.rank)
            sending = LocalSending(segment, comm, main_grad, torch.float32)
            gradient = FlatGradient(segment, comm, main_grad, sending)
            for number, (slot, view) in enumerate(zip(layout.slots, slot_views(master, layout), strict=True)):
                spec, parameter = slot.spec, parameters[slot.spec.name]
                view.copy_(parameter.detach())
                parameter.data = view if spec.replica_dtype == torch.float32 else view.to(spec.replica_dtype)
                if spec.replica_dtype != torch.float32:
                    self._low_precision[spec.name] = (parameter, view)
                self._values.append((spec.name, parameter, parameter.detach()))
                own = slice(slot.start, slot.stop)
                self.local_shards.append(
                    LocalShard(
                        spec.name, spec.shape, 0, master[own], main_grad[own], spec.update_class, replicated=True
                    )
                )
                self._install_hook(parameter, spec.name, gradient, number)
                self._slots.append((gradient, number))
            self._gradients.append(gradient)
            self.main_grads.append(main_grad)
        self._missing = set(self._slots)  # those without a gradient in this step

    def _install_hook(self, parameter: nn.Parameter, name: str, gradient: FlatGradient, slot: int) -> None:
        def on_gradient(_: Tensor) -> None:
            grad, parameter.grad = parameter.grad, None  # it accumulates in the FP32 main grad instead
            if grad is None:  # a backward of the user's own has returned None
                return
            weight = self._on_gradient(name, grad)
            if weight is None:
                return
            is_first = (gradient, slot) in self._missing
            self._missing.discard((gradient, slot))
            gradient.sending.receive([slot], [grad], weight, is_first=is_first)

        hook_last(parameter, on_gradient)

    def check(self) -> None:
        """Raises ``ContractError`` for a parameter that was frozen or replaced."""
        for name, parameter, own in self._values:
            check_in_place(name, parameter, parameter, own)

    @property
    def replicas(self) -> list[Tensor]:
        """The low-precision parameters, which are not their own masters."""
        return [parameter.detach() for parameter, _ in self._low_precision.values()]

    def compute_shards(self, rank: int) -> Iterator[ComputeShard]:
        """Yields the same, each with the master that it is cast from."""
        for name, (parameter, master) in self._low_precision.items():
            values = parameter.detach().view(-1)
            yield ComputeShard(name, COMPUTE, 0, values, rank, master.view(-1), is_gathered=False)

    def finish(self) -> None:
        """Sums the main grads over the ranks; parameters without a gradient in this step get zeros."""
        for gradient, slot in self._missing:
            gradient.sending.receive_zeros(slot, is_first=True)
        self._missing = set(self._slots)
        for gradient in self._gradients:
            gradient.reduce()
        for gradient in self._gradients:
            gradient.finish_reduction(is_last=True)
        # all are started before the first wait, so that they overlap
        for handle in [gradient.start_gather() for gradient in self._gradients]:
            if handle is not None:
                handle.wait()

    @torch.no_grad()
    def refresh(self) -> None:
        for parameter, master in self._low_precision.values():
            parameter.copy_(master)

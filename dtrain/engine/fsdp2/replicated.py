"""Parameters that every rank holds whole beside those that a library shards: few and small ones, mostly norms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from dtrain.distributed.communicator import Communicator
from dtrain.parameters.local_shards import LocalShard, check_in_place
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.sharding.layout import ParamSpec, flat_layouts
from dtrain.sharding.reduce import UnshardedGradient
from dtrain.sharding.replicas import slot_views

OnGradient = Callable[[str, Tensor], Weight]
"""Sees the gradient of the parameter of that name as it leaves backward, and says how it weighs."""


class ReplicatedParameters:
    """FP32 masters in one flat buffer; a parameter that computes in FP32 is a view of its master.

    The gradients of a rank accumulate in FP32, and their sums are all-reduced once a step.

    Args:
        parameters: by name.
        dtypes: that they compute in.
        decayed: the names of those that weight decay acts on.
        comm: the ranks that share.
        on_gradient: is called once for each gradient of each micro-batch.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        dtypes: Mapping[str, torch.dtype],
        decayed: Collection[str],
        comm: Communicator,
        on_gradient: OnGradient,
    ) -> None:
        self._on_gradient = on_gradient
        specs = [ParamSpec(name, tuple(p.shape), dtypes[name], name in decayed) for name, p in parameters.items()]
        self._low: list[tuple[nn.Parameter, Tensor]] = []  # with their masters
        self._places: list[tuple[str, nn.Parameter, Tensor]] = []  # with its values
        self._gradients: list[UnshardedGradient] = []
        self.main_grads: list[Tensor] = []
        self.holdings: list[LocalShard] = []
        for layout in flat_layouts("replicated", specs, comm.world_size):
            master = torch.zeros(layout.real_numel, device=comm.device)
            main_grad = comm.allocate(layout.numel, torch.float32)
            gradient = UnshardedGradient(layout, comm, main_grad, True, None)
            for slot, (place, view) in enumerate(zip(layout.slots, slot_views(master, layout), strict=True)):
                spec, parameter = place.spec, parameters[place.spec.name]
                view.copy_(parameter.detach())
                parameter.data = view if spec.replica_dtype == torch.float32 else view.to(spec.replica_dtype)
                if spec.replica_dtype != torch.float32:
                    self._low.append((parameter, view))
                self._places.append((spec.name, parameter, parameter.detach()))
                own = slice(place.start, place.stop)
                self.holdings.append(
                    LocalShard(spec.name, spec.shape, 0, master[own], main_grad[own], spec.decayed, replicated=True)
                )
                self._install_hook(parameter, spec.name, gradient, slot)
            self._gradients.append(gradient)
            self.main_grads.append(main_grad)

    def _install_hook(self, parameter: nn.Parameter, name: str, gradient: UnshardedGradient, slot: int) -> None:
        def take(_: Tensor) -> None:
            grad, parameter.grad = parameter.grad, None
            assert grad is not None
            gradient.receive(slot, grad, self._on_gradient(name, grad))

        parameter.register_post_accumulate_grad_hook(take)

    def check(self) -> None:
        """Asserts that the parameters still compute with what lies here.

        Raises:
            ContractError: naming the parameter that was frozen or replaced.
        """
        for name, parameter, own in self._places:
            check_in_place(name, parameter, parameter, own)

    @property
    def replicas(self) -> list[Tensor]:
        """The parameters that are not masters themselves."""
        return [parameter.detach() for parameter, _ in self._low]

    def finish(self) -> None:
        """Sums the main grads over the ranks; what got no gradient in the step is zero."""
        pending = []
        for gradient in self._gradients:
            gradient.complete()
            pending.append(gradient.launch(list))
        for work in pending:
            work.wait()

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes low parameters what their masters are."""
        for parameter, master in self._low:
            parameter.copy_(master)

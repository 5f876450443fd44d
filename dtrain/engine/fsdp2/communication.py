"""The collectives under ``fully_shard``: sums of weighted gradients in FP32, and gathered weights, by our communicator.

``fully_shard`` asks twice for memory in each reduction: first for what is sent, [world_size * n], then for what
arrives, [n]. What arrives first in a step is the main grad itself; what follows is added to it.

On CPU the ranks read what is sent from each other's memory, which takes a tenth of the time of gloo's reduce-scatter.
It lies in two buffers that are used in turn: one is opened when the exchange from the other is complete, so all ranks
have begun that exchange, and each of them had completed the one before. So a reduction overlaps the backward of the
next unit. On a GPU the order of the streams, which ``fully_shard`` keeps, takes care of the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtrain.distributed.communicator import Communicator, Pending
from dtrain.engine.observation import ReduceDtypeCheck
from dtrain.errors import ContractError, UsageError
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.parameters.local_shards import require_trained
from dtrain.parameters.micro_batch_weight import Weight


class MicroBatch:
    """The backward under way, which all units share.

    Args:
        comm: who takes part.
        largest: elements of the largest gradient that is sent.
        numbers: of the parameters, by name, as ``monitor`` counts them.
        monitor: sees every gradient.

    Attributes:
        wire: sees what is sent, in the first step after set-up and after a load.
        num_reduced: units that have been reduced in this backward.
        buffers: that are sent from, and what arrives.
    """

    def __init__(self, comm: Communicator, largest: int, numbers: Mapping[str, int], monitor: GradientMonitor) -> None:
        self.comm = comm
        self.reduce_dtype_check: ReduceDtypeCheck | None = None
        self.num_reduced = 0
        self._monitor = monitor
        self._numbers = numbers
        self._weight: Weight | None = None
        self._number = 0
        self._pending = Pending()
        self._turn = 0
        self.buffers: list[Tensor] = []
        if comm.device.type == "cpu" and comm.world_size > 1:
            sent = [comm.allocate(largest, torch.float32) for _ in range(2)]
            self.buffers = [*sent, torch.empty(largest // comm.world_size)]

    def begin(self, weight: Weight, number: int) -> None:
        """Opens a backward of ``weight``; its gradients are watched as those of micro-batch ``number``."""
        self._weight, self._number, self.num_reduced = weight, number, 0

    def end(self) -> None:
        """No gradient comes any more."""
        self._weight = None

    def look(self, name: str, grad: Tensor) -> Weight:
        """Watches the gradient of a parameter as it leaves backward; returns its weight.

        Raises:
            UsageError: no backward of the engine is under way.
        """
        if self._weight is None:
            raise UsageError(f"'{name}' got a gradient outside engine.backward; call engine.backward(loss) instead")
        self._monitor.record_magnitude(grad)
        self._monitor.record_finiteness(self._number, self._numbers[name], [grad])
        return self._weight

    def sent(self, numel: int) -> Tensor:
        """FP32 [numel] for what is to be sent next."""
        self.complete()
        if not self.buffers:
            return torch.empty(numel, device=self.comm.device)
        self._turn = 1 - self._turn
        return self.buffers[self._turn][:numel]

    def arrived(self, numel: int) -> Tensor:
        """FP32 [numel] for a sum that is to be added to another."""
        return self.buffers[-1][:numel] if self.buffers else torch.empty(numel, device=self.comm.device)

    def start(self, pending: Pending) -> None:
        """Takes note of a reduction; on a GPU the stream waits for it, on CPU the next reduction."""
        self._pending = pending
        if self.buffers:
            self.comm.send_ready_message()
        else:
            pending.wait()

    def complete(self) -> None:
        """Waits for the last reduction."""
        self._pending.wait()


class UnitGradient:
    """The main grad of this rank's shard of one unit; the ``ReduceScatter`` of ``fully_shard``.

    Args:
        label: of the unit.
        parameters: its shards by name, in the order in which ``fully_shard`` lays them out.
        shapes: of the whole parameters.
        micro_batch: shared by all units.
    """

    def __init__(
        self,
        label: str,
        parameters: Mapping[str, nn.Parameter],
        shapes: Sequence[torch.Size],
        micro_batch: MicroBatch,
    ) -> None:
        self._label = f"gradients of {label or 'root'}"
        self._parameters = parameters
        self._micro_batch = micro_batch
        self._world_size = micro_batch.comm.world_size
        self._widths = shard_widths(shapes, self._world_size)
        self.numel = sum(self._widths)
        # not a slice of something larger: fully_shard makes views of its storage from the beginning
        self.main_grad = torch.zeros(self.numel, device=micro_batch.comm.device)
        self.is_fresh = True  # nothing of this step has arrived
        self._sent: Tensor | None = None

    def places(self) -> list[tuple[int, int]]:
        """(where it begins in the main grad, elements with padding) of each parameter's shard."""
        return [(sum(self._widths[:number]), width) for number, width in enumerate(self._widths)]

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What is sent, then what arrives; of one rank alone they are the same."""
        if self._sent is None:
            fresh_alone = self._world_size == 1 and self.is_fresh
            expected = self.numel * self._world_size
            if int(size[0]) != expected or dtype != torch.float32:
                for name, parameter in self._parameters.items():
                    require_trained(name, parameter)
                raise ContractError(
                    f"{self._label}: fully_shard reduces {int(size[0])} x {dtype}, expected {expected} x float32"
                )
            self._sent = self.main_grad if fresh_alone else self._micro_batch.sent(expected)
            return self._sent
        sent, self._sent = self._sent, None
        if self._world_size == 1:
            return sent
        return self.main_grad if self.is_fresh else self._micro_batch.arrived(self.numel)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sums over the ranks, each rank's gradient times its weight."""
        weight = self._look(input_tensor)
        if self._micro_batch.reduce_dtype_check is not None:
            self._micro_batch.reduce_dtype_check.record(self._label, input_tensor)
        if not weight.is_one:
            input_tensor.mul_(weight.value)
        pending = self._micro_batch.comm.reduce_scatter_sum(output_tensor, input_tensor, label=self._label)
        if not self.is_fresh:
            pending.then(lambda: self._add(output_tensor))
        self.is_fresh = False
        self._micro_batch.start(pending)

    def alone(self, output: Tensor) -> None:
        """The same with one rank, where ``fully_shard`` does not call for a reduction, but for this hook after it."""
        weight = self._look(output)
        if not weight.is_one:
            output.mul_(weight.value)
        if not self.is_fresh:
            self._add(output)
        self.is_fresh = False

    def _add(self, arrived: Tensor) -> None:
        self.main_grad.add_(arrived)

    def _look(self, sent: Tensor) -> Weight:
        self.forget()
        self._micro_batch.num_reduced += 1
        blocks = sent.view(self._world_size, -1).split(self._widths, dim=1)
        weights = [self._micro_batch.look(name, block) for name, block in zip(self._parameters, blocks, strict=True)]
        return weights[0]

    def check_places(self) -> None:
        """Asserts, after a reduction, that ``fully_shard`` reads each parameter's gradient from where we do.

        Raises:
            ContractError: it lays the parameters out otherwise.
        """
        for (name, parameter), (start, _) in zip(self._parameters.items(), self.places(), strict=True):
            found = None if parameter.grad is None else cast(DTensor, parameter.grad).to_local().storage_offset()
            if found not in (None, start):
                raise ContractError(
                    f"{self._label}: fully_shard reads '{name}' from element {found}, expected {start}; this version "
                    f"of PyTorch ({torch.__version__}) is not one that dtrain knows"
                )

    def forget(self) -> None:
        """Drops the gradients that ``fully_shard`` has put on the parameters: they are views of what lies here."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def finish(self) -> None:
        """A unit that no micro-batch of the step has used has a gradient of zeros."""
        if self.is_fresh:
            self.main_grad.zero_()


class UnitWeights:
    """Gathers the compute weights of one unit; the ``AllGather`` of ``fully_shard``.

    Args:
        label: of the unit.
        numel: elements of a rank's shard, padding included.
        dtype: that the unit computes in.
        comm: who takes part. On CPU its ranks read the shard from each other's memory; it is written again with other
            values only after the next vote.
    """

    def __init__(self, label: str, numel: int, dtype: torch.dtype, comm: Communicator) -> None:
        self._label = f"weights of {label or 'root'}"
        self._comm = comm
        shares = comm.device.type == "cpu" and comm.world_size > 1
        self.shard = comm.allocate(numel, dtype) if shares else None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The gathered weights; each gather has its own."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gathers on the current stream."""
        if self.shard is not None:
            input_tensor = self.shard.copy_(input_tensor)
        self._comm.all_gather(output_tensor, input_tensor, label=self._label).wait()


def shard_widths(shapes: Sequence[torch.Size], world_size: int) -> list[int]:
    """Elements of a rank's shard of each parameter, padding included.

    ``fully_shard`` cuts the first dimension into equal parts; the last ranks' may be short or empty.
    """
    return [-(-shape[0] // world_size) * shape[1:].numel() for shape in shapes]

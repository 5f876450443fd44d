"""Custom collectives of ``fully_shard``: FP32 sums of weighted gradients, and all-gathers, through the communicator.

``fully_shard`` allocates twice in each reduction: first the send buffer, [world_size * n], then the receive buffer,
[n]. The first receive buffer of a step is the main grad itself; later sums are added to it.

[Note: two send buffers] On CPU the ranks read the send buffers from each other's memory, which takes a tenth of the
time of gloo's reduce-scatter. Two buffers alternate. A rank writes one only after its reduction from the other is
complete. By then all ranks have started that reduction, and each rank had completed the one before it, which read the
buffer that is written now. So a reduction overlaps the backward of the next unit. On a GPU the stream order that
``fully_shard`` keeps has the same effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtrain.distributed.communicator import Communicator, Handle
from dtrain.engine.observation import ReduceDtypeCheck
from dtrain.errors import ContractError
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.parameters.local_shards import require_trained
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.parameters.running_backward import require_running


class BackwardState:
    """State of the current backward and its reductions, shared by all units.

    Args:
        comm: the ranks.
        largest: elements of the largest send buffer.
        numbers: index of each parameter in ``monitor``, by name.
        monitor: records every gradient as it leaves this rank's backward.

    Attributes:
        reduce_dtype_check: checks send buffers in the first step after set-up and after a load; else None.
        num_reduced: units that have been reduced in this backward.
        is_second_order: whether a graph of ``autograd.grad(..., create_graph=True)`` may hold unsharded weights.
        is_single_rank: whether ``fully_shard`` calls no reduction, only its all-reduce hook.
    """

    def __init__(self, comm: Communicator, largest: int, numbers: Mapping[str, int], monitor: GradientMonitor) -> None:
        self.comm = comm
        self.reduce_dtype_check: ReduceDtypeCheck | None = None
        self.num_reduced = 0
        self.is_second_order = False
        self._monitor = monitor
        self._numbers = numbers
        self._weight: Weight | None = None
        self._number = 0
        self._in_flight: tuple[UnitGradient, Handle, Tensor | None] | None = None
        self._next_buffer = 0
        self._largest = largest
        self._receive_buffer: Tensor | None = None  # from the second micro-batch of a step on
        self.is_single_rank = comm.process_group is None
        alternates = comm.device.type == "cpu" and not self.is_single_rank
        self._send_buffers = [comm.allocate(largest, torch.float32) for _ in range(2 if alternates else 0)]

    @property
    def buffers(self) -> list[Tensor]:
        """Buffers that outlive a backward: the send buffers, on CPU, and the receive buffer once it is used."""
        return self._send_buffers + ([] if self._receive_buffer is None else [self._receive_buffer])

    def begin(self, weight: Weight, number: int) -> None:
        self._weight, self._number, self.num_reduced = weight, number, 0

    def end(self) -> None:
        self._weight = None  # a gradient outside engine.backward is an error

    def takes(self, name: str) -> bool:
        """Whether this engine's backward runs, so that it takes the gradient of ``name``, and not another engine's.

        Raises:
            UsageError: no engine's backward runs.
        """
        if self._weight is None:
            require_running(name)  # [Note: another engine's backward]
        return self._weight is not None

    def take(self, name: str, grad: Tensor) -> Weight | None:
        """Receives and records a gradient if this engine's backward runs; else returns None."""
        if not self.takes(name):
            return None
        self.receive(name)
        return self.record(name, grad)

    def receive(self, name: str) -> None:
        """Records that a parameter has been given a gradient."""
        self._monitor.receive(self._numbers[name])

    def record(self, name: str, grad: Tensor, num_padding: int = 0) -> Weight | None:
        """Records the gradient of a parameter as it leaves backward; returns its weight.

        ``num_padding``: zeros in ``grad`` beside its own elements.
        """
        self._monitor.record_magnitude(self._numbers[name], grad, num_padding=num_padding)
        self._monitor.record_finiteness(self._number, self._numbers[name], grad)
        return self._weight

    def send_buffer(self, numel: int) -> Tensor:
        """Returns FP32 [numel] to send from in the next reduction."""
        self.finish_reduction()  # [Note: two send buffers]
        if not self._send_buffers:
            return torch.empty(numel, device=self.comm.device)
        self._next_buffer = 1 - self._next_buffer
        return self._send_buffers[self._next_buffer][:numel]

    def receive_buffer(self, numel: int) -> Tensor:
        """Returns FP32 [numel] for a sum that is added to the main grad."""
        # one is enough: it is added before the next reduction starts, which waits in send_buffer; on a GPU it is
        # written, added and written again on one stream. A new one would live until the backward ends, for each unit
        if self._receive_buffer is None:
            self._receive_buffer = torch.empty(self._largest // self.comm.world_size, device=self.comm.device)
        return self._receive_buffer[:numel]

    def start_reduction(self, gradient: UnitGradient, handle: Handle, received: Tensor | None) -> None:
        """Keeps a reduction that the next one waits for; on a GPU the current stream waits for it now.

        ``received`` is what the wait adds to the main grad; None if the sum arrives there itself.
        """
        self._in_flight = (gradient, handle, received)
        if self._send_buffers:
            self.comm.flush()  # now, or the others would wait until this rank waits
        else:
            self.finish_reduction()

    def finish_reduction(self) -> None:
        if self._in_flight is None:
            return
        (gradient, handle, received), self._in_flight = self._in_flight, None
        handle.wait()
        if received is not None:
            gradient.main_grad.add_(received)


class UnitGradient:
    """The main grad of this rank's shard of one unit, filled as the custom ``ReduceScatter`` of ``fully_shard``.

    Args:
        label: name of the unit.
        parameters: its shards by name, in the order in which ``fully_shard`` lays them out.
        shapes: shapes of the whole parameters.
        backward_state: shared by all units.
    """

    def __init__(
        self,
        label: str,
        parameters: Mapping[str, nn.Parameter],
        shapes: Sequence[torch.Size],
        backward_state: BackwardState,
    ) -> None:
        self._label = f"gradients of {label or 'root'}"
        self._parameters = parameters
        self._state = backward_state
        self._world_size = backward_state.comm.world_size
        self._widths = shard_widths(shapes, self._world_size)
        # zeros that fill up the shards of the last ranks
        self._paddings = [
            width * self._world_size - shape.numel() for width, shape in zip(self._widths, shapes, strict=True)
        ]
        self.numel = sum(self._widths)
        # a storage of its own, because fully_shard makes views from the beginning of the storage
        self.main_grad = torch.zeros(self.numel, device=backward_state.comm.device)
        self.is_fresh = True  # no sum of this step has arrived
        self._send_buffer: Tensor | None = None  # between the two calls of allocate

    def slots(self) -> list[tuple[int, int]]:
        """Returns (offset in the main grad, elements with padding) of each parameter's shard."""
        return [(sum(self._widths[:number]), width) for number, width in enumerate(self._widths)]

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns the send buffer, then the receive buffer; on a single rank they are the same tensor."""
        if self._send_buffer is None:
            expected = self.numel * self._world_size
            if int(size[0]) != expected or dtype != torch.float32:
                # a parameter that was frozen is the likely reason
                for name, parameter in self._parameters.items():
                    require_trained(name, parameter)
                raise ContractError(
                    f"{self._label}: fully_shard reduces {int(size[0])} x {dtype}, expected {expected} x float32"
                )
            is_main_grad = self._state.is_single_rank and self.is_fresh
            self._send_buffer = self.main_grad if is_main_grad else self._state.send_buffer(expected)
            return self._send_buffer
        send_buffer, self._send_buffer = self._send_buffer, None
        if self._state.is_single_rank:
            return send_buffer
        return self.main_grad if self.is_fresh else self._state.receive_buffer(self.numel)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Starts the sum over the ranks of each rank's gradient times its weight."""
        weight = self._record(input_tensor)  # as it left backward: not weighted, not summed over ranks
        if not weight.is_one:  # in FP32 and before the sum: ranks may have different weights
            input_tensor.mul_(weight.value)
        handle = self._state.comm.reduce_scatter_sum(output_tensor, input_tensor, label=self._label)
        received = None if self.is_fresh else output_tensor
        self.is_fresh = False
        self._state.start_reduction(self, handle, received)

    def on_single_rank(self, output: Tensor) -> None:
        """Does the same on a single rank, where ``fully_shard`` calls no reduction, only its all-reduce hook."""
        weight = self._record(output)
        if not weight.is_one:
            output.mul_(weight.value)
        if not self.is_fresh:
            self.main_grad.add_(output)
        self.is_fresh = False

    def _record(self, send_buffer: Tensor) -> Weight:
        # else fully_shard would add this sum to the last one, which is a view of the main grad
        self.drop_parameter_grads()
        self._state.num_reduced += 1
        if self._state.reduce_dtype_check is not None:
            self._state.reduce_dtype_check.record(self._label, send_buffer)
        blocks = send_buffer.view(self._world_size, -1).split(self._widths, dim=1)
        weights = [
            self._state.record(name, block, num_padding)
            for name, block, num_padding in zip(self._parameters, blocks, self._paddings, strict=True)
        ]
        assert weights[0] is not None  # units reduce in this engine's backward only
        return weights[0]

    def check_slots(self) -> None:
        """Checks after a reduction that ``fully_shard`` lays the gradients out as ``slots`` does.

        Raises:
            ContractError: its layout differs.
        """
        for (name, parameter), (start, _) in zip(self._parameters.items(), self.slots(), strict=True):
            found = None if parameter.grad is None else cast(DTensor, parameter.grad).to_local().storage_offset()
            if found not in (None, start):
                raise ContractError(
                    f"{self._label}: fully_shard reads '{name}' from element {found}, expected {start}; this version "
                    f"of PyTorch ({torch.__version__}) is not one that dtrain knows"
                )

    def drop_parameter_grads(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def finish(self) -> None:
        """Sets the main grad to zero if no micro-batch of the step used the unit."""
        if self.is_fresh:
            self.main_grad.zero_()


class UnitWeights:
    """All-gathers the compute weights of one unit, as the custom ``AllGather`` of ``fully_shard``.

    Args:
        label: name of the unit.
        numel: elements of a rank's shard, padding included.
        dtype: dtype in which the unit computes.
        comm: the ranks. On CPU they read the shard from each other's memory; its values change only after the next
            vote, which every rank joins after its last read.

    Attributes:
        shard: this rank's part of the last all-gather, on CPU; else None.
        is_current: whether it holds the weights of the masters as they are; reset by who changes those.
    """

    def __init__(self, label: str, numel: int, dtype: torch.dtype, comm: Communicator) -> None:
        self._label = f"weights of {label or 'root'}"
        self._comm = comm
        keeps_shard = comm.device.type == "cpu" and comm.process_group is not None
        self.shard = comm.allocate(numel, dtype) if keeps_shard else None
        self.is_current = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for the gathered weights, new for each all-gather."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Runs the all-gather on the current stream."""
        if self.shard is not None:
            input_tensor = self.shard.copy_(input_tensor)
            self.is_current = True
        self._comm.all_gather(output_tensor, input_tensor, label=self._label).wait()


def shard_widths(shapes: Sequence[torch.Size], world_size: int) -> list[int]:
    """Returns the elements of a rank's shard of each parameter, padding included.

    ``fully_shard`` splits the first dimension into equal parts; those of the last ranks may be short or empty.
    """
    return [-(-shape[0] // world_size) * shape[1:].numel() for shape in shapes]

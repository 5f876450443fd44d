"""The model states in DeepSpeed's optimizers on this rank, by stage: masters, gradients, compute weights.

DeepSpeed concatenates the parameters of each weight-decay class and splits the result among the ranks (stages 1 and 2),
or splits each parameter (stage 3). Each local tensor becomes a ``Partition`` with the intervals of parameters in
it, so that the engine is the same for every optimizer of DeepSpeed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.engine.adapters.deepspeed.optimizer import Partition
from dtrain.parameters.compute_shard import COMPUTE, ComputeShard
from dtrain.parameters.taken_gradient import held_gradient
from dtrain.sharding.layout import ParamSpec, ShardInterval


class ZeroState(ABC):
    """View of this rank's model states in one of DeepSpeed's optimizers.

    Args:
        engine: DeepSpeed's engine.
        specs: the trainable parameters by ``id``.

    Attributes:
        partitions: all of this rank's masters.
        reduces_each: whether gradients are reduced in each backward, not once a step.
    """

    reduces_each = False

    def __init__(self, engine: Any, specs: Mapping[int, ParamSpec]) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.specs = specs
        self.partitions = tuple(self._cut())

    @abstractmethod
    def _cut(self) -> Iterator[Partition]:
        """Yields the partitions in the order of the optimizer."""

    def begin_backward(self) -> None:  # noqa: B027 - most have nothing to drop
        """Drops gradients of an earlier micro-batch that DeepSpeed would add to those of this one by mistake."""

    def reduce(self) -> None:
        """Reduces the sums of a step, unless the backward passes have done so."""
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.allreduce_gradients()

    def release(self) -> None:  # noqa: B027 - only stage 3 unshards
        """Frees the weights that forwards have left unsharded."""

    def main_grads(self) -> list[Tensor]:
        """Returns the reduced gradient of each partition, FP32 [its elements]: the storage that the update reads."""
        grads = [held_gradient(partition.master) for partition in self.partitions]
        return [grad.view(-1) for grad in grads if grad is not None]

    @abstractmethod
    def clear(self, *, stepped: bool) -> None:
        """Drops all gradients; if DeepSpeed has ``stepped``, those that its step leaves behind."""

    @abstractmethod
    def refresh(self) -> None:
        """Casts the masters into the compute weights of all ranks."""

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """Returns the compute weights on this rank, unless they are the masters themselves."""

    @abstractmethod
    def compute_shards(self) -> Iterator[ComputeShard]:
        """Yields the compute weights on this rank, unless they are the masters themselves."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Returns the FP32 tensors that hold gradients now."""


def zero_state(engine: Any, specs: Mapping[int, ParamSpec]) -> ZeroState:
    """Returns the view of the optimizer that DeepSpeed has chosen for the stage and the dtypes."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return _Replicated(engine, specs)
    if stage == 3:
        return _Sharded(engine, specs)
    return _FlatSums(engine, specs) if hasattr(engine.optimizer, "bf16_groups_flat") else _Flat(engine, specs)


class _Replicated(ZeroState):
    """Stage 0: the parameters are the masters, on every rank; DeepSpeed reduces their FP32 gradients."""

    def _cut(self) -> Iterator[Partition]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                spec = self.specs[id(parameter)]
                yield Partition(parameter, (ShardInterval(spec, 0, parameter.numel(), 0),), spec.update_class)

    def clear(self, *, stepped: bool) -> None:
        if not stepped:
            self.engine.zero_grad()

    def refresh(self) -> None:
        """Does nothing: the compute weights are the masters."""

    def weights(self) -> list[Tensor]:
        return []

    def compute_shards(self) -> Iterator[ComputeShard]:
        return iter(())

    def gradients(self) -> list[Tensor]:
        return self.main_grads()


class _FlatSums(ZeroState):
    """Stage 1 in BF16: every rank sums whole FP32 gradients, and owns a part of the masters and optimizer states."""

    def _cut(self) -> Iterator[Partition]:
        optimizer = self.optimizer
        for parameters, master in zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True):
            yield self._partition(parameters, master)

    def _partition(self, parameters: Sequence[nn.Parameter], master: Tensor) -> Partition:
        update_class = self.specs[id(parameters[0])].update_class  # a group of the optimizer has one
        return Partition(master, self._intervals(parameters, master.numel(), self.engine.global_rank), update_class)

    def _intervals(self, parameters: Iterable[nn.Parameter], size: int, rank: int) -> tuple[ShardInterval, ...]:
        """Returns the intervals in the ``size`` elements of ``rank`` of the concatenated parameters."""
        start = rank * size
        found, offset = [], 0
        for parameter in parameters:
            low, high = max(start, offset), min(start + size, offset + parameter.numel())
            if low < high:
                found.append(ShardInterval(self.specs[id(parameter)], low - offset, high - offset, low - start))
            offset += parameter.numel()
        return tuple(found)

    def begin_backward(self) -> None:
        # they are summed in FP32 already; DeepSpeed clears them itself only if its hook finds a tensor in the output
        self.optimizer.clear_lp_grads()

    def reduce(self) -> None:
        # DeepSpeed's norm is a collective that a rank with only dummy micro-batches must join
        self.optimizer.fp32_groups_has_gradients = [[True] * len(group) for group in self.optimizer.bf16_groups]
        super().reduce()

    def main_grads(self) -> list[Tensor]:
        return list(self.optimizer.fp32_groups_gradient_flat_partition)

    def clear(self, *, stepped: bool) -> None:
        if not stepped:
            self.optimizer.zero_grad()

    def refresh(self) -> None:
        self.optimizer.update_lp_params()

    def weights(self) -> list[Tensor]:
        return list(self.optimizer.bf16_groups_flat)

    def _groups(self) -> Sequence[Sequence[nn.Parameter]]:
        """Returns the parameters of each of ``weights``."""
        groups: Sequence[Sequence[nn.Parameter]] = self.optimizer.bf16_groups
        return groups

    def compute_shards(self) -> Iterator[ComputeShard]:
        engine = self.engine
        for parameters, weights, partition in zip(self._groups(), self.weights(), self.partitions, strict=True):
            master = partition.master.detach().view(-1)
            for owner, values in enumerate(weights.detach().view(engine.world_size, -1)):
                for found in self._intervals(parameters, master.numel(), owner):
                    own = slice(found.offset, found.offset + found.stop - found.start)
                    source = master[own] if owner == engine.global_rank else None
                    yield ComputeShard(found.spec.name, COMPUTE, found.start, values[own], owner, source, True)

    def gradients(self) -> list[Tensor]:
        return list(self.optimizer.fp32_groups_gradients_flat)


class _Flat(_FlatSums):
    """Stages 1 and 2 otherwise: DeepSpeed allocates the reduced gradients of this rank in each step."""

    def __init__(self, engine: Any, specs: Mapping[int, ParamSpec]) -> None:
        super().__init__(engine, specs)
        self.reduces_each = self.optimizer.partition_gradients

    def _cut(self) -> Iterator[Partition]:
        optimizer = self.optimizer
        for parameters, master in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
            yield self._partition(parameters, master)

    def begin_backward(self) -> None:
        """Drops nothing: DeepSpeed accumulates into the gradients that it keeps."""

    def reduce(self) -> None:
        optimizer = self.optimizer
        if not self.reduces_each:
            self._fill_gaps()
            ZeroState.reduce(self)
        elif optimizer.cpu_offload or not optimizer.is_gradient_accumulation_boundary():
            # the last backward has not reduced unused parameters, or nothing at all if the loop ended before it
            self.engine.set_gradient_accumulation_boundary(True)
            optimizer.finalize_gradient_accumulation_boundary()
        optimizer._wait_for_offload_copies()

    def _fill_gaps(self) -> None:
        """Gives parameters without a gradient zeros: DeepSpeed skips them, and ranks would sum different parameters."""
        self.optimizer.setup_buckets()
        for group in self.optimizer.bit16_groups:
            for parameter in group:
                if self.optimizer.get_gradient_for_reduction(parameter) is None:
                    parameter.grad = torch.zeros_like(parameter)
        if self.optimizer.use_grad_accum_attribute:
            self.optimizer.fill_grad_accum_attribute()

    def main_grads(self) -> list[Tensor]:
        if self.optimizer.cpu_offload:
            return ZeroState.main_grads(self)
        return [self._flat_gradient(number) for number in range(len(self.partitions))]

    def _flat_gradient(self, number: int) -> Tensor:
        from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup

        grads = self.optimizer.averaged_gradients[number]
        # flattened before the vote, which then reads the storage that DeepSpeed's step takes
        if not isinstance(grads, GradPartitionBufferGroup):
            flat = torch.cat([grad.reshape(-1) for grad in grads]).float()
            grads = self.optimizer.averaged_gradients[number] = GradPartitionBufferGroup([flat], flat)
        partition: Tensor = grads.flat_partition
        return partition

    def clear(self, *, stepped: bool) -> None:
        optimizer = self.optimizer
        if not stepped:
            optimizer.zero_grad()
            for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
                for number in gradients:
                    gradients[number] = None  # else the next backward adds to them
            optimizer.micro_step_id = -1  # as before the first backward
            if optimizer.cpu_offload:
                optimizer.reset_cpu_buffers()
                optimizer._offload_accumulated_param_ids = set()
        if optimizer.cpu_offload:
            # else a parameter that the next step does not use would keep this step's gradient
            for buffer in (*optimizer.accumulated_grads_in_cpu.values(), *self.main_grads()):
                buffer.zero_()

    def weights(self) -> list[Tensor]:
        return list(self.optimizer.bit16_groups_flat)

    def _groups(self) -> Sequence[Sequence[nn.Parameter]]:
        groups: Sequence[Sequence[nn.Parameter]] = self.optimizer.bit16_groups
        return groups

    def gradients(self) -> list[Tensor]:
        if self.optimizer.cpu_offload:
            return self.main_grads()
        return [g for grads in self.optimizer.averaged_gradients.values() if grads is not None for g in grads]


class _Sharded(ZeroState):
    """Stage 3: each parameter is split among the ranks."""

    reduces_each = True

    def _cut(self) -> Iterator[Partition]:
        optimizer, rank = self.optimizer, self.engine.global_rank
        for parameters, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            found, offset = [], 0
            for parameter in parameters:
                size = parameter.partition_numel()
                # the shards of the last ranks reach into padding, or lie in it
                start, stop = (min(bound, parameter.ds_numel) for bound in (rank * size, (rank + 1) * size))
                if start < stop:
                    found.append(ShardInterval(self.specs[id(parameter)], start, stop, offset))
                offset += size
            yield Partition(master, tuple(found), self.specs[id(parameters[0])].update_class)

    def begin_backward(self) -> None:
        # only a forward counts the backward before it, so two in a row would leave the second's gradients alone
        self.optimizer.clear_backward_seen_flag()

    def reduce(self) -> None:
        # as at stage 2
        optimizer = self.optimizer
        self.engine.set_gradient_accumulation_boundary(True)
        optimizer.finalize_gradient_accumulation_boundary()
        if not optimizer.offload_optimizer:  # else a parameter that was frozen in the last backward would have zeros
            grads = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
            for number, group in enumerate(optimizer.fp16_groups):
                optimizer.averaged_gradients[number] = [grads[parameter.ds_id] for parameter in group]
        # DeepSpeed forms the mean, the vote and the update expect the sum
        for grad in self.main_grads():
            grad.mul_(self.engine.world_size)

    def main_grads(self) -> list[Tensor]:
        if self.optimizer.offload_optimizer:
            return super().main_grads()
        sizes = [partition.master.numel() for partition in self.partitions]
        return list(self.optimizer.grad_partitions_flat_buffer.split(sizes))

    def clear(self, *, stepped: bool) -> None:
        optimizer = self.optimizer
        if not stepped:
            optimizer.zero_grad()
            optimizer.averaged_gradients = {}
            optimizer.reset_cpu_buffers()
            optimizer._offload_boundary_param_ids = set()
        # else a parameter that the next step does not use would keep this step's gradient
        for buffer in (optimizer.grad_partitions_flat_buffer, *self.main_grads()):
            buffer.zero_()

    @torch.no_grad()
    def refresh(self) -> None:
        for weights, partition in zip(self.weights(), self.partitions, strict=True):
            weights.copy_(partition.master)
        # small parameters stay unsharded, so their full copies are stale
        kept = [p for p in self.optimizer.persistent_parameters if p.requires_grad]
        if kept:
            kept[0].all_gather(kept)

    def release(self) -> None:
        self.optimizer.empty_partition_cache()

    def weights(self) -> list[Tensor]:
        return list(self.optimizer.fp16_partitioned_groups_flat)

    def compute_shards(self) -> Iterator[ComputeShard]:
        rank = self.engine.global_rank
        for weights, partition in zip(self.weights(), self.partitions, strict=True):
            master = partition.master.detach().view(-1)
            for found in partition.intervals:
                own = slice(found.offset, found.offset + found.stop - found.start)
                yield ComputeShard(found.spec.name, COMPUTE, found.start, weights[own], rank, master[own], False)

    def gradients(self) -> list[Tensor]:
        return [self.optimizer.grad_partitions_flat_buffer]

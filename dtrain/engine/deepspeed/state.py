"""What DeepSpeed's optimizers hold of the model on this rank, stage by stage: masters, gradients, compute weights.

DeepSpeed lays the parameters of each weight-decay class end to end and cuts the whole among the ranks (stages 1 and 2),
or cuts each parameter (stage 3). Here every such stretch is a :class:`Partition` of named intervals, so that the engine
need not know which optimizer it talks to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.optim.adamw import AdamW, UpdateGroup, UpdateScalars
from dtrain.optim.fused import ParameterListAdamW


@dataclass(frozen=True)
class Part:
    """The elements ``start`` to ``stop`` of a parameter, and where they lie in a partition."""

    name: str
    start: int
    stop: int
    place: int


@dataclass(frozen=True)
class Partition:
    """One stretch of this rank's masters.

    Attributes:
        master: FP32, what the optimizer updates; of any shape where it is one whole parameter.
        parts: what lies in it, in row-major order.
    """

    master: Tensor
    parts: tuple[Part, ...]


class ScaledAdamW(torch.optim.Optimizer):
    """The optimizer that DeepSpeed wraps: our AdamW on whatever partition it is given.

    Args:
        rule: hyper-parameters.
        decayed: parameters with weight decay; either list may be empty.
        plain: parameters without.

    Attributes:
        scalars: of the next update; to be set before it.
    """

    def __init__(self, rule: AdamW, decayed: Sequence[nn.Parameter], plain: Sequence[nn.Parameter]) -> None:
        groups = [
            {"params": list(held), "decayed": decays} for held, decays in ((decayed, True), (plain, False)) if held
        ]
        super().__init__(groups, {"lr": rule.lr})
        self._rule = rule
        self.scalars: UpdateScalars | None = None

    def add_moments(self, partitions: Iterable[Partition]) -> None:
        """Gives each partition its moments, zeros, before the first update."""
        for partition in partitions:
            self.state[partition.master] = {kind: torch.zeros_like(partition.master.data) for kind in _MOMENTS}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates what its groups hold now; DeepSpeed puts one partition after the other there."""
        assert self.scalars is not None, "DeepSpeed updates outside of engine.step"
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in held]
            update = UpdateGroup(group["decayed"], held, *([state[kind] for state in states] for kind in _MOMENTS))
            ParameterListAdamW(self._rule, [update]).update([[p.grad for p in held]] if held else [], self.scalars)


_MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroState(ABC):
    """This rank's part of the model states, in the hands of one of DeepSpeed's optimizers.

    Args:
        engine: DeepSpeed's.
        names: of the trainable parameters, by their identity.

    Attributes:
        partitions: all of this rank's masters.
        reduces_each: whether gradients are reduced in each backward, not once a step.
    """

    reduces_each = False

    def __init__(self, engine: Any, names: Mapping[int, str]) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.names = names
        self.partitions = tuple(self._cut())

    @abstractmethod
    def _cut(self) -> Iterator[Partition]:
        """The partitions as they lie in the optimizer."""

    def begin_backward(self) -> None:  # noqa: B027 - most have nothing to drop
        """Drops what of an earlier micro-batch this one's gradients would be added to by mistake."""

    def reduce(self) -> None:
        """Reduces the sums of a step, where the backward passes have not done so."""
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.allreduce_gradients()

    def release(self) -> None:  # noqa: B027 - only stage 3 gathers
        """Frees the weights that forwards have left gathered."""

    @abstractmethod
    def main_grads(self) -> list[Tensor]:
        """The reduced gradient of each partition, FP32 [its elements]: live storage that the update will read."""

    @abstractmethod
    def clear(self, *, stepped: bool) -> None:
        """Drops all gradients; where DeepSpeed has ``stepped``, what its step leaves behind."""

    @abstractmethod
    def refresh(self) -> None:
        """Casts the masters into the compute weights, of all ranks."""

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """The compute weights on this rank, where they are not the masters themselves."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """The FP32 tensors that hold gradients now."""


def zero_state(engine: Any, names: Mapping[int, str]) -> ZeroState:
    """The view of the optimizer that DeepSpeed has chosen for the stage and the dtypes."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return _Replicated(engine, names)
    if stage == 3:
        return _Sharded(engine, names)
    return _FlatSums(engine, names) if hasattr(engine.optimizer, "bf16_groups_flat") else _Flat(engine, names)


class _Replicated(ZeroState):
    """Stage 0: the parameters are the masters, on every rank; DeepSpeed reduces their FP32 gradients."""

    def _cut(self) -> Iterator[Partition]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                yield Partition(parameter, (Part(self.names[id(parameter)], 0, parameter.numel(), 0),))

    def main_grads(self) -> list[Tensor]:
        return [partition.master.grad.view(-1) for partition in self.partitions if partition.master.grad is not None]

    def clear(self, *, stepped: bool) -> None:
        if not stepped:
            self.engine.zero_grad()

    def refresh(self) -> None:
        """They are the masters."""

    def weights(self) -> list[Tensor]:
        return []

    def gradients(self) -> list[Tensor]:
        return self.main_grads()


class _FlatSums(ZeroState):
    """Stage 1 in BF16: every rank sums whole FP32 gradients, and owns a stretch of masters and moments."""

    def _cut(self) -> Iterator[Partition]:
        optimizer = self.optimizer
        for parameters, master in zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, strict=True):
            yield Partition(master, self._parts(parameters, master.numel()))

    def _parts(self, parameters: Iterable[nn.Parameter], size: int) -> tuple[Part, ...]:
        """What lies in this rank's stretch, of ``size`` elements, of parameters laid end to end."""
        start = self.engine.global_rank * size
        parts, offset = [], 0
        for parameter in parameters:
            low, high = max(start, offset), min(start + size, offset + parameter.numel())
            if low < high:
                parts.append(Part(self.names[id(parameter)], low - offset, high - offset, low - start))
            offset += parameter.numel()
        return tuple(parts)

    def begin_backward(self) -> None:
        # in FP32 they are summed already; it does this itself from a hook on the forward's output, where it finds one
        self.optimizer.clear_lp_grads()

    def reduce(self) -> None:
        # a rank whose micro-batches were all dummies takes part in its norm as well
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

    def gradients(self) -> list[Tensor]:
        return list(self.optimizer.fp32_groups_gradients_flat)


class _Flat(_FlatSums):
    """Stages 1 and 2 otherwise: DeepSpeed makes the reduced gradients of this rank's stretch anew in each step."""

    def __init__(self, engine: Any, names: Mapping[int, str]) -> None:
        super().__init__(engine, names)
        self.reduces_each = self.optimizer.partition_gradients

    def _cut(self) -> Iterator[Partition]:
        optimizer = self.optimizer
        for parameters, master in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
            yield Partition(master, self._parts(parameters, master.numel()))

    def begin_backward(self) -> None:
        """Nothing: it means to add to what it keeps."""

    def reduce(self) -> None:
        optimizer = self.optimizer
        if not self.reduces_each:
            self._fill_gaps()
            ZeroState.reduce(self)
        elif optimizer.cpu_offload or not optimizer.is_gradient_accumulation_boundary():
            # the last backward has not finished what it did not use, or anything where the loop was left before it
            self.engine.set_gradient_accumulation_boundary(True)
            optimizer.finalize_gradient_accumulation_boundary()
        optimizer._wait_for_offload_copies()

    def _fill_gaps(self) -> None:
        """It leaves out what has no gradient on this rank, and would then add up different parameters of the ranks."""
        self.optimizer.setup_buckets()
        for group in self.optimizer.bit16_groups:
            for parameter in group:
                if self.optimizer.get_gradient_for_reduction(parameter) is None:
                    parameter.grad = torch.zeros_like(parameter)
        if self.optimizer.use_grad_accum_attribute:
            self.optimizer.fill_grad_accum_attribute()

    def main_grads(self) -> list[Tensor]:
        if self.optimizer.cpu_offload:
            return [partition.master.grad for partition in self.partitions if partition.master.grad is not None]
        return [self._flat_gradient(number) for number in range(len(self.partitions))]

    def _flat_gradient(self, number: int) -> Tensor:
        from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup

        grads = self.optimizer.averaged_gradients[number]
        if not isinstance(grads, GradPartitionBufferGroup):
            flat = torch.cat([grad.reshape(-1) for grad in grads]).float()
            grads = self.optimizer.averaged_gradients[number] = GradPartitionBufferGroup([flat], flat)
        partition: Tensor = grads.flat_partition
        return partition

    def clear(self, *, stepped: bool) -> None:
        optimizer = self.optimizer
        if not stepped:
            optimizer.zero_grad()
            for held in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
                for number in held:
                    held[number] = None  # else the next backward adds to them
            optimizer.micro_step_id = -1  # as before the first backward
            if optimizer.cpu_offload:
                optimizer.reset_cpu_buffers()
                optimizer._offload_accumulated_param_ids = set()
        if optimizer.cpu_offload:
            # of a parameter that the next step does not use, what is here now would be taken for its gradient
            for buffer in (*optimizer.accumulated_grads_in_cpu.values(), *self.main_grads()):
                buffer.zero_()

    def weights(self) -> list[Tensor]:
        return list(self.optimizer.bit16_groups_flat)

    def gradients(self) -> list[Tensor]:
        if self.optimizer.cpu_offload:
            return self.main_grads()
        return [g for held in self.optimizer.averaged_gradients.values() if held is not None for g in held]


class _Sharded(ZeroState):
    """Stage 3: each parameter is cut among the ranks."""

    reduces_each = True

    def _cut(self) -> Iterator[Partition]:
        optimizer, rank = self.optimizer, self.engine.global_rank
        for parameters, master in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
            parts, place = [], 0
            for parameter in parameters:
                size = parameter.partition_numel()
                start, stop = (min(bound, parameter.ds_numel) for bound in (rank * size, (rank + 1) * size))
                if start < stop:
                    parts.append(Part(self.names[id(parameter)], start, stop, place))
                place += size
            yield Partition(master, tuple(parts))

    def reduce(self) -> None:
        # as at stage 2
        self.engine.set_gradient_accumulation_boundary(True)
        self.optimizer.finalize_gradient_accumulation_boundary()
        # DeepSpeed has taken the mean
        for grad in self.main_grads():
            grad.mul_(self.engine.world_size)

    def main_grads(self) -> list[Tensor]:
        if self.optimizer.offload_optimizer:
            return [partition.master.grad for partition in self.partitions if partition.master.grad is not None]
        sizes = [partition.master.numel() for partition in self.partitions]
        return list(self.optimizer.grad_partitions_flat_buffer.split(sizes))

    def clear(self, *, stepped: bool) -> None:
        optimizer = self.optimizer
        if not stepped:
            optimizer.zero_grad()
            optimizer.averaged_gradients = {}
            optimizer.reset_cpu_buffers()
            optimizer._offload_boundary_param_ids = set()
        # of a parameter that the next step does not use, what is here now would be taken for its gradient
        for buffer in (optimizer.grad_partitions_flat_buffer, *self.main_grads()):
            buffer.zero_()

    @torch.no_grad()
    def refresh(self) -> None:
        for weights, partition in zip(self.weights(), self.partitions, strict=True):
            weights.copy_(partition.master)
        # small ones stay gathered
        kept = [p for p in self.optimizer.persistent_parameters if p.requires_grad]
        if kept:
            kept[0].all_gather(kept)

    def release(self) -> None:
        self.optimizer.empty_partition_cache()

    def weights(self) -> list[Tensor]:
        return list(self.optimizer.fp16_partitioned_groups_flat)

    def gradients(self) -> list[Tensor]:
        return [self.optimizer.grad_partitions_flat_buffer]

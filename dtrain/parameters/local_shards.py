"""Local shards of the parameters, for engines whose library chooses the sharding."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.communicator import Communicator
from dtrain.errors import ContractError
from dtrain.optim.average import EMA, MovingAverage
from dtrain.optim.flat import update_group
from dtrain.optim.matrix import MatrixShard, matrix_updates, storages
from dtrain.optim.rule import ElementwiseRule, MatrixRule, UpdateScalars, UpdateSlice
from dtrain.parameters.optimizer_plan import OptimizerPlan


@dataclass
class LocalShard:
    """An interval of one parameter on this rank; the tensors are 1-D, FP32 and of one length.

    Attributes:
        shape: of the whole parameter.
        start: the first element, row-major.
        master: the weights that are updated, as the library holds them.
        main_grad: the reduced gradient of the current step, where it lies now.
        update_class: number of its class in the optimizer's plan.
        replicated: whether all ranks hold the same interval; each rank then owns a part of it.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    master: Tensor
    main_grad: Tensor
    update_class: int
    replicated: bool

    def tensor_shard(
        self, kind: str, values: Tensor, dtype: torch.dtype, share: tuple[int, int] = (0, 1)
    ) -> TensorShard:
        """Returns part ``share[0]`` of ``share[1]`` equal parts of ``values`` [length], which are ``dtype``."""
        rank, count = share
        # multiplied first, so that the parts meet and the last one ends at the length
        low, high = values.numel() * rank // count, values.numel() * (rank + 1) // count
        return TensorShard(self.name, kind, self.shape, dtype, self.start + low, self.start + high, values[low:high])


def check_in_place(name: str, parameter: nn.Parameter, local: Tensor, own: Tensor) -> None:
    """Checks that a parameter is still trained, and that ``local``, its values here, are those that the engine updates.

    Raises:
        ContractError: it was frozen or replaced.
    """
    require_trained(name, parameter)
    # by address: a comparison of values would pass while the two are equal by chance, and cost a pass over memory
    if local.dtype != own.dtype or local.data_ptr() != own.data_ptr():
        raise ContractError(
            f"parameter '{name}' no longer lies where the engine updates it (it is {local.dtype} on {local.device}); "
            f"do not call .to(), .half() or assign .data after dtrain.initialize"
        )


def check_frozen(name: str, parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Raises ``ContractError`` if the frozen parameter called ``name`` requires a gradient or is not ``dtype``."""
    if parameter.requires_grad:
        raise ContractError(
            f"'{name}' was frozen at dtrain.initialize and now requires a gradient; it has no master, so build a new "
            f"engine to train it"
        )
    if parameter.dtype != dtype:
        raise ContractError(
            f"frozen '{name}' is {parameter.dtype}, the contract says {dtype}; do not call .to(), .half() or .float() "
            f"on a model after dtrain.initialize"
        )


def require_trained(name: str, parameter: nn.Parameter) -> None:
    if not parameter.requires_grad:
        raise ContractError(
            f"'{name}' was frozen after dtrain.initialize; its optimizer state and decay would go on, so freeze it "
            f"before, and build a new engine"
        )


class LocalShards:
    """Holds a rank's local shards and their optimizer states, and updates them.

    Args:
        shards: one for each parameter; those without an element here are left out.
        plan: the optimizer of each shard.
        comm: the ranks.
    """

    def __init__(self, shards: Iterable[LocalShard], plan: OptimizerPlan, comm: Communicator) -> None:
        self.shards = [shard for shard in shards if shard.master.numel()]
        self._plan = plan
        self._share = comm.rank, comm.world_size  # of what is replicated
        self._values = {"master": {n: shard.master for n, shard in enumerate(self.shards)}} | {
            kind: {
                n: spec.like(shard.master)
                for n, shard in enumerate(self.shards)
                if plan.has_state(shard.update_class, kind)
            }
            for kind, spec in plan.specs.items()
        }
        self._average = None
        if plan.ema_decay is not None:
            pairs = [[(shard.master, self._values[EMA.name][n])] for n, shard in enumerate(self.shards)]
            self._average = MovingAverage(plan.ema_decay, pairs)
        segment = [
            MatrixShard(shard.name, shard.shape, shard.start, self._slice(n))
            for n, shard in enumerate(self.shards)
            if isinstance(plan.rule_of(shard.update_class), MatrixRule)
        ]
        self._matrices = matrix_updates(plan.rules, [segment], comm)
        # one call of a rule per update class
        numbers = dict.fromkeys(sorted(shard.update_class for shard in self.shards))
        self._classes = [
            (number, [n for n, shard in enumerate(self.shards) if shard.update_class == number]) for number in numbers
        ]

    def owned_shards(self, kind: str) -> Iterator[TensorShard]:
        """Yields what this rank owns of ``master``, an optimizer state or ``main_grad``."""
        for shard, values in self._of_kind(kind):
            yield shard.tensor_shard(kind, values, self._dtype(kind), self._share if shard.replicated else (0, 1))

    def local_shards(self, kind: str) -> Iterator[TensorShard]:
        """Yields all of ``kind`` that lies on this rank."""
        for shard, values in self._of_kind(kind):
            yield shard.tensor_shard(kind, values, self._dtype(kind))

    def _dtype(self, kind: str) -> torch.dtype:
        return self._plan.specs[kind].dtype if kind in self._plan.specs else torch.float32

    def _of_kind(self, kind: str) -> Iterator[tuple[LocalShard, Tensor]]:
        if kind == "main_grad":
            yield from ((shard, shard.main_grad) for shard in self.shards)
        else:
            yield from ((self.shards[n], values) for n, values in self._values[kind].items())

    @torch.no_grad()
    def update(self, scalars: UpdateScalars) -> None:
        """Runs one update of masters and optimizer states; all ranks call; the main grads may be overwritten."""
        for number, matrices in self._matrices.items():
            grads = [s.main_grad for s in self.shards if self._plan.classes[s.update_class].rule == number]
            matrices.begin(scalars.of_rule(number), grads)
            matrices.update([0], scalars.of_rule(number))
        for number, chosen in self._classes:
            update_class, rule = self._plan.classes[number], self._plan.rule_of(number)
            if not isinstance(rule, ElementwiseRule):
                continue
            scaled = scalars.of_rule(update_class.rule).scaled(update_class.lr_factor)
            for own, updated in scaled.split(chosen, self._name_of):
                group = update_group([self._slice(n) for n in updated])
                # read now, because a library may replace the gradients' tensors at any step
                rule.apply(group, [self.shards[n].main_grad for n in updated], own)
        if self._average is not None:
            for own, updated in scalars.split(range(len(self.shards)), self._name_of):
                self._average.update(updated, own)

    def _name_of(self, number: int) -> str:
        return self.shards[number].name

    def _slice(self, number: int) -> UpdateSlice:
        shard = self.shards[number]
        states = (self._values[spec.name][number] for spec in self._plan.rule_of(shard.update_class).states)
        return UpdateSlice(
            self._plan.classes[shard.update_class],
            origin=(zlib.crc32(shard.name.encode()), shard.start),
            master=shard.master,
            main_grad=shard.main_grad,
            states=tuple(states),
            replica=None,
        )

    @property
    def storages(self) -> dict[str, list[Tensor]]:
        """Memory of the update beside the states, by the kinds of ``Engine.memory``."""
        return storages(self._matrices)

    def tensors(self, kind: str) -> list[Tensor]:
        """Returns the tensors of ``master`` or of an optimizer state, one for each shard that has it."""
        return list(self._values[kind].values())


def full_tensors(
    shards: Iterable[TensorShard], dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]], comm: Communicator
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, full tensor) of every parameter, gathered one by one; all ranks call.

    Args:
        shards: what this rank owns, at most one interval a parameter.
        dtype: of all shards; a rank may have none.
        shapes: of all parameters by name, in one order on all ranks.
        comm: the ranks.
    """
    own = {shard.name: shard for shard in shards}
    for name, shape in shapes.items():
        shard = own.get(name)
        values = torch.empty(0, dtype=dtype) if shard is None else shard.data
        start = 0 if shard is None else shard.start
        bounds = torch.tensor([start, start + values.numel()], dtype=torch.int64, device=comm.device)
        intervals = comm.gather_rows(bounds, label=f"intervals of {name}").tolist()
        # the rows of all ranks have the length of the longest interval
        row = torch.zeros(max(stop - start for start, stop in intervals), dtype=dtype, device=comm.device)
        row[: values.numel()] = values
        full = torch.empty(math.prod(shape), dtype=dtype, device=comm.device)
        rows = comm.gather_rows(row, label=f"full {name}")
        for received, (start, stop) in zip(rows, intervals, strict=True):
            full[start:stop] = received[: stop - start]
        yield name, full.view(shape)

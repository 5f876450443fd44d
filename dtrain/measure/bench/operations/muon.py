"""Muon in ``dtrain bench optimizer``: its step on one rank against torch's, and what ranks send to matrices' owners."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from dtrain.config.optim import Muon
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.measure.bench.operations.sequence import decide, torch_sequence
from dtrain.measure.bench.operations.timing import Operation
from dtrain.measure.bench.records import MatrixTraffic
from dtrain.optim.matrix import MatrixShard, MatrixUpdate
from dtrain.optim.muon import MuonRule
from dtrain.optim.owners import MatrixInterval, MatrixPlan, assign_owners, cut_at_matrices, matrices_of
from dtrain.optim.rule import UpdateClass, UpdateScalars, UpdateSlice
from dtrain.sharding.layout import ParamSpec, flat_layouts
from dtrain.tools.tables import plural

Blocks = list[dict[str, tuple[int, int]]]

_RANKS = (2, 4, 8, 64)
_NORM = 0.5
"""Norm of all gradients: below 1, so that clipping multiplies by exactly 1 on both sides and the masters stay equal."""


def gpt_blocks(numel: int) -> Blocks:
    """Returns the shapes of the matrices of each block, of about ``numel`` elements together; at least one block.

    The hidden dim is 64 x the number of blocks, as GPT-2's of 12 blocks is.
    """
    count = max(1, round((numel / (12 * 64**2)) ** (1 / 3)))
    dim = 64 * count
    shapes = {"qkv": (3 * dim, dim), "proj": (dim, dim), "up": (4 * dim, dim), "down": (dim, 4 * dim)}
    return [{f"{number}.{name}": shape for name, shape in shapes.items()} for number in range(count)]


def describe_matrices(numel: int) -> str:
    blocks = gpt_blocks(numel)
    dim, count = blocks[0]["0.proj"][0], len(blocks)
    return (
        f"muon: the {4 * count} matrices of a GPT of {plural(count, 'block')} and hidden dim {dim} "
        f"({12 * dim**2 * count:,} elements), a fused weight as one matrix; TFLOP/s counts the products of "
        f"Newton-Schulz."
    )


class MuonPhase:
    """The tensors that both cases share; matrices of a GPT, a fused weight as one of them."""

    def __init__(self, numel: int, device: torch.device, record: Muon, norm: float = _NORM) -> None:
        self.record, self.device = record, device
        self.state_bytes = MuonRule(record, {}).state_bytes
        self.shapes = {name: shape for block in gpt_blocks(numel) for name, shape in block.items()}
        self.numel = sum(rows * columns for rows, columns in self.shapes.values())
        generator = torch.Generator(device).manual_seed(0)
        self.master = torch.randn(self.numel, generator=generator, device=device)
        self.momentum = torch.zeros_like(self.master)
        self.replica = self.master.bfloat16()
        grad = torch.randn(self.numel, generator=generator, device=device)
        self.main_grad = (grad * (norm / self.numel**0.5)).bfloat16().float()  # the baseline's is BF16

    def operations(self, baseline: str) -> dict[str, Operation]:
        shapes = [(min(shape), max(shape)) for shape in self.shapes.values()]
        flops = self.record.ns_steps * sum(4 * low**2 * high + 2 * low**3 for low, high in shapes)
        return {
            baseline: Operation(self.torch_sequence(self.torch_optimizer()), 0, flops),
            "dtrain": Operation(self.dtrain_step(), 0, flops),
        }

    def torch_optimizer(self) -> torch.optim.Muon:
        record = self.record
        return torch.optim.Muon(
            [nn.Parameter(values) for values in self._matrices(self.master)],
            lr=record.lr,
            weight_decay=record.weight_decay,
            momentum=record.momentum,
            nesterov=record.nesterov,
            ns_steps=record.ns_steps,
            adjust_lr_fn=record.adjust_lr,
        )

    def torch_sequence(self, optimizer: torch.optim.Muon) -> Callable[[], None]:
        grads = [grad.bfloat16() for grad in self._matrices(self.main_grad)]
        return torch_sequence(optimizer, self._matrices(self.replica), grads)

    def dtrain_step(self) -> Callable[[], None]:
        """Returns the engine's phase on one rank: norm, skip and clip on the device, then ``MatrixUpdate``."""
        whole = UpdateSlice(
            UpdateClass(weight_decay=self.record.weight_decay),
            (0, 0),
            self.master,
            self.main_grad,
            (self.momentum,),
            self.replica,
        )
        shards = [
            MatrixShard(name, shape, 0, whole.part(start, stop))
            for (name, shape), (start, stop) in zip(self.shapes.items(), self._bounds(), strict=True)
        ]
        update = MatrixUpdate(MuonRule(self.record, {}), [shards], SingleRank(self.device))

        def run() -> None:
            scalars = UpdateScalars(self.record.lr, 1, *decide(self.main_grad))
            update.begin(scalars)
            update.update([0], scalars)

        return run

    def _bounds(self) -> list[tuple[int, int]]:
        return list(pairwise(accumulate((rows * columns for rows, columns in self.shapes.values()), initial=0)))

    def _matrices(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[start:stop].view(shape)
            for shape, (start, stop) in zip(self.shapes.values(), self._bounds(), strict=True)
        ]


def matrix_traffic(record: Muon, numel: int) -> list[MatrixTraffic]:
    rule, blocks = MuonRule(record, {}), gpt_blocks(numel)
    bound = 2.0 * rule.matrix_dtype.itemsize  # there and back
    return [MatrixTraffic(record.name, ranks, bound * sent_share(blocks, ranks, rule), bound) for ranks in _RANKS]


def sent_share(blocks: Blocks, world_size: int, rule: MuonRule) -> float:
    """Returns the elements that all ranks send to owners, divided by all elements; each block is a flat buffer."""
    held: list[list[MatrixInterval]] = [[] for _ in range(world_size)]
    for number, shapes in enumerate(blocks):
        specs = [ParamSpec(name, shape, torch.bfloat16, 0, True) for name, shape in shapes.items()]
        (layout,) = flat_layouts(f"blocks.{number}", specs, world_size)
        for rank, own in enumerate(held):
            for part in layout.intervals(*layout.shard(rank)):
                matrices = matrices_of(part.spec.name, part.spec.shape)
                own += [interval for interval, _ in cut_at_matrices(matrices, part.start, part.stop)]
    owners = assign_owners({interval.matrix for own in held for interval in own}, rule.cost, world_size)
    return MatrixPlan(held, owners, 0).total / sum(matrix.numel for matrix in owners)

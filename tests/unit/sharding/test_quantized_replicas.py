"""FP8 replicas: scales and casts of shards equal those of whole weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.precision.float8.cast import E4M3, Scaling, quantize
from dtrain.sharding import float8_casts
from dtrain.sharding.float8_casts import Float8Shard, ScaleTable
from dtrain.sharding.float8_scales import Float8Scales
from dtrain.sharding.layout import ParamSpec, flat_layouts
from dtrain.sharding.placement import Placement

CPU = torch.device("cpu")
SHAPES = [(30, 90), (16, 700), (50, 17), (1, 16), (300, 1)]


of_weights = pytest.mark.parametrize("scaling", [Scaling.TENSOR, Scaling.ROWS, Scaling.SQUARES])


class Ranks:
    """The communicator of all ranks, and their handles, in one process: the maximum is taken when one waits for it."""

    def __init__(self) -> None:
        self.reduced: list[Tensor] = []

    def all_reduce_max(self, tensor: Tensor, *, label: str) -> Ranks:
        self.reduced.append(tensor)
        return self

    def wait(self) -> None:
        largest = torch.stack(self.reduced).amax(0)
        for tensor in self.reduced:
            tensor.copy_(largest)


class Shards:
    """The shards of all ranks in one process."""

    def __init__(
        self, weights: list[Tensor], world: int, scaling: Scaling, *, compiled: bool = False, device: torch.device = CPU
    ) -> None:
        specs = [ParamSpec(f"w{n}", tuple(w.shape), E4M3, 0) for n, w in enumerate(weights)]
        (self.layout,) = flat_layouts("g", specs, world)
        self.tables, self.scales, self.copies = [], [], []
        comm: Any = Ranks()
        for rank in range(world):
            segment = Placement.SHARD.segment(self.layout, rank)
            table = ScaleTable([self.layout], scaling, device)
            master = torch.zeros(segment.numel, device=device)
            copies = [torch.zeros(segment.numel, dtype=E4M3, device=device) for _ in range(table.num_copies)]
            for interval in segment.intervals():
                source = weights[int(interval.spec.name[1:])].reshape(-1)[interval.start : interval.stop]
                master[interval.offset : interval.offset + source.numel()] = source
            self.tables.append(table)
            self.copies.append(copies)
            shard = Float8Shard(segment, master, copies)
            self.scales.append(Float8Scales(table, [shard], comm, compiled=compiled))

    def refresh(self) -> None:
        for scales in self.scales:
            scales.measure()
        for scales in self.scales:
            scales.cast()

    def copy(self, number: int, slot: int) -> Tensor:
        flat = torch.cat([copies[number].view(torch.uint8) for copies in self.copies])
        found = self.layout.slots[slot]
        return flat[found.start : found.stop].view(found.spec.shape)


def weights_of(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator) * 10 ** (6 * torch.rand(shape, generator=generator) - 4)
        for shape in SHAPES
    ]


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


@of_weights
@pytest.mark.parametrize(("world", "block"), [(1, 100), (2, 1 << 17), (3, 4000), (7, 100)])
def test_shards_give_the_copies_of_whole_weights(world: int, scaling: Scaling, block: int) -> None:
    weights = weights_of(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float8_casts, "_AT_A_TIME", block)
        shards = Shards(weights, world, scaling)
    shards.refresh()
    table = shards.tables[-1]
    for number, weight in enumerate(weights):
        # a kernel may read scales in vectors, [Note: rules of scaled_mm], whatever weights come before
        for copy in range(table.num_copies if scaling is not Scaling.TENSOR else 0):
            assert table.of_copy(table.scale, f"w{number}", copy).data_ptr() % 16 == 0
        rows = quantize(weight, E4M3, scaling)
        assert torch.equal(shards.copy(0, number), bits(rows.values))
        assert torch.equal(table.of_copy(table.scale, f"w{number}", 0), rows.scale.reshape(-1))
        assert torch.equal(table.scales_of(f"w{number}")[0], rows.scale)
        if scaling is Scaling.ROWS:
            columns = quantize(weight.t(), E4M3, scaling)
            assert torch.equal(shards.copy(1, number), bits(columns.values.t()))
            assert torch.equal(table.of_copy(table.scale, f"w{number}", 1), columns.scale)


def test_without_float8_weights_nothing_is_reduced() -> None:
    comm: Any = Ranks()
    scales = Float8Scales(ScaleTable([], Scaling.TENSOR, CPU), [], comm)
    scales.measure()
    scales.cast()
    assert not comm.reduced


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@of_weights
def test_nonfinite_weights_become_nan(bad: float, scaling: Scaling) -> None:
    """E4M3 has no Inf: a saturating cast would make it 448 and hide the overflow."""
    weights = weights_of(3)
    weights[0][7, 11] = bad
    shards = Shards(weights, 3, scaling)
    shards.refresh()
    nan = 0x7F
    if scaling is not Scaling.ROWS:
        poisoned = torch.zeros(weights[0].shape, dtype=torch.bool)
        poisoned[tuple(slice(0, side or None) for side in scaling.value)] = True
        assert torch.equal(shards.copy(0, 0) & nan == nan, poisoned)
    else:
        for copy, line in ((0, (7, slice(None))), (1, (slice(None), 11))):
            is_nan = shards.copy(copy, 0) & nan == nan
            assert is_nan[line].all()
            assert is_nan.sum() == is_nan[line].numel()
    assert not (shards.copy(0, 1) & nan == nan).any(), "the next weight is not affected"

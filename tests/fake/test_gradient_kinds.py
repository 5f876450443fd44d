"""Each row of the table of gradients, and what an engine builds for it, on one rank among those of the mesh."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import dtrain
from dtrain.config.engines import Native
from dtrain.errors import ConfigError
from dtrain.sharding.accumulate import RunningSum, TreeSum
from dtrain.sharding.gradients import ExchangedSending, LocalSending
from dtrain.sharding.offload import HostSum
from dtrain.sharding.placement import GRADIENTS, GradientKind, Join, Send, Sum, gradient_kind
from dtrain.sharding.replica_sum import RunningReplicaSum, TreeReplicaSum
from dtrain.sharding.rounded_gradients import RoundedSum
from tests.fake import device
from tests.fake.harness import fake_engine
from tests.fake.test_offload import _Event

EXCHANGED_SUMS = {Sum.RUNNING: RunningSum, Sum.TREE: TreeSum, Sum.ROUNDED: RoundedSum, Sum.HOST: HostSum}
REPLICA_SUMS = {Join.NONE: type(None), Join.AT_END: RunningReplicaSum, Join.DURING_BACKWARD: TreeReplicaSum}


def kind_of(num_ranks: int, options: Native) -> GradientKind:
    shard_size = options.shard_size or num_ranks
    mesh: Any = SimpleNamespace(shard=SimpleNamespace(world_size=shard_size), is_hybrid=shard_size < num_ranks)
    return gradient_kind(options, mesh, is_offloaded=options.offload == "cpu")


def test_every_allowed_combination_has_its_kind_and_every_kind_a_combination() -> None:
    found = set()
    for num_ranks, stage, reproducible, grad_dtype, offload, shard_size in itertools.product(
        (1, 2, 4), range(4), (False, True), ("fp32", "bf16"), ("none", "cpu"), (None, 2)
    ):
        try:
            options = Native(
                zero_stage=stage,
                reproducible=reproducible,
                grad_dtype=grad_dtype,
                offload=offload,
                shard_size=shard_size,
            )
            options.check_ranks(num_ranks)
        except ConfigError:
            continue
        sends, joins = reproducible or offload == "cpu", num_ranks == 4 and shard_size == 2
        sends |= num_ranks > 1 and (stage >= 2 or grad_dtype == "bf16")
        narrow = Sum.ROUNDED if grad_dtype == "bf16" else Sum.RUNNING
        join = Join.DURING_BACKWARD if reproducible else Join.AT_END
        expected = GradientKind(
            Send.EXCHANGED if sends else Send.LOCAL,
            Sum.TREE if reproducible else Sum.HOST if offload == "cpu" else narrow,
            join if joins else Join.NONE,
        )
        assert kind_of(num_ranks, options) == expected, (num_ranks, options)
        found.add(expected)
    assert found == set(GRADIENTS.values())


ROWS: list[tuple[int, dict[str, Any]]] = [
    (4, {"reproducible": True, "shard_size": 2}),
    (2, {"reproducible": True, "grad_dtype": "bf16", "zero_stage": 0}),
    (2, {"offload": "cpu", "zero_stage": 1}),
    (1, {"grad_dtype": "bf16"}),
    (2, {"grad_dtype": "bf16", "zero_stage": 1}),
    (1, {"zero_stage": 3}),
    (4, {"shard_size": 2}),
    (2, {}),
    (4, {"shard_size": 2, "zero_stage": 1}),
    (2, {"zero_stage": 0}),
]


@pytest.mark.parametrize(("num_ranks", "options"), ROWS, ids=range(len(ROWS)))
def test_an_engine_builds_what_the_table_says(num_ranks: int, options: dict[str, Any]) -> None:
    """One case for each row of the table, in its order."""
    kind = list(GRADIENTS.values())[ROWS.index((num_ranks, options))]
    assert kind_of(num_ranks, Native(**options)) == kind
    settings = {"optimizer": dtrain.AdamW(compile=False), "zero_stage": 2, **options}
    host_waits = mock.patch.dict(device._TORCH_CUDA, {"Event": _Event})  # for the copies of offloaded states
    with host_waits, fake_engine(num_ranks, **settings) as rank:
        for buffer in rank.engine.sharded.buffers:
            gradient = buffer.gradient
            is_bf16 = gradient.main_grad.dtype == torch.bfloat16
            assert type(gradient.sending) is (LocalSending if kind.send is Send.LOCAL else ExchangedSending)
            assert type(gradient.replicas) is REPLICA_SUMS[kind.join]
            if kind.send is Send.LOCAL:
                assert gradient.total is None
            elif kind.join is Join.DURING_BACKWARD:
                assert gradient.total is gradient.replicas
            elif kind.sum is Sum.ROUNDED and not is_bf16:
                assert type(gradient.total) is RunningSum
            else:
                assert type(gradient.total) is EXCHANGED_SUMS[kind.sum]
            assert (gradient.main_grad.device.type == "cpu") == (kind.sum is Sum.HOST)
        engine, is_sent = rank.engine, kind.send is Send.EXCHANGED
        assert (engine.sharded.reducer.exchange is None) == (not is_sent)
        # what backward gives is sent as it is; a rank's own FP32 sum would be rounded
        if num_ranks > 1:
            sent = torch.bfloat16 if is_sent else torch.float32
            assert engine.policy.dtype_during_reduction(torch.bfloat16) == sent
        grads = [(buffer.gradient.storage, buffer.layout) for buffer in engine.sharded.buffers]
        held = sum(grad.nbytes for grad, _ in grads) / sum(grad.itemsize * layout.numel for grad, layout in grads)
        whole = sum(grad.itemsize * slot.spec.numel for grad, layout in grads for slot in layout.slots)
        assert engine.memory_formula()["main_grad"] == pytest.approx(held * whole, abs=1)

"""Tests of the tests: faults that are planted in an engine, and that the fake devices must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dtrain.distributed.communicator import Handle
from dtrain.distributed.transport.process_group import ProcessGroup
from dtrain.distributed.transport.single_rank import Completed
from dtrain.sharding.group import HeldRange
from dtrain.sharding.replicas import Replica
from tests.fake.collectives import MissingWait
from tests.fake.device import DEVICE, HOST_READS
from tests.fake.harness import fake_engine
from tests.fake.launches import HAS_TRITON, DanglingAddress


class _ReadInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * grad.item()


FORWARDS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda loss: loss * loss.item(),
    "nonzero": lambda loss: loss * len(loss.reshape(1).nonzero()),
    "pageable copy": lambda loss: loss * torch.tensor(2.0, device=DEVICE),
    "event": lambda loss: torch.cuda.Event().synchronize() or loss,  # type: ignore[func-returns-value]
    "backward": _ReadInBackward.apply,
}
"""One of each way in which the host may wait."""


@pytest.mark.parametrize("what", FORWARDS)
def test_a_host_read_in_the_model_is_found(what: str) -> None:
    with fake_engine(8, zero_stage=2) as rank, pytest.raises(HOST_READS):
        rank.step(1, forward=lambda: FORWARDS[what](rank.forward()))


def test_a_read_of_the_flag_in_the_update_is_found() -> None:
    """As torch's own optimizers would read it."""
    with fake_engine(8, zero_stage=2) as rank:
        own = rank.engine._update

        def reads(scalars: Any) -> Any:
            own(scalars)
            scalars.found_inf.item()

        with mock.patch.object(rank.engine, "_update", reads), pytest.raises(HOST_READS):
            rank.step(1)


def forget(collective: str) -> Any:
    """What the collective writes is used before it has arrived."""
    own = getattr(ProcessGroup, collective)

    def started(comm: ProcessGroup, *args: Any, **kwargs: Any) -> Handle:
        own(comm, *args, **kwargs)
        return Completed()

    return mock.patch.object(ProcessGroup, collective, started)


def forget_gather() -> Any:
    own = Replica.start_gather

    def started(replica: Replica) -> list[Handle]:
        own(replica)
        return []

    return mock.patch.object(Replica, "start_gather", started)


FORGETFUL = {
    "reduce-scatter": (0, lambda: forget("reduce_scatter_sum")),
    "all-to-all": (2, lambda: forget("all_to_all_single")),
    "all-gather after the update": (2, forget_gather),
    "all-gather of a group": (3, lambda: mock.patch.object(Replica, "_wait", return_value=None)),
}


@pytest.mark.parametrize("what", sorted(FORGETFUL))
def test_a_missing_wait_is_found(what: str) -> None:
    stage, forget = FORGETFUL[what]
    with fake_engine(8, zero_stage=stage) as rank, forget(), pytest.raises(MissingWait):
        rank.two_steps()  # what follows the update is used in the next one


def test_a_collective_that_nobody_needs_must_end_before_the_vote() -> None:
    with fake_engine(8, zero_stage=2) as rank:
        kept = torch.empty(8, device=DEVICE)
        rank.engine.comm.all_gather(kept, torch.empty(1, device=DEVICE), label="in vain")
        with pytest.raises(MissingWait, match="not waited for before the vote"):
            rank.step(1)


def test_a_gather_into_a_buffer_of_another_size_is_found() -> None:
    with fake_engine(8) as rank, pytest.raises(AssertionError, match=r"all_gather: torch.Size\(\[2\]\)"):
        rank.engine.comm.all_gather(torch.empty(8, device=DEVICE), torch.empty(2, device=DEVICE), label="wrong")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_the_address_of_freed_memory_is_found() -> None:
    """The optimizer's table of addresses outlives one of its tensors."""
    with fake_engine(8, zero_stage=2) as rank:
        rank.step(1)
        ((_, kernel),) = rank.engine._optimizer._together
        kernel._slices.clear()
        rank.engine._optimizer._segments = []
        for buffer in rank.engine.sharded.buffers:
            start = buffer.states["exp_avg"].start
            buffer.states["exp_avg"] = HeldRange(start, torch.empty_like(buffer.states["exp_avg"].values))
        with pytest.raises(DanglingAddress, match="adamw"):
            rank.step(1)

"""Offloaded states beside a fake device: what lies where, the order of the copies, and when the host waits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.distributed.transport.gradient_buffers import PrivateExchange
from dtrain.sharding import offload
from dtrain.sharding.offload import DeviceLink, GradientArrivals, ReplicaStaging
from tests.fake import device
from tests.fake.collectives import MissingWait, _Watch, _Work
from tests.fake.device import QuickMode
from tests.fake.harness import FakeRank, fake_engine


class _HostValues(QuickMode):
    """The host may read what lies in its own memory: a number is 1, a truth value false."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "cpu":
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


class _Event(device._Event):
    """An event for which the host may wait."""

    def synchronize(self) -> None: ...


class Copies:
    """Names of the copies that were started, and of those for which the host has waited."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.waits: list[str] = []


class _Copy:
    """A copy of the link, in flight until the host waits for it."""

    def __init__(self, copied: Any, works: list[_Work], copies: Copies) -> None:
        self._copied, self._works, self._copies = copied, works, copies
        copies.started.append(works[0].name)

    def wait(self) -> None:
        if any(not work.is_completed() for work in self._works):
            self._copies.waits.append(self._works[0].name)
        self._copied.wait()
        for work in self._works:
            work.wait()


@contextmanager
def offloaded(world_size: int, stage: int, **options: Any) -> Iterator[tuple[FakeRank, Copies]]:
    """Yields a rank whose link is watched, and its copies.

    An operation that reads what a copy to the host writes, or writes what a copy reads, raises ``MissingWait``.
    """
    in_flight: list[_Work] = []
    copies = Copies()
    to_host, to_device = DeviceLink.start_to_host, DeviceLink.start_to_device

    def start_to_host(link: DeviceLink, pairs: Any) -> _Copy:
        copied = to_host(link, pairs)
        return _Copy(copied, [_Work("copy to the host", *pair, in_flight) for pair in pairs], copies)

    def start_to_device(link: DeviceLink, target: Tensor, source: Tensor) -> _Copy:
        copied = to_device(link, target, source)
        # the device reads the target behind the copy, so only the source is in use
        return _Copy(copied, [_Work("copy to the device", source[:0], source, in_flight)], copies)

    settings = {"optimizer": dtrain.AdamW(compile=False), "offload": "cpu", "zero_stage": stage, **options}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(device._TORCH_CUDA, {"Event": _Event}))
        rank = stack.enter_context(fake_engine(world_size, **settings))
        stack.enter_context(mock.patch.object(DeviceLink, "start_to_host", start_to_host))
        stack.enter_context(mock.patch.object(DeviceLink, "start_to_device", start_to_device))
        stack.enter_context(_Watch(in_flight))
        stack.enter_context(_HostValues())
        yield rank, copies


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), pytest.param(8, 1, marks=pytest.mark.exhaustive), (8, 3)])
def test_a_step_of_one_rank_among_many(world_size: int, stage: int) -> None:
    with offloaded(world_size, stage) as (rank, copies):
        engine = rank.engine
        assert rank.step(2).applied
        copies.waits.clear()
        rank.step(1)
        rank.collectives.require_waited()
        buffers = engine.sharded.buffers
        # each of the main grads, then divisor and flag of the decision, then each staging buffer as it is used again
        expected = ["copy to the host"] * (len(buffers) + 1) + ["copy to the device"] * len(buffers)
        assert [wait.partition(" of")[0] for wait in copies.waits] == expected
        for buffer in buffers:
            on_host = (buffer.master, buffer.gradient.main_grad, *(held.values for held in buffer.states.values()))
            assert {tensor.device.type for tensor in on_host} == {"cpu"}
            assert {tensor.device.type for tensor in buffer.replica.local} == {"cuda"}
        memory, formula = engine.memory(), engine.memory_formula()
        own = -(-engine.num_parameters // world_size)
        assert [formula[kind] for kind in ("main_grad", "master", "moments")] == [4 * own, 4 * own, 8 * own]
        on_device = {kind: nbytes for kind, nbytes in memory.items() if kind not in engine.host_kinds}
        assert sum(on_device.values()) == memory["compute"] + memory["unreduced_grad"] + memory["transfer"]
        gc.collect()
        assert 0 <= rank.device.live_bytes("cuda") - sum(on_device.values()) < 64 * 1024
        # the vote's numbers, the norms of the main grads, the bounds of FP32 in the update
        assert 0 <= rank.device.live_bytes("cpu") - sum(memory[kind] for kind in engine.host_kinds) < 64 * 1024


def forget_arrival() -> Any:
    own = offload._Arrival
    return mock.patch.object(offload, "_Arrival", lambda one, copied, *rest: own(one, offload._AtOnce(), *rest))


def release_early() -> Any:
    """The exchange gets the buffer of a gradient back while it is copied."""
    own = GradientArrivals.push

    def push(arrivals: GradientArrivals, total: Any, handle: Any, *args: Any) -> None:
        own(arrivals, total, handle, *args)
        handle.release()
        args[0][0].zero_()  # the next gradient

    return mock.patch.object(GradientArrivals, "push", push)


FAULTS: dict[str, Callable[[], Any]] = {
    "a gradient that has not arrived": forget_arrival,
    "a gradient that is copied": release_early,
    "a staging buffer that is copied": lambda: mock.patch.object(ReplicaStaging, "begin", return_value=None),
}


@pytest.mark.parametrize("used", FAULTS)
def test_a_missing_wait_is_found(used: str) -> None:
    with offloaded(1, 2) as (rank, _), FAULTS[used](), pytest.raises(MissingWait):
        rank.two_steps()


def test_gradients_leave_the_device_while_backward_runs() -> None:
    in_flight = mock.patch.object(PrivateExchange, "finish_first", lambda self: self.num_started - 2)  # as large groups
    with offloaded(1, 2) as (rank, copies), in_flight:
        rank.engine.backward(rank.forward())
        assert len(copies.started) == len(rank.engine.sharded.buffers) - 2
        rank.engine.step()

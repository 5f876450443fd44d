"""Times the steps of one rank: its real work on its device, and by a model of the network what it waits for others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch

from dtrain.config.schema import RunConfig
from dtrain.data.loader import PrefetchedBatches
from dtrain.engine.interface import Engine
from dtrain.planning.record.ranks import NCCL, planned_ranks
from dtrain.planning.time.network import Network
from dtrain.planning.time.replay import Replay, replay
from dtrain.planning.time.timeline import Timeline
from dtrain.telemetry.throughput import PhaseTimes, device_name, mfu
from dtrain.train.flops import flops_between, flops_by_seq_len
from dtrain.train.session import Session

PHASES = ("data_wait_ms", "forward_ms", "backward_ms", "update_ms")
"""Phases of a step, by their names in ``metrics.jsonl``."""

_WARMUP_STEPS, _LEAST_WINDOWS, _MOST_WINDOWS = 2, 3, 30
_STEPS_OF_WINDOW = {"cpu": 1, "cuda": 5}  # the end of a window synchronizes with a GPU, which a step does not


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step on one rank, in each of some windows.

    Attributes:
        busy_ms: without waits for other ranks.
        waited_ms: for other ranks.
        hidden_ms: of communication while the rank computes.
        phases_ms: medians by phase of :data:`PHASES`; on a GPU only the wait for data, because the host runs ahead.
        num_transfers: collectives.
        received: bytes that the rank receives.
    """

    busy_ms: list[float]
    waited_ms: list[float]
    hidden_ms: list[float]
    phases_ms: dict[str, float]
    num_transfers: int
    received: int

    @property
    def ms(self) -> float:
        return median(busy + waited for busy, waited in zip(self.busy_ms, self.waited_ms, strict=True))


class PlannedRank:
    """Rank 0 of a job whose other ranks are not there, on its real device with real data."""

    def __init__(self, config: RunConfig, num_ranks: int, device: torch.device, transport: str) -> None:
        """Takes the largest batch of ``config``, and a learning rate of 0: the gradients of others are made up.

        Blocks are not compiled. More than one rank take the native engine. ``transport`` is that of
        :func:`dtrain.planning.record.ranks.planned_ranks`.
        """
        if num_ranks > 1:
            config = replace(config, engine=config.engine.as_native())
        config = replace(config, optim=replace(config.optim, lr=0.0), model=replace(config.model, compile="none"))
        config = config.at_largest_batch()
        self._timeline = Timeline(device)
        comm = planned_ranks(num_ranks, transport, device, self._timeline)
        self.session = Session.open(config, comm)
        self._overlaps = transport == NCCL

    @property
    def engine(self) -> Engine:
        return self.session.engine

    @contextmanager
    def batches(self) -> Iterator[PrefetchedBatches]:
        session = self.session
        batches = PrefetchedBatches(session.loader, session.config.data.prefetch, session.engine.device)
        try:
            yield batches
        finally:
            batches.close()

    def time(self, network: Network | None, budget_s: float, ready: Callable[[], None]) -> StepTime:
        """Times steps for about ``budget_s`` seconds, after two that are not counted.

        Without a ``network``, transfers take no time. ``ready`` waits for the processes that share the host, before the
        steps that count.
        """
        device = self.engine.device
        steps = _STEPS_OF_WINDOW[device.type]
        busy: list[float] = []
        replays: list[Replay] = []
        phases: list[dict[str, float]] = []
        with self.batches() as batches:
            for _ in range(_WARMUP_STEPS):
                self.session.step(next(batches))
            ready()
            deadline = time.monotonic() + budget_s
            clock = PhaseTimes(self.engine.comm)
            while len(busy) < _LEAST_WINDOWS or (time.monotonic() < deadline and len(busy) < _MOST_WINDOWS):
                waited = 0.0
                clock.window(1)
                self._timeline.restart()
                for _ in range(steps):
                    batch = next(batches)
                    waited += batches.waited_s
                    self.session.step(batch)
                trace = self._timeline.trace()
                phases.append({"data_wait_ms": 1e3 * waited / steps, **clock.window(steps)})
                busy.append(1e3 * trace.seconds / steps)
                seconds_of = network.seconds if network is not None else lambda _: 0.0
                replays.append(replay(trace, seconds_of, overlaps=self._overlaps))
        return StepTime(
            busy_ms=busy,
            waited_ms=[1e3 * (one.seconds - one.compute) / steps for one in replays],
            hidden_ms=[1e3 * max(0.0, one.total().seconds + one.compute - one.seconds) / steps for one in replays],
            phases_ms={name: median(one[name] for one in phases) for name in PHASES if name in phases[0]},
            num_transfers=len(trace.transfers) // steps,
            received=sum(transfer.nbytes for transfer in trace.transfers.values()) // steps,
        )

    def utilization(self, step_s: float) -> float | None:
        """Returns the MFU of steps of ``step_s`` seconds, or None if a rate or the model's FLOPs are unknown."""
        engine, config = self.engine, self.session.config
        by_seq_len = flops_by_seq_len(config, self.session.dataset)
        if by_seq_len is None:
            return None
        flops = flops_between(config.batch_growth, by_seq_len, 0, 1) / engine.world_size
        return mfu(device_name(engine.device), engine.policy.name, flops / step_s)

"""Times the work of one rank on its real device, by phase and operation, and its products in other formats."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dtrain.config.schema import RunConfig
from dtrain.data.loader import PrefetchedBatches
from dtrain.device import synchronize
from dtrain.engine.interface import Engine
from dtrain.planning.record.products import computes_product, products
from dtrain.planning.record.ranks import TransferLog, planned_ranks
from dtrain.planning.record.recorder import RecordedCall, StepRecorder
from dtrain.planning.shapes.variants import DTYPES, has_products, in_format, timed_ratio
from dtrain.telemetry.throughput import PhaseTimes
from dtrain.train.flops import flops_between, flops_by_seq_len
from dtrain.train.session import Session

PHASES = {"data_wait_ms": "wait for data", "forward_ms": "forward", "backward_ms": "backward", "update_ms": "update"}
"""Phases of a step by their names in ``metrics.jsonl``, and their names in tables."""

_WARMUP_STEPS, _PROFILED_STEPS, _LEAST_WINDOWS, _MOST_WINDOWS = 2, 3, 3, 30
_STEPS_OF_WINDOW = {"cpu": 1, "cuda": 5}  # the end of a window synchronizes with a GPU, which a step does not


@dataclass(frozen=True)
class Item:
    """An operation of a step, its calls and the milliseconds of all; compiling fuses elementwise ones."""

    name: str
    ms: float
    calls: int
    is_product: bool
    is_elementwise: bool


class _Clock(TransferLog):
    """Times work on a device without the work that stands for other ranks.

    Marks are of the host on a CPU, and of the current stream on a GPU, which the host does not wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        self._absences: list[tuple[Any, Any]] = []
        self._begin = self._mark()

    def seconds(self) -> float:
        """Returns the seconds since ``restart``; on a GPU the host waits for the work until here."""
        spans = [(self._begin, self._mark()), *self._absences]
        if self._is_cuda:
            spans[0][1].synchronize()
        whole, *lost = (begin.elapsed_time(end) / 1e3 if self._is_cuda else end - begin for begin, end in spans)
        return float(whole - sum(lost))

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def absent(self) -> Iterator[None]:
        begin = self._mark()
        yield
        self._absences.append((begin, self._mark()))


class PlannedRank:
    """Rank 0 of a job whose other ranks are not there, on its real device with real data."""

    def __init__(self, config: RunConfig, num_ranks: int, device: torch.device, transport: str) -> None:
        """Takes the largest batch of ``config``, and a learning rate of 0: the gradients of others are made up.

        Blocks are not compiled, nor steps captured. More than one rank take the native engine. ``transport`` is that of
        ``dtrain.planning.record.ranks.planned_ranks``.
        """
        if num_ranks > 1 or config.engine.graph:
            config = replace(config, engine=replace(config.engine.as_native(), graph=False))
        config = replace(config, optim=replace(config.optim, lr=0.0), model=replace(config.model, compile="none"))
        self._clock = _Clock(device)
        comm = planned_ranks(num_ranks, transport, device, self._clock)
        self.session = Session.open(config.at_largest_batch(), comm)

    @property
    def engine(self) -> Engine:
        return self.session.engine

    def batches(self) -> closing[PrefetchedBatches]:
        session = self.session
        return closing(PrefetchedBatches(session.loader, session.config.data.prefetch, session.engine.device))

    def time(self, budget_s: float, ready: Callable[[], None] = lambda: None) -> tuple[list[float], dict[str, float]]:
        """Times steps for about ``budget_s`` seconds, after two that are not counted.

        Returns the milliseconds of a step in each of some windows, without waits for other ranks; and their medians by
        phase of ``PHASES``. On a GPU only the wait for data is among these, because the host runs ahead. ``ready``
        waits for the processes that share the host, before the steps that count.
        """
        steps = _STEPS_OF_WINDOW[self.engine.device.type]
        busy: list[float] = []
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
                self._clock.restart()
                for _ in range(steps):
                    batch = next(batches)
                    waited += batches.waited_s
                    self.session.step(batch)
                busy.append(1e3 * self._clock.seconds() / steps)
                phases.append({"data_wait_ms": 1e3 * waited / steps, **clock.window(steps)})
        return busy, {name: median(one[name] for one in phases) for name in PHASES if name in phases[0]}

    def flops(self) -> tuple[float, float] | None:
        """Returns the model's FLOPs of a step on this rank, by both conventions, or None if they are unknown."""
        config = self.session.config
        if (by_seq_len := flops_by_seq_len(config, self.session.dataset)) is None:
            return None
        causal, full = flops_between(config.batch_growth, by_seq_len, 0, 1)
        return causal / self.engine.world_size, full / self.engine.world_size

    def items(self) -> list[Item]:
        """Returns the operations of a step by their own time, longest first: kernels on a GPU, else the host's."""
        is_gpu = self.engine.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
        with self.batches() as batches:
            prepared = [next(batches) for _ in range(_PROFILED_STEPS)]
        with profile(activities=activities) as profiler:
            for batch in prepared:
                self.session.step(batch)
            synchronize(self.engine.device)
        items = []
        for event in profiler.key_averages():
            us = event.self_device_time_total if is_gpu else event.self_cpu_time_total
            name = event.key.removeprefix("aten::")
            if us and (is_gpu or event.key != name):  # on a CPU the rest are records, such as of autograd
                ms, calls = us / 1e3 / _PROFILED_STEPS, event.count // _PROFILED_STEPS
                items.append(Item(name, ms, calls, computes_product(name), _is_elementwise(name)))
        return sorted(items, key=lambda item: -item.ms)

    def calls(self) -> list[RecordedCall]:
        """Returns the calls of a micro-batch and the update."""
        with self.batches() as batches, StepRecorder(self.engine.module) as recorder:
            self.session.step(next(batches)[:1])
        return recorder.calls


def _is_elementwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, one).tags for one in packet.overloads())


def expected(share: float, speedup: float = math.inf) -> float:
    """Returns the speed-up of a step whose products, ``share`` of it, are ``speedup`` times as fast."""
    return 1 / max(1 - share + share / speedup, 1e-9)


def limit_line(share: float) -> str:
    return f"Amdahl's limit: {expected(share):.3g} times as fast if products took no time"


def speedups(calls: Sequence[RecordedCall], device: torch.device, budget_s: float) -> dict[str, float]:
    """Returns how many times as fast the products of ``calls`` are in other formats that ``device`` has in hardware.

    A format is left out if its products cannot be timed within ``budget_s`` seconds in all.
    """
    found = {product.call.signature: product for product in products(calls)}
    counts = Counter(call.signature for call in calls if call.signature in found)
    own = {product.format for product in found.values()}
    wanted = [name for name in (*DTYPES, "fp8") if has_products(name, device) and {name} != own]
    result = {}
    for name in wanted:
        pairs = {(signature, in_format(found[signature], name)): count for signature, count in counts.items()}
        ratio = timed_ratio(pairs, device, budget_s / len(wanted))
        if ratio is not None:
            result[name] = 1 / ratio
    return result

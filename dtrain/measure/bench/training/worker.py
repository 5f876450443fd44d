"""One rank of a benchmark case, a job of ``dtrain.measure.worker``.

The first result comes after the first step: the seconds in which model and engine were built. Then that of
``{"steps": n}`` holds times and losses of n steps, and that of ``{"last": bool}`` is a ``Footprint``; after the last
one no step follows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from dtrain.config.dump import from_plain
from dtrain.device import elapsed_ms, peak_memory, peak_resident, synchronize
from dtrain.distributed.logging import logger
from dtrain.measure.bench.records import Footprint, RankJob, TimedSteps
from dtrain.measure.bench.training import peer_case
from dtrain.measure.bench.training.batches import Batches
from dtrain.measure.bench.training.model import make_model
from dtrain.measure.bench.training.rank_training import RankTraining, run_config
from dtrain.measure.worker import Rank
from dtrain.models import train_flops_per_token, vocabulary
from dtrain.telemetry.gpu import describe_state
from dtrain.telemetry.throughput import device_name
from dtrain.train.garbage import GarbageCollection

_STEPS_OF_AN_ATTEMPT = 2  # the second meets the allocator as the first has left it


@dataclass(frozen=True)
class RankCase:
    """A case in this process."""

    job: RankJob
    training: RankTraining
    batches: Batches
    device: torch.device

    @classmethod
    def prepare(cls, job: RankJob, rank: Rank) -> RankCase:
        """Builds the job's model, data and engine or peer; the process group exists."""
        device, config = rank.torch_device(), run_config(job)
        batches = Batches(config, rank, device, job.config["bench"]["data"])
        model = make_model(config.model, batches, config.seed, device)
        if job.case.is_dtrain:
            from dtrain.measure.bench.training import engine_case  # a peer's process does not hold dtrain's engines

            training = engine_case.prepare(job, config, model, batches, device)
        else:
            training = peer_case.prepare(job.case, config, model, batches, device)
        del model
        _empty_cache(device)
        return cls(job, training, batches, device)

    def take_steps(self, count: int) -> TimedSteps:
        """Times ``count`` steps, by windows of ``bench.window_steps``."""
        window = self.job.config["bench"]["window_steps"]
        self.batches.prepare(count)
        timed = TimedSteps([], [], 0.0)
        asked = None
        if window > 1 and self.device.type == "cuda":  # meanwhile: the clocks of an idle GPU are others
            asked = ThreadPoolExecutor(1).submit(describe_state, self.device.index or 0)
        for first in range(0, count, window):
            self._take_window(min(window, count - first), timed)
        return replace(timed, gpu=None if asked is None else asked.result())

    def _take_window(self, count: int, timed: TimedSteps) -> None:
        losses: list[Callable[[], float]] = []
        cpu_start = time.process_time()
        if self.job.config["bench"]["window_steps"] > 1:
            ms = elapsed_ms(lambda: losses.append(self.training.step()), self.device, count)
            timed.losses.extend(loss() for loss in losses)
        else:
            start = time.perf_counter()
            timed.losses.append(self.training.step()())
            synchronize(self.device)
            ms = 1000 * (time.perf_counter() - start)
        timed.step_ms.append(ms)
        timed.cpu_ms.append(1000 * (time.process_time() - cpu_start) / count)
        for name, part_ms in self.training.parts().items():
            timed.parts_ms.setdefault(name, [[]])[0].append(part_ms / count)

    def footprint(self, *, last: bool, warnings: list[str]) -> Footprint:
        """Returns the memory so far, and starts its peaks on the GPU again.

        Args:
            last: whether no step follows, so that activations and larger micro-batches are tried.
            warnings: of dtrain.
        """
        training, device, config = self.training, self.device, run_config(self.job)
        on_gpu = device.type == "cuda"
        graphs, breaks = (None, 0) if config.model.compile == "none" else _compiled_graphs()
        num_outputs = vocabulary(config.model, self.batches.task)
        causal, full = train_flops_per_token(config.model, num_outputs, config.model.max_seq_len) or (None, None)
        found = Footprint(
            **{"graphs": graphs, **training.facts()},  # dtrain counts its own
            peak_rss=peak_resident(),
            peak_device=peak_memory(device) if on_gpu else None,
            device=device_name(device),
            graph_breaks=breaks,
            peak_reserved=torch.cuda.max_memory_reserved(device) if on_gpu else None,
            available=torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) if on_gpu else None,
            flops_causal=causal,
            flops_full=full,
            warnings=warnings,
        )
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        if not last:
            return found
        activations = None if training.activations is None else training.activations()
        fitted, unfit = self._attempt()
        return replace(found, activations=activations, fitted=fitted, unfit=unfit)

    def _attempt(self) -> tuple[list[int], int | None]:
        """Tries ``bench.attempts`` micro-batches in rising order; returns those that fit, and the first that does not.

        An engine may be unusable after an error in its backward, so the first error is the last attempt.
        """
        fitted: list[int] = []
        for extra in range(1, self.job.config["bench"]["attempts"] + 1):
            micro_batch = self.job.micro_batch + extra
            try:
                _empty_cache(self.device)
                self.batches.resize(micro_batch)
                for _ in range(_STEPS_OF_AN_ATTEMPT):
                    self.training.step()()
            except torch.OutOfMemoryError:
                return fitted, micro_batch
            fitted.append(micro_batch)
        return fitted, None


def serve(rank: Rank) -> Generator[Any, Any, None]:
    """Serves the requests of ``CaseProcesses``; see above."""
    job = from_plain(RankJob, rank.job)
    start = time.perf_counter()
    with kept_warnings() as warnings, GarbageCollection(1) as garbage:
        case = RankCase.prepare(job, rank)
        setup_s = time.perf_counter() - start
        case.take_steps(1)
        request = yield setup_s
        while True:
            garbage.after_step(0)  # between rounds, for peers too, so that none of their steps is longer for it
            if "steps" in request:
                request = yield case.take_steps(request["steps"])
            else:
                request = yield case.footprint(last=request["last"], warnings=list(warnings))


@contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """Yields the messages of dtrain's warnings, which are appended as they come."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def _empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _compiled_graphs() -> tuple[int, int]:
    """Returns the number of compiled graphs, and of graph breaks."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

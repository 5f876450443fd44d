"""The ranks of one benchmark case."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dtrain.config.dump import config_to_dict, from_plain
from dtrain.config.tool_schema import BenchConfig, TrainingSuite
from dtrain.distributed.logging import logger
from dtrain.errors import BenchError, RankError
from dtrain.measure.bench.records import BenchmarkCase, CaseResult, Footprint, RankJob, TimedSteps
from dtrain.measure.ranks import Ranks
from dtrain.measure.worker import Rank

_WORKER = "dtrain.measure.bench.training.worker:serve"
_START_S = 300.0  # a peer may compile its extensions in its first start
_RESULT_S = 900.0  # a rank without a result for this long hangs
_OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "ALLOC_FAILED")


class CaseProcesses:
    """The ranks of one case; use as a context manager, which ends them.

    Args:
        micro_batch: sequences in a step of one rank; None: as in ``config``.
    """

    def __init__(self, case: BenchmarkCase, config: TrainingSuite[BenchConfig], micro_batch: int | None = None) -> None:
        self.case = case
        self.config = config
        self._micro_batch = micro_batch or config.bench.micro_batch_size
        self._stack = ExitStack()
        self._ranks: Ranks | None = None

    def __enter__(self) -> CaseProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends the ranks and waits for them; may be called more than once."""
        self._stack.close()

    def request_end(self) -> None:
        """Tells the ranks to end; does not wait."""
        if self._ranks is not None:
            self._ranks.request_end()

    def start(self) -> CaseResult:
        """Starts the ranks and warms them up; at half of the micro-batch if they are out of memory.

        Raises:
            BenchError: a rank failed.
        """
        while True:
            try:
                return self._start()
            except BenchError as error:
                if self._micro_batch == 1 or not any(text in str(error) for text in _OUT_OF_MEMORY):
                    raise
                self.end()
                logger.warning("%s: out of memory at %d sequences, now half", self.case.name, self._micro_batch)
                self._micro_batch //= 2

    def _start(self) -> CaseResult:
        bench = self.config.bench
        begin = time.perf_counter()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dtrain-bench-"))
        job = RankJob(self.case, config_to_dict(self.config), folder, self._micro_batch)
        rank = Rank(asdict(job), ranks=self.case.ranks, device=bench.device, threads=bench.threads_per_rank)
        try:
            self._ranks = self._stack.enter_context(Ranks(_WORKER, rank, folder=Path(folder)))
            setups = self._ranks.results(_START_S)
        except RankError as error:
            raise self._failure(error) from error
        first_step_s = time.perf_counter() - begin
        return CaseResult(
            self.case,
            first_step_s,
            self.take_steps(bench.warmup_steps),
            [],
            self.footprint(),
            micro_batch=self._micro_batch,
            setup_s=max(setups),
        )

    def take_steps(self, count: int) -> TimedSteps:
        load = os.getloadavg()[0]
        if not count:
            return TimedSteps([], [], load)
        ranks = [from_plain(TimedSteps, steps) for steps in self._request({"steps": count})]
        return TimedSteps(
            [max(times) for times in zip(*(rank.step_ms for rank in ranks), strict=True)],
            [sum(row) / len(row) for row in zip(*(rank.losses for rank in ranks), strict=True)],
            load,
            [sum(times) for times in zip(*(rank.cpu_ms for rank in ranks), strict=True)],
            {name: [rank.parts_ms[name][0] for rank in ranks] for name in ranks[0].parts_ms},
            ranks[0].gpu,
        )

    def footprint(self, *, last: bool = False) -> Footprint:
        """Returns the footprint of the rank that holds the most, with the peaks of all.

        Args:
            last: whether no step follows, so that activations and larger micro-batches may be tried.
        """
        ranks = [from_plain(Footprint, rank) for rank in self._request({"last": last})]
        most = max(ranks, key=lambda rank: sum(rank.state.values()))
        peaks = {
            name: max((peak for rank in ranks if (peak := getattr(rank, name)) is not None), default=None)
            for name in ("peak_rss", "peak_device", "peak_reserved")
        }
        return replace(most, **peaks)  # type: ignore[arg-type]

    def _request(self, request: dict[str, Any]) -> list[Any]:
        assert self._ranks is not None
        try:
            return self._ranks.request(request, _RESULT_S)
        except RankError as error:
            raise self._failure(error) from error

    def _failure(self, error: RankError) -> BenchError:
        return BenchError(f"{self.case.name}: {error}")

"""Training cases measured in alternating runs, A B A B, each in a process of its own.

The cases of ``dtrain bench`` wait in their processes with their models in memory; two models of a billion parameters do
not fit one GPU. So a case is started again for each run, warms up, and is timed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from dtrain.config.dump import config_to_dict
from dtrain.config.model import ModelConfig
from dtrain.config.optim import OptimConfig
from dtrain.config.tool_schema import Float8BenchConfig, Float8SuiteConfig
from dtrain.distributed.launch_env import num_cores
from dtrain.tools.accept.part import PartRequest, load_partial, save_partial
from dtrain.tools.accept.parts.models import MODELS
from dtrain.tools.accept.processes import run_process
from dtrain.tools.bench.peers import PEERS
from dtrain.tools.bench.records import BenchmarkCase, RankJob

MICRO_BATCHES = (8, 6, 4, 3, 2, 1)
"""Sequences of 4,096 tokens to choose from; an 80 GB card holds 1 to 4 of them beside the states of 1.2B."""

_WORKER = "dtrain.tools.accept.parts.case_worker"
_MAX_THREADS = 8
_SLOWER, _LATE_S = 4.0, 30.0  # than estimated, and than the part's time: what exceeds that hangs, and is killed
_LR = 3e-4
_OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "ALLOC_FAILED")


@dataclass(frozen=True)
class CaseRun:
    """One run of a case.

    Attributes:
        name: of the case, in the tables; ``case.name`` repeats it.
        model: key of :data:`MODELS`.
        number: counted from 0 for each case and model.
        seconds: estimate for the first run, compilation included.
        options: fields of the worker's job.
    """

    case: BenchmarkCase
    model: str
    number: int = 0
    seconds: float = 30.0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def label(self) -> str:
        return f"{self.name}, {self.model}"

    @property
    def missing_package(self) -> str | None:
        peer = None if self.case.is_dtrain else PEERS.get(self.case.engine)
        return None if peer is None or peer.is_installed else peer.package


@dataclass(frozen=True)
class Record:
    """Result of a run: ``figures`` are a worker's ``CaseFigures``, or None with the reason in ``error``."""

    name: str
    model: str
    number: int
    seconds: float
    figures: dict[str, Any] | None
    error: str = ""

    @property
    def micro_batch(self) -> int:
        return int(self.figures["micro_batch"]) if self.figures else 0

    @property
    def step_ms(self) -> float:
        assert self.figures is not None
        return float(median(self.figures["window_ms"]))

    @property
    def tokens_per_s(self) -> float:
        return self.micro_batch * MODELS[self.model].max_seq_len / self.step_ms * 1000


class InterleavedRuns:
    """Runs cases while there is time, and saves the records after each run.

    Args:
        request: of the part; its directory may hold the records of a run that was killed.
        micro_batches: the first case of each model chooses one of them, in falling order, for all cases.
    """

    def __init__(
        self,
        request: PartRequest,
        micro_batches: Sequence[int] = MICRO_BATCHES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request, self._now = request, now
        self._deadline = now() + request.seconds
        self._choices = list(micro_batches)
        self._micro_batches: dict[str, int] = {}
        self.results: dict[str, Any] = {"runs": [], "left_out": {}}
        for values in load_partial(request).get("runs", []):
            self._add(Record(**values))

    @property
    def records(self) -> list[Record]:
        return records_of(self.results)

    @property
    def seconds_left(self) -> float:
        return self._deadline - self._now()

    def run(self, runs: Sequence[CaseRun]) -> None:
        """Runs ``runs`` in order; a case that failed, or needs more time than is left, is left out."""
        for run in runs:
            if self._is_known(run):
                continue
            reason = self._reason_against(run)
            if reason:
                self.results["left_out"].setdefault(run.label, reason)
            else:
                self._run_case(run)
            save_partial(self._request, self.results)

    def micro_batch(self, model: str) -> int | None:
        """Returns the micro-batch that the first run of a model chose, if there was one."""
        return self._micro_batches.get(model)

    def _is_known(self, run: CaseRun) -> bool:
        return any(
            (record.name, record.model) == (run.name, run.model)
            and (record.number == run.number or record.figures is None)
            for record in self.records
        )

    def _reason_against(self, run: CaseRun) -> str:
        if run.missing_package:
            return f"package {run.missing_package} is not installed"
        earlier = [r.seconds for r in self.records if (r.name, r.model) == (run.name, run.model)]
        needs = min(earlier, default=run.seconds)
        if needs <= self.seconds_left:
            return ""
        # a case with a run has its figures; only its further ones are missing
        repeat = f"run {run.number + 1}: " if run.number else ""
        return f"{repeat}needs about {needs:.0f} s, and {max(0.0, self.seconds_left):.0f} s were left"

    def _run_case(self, run: CaseRun) -> None:
        micro_batches = self._candidates(run)
        record = self._measure(run, micro_batches)
        while _is_out_of_memory(record) and micro_batches != [1] and self.seconds_left > 0:
            # a choice that fails leaves one sequence to try, without the eager step that chooses
            micro_batches = [micro_batches[0] // 2] if len(micro_batches) == 1 else [1]
            record = self._measure(run, micro_batches)
        if _is_out_of_memory(record):
            record = replace(record, error=f"does not fit: {record.error}")
        self._add(record)

    def _candidates(self, run: CaseRun) -> list[int]:
        # a case that needed a smaller micro-batch than the others needs it again
        for record in self.records:
            if (record.name, record.model) == (run.name, run.model):
                return [record.micro_batch]
        if run.model in self._micro_batches:
            return [self._micro_batches[run.model]]
        return [2] if run.model == "tiny" else self._choices

    def _measure(self, run: CaseRun, micro_batches: list[int]) -> Record:
        request, folder = self._request, Path(self._request.directory)
        store = folder / f"store-{time.time_ns()}"  # a file that a killed rank has left would end the next one's wait
        job = {
            "rank_job": asdict(
                RankJob(run.case, 0, str(store), suite_config(request, MODELS[run.model], micro_batches[0]))
            ),
            "micro_batches": micro_batches,
            **run.options,
        }
        log = folder / f"{run.label.replace(' ', '_').replace(',', '')}.log"
        ended = run_process(
            _WORKER,
            json.dumps(job),
            limit_s=min(self.seconds_left, _SLOWER * run.seconds) + _LATE_S,
            threads=_threads(request),
            log=log,
        )
        store.unlink(missing_ok=True)
        figures = None if ended.error else json.loads(ended.result)
        return Record(run.name, run.model, run.number, ended.seconds, figures, ended.error)

    def _add(self, record: Record) -> None:
        self.results["runs"].append(asdict(record))
        if record.figures is not None:
            self._micro_batches.setdefault(record.model, record.micro_batch)


def _is_out_of_memory(record: Record) -> bool:
    return any(text in record.error for text in _OUT_OF_MEMORY)


def _threads(request: PartRequest) -> int:
    return 1 if request.device == "cpu" else min(_MAX_THREADS, num_cores())


def suite_config(request: PartRequest, model: ModelConfig, micro_batch_size: int) -> dict[str, Any]:
    """Returns the configuration of a bench suite for one rank on the part's device."""
    bench = Float8BenchConfig(
        device=request.device, threads_per_rank=_threads(request), micro_batch_size=micro_batch_size
    )
    return config_to_dict(Float8SuiteConfig(bench=bench, model=model, optim=OptimConfig(lr=_LR)))


def dtrain_case(name: str, precision: str = "bf16", zero_stage: int = 2, recipe: str | None = None) -> BenchmarkCase:
    """Returns the native engine's case."""
    return BenchmarkCase(name, "native", 1, precision, zero_stage, recipe=recipe)


def records_of(results: Mapping[str, Any]) -> list[Record]:
    """Returns the records of a part's results."""
    return [Record(**values) for values in results.get("runs", [])]


def by_case(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Groups the records with figures by model and case, in the order of their first runs."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.figures is not None:
            groups.setdefault((record.model, record.name), []).append(record)
    return groups


def speed_ups(records: Sequence[Record], baseline: Sequence[Record]) -> list[float]:
    """Returns tokens/s over the baseline's, run by run; further runs of one of the two do not count."""
    others = {record.number: record for record in baseline}
    pairs = [(record, others[record.number]) for record in records if record.number in others]
    return [record.tokens_per_s / other.tokens_per_s for record, other in pairs]


def figures_of(records: Sequence[Record], name: str) -> list[Any]:
    """Returns one of the figures of each run."""
    return [record.figures[name] for record in records if record.figures is not None]


def window_ms(records: Sequence[Record]) -> list[float]:
    """Returns the milliseconds of a step in every window of all runs."""
    return [ms for windows in figures_of(records, "window_ms") for ms in windows]


def gib(records: Sequence[Record], name: str) -> str:
    """Formats the most of a memory figure over all runs; a CPU has none."""
    most = max(figures_of(records, name), default=0)
    return f"{most / 2**30:.1f}" if most else "not measured"


def graphs_text(records: Sequence[Record]) -> str:
    """Formats the graphs and the graph breaks of a case's first run."""
    return f"{figures_of(records, 'graphs')[0]}, {figures_of(records, 'graph_breaks')[0]}"


def warning_lines(records: Sequence[Record]) -> list[str]:
    """Returns a line of Markdown for each thing of which dtrain warned in a case, such as a graph break."""
    found = {
        f"- {record.name}, {record.model}: {text}": None
        for record in records
        for text in (record.figures or {}).get("warnings", ())
    }
    return ["", "dtrain warned:", "", *found] if found else []


def error_lines(records: Sequence[Record]) -> list[str]:
    """Returns one line for each run that failed."""
    return [f"{record.name}, {record.model}: {record.error}" for record in records if record.figures is None]

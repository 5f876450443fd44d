"""Measures one training step on two ranks and draws it: docs/pictures/timeline.json and timeline.png.

PYTHONPATH=. python docs/pictures/timeline.py [draw]

With ``draw`` the existing file is drawn. Times are of the monotonic clock, which the processes of a host
share. The step of median length is kept.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import two_ranks
from matplotlib.axes import Axes
from matplotlib.patches import Patch

import dtrain
from dtrain.config.schema import ModelConfig
from dtrain.distributed.communicator import Handle
from dtrain.distributed.transport.host_memory import Announcement
from dtrain.models import build_model

RESULTS = Path(__file__).with_name("timeline.json")
CONFIG = ModelConfig(num_layers=4, hidden_dim=512, num_heads=8, max_seq_len=128)
ANNOUNCEMENT_WAIT = Announcement.wait
VOCAB, MICRO_BATCHES, WARMUP, STEPS, STAGES = 256, 2, 5, 21, (2, 3)


class Recorder:
    """Records events as [kind, label, start, end] in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self.events: list[list[Any]] = []

    @contextmanager
    def span(self, kind: str, label: str = "") -> Iterator[None]:
        """Records the time of a block."""
        start = time.monotonic()
        yield
        self.events.append([kind, label, start, time.monotonic()])

    def timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``function`` with its calls recorded."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.span(kind):
                return function(*args, **kwargs)

        return call

    def watch(self, engine: Any) -> None:
        """Wraps the parts of a native engine."""
        for buffer in engine.sharded.buffers:
            self._watch_reductions(buffer.gradient, buffer.layout.name)
        comm, all_gather = engine.comm, engine.comm.all_gather
        comm.all_gather = lambda *args, label: _TimedHandle(all_gather(*args, label=label), label, self)
        engine.finish_gradients = self.timed("finish", engine.finish_gradients)
        engine._vote = self.timed("vote", engine._vote)
        engine._optimizer.update = self.timed("update", engine._optimizer.update)
        Announcement.wait = self.timed("wait", ANNOUNCEMENT_WAIT)  # type: ignore[method-assign]

    def _watch_reductions(self, gradient: Any, label: str) -> None:
        """Records each reduction from its start until its result has been added."""
        reduce, finish = gradient.reduce, gradient.finish_reduction
        starts: deque[float] = deque()

        def timed_reduce() -> None:
            starts.append(time.monotonic())
            reduce()

        def timed_finish(*, is_last: bool) -> Any:
            weights = finish(is_last=is_last)
            self.events.append(["all-to-all", label, starts.popleft(), time.monotonic()])
            return weights

        gradient.reduce, gradient.finish_reduction = timed_reduce, timed_finish


class _TimedHandle:
    """A collective, recorded from its start until its result is complete."""

    def __init__(self, handle: Handle, label: str, recorder: Recorder) -> None:
        self._handle = handle
        self._label = label
        self._recorder = recorder
        self._start: float | None = time.monotonic()

    def wait(self) -> None:
        self._handle.wait()
        if self._start is not None:
            self._recorder.events.append(["all-gather", self._label, self._start, time.monotonic()])
            self._start = None


def measure(rank: int) -> list[list[dict[str, Any]]]:
    """Returns all measured steps of this rank, a list a stage."""
    stages = []
    for stage in STAGES:
        model = build_model(CONFIG, VOCAB, seed=0)
        engine: Any = dtrain.initialize(model, zero_stage=stage, precision="bf16", seed=0)
        recorder = Recorder()
        recorder.watch(engine)
        generator = torch.Generator().manual_seed(rank)
        steps = []
        for _ in range(WARMUP + STEPS):
            shape = (MICRO_BATCHES, 2, CONFIG.max_seq_len + 1)
            batch = torch.randint(VOCAB, shape, generator=generator)
            engine.comm.barrier()
            recorder.events = []
            start = time.monotonic()
            for tokens in engine.accumulate(batch):
                with recorder.span("forward"):
                    loss = engine(tokens[:, :-1], tokens[:, 1:]).loss
                with recorder.span("backward"):
                    engine.backward(loss)
            engine.step()
            steps.append({"start": start, "end": time.monotonic(), "events": recorder.events})
        stages.append(steps[WARMUP:])
    return stages


def measure_stages() -> dict[str, Any]:
    """Measures all stages and keeps the step of median length of each."""
    load = os.getloadavg()[0]
    ranks = two_ranks.run(measure)
    stages = {}
    for index, stage in enumerate(STAGES):
        pairs = list(zip(*(rank[index] for rank in ranks), strict=True))
        pairs.sort(key=lambda pair: max(step["end"] for step in pair) - min(step["start"] for step in pair))
        lengths = [max(step["end"] for step in pair) - min(step["start"] for step in pair) for pair in pairs]
        median = pairs[len(pairs) // 2]
        zero = min(step["start"] for step in median)
        stages[str(stage)] = {
            "step_ms": [round(1000 * length, 1) for length in (lengths[len(pairs) // 2], lengths[0], lengths[-1])],
            "ranks": [
                [
                    [kind, label, round(1000 * (start - zero), 3), round(1000 * (end - zero), 3)]
                    for kind, label, start, end in step["events"]
                ]
                for step in median
            ],
        }
    return {
        "description": "one step on 2 ranks of 1 thread; [kind, label, start, end], ms from the step's start",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "host": {"cores": os.cpu_count(), "machine": platform.machine(), "load_before": load},
        "torch": torch.__version__,
        "model": {"parameters": sum(p.numel() for p in build_model(CONFIG, VOCAB, seed=0).parameters())},
        "tokens_per_micro_batch": 2 * CONFIG.max_seq_len,
        "micro_batches": MICRO_BATCHES,
        "steps_measured": STEPS,
        "stages": stages,  # step_ms: median, least, most
    }


KINDS = (("forward", "backward", "finish", "vote", "update"), ("wait",), ("all-to-all",), ("all-gather",))
LANES = ("compute", "wait", "all-to-all", "all-gather")
COLORS = {  # Okabe and Ito's, told apart with any colour vision
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "finish": "#999999",
    "vote": "#CC79A7",
    "update": "#009E73",
    "wait": "#000000",
    "all-to-all": "#E69F00",
    "all-gather": "#F0E442",
}
NAMES = {
    "finish": "last reductions, sums",
    "vote": "norm and vote",
    "all-to-all": "micro-batch gradients",
}


def draw(results: dict[str, Any]) -> None:
    """Draws a panel a stage, with four lanes a rank."""
    figure, panels = plt.subplots(len(STAGES), 1, figsize=(10, 7.6), dpi=130, layout="constrained", sharex=True)
    for axes, (stage, record) in zip(panels, results["stages"].items(), strict=True):
        for rank, events in enumerate(record["ranks"]):
            draw_rank(axes, events, top=-5 * rank)
        labels = [(-5 * rank - lane - 0.5, name) for rank in range(2) for lane, name in enumerate(LANES)]
        axes.set_yticks([height for height, _ in labels], [name for _, name in labels], fontsize=8)
        for rank in range(2):
            height = 1 - (0.24 + 0.53 * rank)
            axes.text(-0.125, height, f"rank {rank}", transform=axes.transAxes, rotation=90, va="center")
        median, least, most = record["step_ms"]
        spread = f"{results['steps_measured']} steps: {least:.0f} to {most:.0f}"
        axes.set_title(f"stage {stage}: {median:.0f} ms ({spread})", fontsize=10)
        axes.set_ylim(-9.2, 0.2)
        axes.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel("ms from the start of the step")
    handles = [Patch(facecolor=color, edgecolor="black", label=NAMES.get(kind, kind)) for kind, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    two_ranks.save(figure, "timeline.png")


def draw_rank(axes: Axes, events: list[list[Any]], top: float) -> None:
    """Draws the lanes of one rank from ``top`` down; concurrent events lie side by side."""
    for lane, kinds in enumerate(KINDS):
        found = sorted((event for event in events if event[0] in kinds), key=lambda event: event[2])
        rows: list[float] = []  # when each row is free
        placed = []
        for kind, _, start, end in found:
            row = next((number for number, free in enumerate(rows) if free <= start), len(rows))
            rows[row : row + 1] = [end]
            placed.append((kind, row, start, end))
        for kind, row, start, end in placed:
            height = 0.9 / max(len(rows), 1)
            bottom = top - lane - 0.05 - (row + 1) * height
            edge = {"edgecolor": "black", "linewidth": 0.3} if kind != "wait" else {}
            axes.barh(bottom, max(end - start, 0.05), height, left=start, align="edge", color=COLORS[kind], **edge)


def main() -> None:
    if sys.argv[1:] != ["draw"]:
        text = json.dumps(measure_stages(), indent=1)
        RESULTS.write_text(_one_line_per_event(text), encoding="utf-8")
    draw(json.loads(RESULTS.read_text(encoding="utf-8")))


def _one_line_per_event(text: str) -> str:
    return re.sub(r'\[\s*"[^\[\]]*\]', lambda event: " ".join(event.group().split()), text) + "\n"


if __name__ == "__main__":
    main()

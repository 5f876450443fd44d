"""Traces of work on a device: time by class of kernel, launches, and waits of the host.

A trace is read from the file that ``torch.profiler`` exports, the format of Chrome's trace viewer. What the device
executes is assigned to a range of the host's time by the call that launched it, so that asynchronous work counts where
it was issued. On a CPU operations take the place of kernels.
"""

from __future__ import annotations

import json
import re
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dtrain.errors import BenchError

WORK, OPTIMIZER = "dtrain::work", "dtrain::optimizer"
"""Names of ranges for ``record_function``: all that is measured, and the optimizer phase in it."""

CLASSES = (
    "matmul",
    "attention",
    "elementwise",
    "cast",
    "reduction",
    "optimizer",
    "communication",
    "memcpy",
    "other",
)
_PATTERNS = (
    ("communication", r"nccl|c10d|allreduce|all_reduce|allgather|reduce_?scatter"),
    ("attention", r"flash|fmha|sdpa|attention|mem_?eff"),
    ("optimizer", r"adam|lamb\b|sgd|^(record|decide)$"),
    ("matmul", r"gemm|gemv|nvjet|xmma|cutlass|cublas|splitk|_mm_|triton_tem_|aten::(_scaled_|add)?b?mm$|_dot_kernel"),
    (
        "cast",  # also copies by a kernel
        r"_copy_kernel|fused_(_to_copy|clone|copy_)_\d+$|aten::(_to_copy|copy_)$|quantize|"
        r"^_(cast|measure|scales|transpose)$",
    ),
    (
        "reduction",
        r"reduce_kernel|softmax|nll_loss|norm(?!al)|welford|triton_(red|per)_|squares|absmax|amax|_nonfinite$|"
        r"aten::(sum|mean|max|min|all)$",
    ),
    (
        "elementwise",
        r"elementwise|triton_poi_|multi_tensor_apply|catarray|index|embedding|gather|scatter|fill|arange|rand|philox|"
        r"transpose|copy|roll|tri[ul]|_add_rows|aten::\w+",
    ),
)  # fmt: skip
_COMPILED = [(name, re.compile(pattern, re.I)) for name, pattern in _PATTERNS]

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_CALLS = {"cuda_runtime", "cuda_driver"}
_LAUNCH = re.compile(r"(Launch(Cooperative)?Kernel|GraphLaunch)")
_COPY = re.compile(r"(Memcpy|Memset)\w*Async")
_WAIT = re.compile(r"(Stream|Device|Event|Ctx)Synchronize|^(cuda|cu|hip)(Memcpy|Memset)(?!\w*Async)\w*")
_ITEM = "aten::_local_scalar_dense"  # of .item(), float() and bool() of a tensor
_VIEWS = re.compile(
    r"aten::(view|_unsafe_view|reshape|as_strided|t|transpose|permute|slice|select|expand|unsqueeze|squeeze|detach|"
    r"alias|unbind|split\w*|chunk|narrow|empty\w*|new_empty\w*|resize_|set_|to|lift_fresh|result_type|resolve_\w+|item)$"
)


def kernel_class(name: str) -> str:
    """Returns one of ``CLASSES`` for the name of a kernel, or of an operation on a CPU."""
    return next((found for found, pattern in _COMPILED if pattern.search(name)), "other")


@dataclass(frozen=True)
class TraceEvent:
    """An event; times in microseconds. ``correlation`` joins a device event and the call that launched it."""

    name: str
    category: str
    start: float
    end: float
    thread: str = ""
    correlation: int = -1


class Trace:
    """The host's events that begin within the ranges named ``label``, and the work that they have launched.

    Attributes:
        wall_ms: from the start of a range to its end, or to the end of the work that it has launched, whichever is
            later; ranges are added up.
    """

    def __init__(self, events: Sequence[TraceEvent], label: str = WORK, optimizer_label: str = OPTIMIZER) -> None:
        self._events = events
        self._ranges = _ranges(events, label)
        optimizer = _ranges(events, optimizer_label)
        self._host = [event for event in events if _covered(event, self._ranges)]
        launched_at = {e.correlation: e for e in events if e.category in _CALLS and e.correlation >= 0}
        self.is_on_device = any(event.category in _DEVICE for event in events)
        self._work: list[tuple[TraceEvent, str, float]] = []  # with its class and its microseconds
        if self.is_on_device:
            for event in events:
                launch = launched_at.get(event.correlation, event)
                if event.category in _DEVICE and _covered(launch, self._ranges):
                    found = _device_class(event, is_optimizer=_covered(launch, optimizer))
                    self._work.append((event, found, event.end - event.start))
        else:
            for event, own in _self_times(event for event in self._host if _is_operation(event)):
                found = "optimizer" if _covered(event, optimizer) else kernel_class(event.name)
                self._work.append((event, found, own))
        ends = [event.end for event, _, _ in self._work]
        wall = sum(end - start for start, end in self._ranges)
        tail = max(ends, default=0.0) - max((end for _, end in self._ranges), default=0.0)
        self.wall_ms = (wall + max(0.0, tail)) / 1000

    def within(self, label: str) -> Trace:
        """Returns the part of the trace that belongs to the ranges named ``label``."""
        return Trace(self._events, label)

    @property
    def num_launches(self) -> int:
        """Kernel launches; on a CPU the operations that are no views and call no other operation."""
        if self.is_on_device:
            return self._num_calls(_LAUNCH)
        return len(_leaves(event for event in self._host if _is_operation(event)))

    @property
    def num_copies(self) -> int:
        """Asynchronous copies and fills that the driver does, which are no kernel launches."""
        return self._num_calls(_COPY)

    @property
    def synchronizations(self) -> dict[str, int]:
        """Calls by name in which the host waits for the device; ``.item()`` stands for them on a CPU.

        A copy from or to pageable memory is one too, although its call is asynchronous by name.
        """
        calls = Counter(e.name for e in self._host if e.category in _CALLS and _WAIT.search(e.name))
        calls.update(e.name for e, _, _ in self._work if e.category == "gpu_memcpy" and "Pageable" in e.name)
        if not self.is_on_device:
            calls.update(".item()" for event in self._host if event.name == _ITEM)
        return dict(calls)

    def _num_calls(self, pattern: re.Pattern[str]) -> int:
        calls = [event for event in self._host if event.category in _CALLS and pattern.search(event.name)]
        # a call of the runtime may be listed again as the driver's, with the same number
        numbers = {event.correlation for event in calls if event.correlation >= 0}
        return len(numbers) + sum(event.correlation < 0 for event in calls)

    @property
    def busy_ms(self) -> float:
        """Time in which the device, or a thread of the CPU, executes something."""
        return _union([(event.start, event.end) for event, _, _ in self._work]) / 1000

    @property
    def idle_ms(self) -> float:
        return max(0.0, self.wall_ms - self.busy_ms)

    def ms_by_class(self) -> dict[str, float]:
        """Returns milliseconds by class; work that overlaps on several streams counts in full."""
        ms = dict.fromkeys(CLASSES, 0.0)
        for _, found, own in self._work:
            ms[found] += own / 1000
        return ms

    def top(self, count: int = 20) -> list[dict[str, Any]]:
        """Returns the kernels that take most time: name, class, calls and milliseconds."""
        rows: dict[tuple[str, str], list[float]] = defaultdict(list)
        for event, found, own in self._work:
            rows[event.name, found].append(own / 1000)
        most = sorted(rows.items(), key=lambda row: -sum(row[1]))[:count]
        return [{"name": name, "class": found, "calls": len(times), "ms": sum(times)} for (name, found), times in most]

    def summary(self, top: int = 20) -> dict[str, Any]:
        """Returns all figures as plain values."""
        return {
            "wall_ms": self.wall_ms,
            "busy_ms": self.busy_ms,
            "idle_ms": self.idle_ms,
            "ms_by_class": self.ms_by_class(),
            "num_launches": self.num_launches,
            "num_copies": self.num_copies,
            "synchronizations": self.synchronizations,
            "top": self.top(top),
        }


def record_trace(run: Callable[[], object], device: torch.device, *, keep: Path | None = None) -> Trace:
    """Calls ``run`` once under the profiler; ``keep`` is the file for the raw trace, deleted if None.

    The returned trace counts neither the profiler's start nor the final wait for the device.

    Raises:
        BenchError: the profiler cannot record the device.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, acc_events=True):  # the first use loads the library that records kernels
            torch.zeros(1, device=device)
            torch.cuda.synchronize(device)
    with profile(activities=activities, acc_events=True) as profiler:
        with record_function(WORK):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory(prefix="dtrain-trace-") as folder:
        path = keep or Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        # not strict: names of kernels may have control characters
        trace = Trace(read_events(json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)))
    if device.type == "cuda" and not trace.is_on_device:
        raise BenchError("the profiler recorded no kernel of the GPU; CUPTI is missing, or another profiler is in use")
    return trace


def read_events(trace: Mapping[str, Any]) -> list[TraceEvent]:
    """Returns the complete events of an exported trace in order of their start."""
    events = []
    for item in trace["traceEvents"]:
        if item.get("ph") != "X" or "cat" not in item:
            continue
        start, arguments = float(item["ts"]), item.get("args", {})
        events.append(
            TraceEvent(
                name=str(item["name"]),
                category=str(item["cat"]),
                start=start,
                end=start + float(item.get("dur", 0.0)),
                thread=f"{item.get('pid')}/{item.get('tid')}",
                correlation=int(arguments.get("correlation", -1)),
            )
        )
    return sorted(events, key=lambda event: (event.start, -event.end))


def _is_operation(event: TraceEvent) -> bool:
    return event.category == "cpu_op" and "::" in event.name and "autograd::" not in event.name


def _device_class(event: TraceEvent, *, is_optimizer: bool) -> str:
    if event.category != "kernel":
        return "memcpy"
    found = kernel_class(event.name)
    return "optimizer" if is_optimizer and found != "communication" else found


def _ranges(events: Iterable[TraceEvent], label: str) -> list[tuple[float, float]]:
    return sorted((e.start, e.end) for e in events if e.category == "user_annotation" and e.name == label)


def _covered(event: TraceEvent, ranges: Sequence[tuple[float, float]]) -> bool:
    """Whether ``event`` starts inside one of the ranges, which are in order and do not overlap."""
    index = bisect_right(ranges, (event.start, float("inf"))) - 1
    return index >= 0 and event.start <= ranges[index][1]


def _self_times(events: Iterable[TraceEvent]) -> list[tuple[TraceEvent, float]]:
    """Returns each event with its time less that of the events directly inside it on the same thread."""
    own: dict[int, float] = {}
    ordered = list(events)
    open_by_thread: dict[str, list[int]] = defaultdict(list)
    for index, event in enumerate(ordered):
        stack = open_by_thread[event.thread]
        while stack and ordered[stack[-1]].end <= event.start:
            stack.pop()
        own[index] = event.end - event.start
        if stack:
            own[stack[-1]] -= event.end - event.start
        stack.append(index)
    return [(event, max(0.0, own[index])) for index, event in enumerate(ordered)]


def _leaves(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Returns the operations that call no other operation except views."""
    last: dict[str, TraceEvent] = {}
    leaves = []
    for event in (event for event in events if not _VIEWS.search(event.name)):
        before = last.get(event.thread)
        if before is not None and before.end <= event.start:
            leaves.append(before)
        last[event.thread] = event
    return [*leaves, *last.values()]


def _union(intervals: Sequence[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total

"""The optimizer phase of the native engine (G3, G4).

The phase is ``engine.step()`` after a backward: norm and overflow check, vote, unscale, clip, AdamW and the cast to
BF16. It is measured from outside, as a training loop calls it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Protocol, cast

import torch
from torch import Tensor

import dtrain
from dtrain.measure.accept.job import Request
from dtrain.measure.accept.models import MODELS
from dtrain.measure.accept.trace import record_trace
from dtrain.measure.bench.operations.optimizer import OptimizerPhase
from dtrain.measure.bench.report.statistics import spread
from dtrain.measure.bench.training.model import build_on
from dtrain.sharding.layout import CHUNK
from dtrain.telemetry.texts import compact
from dtrain.telemetry.throughput import device_name
from dtrain.tools.processes import failure_reason
from dtrain.tools.tables import Column, Table

COUNTED_BYTES = 30
"""Bytes a parameter of G3: BF16 gradient read twice, master and moments read and written, BF16 weight written."""

_TOKENS = 64
_WARMUP = 3  # rounds
_COPY_NUMEL = 1 << 28
_AHEAD_CYCLES = 40_000_000  # about 20 ms in which the device waits and the host queues the phase
_RESERVE_S = 2.0
_NOTES = (
    "dtrain ms: `engine.step()` after a backward, between two events on the device, which sleeps before, so that the "
    "host runs ahead as in training. GB/s counts the bytes a parameter that this engine moves: gradients read twice, "
    "master and moments read and written, weights written. Copy: FP32, timed in the same rounds. At 30: the share of "
    "the copy's bandwidth if 30 bytes a parameter are counted, as for BF16 gradients. torch: unscale and check "
    "(foreach), clip, fused AdamW, cast (foreach), with the FP32 copy of BF16 gradients. Launches, copies by the "
    "driver and waits of the host are counted in a trace of one step. Host ms: until `engine.step()` returns."
)


class _Engine(Protocol):
    """The methods of dtrain's engines that are measured."""

    num_parameters: int

    def __call__(self, **batch: Tensor) -> Any: ...
    def backward(self, loss: Any) -> None: ...
    def finish_gradients(self) -> None: ...
    def step(self) -> Any: ...
    def memory(self) -> dict[str, int]: ...


def run(request: Request) -> Iterator[dict[str, Any]]:
    """Measures the phase at three sizes, and at a tiny one on a CPU."""
    deadline = time.monotonic() + request.seconds
    device = torch.device(request.device, 0) if request.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # at these sizes more threads wait for each other
    results: dict[str, Any] = {"device": device_name(device), "cases": [], "failures": [], "left_out": {}}
    # the largest is what the targets are read at; the smallest comes first, because a failure shows soonest there
    names = ["tiny"] if request.small else ["50M", "1.2B", "400M"]
    rounds = 5 if request.small else 15
    for name in names:
        if results["cases"] and deadline - time.monotonic() < max(_RESERVE_S, results["cases"][-1]["seconds"]):
            results["left_out"][name] = "no time left"
            continue
        start = time.monotonic()
        try:
            case = measure(name, device, rounds)
            results["cases"].append(case | {"seconds": time.monotonic() - start})
            results["failures"] += [f"{name}: {error}" for error in case["errors"]]
        except Exception as error:  # one size must not cost the others
            results["failures"].append(f"{name}: {failure_reason(error)}")
        _free(device)
        yield results
    yield results  # with what was left out


def measure(name: str, device: torch.device, rounds: int) -> dict[str, Any]:
    """Returns the figures of one size; the three operations alternate, round by round."""
    config = MODELS[name]
    model = build_on(device, config, seed=0)
    engine = cast(_Engine, dtrain.initialize(model, optimizer=dtrain.AdamW(lr=1e-4), precision="bf16", seed=0))
    tokens = torch.arange(_TOKENS, device=device).view(1, -1)

    def make_gradients() -> None:
        engine.backward(engine(tokens=tokens, targets=tokens))
        engine.finish_gradients()

    # not zeros, which a GPU copies faster than what training moves
    source = torch.randn(min(_COPY_NUMEL, engine.num_parameters), device=device)
    target = torch.empty_like(source)
    ms: dict[str, list[float]] = {"dtrain": [], "torch": [], "copy": []}
    host_ms: list[float] = []
    errors: list[str] = []
    torch_phase = _torch_phase(engine.num_parameters, device, errors)
    for number in range(rounds + _WARMUP):
        make_gradients()
        elapsed, host = _elapsed_ms(engine.step, device)
        found = {"dtrain": elapsed, "copy": _elapsed_ms(lambda: target.copy_(source), device)[0]}
        if torch_phase is not None:
            found["torch"] = _elapsed_ms(torch_phase, device)[0]
        if number >= _WARMUP:
            host_ms.append(host)
            for key, value in found.items():
                ms[key].append(value)
    return {
        "name": name,
        "num_parameters": engine.num_parameters,
        "bytes_a_parameter": moved_bytes(engine.memory()) / engine.num_parameters,
        "ms": ms,
        "host_ms": host_ms,
        "copy_bytes": 2 * source.nbytes,
        "trace": _trace(engine, make_gradients, device, errors),
        "errors": errors,
    }


def moved_bytes(memory: Mapping[str, int]) -> int:
    """Returns the bytes that the phase moves: gradients twice (norm, update), states in and out, replicas out.

    Args:
        memory: of the engine, by kind.
    """
    states = memory["master"] + memory["moments"]
    return 2 * memory["main_grad"] + 2 * states + memory["compute"]


def _torch_phase(numel: int, device: torch.device, errors: list[str]) -> Callable[[], None] | None:
    """Returns torch's own sequence on as many parameters, on BF16 gradients; None if it does not fit."""
    try:
        phase = OptimizerPhase(max(1, numel // CHUNK) * CHUNK, device).torch_sequence("fused", torch.bfloat16)
        phase()  # makes the moments
    except torch.OutOfMemoryError as error:
        errors.append(f"torch's sequence: {failure_reason(error)}")
        return None
    return phase


def _elapsed_ms(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Returns the milliseconds on the device, and those until ``run`` has returned; equal on a CPU."""
    if device.type == "cpu":
        begin = time.perf_counter()
        run()
        elapsed = 1000 * (time.perf_counter() - begin)
        return elapsed, elapsed
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_AHEAD_CYCLES)
    start.record()
    begin = time.perf_counter()
    run()
    host_ms = 1000 * (time.perf_counter() - begin)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)), host_ms


def _trace(
    engine: _Engine, make_gradients: Callable[[], None], device: torch.device, errors: list[str]
) -> dict[str, Any] | None:
    make_gradients()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    try:
        return record_trace(engine.step, device).summary()
    except Exception as error:  # a profiler may be missing or forbidden
        errors.append(f"trace: {failure_reason(error)}")
        return None


def _free(device: torch.device) -> None:
    gc.collect()  # engines and models refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -- the page ----------------------------------------------------------------------------------------------------------


def bandwidth_share(case: Mapping[str, Any], bytes_a_parameter: float) -> float:
    """Returns the phase's bytes per second over the copy's, medians."""
    rate = bytes_a_parameter * case["num_parameters"] / median(case["ms"]["dtrain"])
    return float(rate / (case["copy_bytes"] / median(case["ms"]["copy"])))


def torch_speed_ups(case: Mapping[str, Any]) -> list[float]:
    """Returns the speed-up over torch's sequence in each round; empty if it was not measured."""
    return [other / own for other, own in zip(case["ms"]["torch"], case["ms"]["dtrain"], strict=False)]


def section(results: Mapping[str, Any]) -> list[str]:
    """Returns the table of sizes."""
    cases: Sequence[Mapping[str, Any]] = results.get("cases", [])
    if not cases:
        return conclusions(results)
    columns: list[Column[Mapping[str, Any]]] = [
        ("parameters", lambda case: compact(case["num_parameters"])),
        ("dtrain ms", lambda case: spread(case["ms"]["dtrain"], 3)),
        ("bytes a parameter", lambda case: f"{case['bytes_a_parameter']:.1f}"),
        ("GB/s", lambda case: f"{_gb_per_s(case, case['bytes_a_parameter']):.0f}"),
        ("copy GB/s", lambda case: f"{case['copy_bytes'] / median(case['ms']['copy']) / 1e6:.0f}"),
        ("share of copy", lambda case: f"{bandwidth_share(case, case['bytes_a_parameter']):.1%}"),
        ("at 30", lambda case: f"{bandwidth_share(case, COUNTED_BYTES):.1%}"),
        ("torch ms", lambda case: spread(case["ms"]["torch"], 3) if case["ms"]["torch"] else "not measured"),
        ("speed-up", lambda case: spread(torch_speed_ups(case), 2) if case["ms"]["torch"] else "not measured"),
        ("launches", lambda case: _traced(case, "num_launches")),
        ("copies", lambda case: _traced(case, "num_copies")),
        ("waits", _waits),
        ("host ms", lambda case: f"{median(case['host_ms']):.2f}"),
    ]
    table = Table.of("Optimizer phase", columns, cases)
    return [*conclusions(results), "", table.markdown(), "", _NOTES, "", *_kernels(_largest(cases))]


def conclusions(results: Mapping[str, Any]) -> list[str]:
    """Returns lines on bandwidth and launches at the most parameters."""
    if not results.get("cases"):
        return ["optimizer phase: not measured"]
    case = _largest(results["cases"])
    size = compact(case["num_parameters"])
    speed_ups = torch_speed_ups(case)
    against = f"{median(speed_ups):.2f} x torch's sequence" if speed_ups else "torch's sequence not measured"
    lines = [
        f"{size} parameters: {median(case['ms']['dtrain']):.2f} ms, "
        f"{bandwidth_share(case, case['bytes_a_parameter']):.1%} of the copy's bandwidth at "
        f"{case['bytes_a_parameter']:.0f} bytes a parameter, {bandwidth_share(case, COUNTED_BYTES):.1%} at "
        f"{COUNTED_BYTES}; {against}"
    ]
    if case["trace"] is None:
        return [*lines, "launches: not measured, because there is no trace"]
    is_cpu = "" if results.get("device") != "cpu" else " (operations on a CPU)"
    return [
        *lines,
        f"{_traced(case, 'num_launches')} kernel launches{is_cpu}, {_traced(case, 'num_copies')} copies and fills by "
        f"the driver; waits of the host: {_waits(case)}",
    ]


def _largest(cases: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max(cases, key=lambda case: int(case["num_parameters"]))


def _gb_per_s(case: Mapping[str, Any], bytes_a_parameter: float) -> float:
    return float(bytes_a_parameter * case["num_parameters"] / median(case["ms"]["dtrain"]) / 1e6)


def _traced(case: Mapping[str, Any], name: str) -> str:
    return "not measured" if case["trace"] is None else str(case["trace"][name])


def _waits(case: Mapping[str, Any]) -> str:
    if case["trace"] is None:
        return "not measured"
    return ", ".join(f"{count} {name}" for name, count in case["trace"]["synchronizations"].items()) or "0"


def _kernels(case: Mapping[str, Any]) -> list[str]:
    """Returns the table of what the traced step of ``case`` ran."""
    if case["trace"] is None:
        return []
    columns: list[Column[Mapping[str, Any]]] = [
        ("kernel", lambda row: f"`{row['name'][:80]}`"),
        ("calls", lambda row: str(row["calls"])),
        ("ms", lambda row: f"{row['ms']:.3f}"),
    ]
    return [
        f"The step that was traced, {compact(case['num_parameters'])} parameters:",
        "",
        Table.of("Kernels", columns, case["trace"]["top"]).markdown(),
    ]

"""The targets on one GPU of 80 GB: figure, target, met or not, and the next thing to do. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dtrain.measure.accept import steps
from dtrain.measure.accept.job import Ended
from dtrain.tools.tables import Table

MFU = {"1.2B": 0.50, "3B": 0.54}
FLOAT8 = {"1.2B": 1.18, "3B": 1.28}
PEERS = {steps.FSDP2: 1.10, steps.DEEPSPEED: 1.30, steps.PLAIN: 0.99}
"""Least speed over each peer in BF16; plain AMP shards nothing, so its step is a lower bound."""

FLOAT8_LOSS, SHARE_OF_COPY, COUNTED_BYTES = 0.0025, 0.90, 30
LAUNCHES, STATES, HEAD, HEAD_SPEED, REPRODUCIBLE = 5, 1.02, 0.05, 1.0, 0.03
_MEASURE = "`dtrain accept goal=figures`"


@dataclass(frozen=True)
class TargetResult:
    """One target.

    Attributes:
        figure: what was measured, or an empty string.
        met: None without a figure.
        todo: the next thing to do if the target is not met.
    """

    key: str
    what: str
    target: str
    figure: str = ""
    met: bool | None = None
    todo: str = ""

    @property
    def row(self) -> tuple[str, ...]:
        status = {None: "not measured", True: "met", False: "NOT MET"}[self.met]
        todo = "" if self.met else f"measure it: {_MEASURE}" if self.met is None else self.todo
        return self.key, self.what, self.figure, self.target, status, todo


def check_targets(ended: Sequence[Ended]) -> list[TargetResult]:
    """Returns a result for every target, whether it was measured or not."""
    results = {found.name: found.results for found in ended}
    groups = steps.by_case(steps.records_of([found for found in ended if found.part == "steps"]))
    return [
        *_training(groups, _slowest_class(results, "bf16")),
        *_float8(groups, _slowest_class(results, "fp8")),
        *_optimizer(results.get("optimizer", {})),
        _states(groups, results.get("states", {})),
        *_head(results.get("loss head", {})),
        _reproducible(groups),
    ]


def table(found: Sequence[TargetResult]) -> str:
    """Returns the results as Markdown."""
    columns = ("", "what", "figure", "target", "", "next")
    return Table("Targets", columns, [result.row for result in found]).markdown()


def _training(groups: steps.Groups, slowest: str) -> list[TargetResult]:
    found = []
    for model, target in MFU.items():
        cases = [groups[model, name] for name in (steps.DTRAIN, steps.CHUNKED) if (model, name) in groups]
        own = max((steps.median_record(records) for records in cases), key=lambda r: r.tokens_per_s, default=None)
        what, text = f"MFU in BF16, {model}", f"{target:.0%} with causal FLOPs"
        if own is None or own.utilization is None:
            found.append(TargetResult("G1", what, text))
            continue
        causal, full = own.utilization
        figure = f"{causal:.1%} causal, {full:.1%} full ({own.name}, {steps.power_and_clock(own)})"
        found.append(TargetResult("G1", what, text, figure, causal >= target, slowest))
    for model in MFU:
        for peer, target in PEERS.items():
            ratio = steps.speed_up(groups, model, steps.DTRAIN, peer)
            what, text = f"speed over {peer}, {model}", f"{target:.2f}"
            result = TargetResult("G1", what, text)
            if ratio is not None:
                result = TargetResult("G1", what, text, f"{ratio:.3f}", ratio >= target, slowest)
            if ratio is not None or model == "1.2B":
                found.append(result)
    return found


def _float8(groups: steps.Groups, slowest: str) -> list[TargetResult]:
    found = []
    for model, target in FLOAT8.items():
        ratio = steps.speed_up(groups, model, steps.TENSORWISE, steps.DTRAIN)
        what = f"FP8 over BF16, {model}"
        if ratio is None:
            found.append(TargetResult("G2", what, f"{target:.2f}"))
            continue
        todo = slowest or "read the choice for each Linear, and profile fp8"
        found.append(TargetResult("G2", what, f"{target:.2f}", f"{ratio:.3f}", ratio >= target, todo))
    differences = {
        model: value
        for model in FLOAT8
        if (
            value := steps.loss_difference(
                groups.get((model, steps.TENSORWISE), []), groups.get((model, steps.DTRAIN), [])
            )
        )
        is not None
    }
    what, text = "loss of FP8 against BF16", f"within {FLOAT8_LOSS:.2%}"
    if not differences:
        return [*found, TargetResult("G2", what, text)]
    figure = ", ".join(f"{value:+.3%} at {model}" for model, value in differences.items())
    is_met = all(abs(value) <= FLOAT8_LOSS for value in differences.values())
    return [*found, TargetResult("G2", what, text, figure, is_met, "`dtrain probe` names the sensitive modules")]


def _optimizer(results: Mapping[str, Any]) -> list[TargetResult]:
    text = f"{SHARE_OF_COPY:.0%} at {COUNTED_BYTES} bytes a parameter"
    bandwidth = TargetResult("G3", "optimizer phase, of the copy's bandwidth", text)
    launches = TargetResult("G4", "launches of the optimizer phase", f"at most {LAUNCHES}")
    waits = TargetResult("G4", "waits of the host in it", "0")
    cases = results.get("cases", [])
    if not cases or results.get("device") == "cpu":
        return [bandwidth, launches, waits]
    case = max(cases, key=lambda case: int(case["num_parameters"]))
    speed = COUNTED_BYTES * case["num_parameters"] / median(case["ms"]["dtrain"])
    share = speed / (case["copy_bytes"] / median(case["ms"]["copy"]))
    trace = case["trace"]
    slow = f"look at `{trace['top'][0]['name'][:60]}`, its slowest kernel" if trace and trace["top"] else "trace it"
    bandwidth = TargetResult("G3", bandwidth.what, text, f"{share:.1%}", share >= SHARE_OF_COPY, slow)
    if trace is None:
        return [bandwidth, launches, waits]
    names = ", ".join(f"{row['calls']} `{row['name'][:40]}`" for row in trace["top"][:8])
    count, calls = trace["num_launches"], trace["synchronizations"]
    where = ", ".join(f"{number} {name}" for name, number in calls.items())
    return [
        bandwidth,
        TargetResult("G4", launches.what, launches.target, str(count), count <= LAUNCHES, f"join them: {names}"),
        TargetResult("G4", waits.what, "0", where or "0", not calls, f"find what calls {where}"),
    ]


def _states(groups: steps.Groups, results: Mapping[str, Any]) -> TargetResult:
    what, text = "model states over the formula", f"{STATES:g}"
    ratios = {}
    for (model, name), records in groups.items():
        figures = records[-1].figures or {}
        if model in MFU and figures["formula"]:
            held, formula = steps.device_states(figures)
            ratios[f"{model}, {name}"] = held / max(1, formula)
    if results.get("states") and results["states"][0]["num_parameters"] > 10**7:  # a smaller model is mostly padding
        ratios |= {f"{row['precision']}, stage {row['stage']}": row["ratio"] for row in results["states"]}
    if not ratios:
        return TargetResult("G5", what, text)
    worst = max(ratios, key=lambda name: ratios[name])
    todo = f"compare memory and formula by kind: {worst}"
    return TargetResult("G5", what, text, f"{ratios[worst]:.4f} ({worst})", ratios[worst] <= STATES, todo)


def _head(results: Mapping[str, Any]) -> list[TargetResult]:
    what, text = "loss head beside its gradients, of full FP32 logits", f"{HEAD:.0%}"
    speed = "loss head, speed over compiled full logits"
    head = results.get("head")
    if not head:
        return [TargetResult("G6", what, text), TargetResult("G6", speed, f"{HEAD_SPEED:g}")]
    share = (head["peak"] - head["gradients"]) / head["full_logits"]
    found = [TargetResult("G6", what, text, f"{share:.1%}", share <= HEAD, "set model.loss_chunk to fewer tokens")]
    if "ms" not in head:
        return [*found, TargetResult("G6", speed, f"{HEAD_SPEED:g}")]
    ratio = median(head["full_ms"]) / median(head["ms"])
    todo = "set model.loss_chunk to more tokens, or fuse its passes"
    return [*found, TargetResult("G6", speed, f"{HEAD_SPEED:g}", f"{ratio:.2f}", ratio >= HEAD_SPEED, todo)]


def _reproducible(groups: steps.Groups) -> TargetResult:
    what, text = "`reproducible=true`, 1.2B", f"at most {REPRODUCIBLE:.0%} slower"
    ratio = steps.speed_up(groups, "1.2B", steps.REPRODUCIBLE, steps.DTRAIN)
    if ratio is None:
        return TargetResult("G7", what, text)
    slower = 1 / ratio - 1
    todo = "compare the profiles; torch's deterministic attention backward is the usual cost"
    return TargetResult("G7", what, text, f"{slower:+.1%}", slower <= REPRODUCIBLE, todo)


def _slowest_class(results: Mapping[str, Mapping[str, Any]], precision: str) -> str:
    """Returns what takes most time of a profiled step outside products and attention."""
    for name, found in results.items():
        if not name.startswith(f"profile of {precision}") or not found.get("cases"):
            continue
        row = found["cases"][0]
        others = {key: ms for key, ms in row["ms_by_class"].items() if key not in ("matmul", "attention")}
        others["idle"] = row["idle_ms"]
        most = max(others, key=lambda key: others[key])
        return f"{most} takes {others[most] / row['wall_ms']:.0%} of the step: see its profile"
    return f"profile a step: {_MEASURE}"

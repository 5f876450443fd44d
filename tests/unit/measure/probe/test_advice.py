from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import replace

import pytest

from dtrain.cli.resolve import compose
from dtrain.measure.noise import Noise
from dtrain.measure.probe.advice import MAX_RETRAINS, advise
from dtrain.measure.probe.evidence import Evidence, line_of
from dtrain.measure.probe.records import Advice, Analysis, Flip, ProductResult, Trial

NOISE = Noise(rounding=0.006, seed=0.008)  # one unit is 0.01


def trial(format_name: str, gap: float = 0.0, *, ms: float | None = None, failure: str | None = None) -> Trial:
    return Trial(format_name, {}, [2.0] * 20, ms, 0, 0.999, 0, 1.0, gap, failure)


def result(module: str, format_name: str, predicted: float, product: str = "fprop") -> ProductResult:
    finite = math.isfinite(predicted)
    sqnr_db, cause = (30.0, "precision") if finite else (-math.inf, "range")
    return ProductResult(module, product, format_name, sqnr_db, 0.0, 0.0, cause, predicted)


class World:
    """Formats in which each culprit outside of the rules adds 5 noise units."""

    def __init__(self, culprits: Mapping[str, set[str]]) -> None:
        self.culprits = culprits
        self.asked: list[tuple[str, dict[str, str], float | None]] = []

    def __call__(self, format_name: str, rules: Mapping[str, str], loss_scale: float | None = None) -> Trial:
        self.asked.append((format_name, dict(rules), loss_scale))

        def covered(module: str) -> bool:
            return any(module == rule or module.startswith(f"{rule}.") for rule in rules)

        left = [module for module in self.culprits[format_name] if not covered(module)]
        return trial(format_name, 0.05 * len(left))


def ask(evidence: Evidence, culprits: Mapping[str, set[str]] | None = None) -> tuple[Advice, World]:
    world = World(culprits or {})
    return advise(evidence, world), world


def rules(advice: Advice) -> dict[str, str]:
    return {rule.pattern: rule.format for rule in advice.rules}


def test_a_healthy_model_gets_bf16_without_rules_and_without_another_training() -> None:
    analysis = Analysis((result("a", "bf16", 1.0), result("a", "fp16", math.inf)))
    trials = [trial("fp32"), trial("tf32"), trial("bf16", 0.019), trial("fp16"), trial("fp8")]
    advice, world = ask(Evidence(trials, NOISE, analysis))
    assert (advice.precision, advice.rules, advice.loss_scale) == ("bf16", (), None)
    assert advice.line == "precision=bf16"
    assert not world.asked
    assert "bf16 ends +1.9 noise units from FP32" in advice.reasons[1]
    assert advice.reasons[0] == "fp8 is emulated on this device: it brings no speed here"


@pytest.mark.parametrize(("gap", "precision"), [(0.0199, "bf16"), (0.0201, "fp16"), (-1.0, "bf16"), (math.nan, "fp16")])
def test_fp16_where_bf16_is_two_units_off(gap: float, precision: str) -> None:
    trials = [trial("fp32"), trial("bf16", gap), trial("fp16", 0.001)]
    advice, world = ask(Evidence(trials, NOISE, Analysis((), loss_scale=1024.0)), {"fp16": set()})
    assert advice.precision == precision
    if precision == "fp16":
        assert advice.loss_scale == 1024.0
        assert world.asked == [("fp16", {}, 1024.0)]  # what is advised was tried
        assert advice.line == "precision=fp16 precision.loss_scale.mode=static precision.loss_scale.init=1024"


@pytest.mark.parametrize(
    ("trials", "noise", "culprits", "line"),
    [
        ([trial("fp32"), trial("tf32"), trial("bf16", 1.0)], NOISE, {"b"}, "precision=tf32"),
        # a name with quotes is matched without them
        ([trial("fp32"), trial("bf16", 1.0)], NOISE, {"it?s"}, "precision=bf16 'precision.rules={\"it?s\": fp32}'"),
        # the user's own rules stay
        (
            [trial("fp32"), replace(trial("bf16"), rules={"head": "fp32"})],
            NOISE,
            set(),
            "precision=bf16 'precision.rules={\"head\": fp32}'",
        ),
        # without noise FP32's own rounding is left
        ([trial("fp32"), trial("bf16", 1e-7)], Noise(0.0, 0.0), set(), "precision=bf16"),
    ],
)
def test_lines_of_advice(trials: list[Trial], noise: Noise, culprits: set[str], line: str) -> None:
    advice, _ = ask(Evidence(trials, noise, Analysis((result("it's", "bf16", 1.0),))), {"bf16": culprits})
    assert advice.line == line


def test_fp16_keeps_its_dynamic_scale_if_the_constant_one_fails() -> None:
    evidence = Evidence([trial("fp32"), trial("fp16", 0.001)], NOISE, Analysis((), loss_scale=1024.0))
    advice, _ = ask(evidence, {"fp16": {"any"}})
    assert (advice.precision, advice.loss_scale, advice.line) == ("fp16", None, "precision=fp16")


@pytest.mark.parametrize(
    ("fp8", "bf16", "precision", "reason"),
    [
        (None, 10.0, "bf16", "fp8 is emulated"),
        (9.9, 10.0, "bf16", "fp8 is not faster than bf16 here (9.9 against 10 ms a step)"),
        (8.0, 10.0, "fp8", "fp8 ends"),
    ],
)
def test_fp8_where_it_is_real_and_faster(fp8: float | None, bf16: float, precision: str, reason: str) -> None:
    advice, _ = ask(Evidence([trial("fp32"), trial("bf16", ms=bf16), trial("fp8", ms=fp8)], NOISE, Analysis(())))
    assert advice.precision == precision
    assert any(text.startswith(reason) for text in advice.reasons)


def test_rules_for_the_culprits_alone() -> None:
    predicted = {"a": 0.1, "b": 0.5, "c": 0.01, "d": 0.3, "e": 0.2}
    analysis = Analysis(tuple(result(name, "bf16", value) for name, value in predicted.items()))
    advice, world = ask(
        Evidence([trial("fp32"), trial("bf16", 0.1)], NOISE, analysis, [Flip("b", "bf16", 0.5, 0.4)]),
        {"bf16": {"d", "a"}},
    )
    assert rules(advice) == {"d": "fp32", "a": "fp32"}
    assert advice.precision == "bf16"
    assert advice.line == """precision=bf16 'precision.rules={"d": fp32, "a": fp32}'"""
    assert [set(asked) for _, asked, _ in world.asked[:3]] == [{"b"}, {"b", "d"}, {"b", "d", "e", "a"}]
    assert len(world.asked) <= MAX_RETRAINS
    assert advice.rules[0].reason == (
        "module 'd': fprop in bf16 has 30 dB (precision), predicted change of the loss 3.0e-01; bf16 ends +10.0 noise "
        "units from FP32 without, ends +0.0 noise units from FP32 with 2 rules"
    )


def test_a_rule_for_a_module_covers_those_inside() -> None:
    results = result("attn.q", "bf16", 0.5), result("attn", "bf16", 0.3, "forward"), result("attn.k", "bf16", 0.2)
    evidence = Evidence([trial("fp32"), trial("bf16", 0.1)], NOISE, Analysis(results))
    advice, world = ask(evidence, {"bf16": {"attn", "attn.q", "attn.k"}})
    assert rules(advice) == {"attn": "fp32"}
    assert [asked for _, asked, _ in world.asked] == [{"attn.q": "fp32"}, {"attn": "fp32"}]


def test_fp8_rules_say_bf16_for_its_products_and_fp32_for_the_rest() -> None:
    analysis = Analysis((result("up", "fp8", 0.5), result("up", "bf16", 0.4), result("act", "bf16", 0.3, "forward")))
    trials = [trial("fp32"), trial("bf16", ms=10.0), trial("fp8", 0.1, ms=5.0)]
    advice, _ = ask(Evidence(trials, NOISE, analysis), {"fp8": {"up", "act"}})
    assert (advice.precision, rules(advice)) == ("fp8", {"up": "bf16", "act": "fp32"})


def test_the_search_ends() -> None:
    analysis = Analysis(tuple(result(f"m{index}", "bf16", 1.0 + index) for index in range(10_000)))
    advice, world = ask(Evidence([trial("fp32"), trial("bf16", 1.0)], NOISE, analysis), {"bf16": {"elsewhere"}})
    assert advice.precision == "fp32"
    assert len(world.asked) == MAX_RETRAINS


@pytest.mark.parametrize("pattern", ["a.b", "a b", "it?s", "[[]x]", "0", "a,b:c", "*.attn"])
def test_lines_are_accepted(pattern: str) -> None:
    line = line_of("fp16", {pattern: "fp32"}, 0.125)
    precision = compose(shlex.split(line)).precision
    assert precision.rules == {pattern: "fp32"}
    assert (precision.name, precision.loss_scale.mode, precision.loss_scale.init) == ("fp16", "static", 0.125)


def test_what_was_not_tested_is_named() -> None:
    analysis = Analysis((), unexamined={"odd": "it fails in bf16: no"}, loss_scale=8.0)
    trials = [trial("fp32", ms=5.0), trial("fp16"), trial("fp8")]
    advice, _ = ask(Evidence(trials, NOISE, analysis, device="this CPU"), {"fp16": set()})
    text = "\n".join(advice.untested)
    for words in (
        "more than 20 steps: gaps below 0.02",
        "learning rates",
        "several ranks",
        "this CPU",
        "the speed of fp16, fp8, emulated here",
        "'odd' by itself: it fails in bf16: no",
        "constant loss scale later",
    ):
        assert words in text

"""The page of an acceptance made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dtrain.tools.accept import steps
from dtrain.tools.accept.job import CUT, FAILED, LATE
from dtrain.tools.accept.page import Acceptance, compiled_report, render, summary
from dtrain.tools.accept.plan import PARTS
from tests.unit.tools.accept.made import H100, ended, step

MACHINE: dict[str, Any] = {
    "device": "cuda", "name": H100, "memory_gib": 79.6, "power_limit_w": 700.0, "packages": {"torch": "2.13.0"},
}  # fmt: skip
COMPILED = {"figures": {"graphs": 1, "graph_breaks": 2, "first_step_s": 31.25, "warnings": ["cut here"]}}
MADE = Acceptance(
    "dtrain accept goal=figures",
    "2026-07-29T12:00:00",
    "figures",
    280.0,
    MACHINE,
    [
        step("1.2B", steps.DTRAIN, 0, 60.0),
        ended("rates", "rates", {"conclusions": ["bf16 742"], "section": ["Rates."], "left_out": {"fp8": "no time"}}),
        ended("environment", "environment", status=LATE, error="not finished after 9 s", tail=["in nccl", "killed"]),
        ended("1.2B, FSDP2, run 1", "steps", status=CUT, error="no time was left"),
        ended("casts", "casts", {"failures": ["quantize: other bits"], "section": ["Casts."], "conclusions": ["97"]}),
        ended("compiled, dtrain", "compiled", COMPILED),
    ],
    {"3B, dtrain, run 1": "no time left"},
    {"steps": {"1.2B, DeepSpeed": "not installed", "3B, DeepSpeed": "not installed"}, "curves": {"tf32": "no GPU"}},
)


def part_of(page: str, title: str) -> str:
    """The lines below a title, up to the next one of its rank."""
    return page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_the_page_begins_with_targets_and_failures() -> None:
    page = render(MADE)
    assert page.startswith(
        f"# Acceptance of {H100}\n\n`dtrain accept goal=figures`, 2026-07-29T12:00:00, name {H100}, memory_gib 79.6, "
        "power_limit_w 700.0, torch 2.13.0\n\n## Targets\n\n|"
    )
    assert "| G1 | MFU in BF16, 1.2B " in part_of(page, "Targets")
    result = part_of(page, "Result")
    assert result.startswith(
        "\n**4 of 7 jobs done; 2 things did not work:**\n\n"
        "- environment: environment late: not finished after 9 s\n- casts: quantize: other bits\n\n- casts: 97\n"
    )
    assert MADE.failures == ["environment: environment late: not finished after 9 s", "casts: quantize: other bits"]
    fine = replace(MADE, ended=[ended("rates", "rates", {"conclusions": ["bf16 742"]})])
    assert "**1 of 2 jobs done; nothing failed.**\n\n- rates: bf16 742\n" in render(fine)


def test_the_page_lists_every_job_with_its_end_and_reason() -> None:
    text = render(MADE).split("### Jobs\n", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.strip().splitlines()[2:]]
    assert rows[0] == ["1.2B, dtrain, run 1", "steps", "done", "30 s", ""]
    assert rows[2] == ["environment", "environment", "late", "30 s", "not finished after 9 s"]
    assert rows[3][2:] == ["cut short", "30 s", "no time was left"]
    assert rows[6] == ["3B, dtrain, run 1", "", "not run", "", "no time left"]
    assert len(rows) == 7


def test_the_page_has_a_section_for_each_part_that_has_begun_in_order() -> None:
    page = render(MADE)
    titles = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    own = ("environment", "casts", "compiled", "rates", "steps")
    assert titles == ["Targets", "Result", *(PARTS[part] for part in own), "Left out"]
    assert list(PARTS).index("environment") < list(PARTS).index("steps")
    assert "Casts.\n\nDid not work:\n\n- quantize: other bits\n" in part_of(page, PARTS["casts"])
    assert "```text\nin nccl\nkilled\n```" in part_of(page, PARTS["environment"])
    assert "| 1.2B  | dtrain |" in part_of(page, PARTS["steps"])
    assert part_of(page, PARTS["rates"]) == "\nRates.\n"
    nothing = replace(MADE, ended=[ended("optimizer", "optimizer")])
    assert part_of(render(nothing), PARTS["optimizer"]) == "\nNo results.\n"


def test_what_was_left_out_is_grouped_by_reason() -> None:
    left_out = part_of(render(MADE), "Left out").strip().splitlines()
    assert left_out == [
        "- rates: fp8: no time",
        "- steps: 1.2B, DeepSpeed; 3B, DeepSpeed: not installed",
        "- steps: 1.2B, FSDP2, run 1: no time was left",
        "- curves: tf32: no GPU",
    ]
    assert part_of(render(replace(MADE, ended=[], left_out={})), "Left out") == "\nNothing.\n"


def test_the_console_shows_the_page_up_to_the_jobs() -> None:
    text = summary(MADE)
    assert "did not work" in text
    assert "### Jobs" not in text
    assert render(MADE).startswith(text)


def test_a_job_under_way_is_no_failure_yet() -> None:
    under_way = replace(MADE, ended=[ended("casts", "casts", {"failures": []}, status="under way")])
    assert under_way.failures == []
    found = replace(MADE, ended=[ended("casts", "casts", {"failures": ["other bits"]}, status="under way")])
    assert found.failures == ["casts: other bits"]


def test_compiled_blocks_have_a_line_each() -> None:
    found = compiled_report(
        [
            ended("compiled, dtrain", "compiled", COMPILED),
            ended("compiled, FP8 tensorwise", "compiled", status=FAILED, error="no kernel", tail=["Traceback"]),
        ]
    )
    assert found.conclusions == ["compiled, dtrain: 1 graph, 2 breaks, first step 31.2 s; warned: cut here"]
    assert found.failures == ["compiled, FP8 tensorwise failed: no kernel"]
    assert found.section[0] == f"- {found.conclusions[0]}"
    assert "Traceback" in found.section


def test_a_cpu_says_that_its_figures_mean_nothing() -> None:
    page = render(replace(MADE, machine={"device": "cpu", "packages": {}}))
    assert page.startswith("# Acceptance of a CPU\n")
    assert "the figures only show that the command runs" in page

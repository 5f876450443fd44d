"""The manuals stay short: words by page, one thought a paragraph, lines that a terminal shows whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Words as `wc -w` counts them, bars of tables included (README.md: 180).
# A page that needs more takes it from another one: TOTAL holds. Tables that are generated from tests do not count.
BUDGETS = {
    "README.md": 1249,
    "docs/README.md": 272,
    "docs/examples/README.md": 199,
    "docs/experiments/README.md": 1129,
    "docs/precision/formats.md": 298,
    "docs/precision/fp8.md": 851,
    "docs/precision/precision.md": 1176,
    "docs/precision/probe.md": 692,
    "docs/precision/replay.md": 889,
    "docs/precision/telemetry.md": 1170,
    "docs/run/checkpoints.md": 1804,
    "docs/run/data.md": 1356,
    "docs/run/launchers.md": 665,
    "docs/run/models.md": 1511,
    "docs/run/optimizers.md": 1173,
    "docs/run/running.md": 1008,
    "docs/run/supervision.md": 831,
    "docs/run/watching.md": 300,
    "docs/scale/engine.md": 900,
    "docs/scale/engines.md": 1494,
    "docs/scale/memory.md": 1116,
    "docs/scale/planning.md": 1514,
    "docs/scale/speed.md": 418,
    "docs/start/library.md": 2360,
    "docs/start/notebooks/README.md": 156,
    "docs/start/tasks.md": 1494,
    "docs/trust/accept.md": 650,
    "docs/trust/audit.md": 902,
    "docs/trust/benchmarks.md": 1108,
    "docs/trust/parity.md": 779,
    "docs/trust/reliability.md": 1238,
    "docs/trust/silent-faults.md": 424,
    "docs/trust/vote.md": 862,
}
TOTAL = 32_000
NOT_MANUALS = ("docs/decisions/", "docs/reference/", "docs/results/")
MANUALS = sorted(
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
    if not str(page.relative_to(ROOT)).startswith(NOT_MANUALS)
)
PROSE = [*MANUALS, "CONTRIBUTING.md"]
PARAGRAPH, LINE, CODE_LINES = 90, 120, 30
_GENERATED = re.compile(r"<!-- (faults|assertions) -->.*?<!-- end \1 -->", re.DOTALL)
_ITEM = re.compile(r" *(?:[-*]|\d+\.) ")


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields what ``text`` consists of: kind ("prose", "code" or "table") and lines; a list's items one by one."""
    kind, lines = "prose", []
    for line in [*text.splitlines(), ""]:
        fence = line.lstrip().startswith("```")
        if kind == "code":
            if fence:
                yield kind, lines
                kind, lines = "prose", []
            else:
                lines.append(line)
            continue
        new = "table" if line.startswith("|") else "prose"
        if lines and (fence or not line.strip() or new != kind or line.startswith(("#", "<!--")) or _ITEM.match(line)):
            yield kind, lines
            lines = []
        kind = "code" if fence else new
        if not fence and line.strip() and not line.startswith("<!--"):
            lines.append(line)


def faults(text: str) -> list[str]:
    """Returns what is too long in ``text``: paragraphs, lines of prose, blocks of code."""
    found = []
    for kind, lines in blocks(text):
        if kind == "code" and len(lines) > CODE_LINES:
            found.append(f"{len(lines)} lines of code or output: {lines[0]}")
        if kind == "prose":
            words = " ".join(lines).split()
            if len(words) > PARAGRAPH:
                found.append(f"a paragraph of {len(words)} words: {' '.join(words[:8])} ...")
            found += [f"a line of {len(line)} characters: {line[:60]} ..." for line in lines if len(line) > LINE]
    return found


def test_faults_are_found() -> None:
    item = "- " + "word " * 60
    text = "\n".join([f"# {'title ' * 9}", item, item, "| " + "cell " * 200 + "|", "```text", *["x " * 200] * 3, "```"])
    assert faults(text.replace("word word word ", "word word word\n  ")) == []
    assert [fault.split(":")[0] for fault in faults("word\n" * 91)] == ["a paragraph of 91 words"]
    assert [fault.split(":")[0] for fault in faults(f"# title\n{'x' * 121}\n")] == ["a line of 121 characters"]
    assert [fault.split(":")[0] for fault in faults("```\n" + "x\n" * 31 + "```\n")] == ["31 lines of code or output"]


@pytest.mark.parametrize("page", PROSE)
def test_no_paragraph_and_no_line_is_too_long(page: str) -> None:
    found = faults((ROOT / page).read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", MANUALS)
def test_a_page_keeps_its_budget(page: str) -> None:
    text = _GENERATED.sub("", (ROOT / page).read_text(encoding="utf-8"))
    words = len(text.split())
    assert words <= BUDGETS[page], f"{words} words: shorten it, or move output and tables to docs/results"


def test_the_budgets_are_those_of_the_pages() -> None:
    assert [*BUDGETS] == [page for page in BUDGETS if (ROOT / page).exists()]
    assert sum(BUDGETS.values()) <= TOTAL

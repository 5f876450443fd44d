"""The table of ``docs/trust/benchmarks.md``: how many times as fast as its peers dtrain is, by the stored results.

``python -m tests.helpers.speed_ups`` writes it.
"""

from __future__ import annotations

import re
from statistics import median

from dtrain.measure.bench.records import TrainingResults, read_results
from dtrain.measure.bench.report.statistics import ratios
from dtrain.tools.tables import Table
from tests.helpers.promises import ROOT

PAGE = ROOT / "docs/trust/benchmarks.md"
TABLE = re.compile(r"(?<=<!-- speed-ups -->\n\n).*?(?=\n\n<!-- end speed-ups -->)", re.DOTALL)
PEERS = ("plain", "ddp", "ddp_zero", "accelerate", "fsdp2", "fsdp2_no_reshard", *map("deepspeed_{}".format, (1, 2, 3)))
SHAPES = ("compute-bound", "communication-bound")


def speed_ups() -> str:
    """Returns the table in Markdown: medians over the rounds of stages 1 to 3; beside plain PyTorch, of one rank."""
    return Table("", ("speed-up over", *SHAPES), [(f"`{p}`", *(_cell(p, s) for s in SHAPES)) for p in PEERS]).markdown()


def _cell(peer: str, shape: str) -> str:
    results = read_results(ROOT / f"docs/results/engine-{shape}.json")
    assert isinstance(results, TrainingResults)
    found = {result.case.name: result for result in results.cases}
    if peer not in found:
        return "not measured"
    cases = ("1 rank",) if peer == "plain" else ("stage 1", "stage 2", "stage 3")
    return ", ".join(f"{median(ratios(found[peer], found[f'native, {case}'])):.2f}" for case in cases)


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: speed_ups(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")

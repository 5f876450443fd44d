"""``docs/scaling.md`` compares published scaling tables with simulations as they were recorded."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from dtrain.planning.fabric import find_fabric
from dtrain.planning.timeline import Transfer
from tests.helpers.launch import ROOT
from tests.measure.compare_scaling import COMPARED, RESULTS, compare, read_series, table


def recorded() -> list[dict[str, Any]]:
    series: list[dict[str, Any]] = json.loads(COMPARED.read_text(encoding="utf-8"))["series"]
    return series


def test_the_page_has_the_recorded_figures() -> None:
    assert table(recorded()) in (ROOT / "docs/scaling.md").read_text(encoding="utf-8")


def test_the_record_has_all_published_figures() -> None:
    for row, series in zip(recorded(), read_series(), strict=True):
        first, *others = series["points"]
        assert (row["name"], row["base"]) == (series["name"], first["gpus"])
        assert [(point["gpus"], point["published"]) for point in row["points"]] == [
            (point["gpus"], round(100 * point["tokens_per_s_per_gpu"] / first["tokens_per_s_per_gpu"], 1))
            for point in others
        ]


def test_a_simulation_gives_the_recorded_figures() -> None:
    series = next(one for one in read_series() if one["name"] == "MPT-125M A100")
    row = next(one for one in recorded() if one["name"] == series["name"])
    assert compare(series | {"points": series["points"][:2]})["points"] == row["points"][:1]


def test_collectives_take_what_is_published() -> None:
    published = json.loads((RESULTS / "collectives-efa.json").read_text(encoding="utf-8"))
    fabric = find_fabric("efa")
    ratios = []
    for op in ("all_gather", "all_to_all"):
        for size, row in published[op].items():
            ranks = int(size)
            for mebibytes, bandwidth in zip(published["mebibytes"], row, strict=True):
                received = mebibytes * 2**20 * (ranks - 1) // ranks
                seconds = fabric.seconds(Transfer(op, received, ranks))
                ratios.append(received / seconds / 1e9 / bandwidth)
    assert 0.95 < median(ratios) < 1.05
    assert sum(0.8 < ratio < 1.3 for ratio in ratios) > 0.94 * len(ratios)

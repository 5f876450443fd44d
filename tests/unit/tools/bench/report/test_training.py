"""The report on a suite that trains: ratios by round, wrong losses, and the fastest peer."""

from __future__ import annotations

import pytest

from dtrain.tools.bench.report.document import describe
from dtrain.tools.bench.report.statistics import ratios, step_ms
from dtrain.tools.bench.report.training import fastest_peer, has_wrong_loss
from tests.unit.tools.bench.made import result, results_of, row


def test_ratios_compare_steps_of_one_round() -> None:
    base = result("plain", 1, [[100, 100], [200, 200]], engine="plain")
    other = result("native", 1, [[110, 110], [190, 190]])
    assert ratios(other, base) == pytest.approx([1.1, 0.95])
    assert step_ms(base) == 150
    report = describe(results_of([base, other]))
    steps, details = report.tables
    assert row(steps, "native")["step / plain"] == "1.025 (0.950 to 1.100)"
    assert row(details, "plain")["tokens/s"] == "853"  # 128 tokens in 150 ms
    assert any("4.0 (3.0 to 5.0) s (3 starts)" in fact for fact in report.facts)


@pytest.mark.parametrize(
    ("loss", "wrong"), [(2.0, False), (2.03, False), (1.97, False), (2.05, True), (1.5, True), (None, True)]
)
def test_a_case_with_another_loss_is_marked_wrong(loss: float | None, wrong: bool) -> None:
    cases = [
        result("plain", 1, [[1.0]], [2.0], "plain"),
        result("ddp", 2, [[1.0]], [9.0], "ddp"),
        result("native", 1, [[1.0]], [loss]),
    ]
    assert [has_wrong_loss(item, cases) for item in cases] == [False, False, wrong]
    table = describe(results_of(cases)).tables[0]
    assert [cells[0] for cells in table.rows if "WRONG" in cells[-1]] == ["native"] * wrong


def test_the_fastest_peer_has_a_right_loss_and_is_compared_with_native() -> None:
    cases = [
        result("plain", 1, [[1.0], [1.0]], [2.0], "plain"),
        result("plain, 2 at once", 2, [[1.0], [1.0]], [3.0], "plain"),
        result("ddp", 2, [[300.0], [100.0]], [2.0], "ddp"),
        result("fsdp2", 2, [[400.0], [400.0]], [2.0], "fsdp2"),
        result("fsdp2_no_reshard", 2, [[5.0], [5.0]], [9.0], "fsdp2_no_reshard"),
        result("deepspeed_1", 2, [[500.0], [600.0]], [2.0], "deepspeed_1"),
        result("deepspeed_2", 2, [[500.0], [500.0]], [2.0], "deepspeed_2"),
        result("native, 1 rank", 1, [[1.0], [1.0]], [2.0]),
        result("native, stage 2", 2, [[100.0], [200.0]], [2.0]),
    ]
    found = [fastest_peer(cases, prefix) for prefix in ("", "fsdp2", "deepspeed", "horovod")]
    assert [item and item.case.name for item in found] == ["ddp", "fsdp2", "deepspeed_2", None]
    table = describe(results_of(cases)).tables[0]
    names = [column for column in table.columns if column.startswith("speed-up")]
    assert names == ["speed-up over ddp", "speed-up over fsdp2", "speed-up over deepspeed_2"]
    assert [row(table, "native, stage 2")[name] for name in names] == [
        "1.750 (0.500 to 3.000)",
        "3.000 (2.000 to 4.000)",
        "3.750 (2.500 to 5.000)",
    ]
    for case in ("native, 1 rank", "fsdp2"):  # on another number of ranks, and not native
        assert {row(table, case)[name] for name in names} == {""}
    without_peers = describe(results_of([cases[0], cases[7]])).tables[0]
    assert not any(column.startswith("speed-up") for column in without_peers.columns)

"""`dtrain bench float8`: real races at tiny widths, its products, its tables and its mistakes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtrain.__main__ import main
from dtrain.config.schema import ModelConfig
from dtrain.errors import ConfigError
from dtrain.precision.float8.options import Float8Options, Recipe
from dtrain.tools.bench.records import (
    Absence,
    Contender,
    Entry,
    Float8Results,
    Footprint,
    Host,
    LinearFormat,
    ProductTimes,
    Turn,
    Width,
    read_results,
    write_results,
)
from dtrain.tools.bench.report.document import describe, final_loss
from dtrain.tools.bench.report.float8 import describe_float8
from dtrain.tools.bench.training.float8 import ALL_THREE, model_of, product_shapes, time_products

CPU = torch.device("cpu")
TINY = ["model.num_layers=1", "model.hidden_dim=32", "model.num_heads=2", "model.max_seq_len=16", "bench.device=cpu"]
SHORT = ["bench.micro_batch_size=2", "bench.warmup_steps=0", "bench.rounds=2", "bench.steps=2"]
PRODUCTS = ["output", "input gradient", "weight gradient", ALL_THREE]


@pytest.mark.processes
def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    words = [*TINY, *SHORT, "bench.widths=[48]", "bench.recipes=[tensorwise]", f"bench.out={tmp_path / 'r.json'}"]
    try:
        assert main(["bench", "float8", *words]) == 0
    finally:
        torch.set_num_threads(threads)
    results = read_results(tmp_path / "r.json")
    assert isinstance(results, Float8Results)
    assert results.emulated
    assert results.tokens_per_rank == 32
    (width,) = results.widths
    assert width.hidden_dim == 48
    embedding = 320 * 48  # shared with the head; bytes, padded
    assert width.entries[0].footprint.num_parameters == embedding + 4 * 48 * 48 + 3 * 48 * 128 + 3 * 48
    low, fp8 = width.entries
    assert (low.contender.name, fp8.contender.name) == ("bf16", "fp8 tensorwise")
    assert [len(turn.step_ms) for turn in fp8.turns] == [2, 2]
    # the same weights and data, other numbers
    assert final_loss(fp8) == pytest.approx(final_loss(low), rel=0.02)
    assert final_loss(fp8) != final_loss(low)
    assert not low.footprint.linears
    formats = {linear.name: linear.format for linear in fp8.footprint.linears}
    assert formats["blocks.0.ffn.down"] == "fp8"
    assert formats["head"] != "fp8", "the last product stays as it is by default"
    assert all(linear.reason for linear in fp8.footprint.linears)
    shapes = product_shapes(fp8.footprint.linears)
    assert [product.product for product in width.products] == PRODUCTS * len(shapes)
    assert all(len(ms) == 2 and min(ms) > 0 for product in width.products for ms in product.ms.values())
    out = capsys.readouterr().out.strip()
    assert out == describe(results)
    assert "the times say nothing" in out
    (tmp_path / "doc.md").write_text("# Title\n")
    assert main(["bench", "report", str(tmp_path / "r.json"), f"bench.docs={tmp_path / 'doc.md'}"]) == 0
    assert out in (tmp_path / "doc.md").read_text()


def test_the_products_of_a_linear_take_turns() -> None:
    options = Float8Options(emulate=True)
    recipes = {
        name: Recipe.of(replace(options, recipe=name).on(CPU), torch.bfloat16) for name in ("tensorwise", "rowwise")
    }
    found = time_products(24, 48, 32, recipes, 2, CPU)
    assert [product.product for product in found] == PRODUCTS
    for product in found:
        assert (product.rows, product.out_features, product.in_features) == (24, 48, 32)
        assert list(product.ms) == ["bf16", "tensorwise", "rowwise"]
        assert all(len(ms) == 2 for ms in product.ms.values())


def test_a_wider_model_has_more_heads_of_the_same_size() -> None:
    model = ModelConfig(hidden_dim=2048, num_heads=32, num_kv_heads=8, ffn_dim=8192)
    assert model_of(model, 2048) == model
    wider = model_of(model, 3072)
    assert (wider.hidden_dim, wider.num_heads, wider.num_kv_heads, wider.ffn_dim) == (3072, 48, 12, 12288)
    assert model_of(ModelConfig(), 128) == ModelConfig(hidden_dim=128, num_heads=2)
    with pytest.raises(ConfigError, match=r"bench\.widths: 100 is not a multiple of 64, the size of a head"):
        model_of(model, 100)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("bench.width=[3]", "unknown key 'bench.width'; did you mean 'bench.widths'?"),
        ("bench.widths=[]", "bench.widths=[] must list one or more, each once"),
        ("bench.widths=[64,64]", "bench.widths=[64, 64] must list one or more, each once"),
        ("bench.widths=[100]", "bench.widths: 100 is not a multiple of 64, the size of a head"),
        ("bench.recipes=[rowise]", "'rowise'; did you mean 'rowwise'?"),
        ("float8.recipes=[rowwise]", "unknown key 'float8.recipes'; did you mean 'bench.recipes'?"),
        ("float8.weight_scale=delayed", "needs recipe=tensorwise"),
        ("float8.recipe=rowwise", "float8.recipe=rowwise has no effect here; list it in bench.recipes"),
    ],
)
def test_mistakes_are_one_line(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "float8", "bench.device=cpu", word]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dtrain: ")
    assert message in err
    assert err.count("\n") == 1


# -- the tables --------------------------------------------------------------------------------------------------------

HOST = Host("a cpu", 2, 8.0, [], "Linux x86_64", "3.11", "2.13", "0.1.0")


def entry(name: str, turns: list[float], loss: float, linears: list[LinearFormat]) -> Entry:
    precision, _, recipe = name.partition(" ")
    footprint = Footprint(1000, {"master": 4000}, {"master": 4000}, 2**27, None, "cpu", linears)
    made = [Turn([ms], [loss], 0.5) for ms in turns]
    return Entry(
        Contender(name, "native", 1, precision, 2, recipe=recipe or None), 1.5, Turn([], [], 0.1), made, footprint
    )


def made_results() -> Float8Results:
    linears = [
        *(LinearFormat(f"blocks.{n}.up", 64, 32, "fp8", "timed 0.81 of BF16") for n in range(2)),
        LinearFormat("head", 48, 32, "bf16", "last product"),
    ]
    entries = [entry("bf16", [100.0, 200.0], 2.0, []), entry("fp8 rowwise", [50.0, 160.0], 2.005, linears)]
    products = [
        ProductTimes(name, 1000, 64, 32, {"bf16": [2.0, 4.0], "rowwise": [1.0, 1.0]})
        for name in ("output", "input gradient", "weight gradient", ALL_THREE)
    ]
    late = Absence(Contender("fp8 tensorwise", "native", 1, "fp8", 2), "fp8 tensorwise: rank 0 failed: no memory")
    config = {"bench": {"threads_per_rank": 1, "rounds": 2, "steps": 1, "ranks": 1}}
    widths = [Width(32, entries, products, [late])]
    return Float8Results("float8", "dtrain bench float8", "2026-01-01T00:00:00", HOST, config, 1000, False, widths)


def rows(text: str, first: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith(f"| {first}")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_tables_compare_round_by_round(tmp_path: Path) -> None:
    results = made_results()
    write_results(tmp_path / "made.json", results)
    assert read_results(tmp_path / "made.json") == results
    text = describe_float8(results)
    assert "the times say nothing" not in text
    (race,) = rows(text, "fp8 rowwise")
    assert race[-2:] == ["+0.25 %", "1.625 (1.250 to 2.000)"]
    assert race[2] == "9.52k"  # 1,000 tokens in 105 ms
    assert "Linears of fp8 rowwise:" in text
    assert rows(text, "blocks.0.up") == [["blocks.0.up", "2", "64 x 32", "fp8", "timed 0.81 of BF16"]]
    assert rows(text, "head") == [["head", "1", "48 x 32", "bf16", "last product"]]
    sizes = {name: rows(text, name)[0] for name in PRODUCTS}
    assert [sizes[name][1] for name in PRODUCTS] == [
        *("1000 x 64 x 32", "1000 x 32 x 64", "64 x 32 x 1000", "1000 x 64 x 32")
    ]
    # 2 x 1000 x 64 x 32 in 3 ms; all three are three times as much
    assert sizes["output"][2:4] == ["3.000", "0.00137"]
    assert sizes[ALL_THREE][2:4] == ["3.000", "0.0041"]
    assert sizes["output"][-1] == "3.00 (2.00 to 4.00)"
    assert "Did not run: fp8 tensorwise: rank 0 failed: no memory." in text
    assert [absence.contender.name for absence in results.absences] == ["fp8 tensorwise"]


def test_contenders_that_chose_alike_share_a_table() -> None:
    results = made_results()
    (width,) = results.widths
    low, fp8 = width.entries
    twin = replace(fp8, contender=replace(fp8.contender, name="fp8 tensorwise"))
    text = describe_float8(replace(results, widths=[replace(width, entries=[low, fp8, twin])]))
    assert "Linears of fp8 rowwise, fp8 tensorwise:" in text
    assert len(rows(text, "blocks.0.up")) == 1


def test_without_bf16_nothing_is_compared() -> None:
    results = made_results()
    (width,) = results.widths
    text = describe_float8(replace(results, widths=[replace(width, entries=width.entries[1:], products=[])]))
    assert "speed-up over bf16 |" not in text
    assert rows(text, "fp8 rowwise")

"""The experiments of docs/experiments: short runs show what they are about, and the pages have the stored results."""

from __future__ import annotations

import json
import runpy
import sys
from collections import Counter, defaultdict
from importlib import import_module
from math import hypot
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import accumulation
import float8_recipes
import formats
import gradient_histogram
import loss_scaling
import master_weights
import pytest
import torch
from common import markdown
from matplotlib.figure import Figure
from networks import Convnet, Detector, Regression
from torch import nn
from torch.utils.flop_counter import flop_registry

import dtrain
from dtrain.precision.fp16_products import fp16_products
from tests.helpers.op_dtypes import OpDtypes

exhaustive = pytest.mark.exhaustive
DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "experiments/README.md").read_text(encoding="utf-8")
RESULTS_PAGE = (DOCS / "results/experiments/README.md").read_text(encoding="utf-8")
FINDINGS = {  # of the stored results
    "master_weights": "at a learning rate of 1e-05 the regression loses 74% in FP16 and 98% in BF16 of its progress",
    "gradient_histogram": "FP16 flushes 100.0% of the nonzero activation gradients; a loss scale of 32,768 leaves 4.5%",
    "loss_scaling": "its loss ends at 43 times FP32's; with the dynamic loss scale at 0.97 times",
    "accumulation": "4,096 positive terms is off by 12%; summed in FP32 by 2e-06, and every error is within its bound",
    "formats": "FP8 on regression, exact targets (+3.6 units); other mean gaps are at most 1.0 units at the end, 1.8",
    "float8_recipes": "FP8 ends -0.1% to +0.3% from BF16 (noise: 0.6%); regression, exact targets: FP8 ends +32.8% to",
}


STORED = {name: DOCS / f"results/experiments/experiment-{name.replace('_', '-')}.json" for name in FINDINGS}


def run_script(name: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(DOCS / f"experiments/{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", FINDINGS)
def test_the_pages_have_what_a_script_shows_of_the_stored_result(
    name: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    run_script(name, monkeypatch, "--from", str(STORED[name]), "--out", str(tmp_path))
    _, table, finding = capsys.readouterr().out.split("\n\n")
    assert table in RESULTS_PAGE
    assert FINDINGS[name] in finding
    (picture,) = tmp_path.iterdir()
    assert (picture.stem, picture.stat().st_size > 20_000) == (STORED[name].stem, True)
    assert f"```bash\npython docs/experiments/{name}.py\n```\n\n![" in PAGE
    assert f"](../pictures/{picture.name})" in PAGE
    assert f"| [{name}.py]({name}.py) | {str(import_module(name).__doc__).splitlines()[0]} |" in PAGE
    other = "formats" if name == "accumulation" else "accumulation"
    with pytest.raises(SystemExit, match="2"):
        run_script(other, monkeypatch, "--from", str(STORED[name]), "--out", str(tmp_path))
    assert f"is a result of '{name.replace('_', '-')}', not of '{other}'" in capsys.readouterr().err


@pytest.mark.parametrize("name", FINDINGS)
def test_a_small_run_writes_a_table_a_json_and_a_picture(
    name: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    out = tmp_path / "new/folder"
    run_script(name, monkeypatch, "--small", "--out", str(out))
    title, table, finding = capsys.readouterr().out.split("\n\n")
    record = json.loads((out / STORED[name].name).read_text(encoding="utf-8"))
    assert record["host"]["torch"] == torch.__version__
    expected, columns, rows = import_module(name).table(record["result"])
    assert (title, table) == (f"## {expected}", markdown(columns, rows))
    assert "\nThe paper: " in finding
    assert (out / f"{STORED[name].stem}.png").read_bytes().startswith(b"\x89PNG")


def test_accumulation() -> None:
    result = accumulation.run(longest=4096, trials=16)
    assert len(result["cases"]) == len(accumulation.VECTORS) * (len(accumulation.SUMS) + 1)
    for case in result["cases"]:
        assert len(case["errors"]) == len(case["bounds"]) == len(result["lengths"]) == 12
        for error, bound in zip(case["errors"], case["bounds"], strict=True):
            assert bound is None or error <= bound, case
    place = result["lengths"].index(16)
    for sums in accumulation.SUMS:
        case = accumulation.of(result, "worst case", sums)
        assert 0.8 * case["bounds"][place] < case["errors"][place] <= case["bounds"][place]
    errors = [accumulation.error(result, "positive", sums, 4096) for sums in ("fp16", "bf16", "fp32")]
    assert (errors[0] > 0.05, errors[1] > 0.8, errors[2] < 1e-5) == (True, True, True)
    for length in result["lengths"]:  # a matmul of FP16 tensors sums in FP32
        assert accumulation.error(result, "positive", accumulation.MATMUL, length) <= 2.0**-11 + 1e-5
    assert accumulation.gamma(256, torch.bfloat16) is None, "the bound proves nothing"


@exhaustive
def test_loss_scaling() -> None:
    """60 steps: the fewest after which FP32 is under its bound by a quarter."""
    result = loss_scaling.run(steps=60, seeds=(0,), scales=("none", "dynamic"))
    final = loss_scaling.final(result, "fp32", "none")
    assert final < 0.12  # of the variance
    assert loss_scaling.final(result, "fp16", "none") > 0.85
    (fp32,), (fp16,) = loss_scaling.of(result, "fp32", "none"), loss_scaling.of(result, "fp16", "dynamic")
    assert fp16["final"] == pytest.approx(final, rel=0.15)
    assert fp16["skipped"] <= 2
    assert len(fp16["losses"]) == 6
    assert fp16["losses"] == pytest.approx(fp32["losses"], rel=0.15)


def test_a_scale_recovers_the_gradients_of_a_detector_and_a_classifier_needs_none() -> None:
    found, other = gradient_histogram.run((Detector, Convnet), steps=30)["networks"]
    exponents = gradient_histogram.exponents(found)
    total = found["histogram"]["zeros"] + sum(exponents.values())
    assert total == 30 * 16 * (2 * 8 * 16**2 + 2 * 16 * 8**2 + 64 + 3)
    assert 0.5 < gradient_histogram.zeros(found) < 0.8  # 66.8 % in the paper's detector
    shares = [gradient_histogram.flushed(found, scale) for scale in gradient_histogram.SCALES]
    assert shares == sorted(shares, reverse=True)
    assert (gradient_histogram.SCALES[0], gradient_histogram.SCALES[-1]) == (1, 32768)
    assert shares[0] > 0.999
    assert shares[-1] < 0.05
    assert max(exponents) + 15 < 16, "overflows at the largest scale"
    assert gradient_histogram.flushed(other) < 0.02


def test_a_gap_is_relative_to_the_mean_of_bf16_and_its_noise_is_that_of_seeds() -> None:
    def curve(*losses: float) -> dict[str, Any]:
        return {"losses": [9.0] * 6 + list(losses), "casts": []}

    copied = [[curve(1.9, 1.9), curve(2.0, 2.0), curve(2.1, 2.1)], [curve(4.0, 4.0)] * 3]
    item = {"formats": {"bf16": copied, "rowwise": [[curve(2.0, 2.4)], [curve(4.4, 4.8)]]}}
    assert float8_recipes.gaps(item, "rowwise") == pytest.approx([0.1, 0.15])
    assert float8_recipes.limit(item) == pytest.approx(2.18 * 0.025)  # the error of the mean of 10 % and 15 %
    casts = [{"module": "up", "product": "dgrad", "sqnr_db": 24.0, "underflow": share} for share in (0.1, 0.2)]
    item["formats"]["rowwise"] = [[{"casts": [own]}] for own in casts]
    assert float8_recipes.lost(float8_recipes.casts(item, "rowwise")) == ("bf16, 24.0, bf16", "20.00% (up, dgrad)")


def test_the_page_of_fp8_has_the_gaps_and_losses_of_the_stored_result() -> None:
    page = (DOCS / "precision/fp8.md").read_text(encoding="utf-8")
    language, regression = json.loads(STORED["float8_recipes"].read_text(encoding="utf-8"))["result"]["tasks"]
    noise, least = (f"{float8_recipes.limit(item):.2%}" for item in (language, regression))
    assert f"| noise | {noise} | | | {least} |" in page
    for name in [name for name in language["formats"] if name not in ("bf16", *float8_recipes.ENDS)]:
        gap, other = (float8_recipes.percent(fmean(float8_recipes.gaps(item, name))) for item in (language, regression))
        casts = float8_recipes.casts(language, name)
        of_gradients = [sqnr for (_, product), (sqnr, _) in casts.items() if product != "fprop"]
        lost = f"{min(of_gradients):.1f} dB | {max(own for _, own in casts.values()):.2%} |" if casts else "| |"
        assert f"| {gap} | {lost} {other} |" in page, name


def test_flushed_is_what_a_cast_flushes() -> None:
    tie = 2.0**-25
    gradient = torch.tensor([tie, -1.01 * tie, 2.0**-30, 0.0])
    counts: Any = defaultdict(Counter)
    gradient_histogram.count(counts, gradient)
    histogram = gradient_histogram.as_histogram(counts)
    assert histogram == {"zeros": 1, "powers_of_two": {"-30": 1, "-25": 1}, "between": {"-25": 1}}
    for scale in (1.0, 2.0, 64.0):
        lost = int(((gradient * scale).half() == 0).sum()) - 1
        assert gradient_histogram.flushed({"histogram": histogram}, scale) == lost / 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_without_masters_is_the_loop_that_updates_rounded_weights(dtype: torch.dtype) -> None:
    """The same bits as a loop without dtrain that keeps nothing but 16-bit weights."""
    start, lr, scale = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), 2.0**-8, 2.0**6
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model = nn.Linear(8, 8, bias=False)
    model.weight.data.copy_(start)
    rule = dtrain.SGD(lr=lr, momentum=0.0)
    engine = dtrain.initialize(model, optimizer=rule, precision=dtype, loss_scale=scale, max_grad_norm=None, seed=0)
    observer = master_weights.WithoutMasters()
    observer.round(engine)
    weight = start.to(dtype)
    updates = lost = 0
    for _ in range(20):
        engine.backward(engine(x).square().mean())
        engine.step()
        observer.round(engine)
        leaf = weight.clone().requires_grad_()
        ((x.to(dtype) @ leaf.T).float().square().mean() * scale).backward()
        assert leaf.grad is not None
        moved = weight.float() - lr * (leaf.grad.float() / scale)
        updates += int((moved != weight.float()).sum())
        lost += int(((moved != weight.float()) & (moved.to(dtype) == weight)).sum())
        weight = moved.to(dtype)
    assert torch.equal(engine.master_state()["weight"], weight.float())
    assert (observer.updates, observer.lost) == (updates, lost)
    assert 0 < lost < updates


def test_norms_keep_their_fp32_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    engine = dtrain.initialize(model, precision="bf16", seed=0)
    value = torch.tensor([1.0001, 1.0, 1.0, 1.0])
    with engine.modify_weights():
        model[1].weight.copy_(value)
    master_weights.WithoutMasters().round(engine)
    state = engine.master_state()
    assert torch.equal(state["1.weight"], value)
    assert torch.equal(state["0.weight"], state["0.weight"].bfloat16().float())


@exhaustive
def test_small_updates_are_lost_without_masters_in_bf16_first() -> None:
    rates = (1e-5, 1e-3)
    result = master_weights.run([(Regression, rates, (0,))], steps=60)
    curves = [item[name]["losses"] for item in result["trainings"] for name in ("with_masters", "without")]
    assert {len(losses) for losses in curves} == {6}
    found = {
        (name, lr): master_weights.of(result, "regression", name, lr)[0] for name in ("fp16", "bf16") for lr in rates
    }
    progress = {key: master_weights.lost_progress(item) for key, item in found.items()}
    for name, updates, least in (("fp16", 0.7, 0.6), ("bf16", 0.95, 0.9)):
        assert found[name, 1e-5]["lost_updates"] > updates
        assert progress[name, 1e-5] > least
    assert found["fp16", 1e-3]["lost_updates"] < 0.1 < found["bf16", 1e-3]["lost_updates"]
    assert abs(progress["fp16", 1e-3]) < 0.1
    for lr in rates:  # with masters both formats train alike
        fp16, bf16 = (found[name, lr]["with_masters"]["final"] for name in ("fp16", "bf16"))
        learned = found["fp16", lr]["untrained"] - fp16
        assert learned > 0
        assert abs(bf16 - fp16) < 0.02 * learned


def curves(precision: str, *losses: list[float]) -> dict[str, Any]:
    return {"precision": precision, "curves": [{"losses": item, "metric": None, "skipped": 1} for item in losses]}


def compared(*bf16: list[float]) -> dict[str, Any]:
    fp32 = [[5.0, 1.0], [6.0, 3.0]]
    shares = {"float8": 0.5, "convolutions": 0.25, "num_float8": 1, "num_linears": 2}
    found = {"task": "any", "metric": "", "steps": [1, 2], "shares": shares, "fp32": curves("fp32", *fp32)}
    others = [curves("bf16", *bf16), curves("fp16", *fp32), curves("fp8", *fp32)]
    return {**found, "perturbed": curves("fp32", [5.5, 1.6])["curves"], "formats": others}


def test_gaps_are_in_units_of_seed_and_rounding_noise_at_that_step() -> None:
    item = compared([5.0, 2.0], [7.0, 3.0])
    start, end = hypot(stdev([5.0, 5.5]), stdev([5.0, 6.0])), hypot(stdev([1.0, 1.6]), stdev([1.0, 3.0]))
    assert (formats.noise(item, 0)[-1], formats.noise(item)[-1]) == (start, end)
    bf16 = item["formats"][0]
    assert formats.gaps(item, bf16, 0) == [0.0, 1 / start]
    assert formats.gaps(item, bf16) == [1 / end, 0.0]
    assert formats.mean_gaps(item, bf16) == [0.5 / start, 0.5 / end]


def test_a_worse_format_is_told_from_noise() -> None:
    item = compared([5.0, 9.0], [6.0, 11.0])
    assert formats.finding({"tasks": [item]}) == (
        "Outside FP32's own noise: BF16 on any (+5.4 units); other mean gaps are at most 0.0 units at the end, "
        "0.0 at any step"
    )
    assert formats.finding({"tasks": [compared([5.0, 1.0], [6.5, 3.0])]}) == (
        "No format can be told from FP32's own noise; mean gaps are at most 0.0 units at the end, 0.3 at any step"
    )
    rows = formats.table({"seeds": [0, 1], "tasks": [item]})[-1]
    assert rows[3][:3] == ["", "fp8", "50% fp8 (Linears: 1 of 2); convolutions, 25%, bf16"]


TASKS = [name if name in ("convnet", "regression") else pytest.param(name, marks=exhaustive) for name in formats.TASKS]


@pytest.mark.parametrize("name", TASKS)
def test_shares_of_products_are_the_stored_ones(name: str) -> None:
    """Those of a smaller batch are the same."""
    tasks = json.loads(STORED["formats"].read_text(encoding="utf-8"))["result"]["tasks"]
    (expected,) = (item["shares"] for item in tasks if item["task"] == name)
    assert formats.product_shares(name, formats.SHORT) == expected


@exhaustive
def test_every_task_trains_in_every_format_and_is_drawn() -> None:
    result = formats.run(seeds=(0, 1), more=formats.SHORT)
    assert [item["task"] for item in result["tasks"]] == list(formats.TASKS)
    for item in result["tasks"]:
        assert item["steps"] == [1, 2]
        assert formats.noise(item)[0] > 0
        finals = {tuple(formats.losses(found["curves"])) for found in (item["fp32"], *item["formats"])}
        # without an FP8 Linear, FP8 is BF16 bit by bit
        assert len(finals) == 1 + len(formats.PRECISIONS) - (item["shares"]["num_float8"] == 0)
        assert {curve["metric"] is None for curve in item["fp32"]["curves"]} == {not item["metric"]}
    formats.draw(figure := Figure(), result)
    assert len(figure.axes) >= len(formats.TASKS)


@exhaustive
def test_a_convnet_follows_its_fp32_curve_in_every_format() -> None:
    words = "train.steps=60 train.eval_every=15 train.eval_batches=4 data.size=8 schedule.warmup_steps=2 optim.lr=2e-3"
    fp32, *others = (formats.train("convnet", precision, 0, words) for precision in ("fp32", *formats.PRECISIONS))
    assert fp32["losses"][-1] < 0.8 * fp32["losses"][0]
    for precision, curve in zip(formats.PRECISIONS, others, strict=True):
        assert curve["losses"] != fp32["losses"]
        # not at a larger learning rate, where FP32 parts from itself as much if its weights begin an ulp apart
        assert curve["losses"] == pytest.approx(fp32["losses"], rel=0.02), precision
        assert curve["skipped"] <= 2


@pytest.mark.parametrize("name", TASKS)
def test_all_products_in_fp16_are_emulated(name: str) -> None:
    session = formats.open_session(name, "fp16", 0, formats.SHORT)
    model, emulated = session.engine.module, fp16_products(session.engine.device, ["fp16"])
    with OpDtypes(model) as computed, emulated, OpDtypes(model) as asked:
        session.step()
    counted = {op.__name__ for op in flop_registry if isinstance(op, torch._ops.OpOverloadPacket)}
    ran = [[ran for ran in ops.ran if ran.op in counted or "attention" in ran.op] for ops in (asked, computed)]
    assert len(ran[0]) == len(ran[1]) > 0
    assert all("fp16" in product.inputs for product in ran[0])
    assert not [product for product in ran[1] if "fp16" in product.inputs]

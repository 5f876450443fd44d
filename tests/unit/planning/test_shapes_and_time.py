"""``dtrain plan shapes`` and ``plan time``: sizes that break a rule, measured advice, real steps, and bounds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.__main__ import main
from dtrain.cli.resolve import compose
from dtrain.config.dump import config_to_dict
from dtrain.config.model import ModelConfig
from dtrain.measure.worker import Rank
from dtrain.models.causal_lm import ModelOutput, causal_lm_output
from dtrain.planning.devices import find_device
from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.plans import RunPlanner
from dtrain.planning.record.products import ATTENTION, MATMUL, products
from dtrain.planning.record.ranks import HOST, SOCKETS, planned_ranks
from dtrain.planning.record.recorder import ACTIVATIONS, RecordedCall, Signature, StepRecorder, TensorSpec
from dtrain.planning.shapes import show as shapes
from dtrain.planning.shapes import variants
from dtrain.planning.shapes.rules import BATCH, Cause, find_causes
from dtrain.planning.shapes.show import describe, record_products, show_shapes
from dtrain.planning.shapes.variants import bind, in_format
from dtrain.planning.time import show as plan_time
from dtrain.planning.time.measured import Item, PlannedRank, expected
from dtrain.planning.time.prediction import Assumptions, PricedRun, predict
from dtrain.planning.time.replay import Replay, Share
from dtrain.tasks import IGNORE_INDEX, num_targets
from dtrain.train.session import Session
from tests.helpers.launch import ROOT
from tests.helpers.net import Net
from tests.unit.planning.planned_runs import planned_run

_SHAPED = f"model.factory={__name__}:build_"
_BAD_BATCH = ("train.micro_batch_size=7", "train.global_batch_size=7", "model.max_seq_len=33")
_BAD = (f"{_SHAPED}bad", *_BAD_BATCH)
_IMAGES = (f"{_SHAPED}images", "precision=bf16")
CPU = torch.device("cpu")


def run_layer(net: Any, x: Tensor) -> Tensor:
    """Attention and feed-forward."""
    q, k, v = (layer(x).unflatten(-1, (net.heads, -1)).transpose(1, 2) for layer in (net.q, net.k, net.v))
    x = x + net.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
    return x + net.down(F.gelu(net.up(x)))


def run_shaped(net: Any, tokens: Tensor, targets: Tensor | None = None, positions: Any = None) -> ModelOutput:
    x = net.embed(tokens)
    for block in net.blocks:
        x = block(x)
    return causal_lm_output(net.head(x)[..., : net.vocab_size], targets)


def shaped(hidden: int, heads: int, head_dim: int, ffn: int, vocab_rows: int, vocab_size: int) -> nn.Module:
    """Returns a model of two layers; their queries, keys and values are as wide as ``heads`` heads."""
    sizes = dict.fromkeys(("q", "k", "v"), (hidden, heads * head_dim))
    sizes |= {"out": (heads * head_dim, hidden), "up": (hidden, ffn), "down": (ffn, hidden)}
    layers = [Net(run_layer, heads=heads, **{name: nn.Linear(*size) for name, size in sizes.items()}) for _ in range(2)]
    ends = {"embed": nn.Embedding(vocab_rows, hidden), "head": nn.Linear(hidden, vocab_rows, bias=False)}
    return Net(run_shaped, vocab_size=vocab_size, blocks=nn.ModuleList(layers), **ends)


def build_bad(config: ModelConfig, vocab_size: int) -> nn.Module:
    """Vocabulary 257, hidden dim 60, feed-forward 101, heads of dim 12: four sizes that are no multiples of 8."""
    return shaped(60, 6, 12, 101, vocab_size, vocab_size)


def build_good(config: ModelConfig, vocab_size: int) -> nn.Module:
    return shaped(64, 4, 16, 104, 264, vocab_size)


def run_images(net: Any, tokens: Tensor, targets: Tensor) -> ModelOutput:
    """Two convolutions and a classifier, on the tokens as pixels."""
    batch = tokens.shape[0]
    pixels = tokens.view(batch, 1, 16, -1).expand(-1, net.first.in_channels, -1, -1).to(net.first.weight.dtype)
    pooled = F.relu(net.second(F.relu(net.first(pixels / 256)))).mean((2, 3))
    loss = F.cross_entropy(net.head(pooled).float(), torch.zeros(batch, dtype=torch.int64, device=tokens.device))
    return ModelOutput(loss, loss)


def build_images(config: ModelConfig, vocab_size: int) -> nn.Module:
    """Channels 3 and 20 are no multiples of 8; ``model.args`` may replace them."""
    inner = config.args.get("inner", 20)
    first = nn.Conv2d(config.args.get("channels", 3), 16, 3, padding=1)
    return Net(run_images, first=first, second=nn.Conv2d(16, inner, 3, padding=1, stride=2), head=nn.Linear(inner, 16))


def causes_of(run: PlannedRun, *, tf32: bool = False) -> dict[str, Cause]:
    found, linears = record_products(run)
    found = [replace(product, format="tf32") if tf32 else product for product in found]
    return {describe(cause, run)[0]: cause for cause in find_causes(found, linears)}


def tables(capsys: pytest.CaptureFixture[str]) -> tuple[list[list[list[str]]], str]:
    """Returns the rows of each table, and the whole output."""
    text = capsys.readouterr().out
    parts = [part.partition("\n\n")[2] for part in text.split("## ")[1:]]
    rows = [[line for line in part.splitlines() if line.startswith("|")][2:] for part in parts]
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in part] for part in rows], text


def test_five_bad_sizes_are_named_once_and_nothing_else() -> None:
    found = causes_of(planned_run(*_BAD, "precision=bf16"))
    blocks = ("blocks.0", "blocks.1")
    layers = [f"{block}.{layer}" for block in blocks for layer in ("q", "k", "v", "out", "up", "down")]
    assert {name: set(cause.uses) for name, cause in found.items()} == {
        "micro-batch 7 x sequence 33 = 231": {(module, "M") for module in ("head", *layers)},
        "size 60": {
            *((f"{block}.{layer}", "K") for block in blocks for layer in ("q", "k", "v", "up")),
            *((f"{block}.{layer}", "N") for block in blocks for layer in ("out", "down")),
            ("head", "K"),
        },
        "head dim 12": {(block, "head dim") for block in blocks},
        "size 101": {(f"{block}.{layer}", use) for block in blocks for layer, use in (("up", "N"), ("down", "K"))},
        "vocabulary 257": {("head", "N")},
    }


def test_fp32_breaks_no_rule_and_tf32_takes_multiples_of_4(capsys: pytest.CaptureFixture[str]) -> None:
    run = planned_run(*_BAD, "precision=fp32")
    assert not causes_of(run)
    assert set(causes_of(run, tf32=True)) == {"micro-batch 7 x sequence 33 = 231", "size 101", "vocabulary 257"}
    show_shapes(run)
    assert "no size breaks a rule" in capsys.readouterr().out


def test_good_sizes_and_channels_of_convolutions() -> None:
    for keys in ((f"{_SHAPED}good", "precision=bf16"), (*_IMAGES, "model.args={channels: 8, inner: 24}")):
        assert not causes_of(planned_run(*keys))
    assert {name: list(cause.uses) for name, cause in causes_of(planned_run(*_IMAGES)).items()} == {
        "channels 3": [("first", "channels in")],
        "channels 20": [("second", "channels out"), ("head", "K")],
    }


def described(*keys: str, device: str = "cpu") -> list[tuple[str, str]]:
    run = planned_run(*keys, device=device)
    return [describe(cause, run) for cause in causes_of(run).values()]


def test_each_size_has_its_name_and_its_key() -> None:
    heads = ("head dim 12", "model.num_heads = model.hidden_dim / head dim")
    one_layer = ("model.num_layers=1", "model.ffn_dim=256")
    hidden = ("hidden_dim 60, 180 = 3 x 60", "model.hidden_dim")
    assert described("model.hidden_dim=60", "model.num_heads=5", *one_layer, "precision=bf16") == [hidden, heads]
    # multiples of 16 of the sizes before padding; in BF16, 136 and heads of 68 / 8: the head alone is BF16
    found = described("precision=fp8", "model.hidden_dim=136", "model.num_heads=2", *one_layer, device="h100-80gb")
    assert [name for name, _ in found] == ["hidden_dim 136, 408 = 3 x 136", "head dim 68"]


@pytest.mark.parametrize(
    ("gain", "advice"),
    [
        (0.07, "padding to 320 saves 7% of these products (measured)"),
        pytest.param(0.02, "rule broken, gain of 320 measured below 3%", marks=pytest.mark.exhaustive),
    ],
)
def test_advice_needs_a_measured_gain(monkeypatch: Any, capsys: Any, gain: float | None, advice: str) -> None:
    monkeypatch.setattr(shapes, "_gain", lambda *_: gain)
    show_shapes(planned_run(f"{_SHAPED}bad", "precision=bf16"))
    (row,) = (row for row in tables(capsys)[0][1] if row[0] == "vocabulary 257")
    assert row[4] == advice
    assert "padded_vocab_size()" in row[3]


def test_a_device_that_is_elsewhere_is_not_timed(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(shapes, "measured_gain", lambda *_: pytest.fail("timed"))
    show_shapes(planned_run(f"{_SHAPED}bad", "precision=bf16", device="h100-80gb"))
    assert "gain of 320 not measured" in capsys.readouterr().out


def test_what_is_timed_are_the_products_with_the_size_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[tuple[Any, ...]] = []

    def ratio(pairs: Mapping[tuple[Signature, Signature], int], *_: Any) -> float:
        timed.extend(tuple(s.args[0].shape + s.args[1].shape for s in pair) for pair in pairs)
        return 0.9

    cause = causes_of(planned_run(f"{_SHAPED}bad", "precision=bf16", "model.max_seq_len=32"))["vocabulary 257"]
    monkeypatch.setattr(variants, "timed_ratio", ratio)
    assert variants.measured_gain(cause, 64, CPU, 1.0) == pytest.approx(0.1)
    assert timed == [
        ((256, 60, 60, 257), (256, 60, 60, 320)),
        ((257, 256, 256, 60), (320, 256, 256, 60)),
        ((256, 257, 257, 60), (256, 320, 320, 60)),
    ]


def test_both_gradients_of_a_convolution_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: dict[tuple[Signature, Signature], int] = {}
    monkeypatch.setattr(variants, "timed_ratio", lambda pairs, *_: timed.update(pairs))
    assert variants.measured_gain(causes_of(planned_run(*_IMAGES))["channels 20"], 24, CPU, 1.0) is None
    expected = dict.fromkeys(("convolution", "convolution_backward", "addmm"), 1) | {"mm": 2}
    assert Counter(before.name for before, _ in timed) == expected
    assert set(timed.values()) == {1}


@pytest.mark.parametrize("keys", [_IMAGES[:1], pytest.param(_BAD, marks=pytest.mark.exhaustive)])
def test_padded_calls_run_and_are_timed(keys: tuple[str, ...]) -> None:
    found, linears = record_products(planned_run(*keys, "precision=fp32"))
    causes = find_causes([replace(product, format="tf32") for product in found], linears)  # which every CPU has
    assert causes
    assert all(variants.measured_gain(cause, 16, CPU, 60.0) is not None for cause in causes)


def test_scales_of_rows_are_padded_with_their_rows() -> None:
    def spec(rows: int, columns: int, dtype: torch.dtype) -> TensorSpec:
        return TensorSpec((rows, columns), (columns, 1), dtype)

    sides = (spec(231, 64, torch.float8_e4m3fn), spec(64, 32, torch.float8_e4m3fn))
    scales = (spec(231, 1, torch.float32), spec(1, 32, torch.float32))
    signature = Signature(torch.ops.aten._scaled_mm.default, (*sides, *scales), ())
    output = (spec(231, 32, torch.bfloat16),)
    (product,) = products([RecordedCall(signature, output, (0, 1, 2, 3), "layer", 0, False, False, ACTIVATIONS, 0)])
    padded = variants.padded_signature(Cause(BATCH, 231, 16, {231}), product, 16)
    assert padded is not None
    assert [value.shape for value in padded.args] == [(240, 64), (64, 32), (240, 1), (1, 32)]
    lists = (*sides, (scales[0],), (1,), (), (scales[1],), (1,), ())  # as torch.nn.functional.scaled_mm gives them
    signature = Signature(torch.ops.aten._scaled_mm_v2.default, lists, ())
    (product,) = products([RecordedCall(signature, output, (0, 1, 2, 3), "layer", 0, False, False, ACTIVATIONS, 0)])
    padded = variants.padded_signature(Cause(BATCH, 231, 16, {231}), product, 16)
    assert [value.shape for value in (*padded.args[:2], padded.args[2][0], padded.args[5][0])] == [
        (240, 64),
        (64, 32),
        (240, 1),
        (1, 32),
    ]


SMALL = ("experiment=smoke", "model.num_layers=1", "launch.device=cpu", "precision=fp32")
NETWORK = ROOT / "docs" / "results" / "collectives-cpu.json"


def rank_of(*keys: str, ranks: int = 1, transport: str = HOST) -> PlannedRank:
    return PlannedRank(compose([*SMALL, *keys]), ranks, CPU, transport)


@pytest.mark.parametrize(
    ("ranks", "transport", "keys"),
    [
        (1, HOST, ("engine.zero_stage=0",)),
        (2, SOCKETS, ("engine.zero_stage=2", "precision=bf16", "model.compile=blocks", "model.recompute=selective")),
        pytest.param(4, SOCKETS, ("engine.zero_stage=3",), marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_among_absent_ones_really_steps(ranks: int, transport: str, keys: tuple[str, ...]) -> None:
    rank = rank_of("train.global_batch_size=16", "train.micro_batch_size=4", *keys, ranks=ranks, transport=transport)
    before = {name: value.clone() for name, value in rank.engine.module.state_dict().items()} if ranks == 1 else {}
    busy_ms, phases_ms = rank.time(0.0)
    engine = rank.engine
    assert (engine.world_size, engine.attempted_steps) == (ranks, engine.applied_steps)
    assert engine.compiled_graphs is None
    assert engine.applied_steps >= 4, "a step that is skipped is not timed in full"
    assert all(ms > 0 for ms in busy_ms)
    assert set(phases_ms) == {"data_wait_ms", "forward_ms", "backward_ms", "update_ms"}
    assert sum(phases_ms.values()) <= 1.1 * max(busy_ms)
    for name, value in before.items():
        assert torch.equal(value, engine.module.state_dict()[name]), "weights stay"


def test_the_bytes_of_stage_2_follow_the_formula() -> None:
    keys = ("precision=bf16", "engine.zero_stage=2", "optim=lion", "train.global_batch_size=8")
    recorded = planned_run(*SMALL, *keys, ranks=2).record()
    numel = sum(numel for _, numel in recorded.elements.values())
    # BF16 weights are gathered; gradients are read in place
    received = sum(one.transfer.nbytes for one in recorded.steps[1].transfers.values())
    assert received == pytest.approx(2 * numel // 2, rel=0.05)


def masked(batch: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Returns ``batch`` with the first ``count`` targets of each sample masked."""
    return {**batch, "targets": batch["targets"].index_fill(1, torch.arange(count), IGNORE_INDEX)}


def test_micro_batches_weigh_by_their_targets() -> None:
    session = rank_of("train.micro_batch_size=4", "train.global_batch_size=8").session
    few, all_count = next(session.loader)
    few = masked(few, 48)
    alone, other, both = (session.step(batch).loss for batch in ([few], [all_count], [few, all_count]))
    numbers = num_targets(few["targets"]), num_targets(all_count["targets"])
    assert abs(alone - other) > 1e-3
    assert both == pytest.approx((numbers[0] * alone + numbers[1] * other) / sum(numbers), rel=1e-6)


def test_a_plan_multiplies_by_a_weight_that_is_not_1() -> None:
    run = planned_run(*SMALL, device="h100-80gb")
    weighed = replace(run, batch=masked(run.batch, 16))
    plain, multiplied = (predict(one, Assumptions()) for one in (run, weighed))
    assert plain.priced.parts.others < multiplied.priced.parts.others
    assert plain.step.seconds < multiplied.step.seconds


def test_items_and_products_fill_a_step() -> None:
    config = config_to_dict(compose([*SMALL, "train.micro_batch_size=4"]))
    job = {"config": config, "ranks": 1, "transport": HOST, "budget_s": 0.2}
    times = plan_time.measure_rank(Rank(job, device="cpu"))
    names = [item.name for item in times.items]
    assert len(set(names)) == len(names)
    assert {"mm", "addmm"} & {item.name for item in times.items if item.is_product}
    assert 0.05 < times.product_share < 0.98
    assert [item.ms for item in times.items] == sorted((item.ms for item in times.items), reverse=True)
    by_name = {item.name: item for item in times.items}
    assert (by_name["mul"].is_elementwise, by_name["mul"].is_product) == (True, False)
    assert not by_name["mm"].is_elementwise
    assert times.precision == "fp32"


def test_tables_show_what_was_measured() -> None:
    phases = {"forward_ms": 30.0, "backward_ms": 60.0}
    shares = {("weights", "all ranks"): Share(7, 2 * 10**6, 0.025, 0.02)}
    planned = Replay(0.12, 0.1, 0.0, shares)
    items = [Item("mm", 60.0, 9, True, False), Item("mul", 20.0, 4, False, True), Item("sum", 5.0, 1, False, False)]
    flops = 0.12 * 16.725e12, 0.12 * 20.07e12
    times = plan_time.RankTime([90.0, 110.0, 100.0], phases, flops, items, {"bf16": 2.0}, "fp32")
    run = planned_run(*SMALL, ranks=2, device="h100-80gb")
    assert times.ms == 100.0
    parts = dict(row[:2] for row in plan_time.phase_table(times, planned).rows)
    assert (parts["wait for ranks"], parts["other"], parts["step"]) == ("20", "10", "120")
    rows = plan_time.item_table(times).rows
    assert [row[0] for row in rows] == ["mul", "sum", "0 other operations", "no operation: Python, launches"]
    assert rows[0] == ("mul", "4", "20", "20.0%", "would fuse it")
    assert rows[-1][2] == "15"
    assert plan_time.format_table(times).rows == [("bf16", "2 x", "1.43 x", "2.5 x")]
    slow = replace(times, items=[Item("mm", 120.0, 9, True, False), Item("sum", 30.0, 1, False, False)])
    assert slow.product_share == 0.8, "the profiled steps were slower than the others"
    assert plan_time.item_table(slow).rows[-1][2] == "0"
    first, mfu, communication = plan_time.summary(times, planned, run, Assumptions(step_ms=100.0))
    assert first.startswith("120 ms a step (half of them between 110 and 130), ")
    assert mfu.startswith("MFU 25.0 % with causal attention, 30.0 % with full (power limit ")
    assert communication == (
        "7 collectives a step, of which a rank receives 2 MB in 25 ms through ib-400g, 20 ms of which it waits"
    )


@pytest.mark.parametrize(
    ("key", "kinds"),
    [("model.num_heads=4", {MATMUL, ATTENTION}), ("model.factory=tests.helpers.planned_models:Experts", {MATMUL})],
)
def test_products_in_other_formats_are_the_same_products(key: str, kinds: set[str]) -> None:
    calls = PlannedRank(compose([*SMALL, key]), 1, CPU, HOST).calls()
    found = {product.call.signature: product for product in products(calls)}.values()
    assert {product.kind for product in found} == kinds
    for product in found:
        for name, dtype in {"bf16": torch.bfloat16, "fp32": torch.float32}.items():
            result = bind(in_format(product, name), CPU)()
            output = result if isinstance(result, torch.Tensor) else result[0]
            assert output.dtype == dtype
            if product.kind == MATMUL:
                assert output.shape[-2:] == (product.m, product.n)
        if product.kind == MATMUL and product.n % 16 == product.k % 16 == 0:
            assert bind(in_format(product, "fp8"), CPU)().shape[-2:] == (product.m, product.n)


def test_amdahls_law() -> None:
    assert expected(0.5, 2.0) == pytest.approx(4 / 3)
    assert expected(0.75) == pytest.approx(4.0)
    assert expected(0.9, 1e12) == pytest.approx(expected(0.9))
    assert expected(0.3, 1.0) == 1.0


def test_the_bound_of_a_device_that_is_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("precision=bf16", "train.micro_batch_size=1", "train.global_batch_size=16", "device=h100-80gb", "ranks=8")
    run = planned_run("model=llama-1b", "model.num_layers=1", *keys[:2], device="h100-80gb", ranks=8)
    run = replace(run, config=replace(run.config, train=replace(run.config.train, global_batch_size=16)))
    found, _ = record_products(run)
    recorded = run.record(for_time=True)
    bound = PricedRun.of(recorded).parts
    flops = 2 * sum(product.flops for product in found)  # two micro-batches
    assert 1.0 <= bound.products / (flops / 989.4e12) < 1.5
    assert min(bound.others, bound.update) > 0
    assert bound.total == bound.products + bound.others + bound.update
    assert {one.transfer.world_size for one in recorded.steps[1].transfers.values()} == {8}
    assert main(["plan", "time", *SMALL, *keys]) == 0
    shown = capsys.readouterr().out
    assert "Time of a step on h100-80gb" in shown
    assert re.search(r"\d+ collectives a step, of which a rank receives .* MB in .* ms through ib-400g, ", shown)


@pytest.mark.parametrize("ranks", [1, 8])
def test_time_scale_and_the_receipt_of_a_run_have_one_number(ranks: int, capsys: Any, monkeypatch: Any) -> None:
    batches = ("train.micro_batch_size=1", f"train.global_batch_size={4 * ranks}")
    keys = ("experiment=smoke", "model.num_layers=1", "launch.device=cpu", "precision=bf16", *batches)
    planned = (f"ranks={ranks}", "device=h100-80gb")

    def shown(*words: str) -> list[list[str]]:
        assert main([*words, *keys, *planned]) == 0
        return tables(capsys)[0][0]

    ((_, step_ms, *_),) = (row for row in shown("plan", "time") if row[0] == "step")
    assert shown("plan", "scale")[0][1] == shown("simulate")[0][1] == step_ms
    config = compose(keys)
    monkeypatch.setattr("dtrain.planning.plans.find_device", lambda *_: find_device("h100-80gb"))
    session = Session.open(config, planned_ranks(ranks, HOST, CPU, StepRecorder()))
    receipt = RunPlanner().receipt(config, session.engine, session.dataset, peak=None, step_ms=12.0)
    assert receipt.notes[-1] == f"a step: {step_ms} ms planned, 12 ms measured"


@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
def test_command_on_two_processes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_time, "_BUDGET_S", 0.2)
    assert main(["plan", "time", *SMALL, "ranks=2", f"network={NETWORK}"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "| wait for ranks ",
        "tokens/s, on 2 ranks",
        " ms of which it waits",
        "no operation: Python, launches",
    ):
        assert line in shown

"""``dtrain plan shapes``: rows of products, the sizes that break a rule, and advice that is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.models.causal_lm import padded_vocab_size
from dtrain.tools.plan import padding, shapes
from dtrain.tools.plan.rules import Cause, find_causes
from dtrain.tools.plan.shapes import describe, record_products, show_shapes
from dtrain.train.planned import PlannedRun
from tests.helpers.hf_models import save_hf
from tests.helpers.shaped_models import Shaped
from tests.unit.tools.plan.planned_runs import planned_run

_SHAPED = "model.factory=tests.helpers.shaped_models:build_"
_BAD_BATCH = ("train.micro_batch_size=7", "train.global_batch_size=7", "model.max_seq_len=33")


def causes_of(run: PlannedRun, *, tf32: bool = False) -> dict[str, Cause]:
    found, linears = record_products(run)
    return {describe(cause, run)[0]: cause for cause in find_causes(found, linears, tf32=tf32)}


def tables(capsys: pytest.CaptureFixture[str]) -> tuple[list[list[list[str]]], str]:
    """Returns the rows of each table, and the whole output."""
    text = capsys.readouterr().out
    parts = [part.partition("\n\n")[2] for part in text.split("## ")[1:]]
    rows = [[line for line in part.splitlines() if line.startswith("|")][2:] for part in parts]
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in part] for part in rows], text


def test_five_bad_sizes_are_named_once_and_nothing_else() -> None:
    found = causes_of(planned_run(f"{_SHAPED}bad", "precision=bf16", *_BAD_BATCH))
    assert {name: set(cause.uses) for name, cause in found.items()} == {
        "micro-batch 7 x sequence 33 = 231": {
            (module, "M")
            for module in (
                "head",
                *(f"blocks.{i}.{layer}" for i in (0, 1) for layer in ("q", "k", "v", "out", "up", "down")),
            )
        },
        "size 60": {
            *((f"blocks.{i}.{layer}", "K") for i in (0, 1) for layer in ("q", "k", "v", "up")),
            *((f"blocks.{i}.{layer}", "N") for i in (0, 1) for layer in ("out", "down")),
            ("head", "K"),
        },
        "head dim 12": {("blocks.0", "head dim"), ("blocks.1", "head dim")},
        "size 101": {(f"blocks.{i}.{use}", use2) for i in (0, 1) for use, use2 in (("up", "N"), ("down", "K"))},
        "vocabulary 257": {("head", "N")},
    }


@pytest.mark.parametrize(
    "keys", [(f"{_SHAPED}good", "precision=bf16"), (f"{_SHAPED}bad", "precision=fp32", *_BAD_BATCH)]
)
def test_good_sizes_and_fp32_break_no_rule(keys: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    run = planned_run(*keys)
    assert not causes_of(run)
    show_shapes(run)
    assert "no size breaks a rule" in capsys.readouterr().out


def test_tf32_takes_multiples_of_4() -> None:
    run = planned_run(f"{_SHAPED}bad", "precision=fp32", *_BAD_BATCH)
    assert set(causes_of(run, tf32=True)) == {"micro-batch 7 x sequence 33 = 231", "size 101", "vocabulary 257"}


def test_channels_of_convolutions() -> None:
    keys = ("model.factory=tests.helpers.shaped_models:build_images", "precision=bf16")
    found = causes_of(planned_run(*keys))
    assert {name: list(cause.uses) for name, cause in found.items()} == {
        "channels 3": [("first", "channels in")],
        "channels 20": [("second", "channels out"), ("head", "K")],
    }
    assert not causes_of(planned_run(*keys, "model.args={channels: 8, inner: 24}"))


def test_fp8_takes_multiples_of_16_of_the_unpadded_sizes() -> None:
    sizes = ("model.hidden_dim=136", "model.num_heads=2", "model.ffn_dim=256", "model.num_layers=1")
    found = causes_of(planned_run("precision=fp8", *sizes, device="h100-80gb"))
    # in BF16, 136 and heads of 68 / 8: the head alone is BF16
    assert list(found) == ["hidden_dim 136, 408 = 3 x 136", "head dim 68"]
    assert found["hidden_dim 136, 408 = 3 x 136"].multiple == 16


def test_a_size_and_its_multiples_are_one_cause_with_its_key() -> None:
    run = planned_run("model.hidden_dim=60", "model.num_heads=5", "model.num_layers=1", "precision=bf16")
    found = causes_of(run)
    assert [describe(cause, run) for cause in found.values()] == [
        ("hidden_dim 60, 180 = 3 x 60", "model.hidden_dim"),
        ("head dim 12", "model.num_heads = model.hidden_dim / head dim"),
    ]


def test_the_rank_of_adapters_and_the_sizes_of_a_transformers_model_have_their_own_places(tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "hf", "llama", intermediate_size=60, vocab_size=264)
    lora = "model.lora={r: 4, alpha: 8, targets: [q_proj]}"
    run = planned_run("model=hf", f"model.path={folder}", "model.max_seq_len=16", lora, "precision=bf16")
    assert [describe(cause, run) for cause in causes_of(run).values()] == [
        ("r 4", "model.lora.r"),
        ("size 60", "config.json of model.path"),
    ]


def test_equal_blocks_share_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    run = planned_run("model.num_layers=3", "precision=bf16", device="h100-80gb", ranks=4)
    show_shapes(run)
    (products, *_), text = tables(capsys)
    assert [row[0] for row in products if row[1] == "wgrad" and row[2] == "matmul"] == [
        "head",
        "blocks.0-2.ffn.down",
        "blocks.0-2.ffn.gate_up",
        "blocks.0-2.attn.out",
        "blocks.0-2.attn.qkv",
    ]
    # 2 x 2048 x 768 x 256 FLOP over 2 x (2048 x 256 + 256 x 768 + 2048 x 768) bytes; 48 tiles of 128 x 256 on 132
    assert products[0] == [
        "blocks.0-2.attn.qkv",
        "fprop",
        "matmul",
        "2048 x 768 x 256",
        "1",
        "bf16",
        "0.8053",
        "4.588",
        "176",
        "memory",
        "100% x 36%",
    ]
    assert "products above 295 in bf16 FLOP/byte are bound by compute" in text
    show_shapes(run, folded=False)
    (all_products, *_), _ = tables(capsys)
    assert len(all_products) == 3 + 3 * (4 * 3 + 2) > len(products)


def test_what_bounds_a_product_is_unknown_without_published_rates(capsys: pytest.CaptureFixture[str]) -> None:
    show_shapes(planned_run("model.num_layers=1", "precision=bf16"))
    (products, *_), text = tables(capsys)
    assert {row[9] for row in products} == {"-"}
    assert "cpu: what bounds products in bf16 is unknown" in text


@pytest.mark.parametrize(
    ("gain", "advice"),
    [
        (0.07, "padding to 320 saves 7% of these products (measured)"),
        (0.02, "rule broken, gain of 320 measured below 3%"),
        (None, "rule broken, gain of 320 not measured"),
    ],
)
def test_advice_needs_a_measured_gain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gain: float | None, advice: str
) -> None:
    monkeypatch.setattr(shapes, "_gain", lambda *_: gain)
    show_shapes(planned_run(f"{_SHAPED}bad", "precision=bf16"))
    rows = {row[0]: row for row in tables(capsys)[0][1]}
    assert rows["vocabulary 257"][4] == advice
    assert "padded_vocab_size()" in rows["vocabulary 257"][3]


def test_a_device_that_is_elsewhere_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr(shapes, "measured_gain", fail)
    show_shapes(planned_run(f"{_SHAPED}bad", "precision=bf16", device="h100-80gb"))
    assert "gain of 320 not measured" in capsys.readouterr().out
    monkeypatch.setattr(shapes, "has_bf16_products", lambda _: True)
    show_shapes(planned_run(f"{_SHAPED}bad", "precision=bf16"), measure=False)
    assert "gain of 320 not measured" in capsys.readouterr().out


def test_what_is_timed_are_the_products_with_the_size_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[tuple[Any, Any]] = []

    def medians(signatures: Sequence[Any], *_: Any) -> list[float]:
        timed.append(tuple(s.args[0].shape + s.args[1].shape for s in signatures))
        return [1.0, 0.9]

    run = planned_run(f"{_SHAPED}bad", "precision=bf16", "model.max_seq_len=32")
    cause = causes_of(run)["vocabulary 257"]
    monkeypatch.setattr(padding, "bind", lambda signature, _: signature)
    monkeypatch.setattr(padding, "median_ms", medians)
    assert padding.measured_gain(cause, 64, torch.device("cpu"), 1.0) == pytest.approx(0.1)
    assert timed == [
        ((256, 60, 60, 257), (256, 60, 60, 320)),
        ((257, 256, 256, 60), (320, 256, 256, 60)),
        ((256, 257, 257, 60), (256, 320, 320, 60)),
    ]


@pytest.mark.parametrize("factory", ["bad", "images"])
def test_padded_calls_run_and_are_timed(factory: str) -> None:
    run = planned_run(f"{_SHAPED}{factory}", "precision=fp32", *(_BAD_BATCH if factory == "bad" else ()))
    found, linears = record_products(run)
    causes = find_causes(found, linears, tf32=True)  # FP32 products, which every CPU has
    assert causes
    for cause in causes:
        assert padding.measured_gain(cause, 16, torch.device("cpu"), 5.0) is not None


def test_padding_of_the_vocabulary_keeps_the_loss() -> None:
    torch.manual_seed(0)
    padded = Shaped(16, 2, 8, 16, padded_vocab_size(257), 257)
    plain = Shaped(16, 2, 8, 16, 257, 257)
    values = {
        name: t[:257] if name in ("embed.weight", "head.weight") else t for name, t in padded.state_dict().items()
    }
    plain.load_state_dict(values)
    nn.init.constant_(padded.head.weight.data[257:], 1e3)  # the padding must not count
    tokens = torch.randint(257, (2, 9))
    losses = [model(tokens[:, :-1], tokens[:, 1:]).loss for model in (padded, plain)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    losses[0].backward()
    assert not padded.head.weight.grad[257:].any()

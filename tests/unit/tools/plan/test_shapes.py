"""``dtrain plan shapes``: rows of products, the sizes that break a rule, and advice that is measured."""

from __future__ import annotations

import pytest
import torch

from dtrain.tools.plan import padding, shapes
from dtrain.tools.plan.rules import Cause, find_causes
from dtrain.tools.plan.shapes import describe, record_products, show_shapes
from dtrain.train.planned import PlannedRun
from tests.unit.tools.plan.planned_runs import planned_run

_SHAPED = "model.factory=tests.helpers.shaped_models:build_"
_BAD_BATCH = ("train.micro_batch_size=7", "train.global_batch_size=7", "model.max_seq_len=33")
_BAD = (f"{_SHAPED}bad", *_BAD_BATCH)
_IMAGES = (f"{_SHAPED}images", "precision=bf16")
CPU = torch.device("cpu")


def causes_of(run: PlannedRun, *, tf32: bool = False) -> dict[str, Cause]:
    found, linears = record_products(run)
    return {describe(cause, run)[0]: cause for cause in find_causes(found, linears, tf32=tf32)}


def tables(capsys: pytest.CaptureFixture[str]) -> tuple[list[list[list[str]]], str]:
    """Returns the rows of each table, and the whole output."""
    text = capsys.readouterr().out
    parts = [part.partition("\n\n")[2] for part in text.split("## ")[1:]]
    rows = [[line for line in part.splitlines() if line.startswith("|")][2:] for part in parts]
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in part] for part in rows], text


# -- sizes that break a rule -------------------------------------------------------------------------------------------


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


# -- products ----------------------------------------------------------------------------------------------------------


# -- advice ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gain", "advice"),
    [
        (0.07, "padding to 320 saves 7% of these products (measured)"),
        pytest.param(0.02, "rule broken, gain of 320 measured below 3%", marks=pytest.mark.exhaustive),
    ],
)
def test_advice_needs_a_measured_gain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gain: float | None, advice: str
) -> None:
    monkeypatch.setattr(shapes, "_gain", lambda *_: gain)
    show_shapes(planned_run(f"{_SHAPED}bad", "precision=bf16"))
    (row,) = (row for row in tables(capsys)[0][1] if row[0] == "vocabulary 257")
    assert row[4] == advice
    assert "padded_vocab_size()" in row[3]


def test_a_device_that_is_elsewhere_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shapes, "measured_gain", lambda *_: pytest.fail("timed"))
    show_shapes(planned_run(f"{_SHAPED}bad", "precision=bf16", device="h100-80gb"))
    assert "gain of 320 not measured" in capsys.readouterr().out


@pytest.mark.parametrize("keys", [_IMAGES[:1], pytest.param(_BAD, marks=pytest.mark.exhaustive)])
def test_padded_calls_run_and_are_timed(keys: tuple[str, ...]) -> None:
    found, linears = record_products(planned_run(*keys, "precision=fp32"))
    causes = find_causes(found, linears, tf32=True)  # FP32 products, which every CPU has
    assert causes
    assert all(padding.measured_gain(cause, 16, CPU, 60.0) is not None for cause in causes)

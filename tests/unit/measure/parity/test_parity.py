from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.__main__ import main
from dtrain.config.model import ModelConfig
from dtrain.config.schema import OptimConfig
from dtrain.engine.rng import rng_key
from dtrain.errors import ParityError
from dtrain.measure.parity.compare import (
    BOUNDS,
    NOISE_FACTOR,
    Bounds,
    Mismatch,
    Point,
    Trajectory,
    first_mismatch,
    make_limits,
    measure,
)
from dtrain.measure.parity.oracle import PlainTraining
from dtrain.measure.parity.run import check_oracle
from dtrain.models import transformer
from tests.helpers.chat import masked_data
from tests.helpers.oracle import AdamWSettings, Oracle, normwise_error
from tests.helpers.zoo import Micro, make

TINY = [
    *("model.num_layers=1", "model.hidden_dim=32", "model.num_heads=2", "model.max_seq_len=16", "parity.device=cpu"),
    *("schedule.warmup_steps=1", "parity.steps=4", "parity.micro_batch_size=1", "parity.global_batch_size=4"),
]


def trajectory(folder: Path, losses: Sequence[float], **weights: Sequence[float]) -> Trajectory:
    """Writes a trajectory; each weight is a vector of 2 equal elements, at the start and after each step."""
    run = Trajectory(folder)
    rows = [{name: torch.full((2,), own[step]) for name, own in weights.items()} for step in range(len(losses) + 1)]
    run.start(rows[0])
    for loss, row in zip(losses, rows[1:], strict=True):
        run.add(Point(loss, 1.0), row)
    return run


@pytest.fixture
def oracle(tmp_path: Path) -> Trajectory:
    return trajectory(tmp_path / "oracle", [4.0, 2.0], a=[1.0, 1.5, 3.0], b=[1.0, 2.0, 0.0], still=[5.0, 5.0, 5.0])


def test_deviations_are_relative_to_loss_and_distance_from_the_start(oracle: Trajectory, tmp_path: Path) -> None:
    run = trajectory(tmp_path / "run", [4.0, 2.2], a=[1.0, 1.5, 2.5], b=[1.0, 2.25, 0.0], still=[5.0, 5.0, 5.0])
    found = measure(run, oracle)
    assert found.loss == pytest.approx([0.0, 0.1])
    # `a` moves by 2 from its start, `b` by 1; a tensor that the oracle never moves must not move at all
    assert found.weights == {"a": [0.0, 0.0, 0.25], "b": [0.0, 0.25, 0.0], "still": [0.0, 0.0, 0.0]}
    moved = trajectory(tmp_path / "moved", [4.0, 2.0], a=[1.0, 1.5, 3.0], b=[1.0, 2.0, 0.0], still=[5.0, 5.1, 5.1])
    assert measure(moved, oracle).weights["still"] == [0.0, math.inf, math.inf]


def mismatch(
    run: Trajectory, oracle: Trajectory, bounds: Bounds, noise: Trajectory | None = None, bound: float | None = None
) -> Mismatch | None:
    limits = make_limits(bounds, oracle, measure(noise, oracle) if noise else None, weight_bound=bound)
    return first_mismatch(measure(run, oracle), limits)


def test_first_mismatch_names_step_and_worst_tensor(oracle: Trajectory, tmp_path: Path) -> None:
    run = trajectory(tmp_path / "run", [4.0, 2.2], a=[1.0, 1.7, 2.5], b=[1.0, 2.25, 0.0], still=[5.0, 5.0, 5.0])
    found = mismatch(run, oracle, Bounds(loss=0.01, weights=0.05))
    assert found == Mismatch(1, "b", pytest.approx(0.25), 0.05, num_others=1)
    # the loss of step 2 comes from the weights before it, so it is named before the weights after it
    found = mismatch(run, oracle, Bounds(loss=0.01, weights=0.5))
    assert found == Mismatch(2, "loss", pytest.approx(0.1), 0.01)
    assert mismatch(run, oracle, Bounds(loss=0.2, weights=0.5)) is None


@pytest.mark.parametrize(
    ("losses", "weights", "expected"),
    [
        ([4.0, 2.0], [1.0001, 1.5, 3.0], (0, "a")),  # other initial weights
        ([4.0, 2.0], [1.0, math.nan, math.nan], (1, "a")),
        ([4.0, 2.0], [1.0, math.inf, math.inf], (1, "a")),
        ([4.0, math.nan], [1.0, 1.5, 3.0], (2, "loss")),
    ],
)
def test_what_exceeds_every_bound(
    losses: list[float], weights: list[float], expected: tuple[int, str], oracle: Trajectory, tmp_path: Path
) -> None:
    run = trajectory(tmp_path / "run", losses, a=weights, b=[1.0, 2.0, 0.0], still=[5.0, 5.0, 5.0])
    found = mismatch(run, oracle, Bounds(loss=1.0, weights=1.0))
    assert found is not None
    assert (found.step, found.quantity) == expected


def test_limit_grows_with_the_noise_baseline(oracle: Trajectory, tmp_path: Path) -> None:
    still = [5.0, 5.0, 5.0]
    noise = trajectory(tmp_path / "noise", [4.0, 2.0], a=[1.0, 1.5, 3.0], b=[1.0, 2.1, 0.0], still=still)
    near, far = (
        trajectory(tmp_path / str(off), [4.0, 2.0], a=[1.0, 1.5, 3.0], b=[1.0, 2.0 + off, off], still=still)
        for off in (0.1 * NOISE_FACTOR, 0.1 * NOISE_FACTOR + 0.05)
    )
    bounds = Bounds(loss=0.01, weights=0.01)
    assert mismatch(near, oracle, bounds) == Mismatch(1, "b", pytest.approx(0.1 * NOISE_FACTOR), 0.01)
    # at step 2 the noise baseline is back at the oracle, but its largest deviation so far counts
    assert mismatch(near, oracle, bounds, noise=noise) is None
    found = mismatch(far, oracle, bounds, noise=noise)
    assert found == Mismatch(1, "b", pytest.approx(0.35), pytest.approx(0.31))
    # a bound of the user replaces bound and noise
    assert mismatch(near, oracle, bounds, noise=noise, bound=0.2).quantity == "b"  # type: ignore[union-attr]
    assert mismatch(far, oracle, bounds, bound=0.4) is None


class Called(nn.Module):
    """Wraps a model of the zoo: the micro-batch is one keyword argument, and the output is the loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.entry = make(name)
        self.inner = self.entry.build(0)

    def forward(self, micro: Micro) -> Tensor:
        return self.entry.loss(self.inner, micro)


def batches(name: str, steps: int, size: int) -> list[list[dict[str, Any]]]:
    return [[{"micro": make(name).batch(step * size + i)} for i in range(size)] for step in range(steps)]


@pytest.mark.parametrize("name", ["transformer", "unused", "tied", "partly_frozen", "weight_norm"])
def test_oracle_matches_the_independent_oracle_of_the_tests(name: str) -> None:
    """One uses torch's AdamW and clipping, the other is written from the formulas."""

    def seed(step: int, index: int) -> object:
        return torch.manual_seed(rng_key(7, step, index))

    model = Called(name)
    reference = Oracle(
        model, optimizer=AdamWSettings(lr=3e-3), schedule=lambda n: 1 / (n + 1), max_grad_norm=0.05, before_forward=seed
    )
    plain = PlainTraining(model, OptimConfig(lr=3e-3, max_grad_norm=0.05), seed)
    for step, micro_batches in enumerate(batches(name, 4, 3)):
        want = reference.step([(micro_batch, 1.0) for micro_batch in micro_batches])
        loss, grad_norm = plain.step(micro_batches, 3e-3 / (step + 1))
        assert loss == pytest.approx(want.loss, rel=1e-5)
        assert grad_norm == pytest.approx(want.grad_norm, rel=1e-4)
        assert grad_norm > 0.05, "clipping must be active"
    trained = {key: p for key, p in reference.masters().items() if model.get_parameter(key).requires_grad}
    # the gradient of a key's bias is rounding alone, so it differs between the two
    compared = [key for key in trained if "qkv.bias" not in key]
    assert normwise_error({k: plain.weights()[k] for k in compared}, {k: trained[k] for k in compared}) < 1e-5
    assert list(plain.weights()) == list(trained)


def test_noise_baseline_perturbs_weights_during_forwards_only() -> None:
    losses, unchanged = [], []
    for perturbation in (0.0, 1e-2):
        plain = PlainTraining(Called("mlp"), OptimConfig(weight_decay=0.0), lambda *_: None, perturbation=perturbation)
        before = plain.weights()
        losses.append(plain.step(batches("mlp", 1, 2)[0], 0.0)[0])
        unchanged.append(all(torch.equal(before[name], value) for name, value in plain.weights().items()))
    assert unchanged == [True, True]
    assert 0 < abs(losses[1] - losses[0]) < 0.1 * losses[0]


def test_noise_baseline_in_fp16_lowers_its_loss_scale_until_no_gradient_overflows() -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).float().sum() * 100.0

    torch.manual_seed(0)
    fp32, fp16 = (
        PlainTraining(Steep(), OptimConfig(max_grad_norm=None), lambda *_: None, compute_dtype=dtype)
        for dtype in (None, torch.float16)
    )
    micro_batches = [{"x": torch.ones(2, 4)}]
    norms = [plain.step(micro_batches, 1e-3)[1] for plain in (fp32, fp16)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    assert fp16.applied_steps == 1


@pytest.mark.parametrize("magnitude", [1.0, 1e-6])
def test_noise_baseline_in_fp8_rounds_the_operands_of_the_named_linears(magnitude: float) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(32, 48), nn.Linear(48, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x)).float().square().sum()

    x = magnitude * torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    gradients = {}
    for name, linears in (("bf16", ()), ("fp8", ("first",))):
        model = Two()
        with torch.no_grad():
            model.first.bias.zero_()
        plain = PlainTraining(
            model,
            OptimConfig(max_grad_norm=None),
            lambda *_: None,
            compute_dtype=torch.bfloat16,
            float8_linears=linears,
        )
        plain.step([{"x": x}], 0.0)
        gradients[name] = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    assert gradients["fp8"].keys() == gradients["bf16"].keys() == {"first.weight", "first.bias", "last.weight"}
    for key, exact in gradients["bf16"].items():
        error = float((gradients["fp8"][key] - exact).norm() / exact.norm())
        # E4M3 rounds an operand by up to 6 %, E5M2 by up to 12 %; BF16 by 0.4 %
        assert 0.01 < error < 0.15, key


def test_nonfinite_oracle_is_refused() -> None:
    check_oracle([Point(2.0, 1.0), Point(1.0, 0.5)])
    with pytest.raises(ParityError, match=r"loss is nan .* step 2"):
        check_oracle([Point(2.0, 1.0), Point(math.nan, 1.0)])
    with pytest.raises(ParityError, match=r"gradient norm inf at step 1"):
        check_oracle([Point(2.0, math.inf)])


def report_of(run_dir: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run_dir / "report.json").read_text(encoding="utf-8"))
    return values


@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_engines_agree_with_the_oracle(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parity.engines=[native,ddp]", "precision=fp32", "model.dropout=0.1", "engines.native.zero_stage=3"]
    assert main(["parity", *TINY, *words, f"parity.ranks={ranks}", f"run_dir={tmp_path}"]) == 0
    output = capsys.readouterr().out
    assert all(f"{engine} agrees with the oracle" in output for engine in ("native", "ddp"))
    report = report_of(tmp_path)
    assert (report["agrees"], report["precision"], report["noise_failure"]) == (True, "fp32", None)
    assert len(report["oracle"]) == len(report["noise_baseline"]) == 4
    assert [(entry["engine"], entry["zero_stage"]) for entry in report["engines"]] == [("native", 3), ("ddp", 0)]
    for entry in report["engines"]:
        assert max(entry["deviations"]["loss"]) < BOUNDS["fp32"].loss
        assert max(max(series) for series in entry["deviations"]["weights"].values()) > 0
        assert {series[0] for series in entry["deviations"]["weights"].values()} == {0.0}, "equal initial weights"
    assert (tmp_path / "parity.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
def test_engine_agrees_in_fp8_with_a_noise_baseline_in_fp8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parity.engines=[native]", "precision=fp8", "parity.ranks=1", f"run_dir={tmp_path}"]
    assert main(["parity", *TINY, *words]) == 0
    assert "native agrees with the oracle" in capsys.readouterr().out
    report = report_of(tmp_path)
    (entry,) = report["engines"]
    off, expected = (max(run["loss"]) for run in (entry["deviations"], report["noise_deviations"]))
    assert 0 < off < BOUNDS["fp8"].loss
    assert 0 < expected < BOUNDS["fp8"].loss
    # the products of FP8 move weights several times as far as those of BF16
    assert max(max(series) for series in report["noise_deviations"]["weights"].values()) > BOUNDS["bf16"].weights


@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
def test_engines_and_oracle_weigh_micro_batches_by_their_targets_that_count(tmp_path: Path) -> None:
    words = [*masked_data(tmp_path / "data"), "parity.engines=[native]", "parity.ranks=1", "precision=fp32"]
    assert main(["parity", *TINY, *words, "model.max_seq_len=32", f"run_dir={tmp_path / 'run'}"]) == 0


def build(config: ModelConfig, vocab_size: int) -> nn.Module:
    """The default model; on rank 1 the gradient of ``model.args.flip`` has the wrong sign, not so in the oracle."""
    model = transformer.build(replace(config, args={}), vocab_size)
    if dist.is_initialized() and dist.get_rank() == 1:
        model.get_parameter(config.args["flip"]).register_hook(lambda grad: -grad)
    return model


@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
def test_wrong_gradient_on_one_rank_is_found_at_its_step_and_tensor(tmp_path: Path, capsys: Any) -> None:
    name = "blocks.0.ffn.down.weight"
    model = [f"model.factory={__name__}:build", f"model.args.flip={name}"]
    words = [*model, "parity.engines=[native]", "precision=fp32", f"run_dir={tmp_path}"]
    assert main(["parity", *TINY, *words]) == 1
    assert f"native deviates from the oracle at step 1: '{name}' is off by" in capsys.readouterr().out
    report = report_of(tmp_path)
    assert not report["agrees"]
    found = report["engines"][0]["mismatch"]
    assert (found["step"], found["quantity"], found["reason"]) == (1, name, None)
    assert found["limit"] == pytest.approx(BOUNDS["fp32"].weights, rel=10)


@pytest.mark.processes
@pytest.mark.usefixtures("warm_ranks")
def test_oracle_skips_the_overflows_of_a_dynamic_loss_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With ``weight_bound=1e-12`` the first applied step is the first above its limit."""
    words = ["parity.engines=[native]", "parity.ranks=1", "precision=fp16", "precision.loss_scale.init=524288"]
    assert main(["parity", *TINY, *words, f"run_dir={tmp_path}", "parity.steps=7", "parity.weight_bound=1e-12"]) == 1
    (entry,) = report_of(tmp_path)["engines"]
    reasons = [point["reason"] for point in entry["curve"]]
    applied = reasons.index(None)
    assert applied > 0
    assert set(reasons[:applied]) == {"overflow"}
    assert (entry["mismatch"]["step"], entry["mismatch"]["limit"]) == (applied + 1, 1e-12)
    assert f"native deviates from the oracle at step {applied + 1}: '" in capsys.readouterr().out
    # an oracle that applied all steps would be half of the distance ahead
    assert max(max(series) for series in entry["deviations"]["weights"].values()) < 0.05

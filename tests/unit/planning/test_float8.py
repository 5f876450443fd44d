"""What FP8 is expected to bring: the arithmetic against figures by hand, and the line of a plan and of a start."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from dtrain.__main__ import main
from dtrain.cli.resolve import compose
from dtrain.planning.devices import find_device
from dtrain.planning.plans import RunPlanner
from dtrain.planning.time.float8 import expect
from dtrain.train import outlook
from dtrain.train.outlook import Outlook, RecipeCost, Times, float8_seconds, recipe_cost
from dtrain.train.run import run_training
from tests.unit.planning.planned_runs import planned_run

_BF16, _FP8, _BANDWIDTH = 989.4e12, 1978.9e12, 3.35e12  # of an H100 SXM


def test_the_seconds_of_products_and_casts() -> None:
    # 590 TFLOP at 59 % of 1 PFLOP/s: 1 s; 150 G elements of 6 bytes at 90 % of 1 TB/s: 1 s
    assert float8_seconds(590e12, 0, 1e15, 1e12, fused=False) == pytest.approx(1.0)
    assert float8_seconds(590e12, 150e9, 1e15, 1e12, fused=False) == pytest.approx(2.0)
    assert float8_seconds(590e12, 150e9, 1e15, 1e12, fused=True) == pytest.approx(1.2)
    assert float8_seconds(590e12, 0, 1e15, 1e12, fused=True, nbytes=3e12) == pytest.approx(3.0), "bound by bytes"
    assert float8_seconds(590e12, 0, 1e15, 1e12, recipe_cost("blockwise"), fused=False) == pytest.approx(1.25)
    # without the second order of the weight gradient 5 bytes an element
    cost = recipe_cost("rowwise_bf16_wgrad")
    assert float8_seconds(0, 180e9, 1e15, 1e12, cost, fused=False) == pytest.approx(1.0)
    assert not cost.has_wgrad
    assert recipe_cost("tensorwise") == recipe_cost("one of tomorrow") == RecipeCost(1.0, True)


def test_the_rate_row_by_row_follows_from_two_published_steps() -> None:
    """torchao's steps of 8B on H100 are 25.0 % faster than BF16's tensorwise, and 10.05 % row by row."""
    step, linears, casts = 110.0, 63.2, 0.9  # us of a token in BF16; as below
    rest = step - linears + casts
    tensorwise = step / 1.25 - rest
    assert step / (rest + tensorwise / recipe_cost("rowwise").rate) == pytest.approx(1.1005, abs=0.01)
    assert recipe_cost("rowwise_bf16_wgrad").rate == recipe_cost("rowwise").rate


@pytest.mark.parametrize(
    ("blocks", "width", "of_keys", "ffn", "bf16_us", "unfused", "fused"),
    [
        (16, 2048, 512, 8192, 17.3, 1.18, 1.27),  # 1B, rows of 4096 tokens, at 48 % MFU
        (28, 3072, 1024, 8192, 40.1, 1.28, 1.37),  # 3B, rows of 4096 tokens, at 54 % MFU
        (32, 4096, 1024, 14336, 110.0, 1.25, 1.31),  # 8B, rows of 8192 tokens, at 50 % MFU
    ],
)
def test_the_speed_up_of_a_llama_by_hand(
    blocks: int, width: int, of_keys: int, ffn: int, bf16_us: float, unfused: float, fused: float
) -> None:
    # in, out of each Linear of a block: qkv, out, gate_up, down
    linears = [(width, width + 2 * of_keys), (width, width), (width, 2 * ffn), (ffn, width)]
    flops = 6 * blocks * sum(before * after for before, after in linears)  # of a token
    elements = blocks * sum(before + after for before, after in linears)
    rest = bf16_us * 1e-6 - flops / (0.67 * _BF16)
    for is_fused, expected in ((False, unfused), (True, fused)):
        step = rest + float8_seconds(flops, elements, _FP8, _BANDWIDTH, fused=is_fused)
        assert bf16_us * 1e-6 / step == pytest.approx(expected, abs=0.03)


_SIZES = ("model=llama-1b", "model.num_layers=2", "model.max_seq_len=4096", "train.micro_batch_size=1")
_KEYS = ("precision=fp8", *_SIZES, "train.global_batch_size=1")
_LINEARS = {"attn.qkv": (2048, 3072), "attn.out": (2048, 2048), "ffn.gate_up": (2048, 16384), "ffn.down": (8192, 2048)}
_MODULES = [f"blocks.{number}.{name}" for number in range(2) for name in _LINEARS]
_MACS = 2 * 4096 * sum(before * after for before, after in _LINEARS.values())  # of one of three products
_ELEMENTS = 2 * 4096 * sum(before + after for before, after in _LINEARS.values())


def test_the_predicted_step_differs_by_products_and_casts() -> None:
    found = expect(planned_run(*_KEYS, device="h100-80gb"), _MODULES)
    faster = 6 * _MACS / (0.67 * _BF16) - 6 * _MACS / (0.59 * _FP8)
    casts = _ELEMENTS * 6 / (0.9 * _BANDWIDTH)
    assert found.unfused.bf16_s - found.unfused.float8_s == pytest.approx(faster - casts)
    assert found.fused.bf16_s - found.fused.float8_s == pytest.approx(faster - 0.2 * casts)
    assert found.fused.bf16_s < found.unfused.bf16_s, "other operations of blocks are fused too"
    assert found.flops["FP8 Linears"] == 6 * _MACS
    assert found.flops["other Linears"] == 6 * 4096 * 2048 * 320  # the head, of 320 tokens
    # scores and sums in forward, the same and five products in backward, half of them
    assert found.flops["attention (causal: half counted)"] == 2 * 32 * 2 * 4096 * 4096 * 64 * 7 // 2
    assert found.flops["other products"] == 0


def test_a_recipe_whose_weight_gradients_are_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlook, "RECIPE_COSTS", {"tensorwise": RecipeCost(has_wgrad=False)})
    found = expect(planned_run(*_KEYS, device="h100-80gb"), _MODULES)
    saved = 4 * _MACS / (0.67 * _BF16) - 4 * _MACS / (0.59 * _FP8) - _ELEMENTS * 5 / (0.9 * _BANDWIDTH)
    assert found.unfused.bf16_s - found.unfused.float8_s == pytest.approx(saved)


def test_a_rule_takes_modules_out_of_fp8() -> None:
    keys = (*_KEYS, 'precision.rules={"blocks.0.*": bf16, "*.ffn.*": fp8}')
    found = expect(planned_run(*keys, device="h100-80gb"), _MODULES[4:])
    assert found.flops["FP8 Linears"] == 3 * _MACS


@pytest.mark.parametrize(
    ("fused", "unfused", "compiles", "advice"),
    [
        (1.25, 1.1, False, ""),
        (1.25, 1.02, False, ", which is less than 3%: use model.compile=blocks or precision=bf16"),
        (1.25, 1.02, True, ""),
        (1.02, 0.9, True, "; less than 3%: use precision=bf16"),
    ],
)
def test_the_line_advises_against_a_small_gain(fused: float, unfused: float, compiles: bool, advice: str) -> None:
    step = Outlook("a100", {}, Times(unfused, 1.0), Times(fused, 1.0), compiles, 1, "tokens")
    gains = f"{fused:.2f}x with casts that the compiler fuses (model.compile=blocks), {unfused:.2f}x without"
    assert step.line() == f"fp8 on a100: expected {gains}{advice}"


def lines_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["plan", "precision", "launch.device=cpu", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_plan_says_shares_times_and_speed_up(capsys: pytest.CaptureFixture[str]) -> None:
    *_, shares, times, compiled, assumed, line = lines_of(capsys, *_KEYS, "model.vocab_size=128256", "device=h100-80gb")
    assert shares.startswith("FLOPs of a step: ")
    assert "% in FP8 Linears, " in shares
    assert times.startswith("a step of 4,096 tokens: ")
    assert compiled.startswith("with compiled blocks: ")
    assert assumed.startswith(
        "assumed, not measured: 67% of the published BF16 rate, 59% of FP8's, 90% of the memory's"
    )
    assert line.startswith("fp8 on h100-80gb: expected 1.")
    assert any(one.startswith("precision fp8 on h100-80gb") for one in lines_of(capsys, *_KEYS, "device=h100-80gb"))


def test_a_plan_without_fp8_products_promises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    emulated = (
        "and brings no speed; what a GPU with FP8 would gain: dtrain plan precision with these keys and "
        "device=h100-80gb"
    )
    assert lines_of(capsys, "precision=fp8", "model=tiny")[-1] == f"fp8 is emulated on cpu {emulated}"
    lines = lines_of(capsys, "precision=fp8", "model=tiny", "device=a100-80gb")
    assert lines[-1] == f"fp8 is emulated on a100-80gb {emulated}"
    assert "emulated" in next(line for line in lines if line.startswith("float8: "))
    for keys in (("precision=bf16",), ("precision=tf32", "device=a100-80gb"), ("precision=auto", "device=t4-16gb")):
        lines = lines_of(capsys, *keys, "model=tiny")
        assert "fp8" not in lines[-1]
    assert any(line.startswith("precision fp16 on t4-16gb") for line in lines)


_RUN = (
    "launch.device=cpu",
    "experiment=smoke",
    "precision=fp8",
    "train.steps=2",
    "report=false",
    "supervise.enabled=false",
)


@pytest.fixture(params=["cpu", "h100-80gb"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a device, which the planner of a run takes for this machine's."""
    monkeypatch.setattr("dtrain.planning.plans.find_device", lambda *_: find_device(request.param))
    name: str = request.param
    return name


def test_a_start_says_the_line_of_the_plan(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    planned = lines_of(capsys, *_RUN[1:], f"device={device}")[-1]
    assert planned.startswith("fp8 is emulated" if device == "cpu" else f"fp8 on {device}: expected ")
    with caplog.at_level(logging.INFO):
        assert run_training(compose([*_RUN, f"run_dir={tmp_path}/run"]), planner=RunPlanner()) == 0
    captured = capsys.readouterr()
    assert planned in captured.out + captured.err + caplog.text


def test_a_plan_that_fails_does_not_stop_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object) -> str:
        raise RuntimeError("no shapes")

    monkeypatch.setattr(RunPlanner, "float8_line", fails)
    assert run_training(compose([*_RUN, f"run_dir={tmp_path}/run"]), planner=RunPlanner()) == 0
    captured = capsys.readouterr()
    assert "no plan of what FP8 brings: " in captured.out + captured.err + caplog.text


@pytest.mark.parametrize("recipe", ["rowwise_bf16_wgrad", "blockwise"])
def test_each_recipe_is_planned_for_a_gpu_that_is_elsewhere(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that a CPU cannot multiply in."""
    shape = ("model.hidden_dim=256", "model.num_layers=3", "model.num_heads=2", "model.ffn_dim=512")
    assert (
        main(["plan", "precision", "precision=fp8", f"precision.float8.recipe={recipe}", "device=h100-80gb", *shape])
        == 0
    )
    out = capsys.readouterr().out
    assert "fp8 on h100-80gb: expected" in out
    assert f"{ {'rowwise_bf16_wgrad': 45, 'blockwise': 47}[recipe] }% of FP8's" in out


@pytest.mark.exhaustive
def test_the_page_of_fp8_has_what_each_recipe_is_expected_to_bring(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs/precision/fp8.md").read_text(encoding="utf-8")
    found = re.search(r"\$ dtrain (plan precision .*)\n(FLOPs .*)\n(fp8 on .*)", page)
    assert found is not None
    gains = dict(re.findall(r"\| `(\w+)`[^|]*\|[^|]*\|[^|]*\| (\d\.\d\dx) \|", page))
    assert [*gains] == ["tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise"]
    for recipe, gain in gains.items():
        assert main([*found[1].split(), f"precision.float8.recipe={recipe}"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert found[2] in lines
        assert f"expected {gain} with casts" in lines[-1]
        assert recipe != "tensorwise" or lines[-1] == found[3]

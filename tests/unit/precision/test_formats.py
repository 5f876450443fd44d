"""The formats against PyTorch's own, and ``dtrain formats`` as users run it."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.__main__ import main
from dtrain.precision import formats
from dtrain.precision.formats import BF16, FORMATS, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, FloatFormat
from dtrain.precision.hardware import GPUS, rate
from dtrain.tools.formats.picture import worst_errors

DTYPES = {
    FP32: torch.float32,
    BF16: torch.bfloat16,
    FP16: torch.float16,
    FP8_E4M3: torch.float8_e4m3fn,
    FP8_E5M2: torch.float8_e5m2,
}
LOW = [floats for floats in DTYPES if floats != FP32]
names = [floats.name for floats in DTYPES]


def all_codes(floats: FloatFormat) -> torch.Tensor:
    """Every number of a format of 8 or 16 bits as PyTorch decodes it, FP64, NaN included."""
    integers = {8: torch.uint8, 16: torch.int16}[floats.bits]
    return torch.arange(2**floats.bits).to(integers).view(DTYPES[floats]).double()


def in_range(numbers: torch.Tensor, floats: FloatFormat) -> torch.Tensor:
    """As dtrain clamps before each cast to E4M3, for a PyTorch (before 2.13) whose own cast does not saturate."""
    saturates = torch.tensor(math.inf).to(DTYPES[floats]).float().isfinite()
    return numbers if floats.ieee or saturates else numbers.clamp(-floats.max, floats.max)


def cast(value: float, floats: FloatFormat) -> float:
    return float(in_range(torch.tensor(value, dtype=torch.float32), floats).to(DTYPES[floats]).double())


def same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


@pytest.mark.parametrize("floats", LOW, ids=names[1:])
def test_every_number_is_counted_and_is_exact(floats: FloatFormat) -> None:
    values = all_codes(floats)
    finite = values[values.isfinite()].unique().tolist()  # zero once
    info = torch.finfo(DTYPES[floats])
    assert (floats.bits, floats.max, floats.min_normal) == (info.bits, info.max, info.smallest_normal)
    assert floats.epsilon == info.eps
    assert floats.num_finite == len(finite)
    assert floats.min_subnormal == min(value for value in finite if value > 0)
    assert values.isinf().any() == floats.ieee
    some = finite if floats.bits == 8 else finite[::97]
    for value in some:
        rounded = floats.rounded(value)
        assert (rounded.value, rounded.event) == (value, formats.EXACT)


def test_what_only_a_formula_gives() -> None:
    assert (TF32.bits, TF32.max_exponent, TF32.min_normal, TF32.epsilon) == (19, 127, FP32.min_normal, FP16.epsilon)
    assert [floats.needs_scaling for floats in FORMATS] == [False, False, False, True, True, True]
    assert [floats.binades for floats in (FP16, FP8_E4M3, FP8_E5M2)] == [40, 18, 32]
    assert f"{FP32.decimal_digits:.1f}" == "7.2"
    info = torch.finfo(torch.float32)
    assert (FP32.bits, FP32.max, FP32.min_normal, FP32.epsilon) == (32, info.max, info.smallest_normal, info.eps)


@pytest.mark.parametrize("floats", LOW, ids=names[1:])
def test_a_sum_of_ones_stops_where_it_is_said_to(floats: FloatFormat) -> None:
    total = 0.0
    while (larger := cast(total + 1.0, floats)) != total:
        total = larger
    assert total == floats.ones_add_up_to


@pytest.mark.parametrize("floats", [FP8_E4M3, FP8_E5M2], ids=["e4m3", "e5m2"])
def test_fp8_between_all_neighbors(floats: FloatFormat) -> None:
    """Every number, every midpoint, and the FP32 numbers beside them, both signs; then far beyond."""
    values = all_codes(floats)
    finite = values[values.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    exact = torch.cat([finite, middles, torch.tensor([floats.max * 1.03, floats.max * 1.5, 1e30, 1e-30])]).float()
    beside = [torch.nextafter(exact, torch.full_like(exact, end)) for end in (-math.inf, math.inf)]
    numbers = torch.cat([exact, *beside])
    want = in_range(numbers, floats).to(DTYPES[floats]).double().tolist()
    for number, expected in zip(numbers.tolist(), want, strict=True):
        assert floats.rounded(number).value == expected, number


def float_of(bits: int) -> float:
    """The FP32 number with these bits."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


any_bits = st.integers(0, 2**32 - 1)


@settings(max_examples=150)
@given(number=st.one_of(any_bits.map(float_of), st.floats(width=32, min_value=-7e4, max_value=7e4)))
def test_rounding_is_pytorchs_cast(number: float) -> None:
    for floats in DTYPES:
        assert same(floats.rounded(number).value, cast(number, floats)), floats.name


@settings(max_examples=150)
@given(bits=any_bits)
def test_tf32_is_fp32_without_its_last_13_bits(bits: int) -> None:
    """Nearest even by integer arithmetic: a half and the last bit that stays are added, the rest is masked."""
    number = float_of(bits)
    want = math.nan if math.isnan(number) else float_of((bits + 0xFFF + (bits >> 13 & 1)) & 0xFFFFE000)
    assert same(TF32.rounded(number).value, want)


@pytest.mark.parametrize(
    ("floats", "number", "value", "event"),
    [
        (FP16, 300.0 * 300.0, math.inf, formats.INF),
        (FP16, 65519.99, 65504.0, formats.ROUNDED),
        (FP16, -65520.0, -math.inf, formats.INF),
        (FP16, 1e-8, 0.0, formats.ZERO),
        (FP16, 2.0**-24, 2.0**-24, formats.EXACT),
        (FP16, 1e-7, 2 * 2.0**-24, formats.SUBNORMAL),
        (BF16, 1 + 1e-4, 1.0, formats.ROUNDED),
        (FP8_E4M3, 70000.0, 448.0, formats.SATURATED),
        (FP8_E4M3, -math.inf, -448.0, formats.SATURATED),
        (FP8_E5M2, math.inf, math.inf, formats.EXACT),
        (FP8_E5M2, math.nan, math.nan, formats.NAN),
        (FP32, Fraction(1, 3), float(torch.tensor(1 / 3)), formats.ROUNDED),
        (FP32, Fraction(2) ** 200, math.inf, formats.INF),
        # just above a midpoint; rounded to FP32 first it would be a tie, and round to even
        (FP16, 1 + Fraction(1, 2**11) + Fraction(1, 2**40), 1 + 2.0**-10, formats.ROUNDED),
    ],
)
def test_what_happens_is_named(floats: FloatFormat, number: Fraction | float, value: float, event: str) -> None:
    rounded = floats.rounded(number)
    assert same(rounded.value, value)
    assert rounded.event == event


def test_rates_are_found_by_torchs_names() -> None:
    assert rate("NVIDIA H200", "fp8") == 1978.9
    assert rate("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert rate("NVIDIA H200 MIG 1g.18gb", "bf16") is None
    device_names = [name for gpu in GPUS for name in gpu.variants]
    assert len(set(device_names)) == len(device_names)


def rows(output: str) -> dict[str, list[str]]:
    """The rows of Markdown tables by their first cell."""
    lines = [line for line in output.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats"]) == 0
    output = capsys.readouterr().out
    table = rows(output)
    assert table["sign + exponent + mantissa"][3:] == ["1 + 5 + 10", "1 + 4 + 3", "1 + 5 + 2"]
    assert table["largest"][3:] == ["65,504", "448", "57,344"]
    assert table["finite numbers"][4] == "253"
    assert table["overflow becomes"] == ["Inf", "Inf", "Inf", "Inf", "448", "Inf"]
    assert table["needs scaling"] == ["no", "no", "no", "yes", "yes", "yes"]
    assert table["A100"] == ["19.5", "156", "312", "312", "-", "A100 datasheet"]
    assert table["B200"][:3] == ["unknown", "unknown", "2250"]
    for gpu in GPUS:
        assert f"{gpu.source}: {gpu.url}" in output


def test_a_number_is_rounded_to_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "0.1", "-70000"]) == 0
    first, second = (rows(part) for part in capsys.readouterr().out.split("## -70000"))
    assert first["fp8 e4m3"] == ["0.1015625", "0.00156", "0.0156", "rounded"]
    assert second["fp16"] == ["-inf", "-", "-", "overflow to Inf"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pictur"], "got 'pictur'; did you mean 'picture'?"),
        (["0.1", "1/3"], "got '1/3'"),
        (["picture", "a.png", "0.1"], "cannot read '0.1' after 'picture a.png'"),
        (["picture", "formats.pdf"], "one file that ends in .png; got 'formats.pdf'"),
        (["picture", "nowhere/formats.png"], "there is no folder 'nowhere'"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert message in err


@pytest.mark.processes
def test_a_number_needs_no_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "dtrain", "formats", "1e-8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "flushed to zero" in done.stdout
    assert " torch" not in done.stderr


@pytest.mark.parametrize("floats", [FP16, FP8_E4M3], ids=["fp16", "e4m3"])
def test_the_pictures_curve_is_the_worst_of_each_binade(floats: FloatFormat) -> None:
    exponents = range(floats.min_exponent - floats.mantissa_bits - 2, floats.max_exponent)
    starts, errors = worst_errors(floats, exponents)
    for start, error in zip(starts, errors, strict=True):
        numbers = torch.linspace(start, 2 * start, 4097, dtype=torch.float64)[:-1].float()
        quantized = numbers.to(DTYPES[floats]).double()
        worst = ((quantized - numbers.double()) / numbers.double()).abs().max()
        assert float(worst) == pytest.approx(error, rel=2e-3)


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.png"
    assert main(["formats", "picture", str(path)]) == 0
    assert capsys.readouterr().out.strip() == str(path)
    assert path.read_bytes()[:4] == b"\x89PNG"

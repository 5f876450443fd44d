"""The Triton kernels of FP8 give the bits of tensor code, wherever shards are cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dtrain.config.precision import Float8
from dtrain.precision.float8 import cast as eager
from dtrain.precision.float8 import options
from dtrain.precision.float8 import weights as quantized_weights
from dtrain.precision.float8.cast import E4M3, E5M2, Scaling
from dtrain.precision.float8.matmul import ALIGNMENT, operand
from dtrain.precision.float8.options import Recipe
from dtrain.precision.float8.weights import Bound, QuantizedWeight, TransposeSet
from dtrain.precision.policy import PrecisionPolicy
from dtrain.sharding import float8_scales
from tests.engines.float8_model import start, train_step
from tests.engines.helpers import state_digests
from tests.helpers import needs
from tests.unit.sharding.test_quantized_replicas import Shards

pytest.importorskip("triton")

from dtrain.kernels.float8 import Transposes
from dtrain.kernels.quantize import quantize
from dtrain.kernels.tiles import TileTable

# the sizes of a kernel's tiles, so that some weights have several
SHAPES = {"aligned": [(48, 80), (8, 640), (80, 16)], "any": [(30, 90), (3, 700), (50, 17), (1, 16), (300, 1)]}
of_weights = st.sampled_from([Scaling.TENSOR, Scaling.ROWS, Scaling.SQUARES])
everywhere = settings(
    deadline=None,
    max_examples=5,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # interpreted kernels are too slow to shrink a failure
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (eager, float8_scales, quantized_weights):
        monkeypatch.setattr(module, "uses_kernels", lambda device, *, compiled: compiled)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched over a table of tiles."""
    names: list[str] = []
    launch = TileTable.launch

    def record(self: TileTable, kernel: Any, *args: Any, **meta: Any) -> None:
        names.append(kernel.fn.__name__)
        launch(self, kernel, *args, **meta)

    monkeypatch.setattr(TileTable, "launch", record)
    return names


def numbers(seed: int, *shape: int) -> Tensor:
    """FP32 of all magnitudes, with subnormal numbers, zeros, ties and their neighbors, and sometimes Inf or NaN."""
    generator = torch.Generator().manual_seed(seed)
    low = [-149, -20, -8, 100][seed % 4]
    x = torch.randn(shape, generator=generator).ldexp(torch.randint(low, low + 27, shape, generator=generator))
    kind = torch.rand(shape, generator=generator)
    x[kind < 0.1] = 0.0
    # mantissas of 5 bits, many of them half-way between two FP8 numbers, and the numbers next to them
    ties = (x.view(torch.int32) & -0x40000) + torch.randint(-1, 2, shape, generator=generator, dtype=torch.int32)
    x = torch.where((kind > 0.5) & ties.view(torch.float32).isfinite(), ties.view(torch.float32), x)
    if seed % 3 == 0:
        x.view(-1)[seed % x.numel()] = [math.inf, -math.inf, math.nan][seed // 3 % 3]
    return x


def assert_same(got: Tensor, want: Tensor) -> None:
    """Bit for bit, but for the sign and payload of NaN."""
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.cpu().float(), want.cpu().float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(got.cpu().float().nan_to_num()), torch.signbit(want.cpu().float().nan_to_num()))


@everywhere
@given(st.integers(1, 7), of_weights, st.sampled_from(sorted(SHAPES)), st.integers(0, 2**31))
def test_shards_have_the_scales_and_casts_of_tensor_code(
    device: torch.device, world: int, scaling: Scaling, shapes: str, seed: int
) -> None:
    weights = [numbers(seed + number, *shape) for number, shape in enumerate(SHAPES[shapes])]
    want = Shards(weights, world, scaling)
    got = Shards(weights, world, scaling, compiled=True, device=device)
    for shards in (want, got):
        shards.refresh()
    for own, other in zip(got.tables, want.tables, strict=True):
        assert_same(own.amax, other.amax)
        assert_same(own.scale, other.scale)
    for copies, others in zip(got.copies, want.copies, strict=True):
        for copy, expected in zip(copies, others, strict=True):
            assert_same(copy, expected)


@everywhere
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=3), st.booleans(), st.integers()
)
def test_transposes_are_padded_operands(
    device: torch.device, sizes: list[tuple[int, int]], aligned: bool, seed: int
) -> None:
    shapes = [(16 * -(-n // 16), 16 * -(-k // 16)) for n, k in sizes] if aligned else sizes
    flat = torch.randint(0, 256, (sum(n * k + 64 for n, k in shapes),), dtype=torch.uint8)
    flat[flat & 0x7F == 0x7F] = 0  # NaN
    flat = flat.to(device).view(E4M3)
    matrices, cursor = [], 0
    for n, k in shapes:  # each starts on 64 elements, as in a flat buffer
        matrices.append(flat[cursor : cursor + n * k].view(n, k))
        cursor += -(-n * k // 64) * 64
    transposes = Transposes(matrices, ALIGNMENT)
    moved = flat.clone()  # at stage 3 each unshard allocates the flat buffer anew
    found = transposes(moved[: matrices[0].numel()].view(matrices[0].shape))
    for got, matrix in zip(found, matrices, strict=True):
        assert got.data_ptr() % 16 == 0
        assert_same(got, operand(matrix, emulate=False, transposed=True))


def test_one_launch_makes_the_transposes_of_a_set(device: torch.device, launched: list[str]) -> None:
    """And again after the copies have moved, as they do at stage 3 with every unshard."""
    recipe, shapes = Recipe(emulate=False, compile=True), [(48, 80), (40, 24)]
    scale, transposes = torch.ones((), device=device), TransposeSet()
    parameters = [nn.Parameter(torch.empty(shape, device=device)) for shape in shapes]
    weights = [QuantizedWeight(recipe, Bound("w", parameter, [scale], transposes)) for parameter in parameters]
    for seed in (1, 2):
        flat = numbers(seed, 48 * 80 + 40 * 24).to(E4M3).to(device)
        copies = [flat[: 48 * 80].view(48, 80), flat[48 * 80 :].view(40, 24)]
        for weight, copy in zip(weights, copies, strict=True):
            weight.bind([copy])
            assert not weight.cached()
        for weight, parameter, copy in zip(weights, parameters, copies, strict=True):
            _, saved = weight.tensors(parameter)
            assert [tensor.data_ptr() for tensor in saved] == [copy.data_ptr(), scale.data_ptr()], "no factor"
            transposed = weight.backward(*saved)
            assert_same(transposed.values, operand(copy, emulate=False, transposed=True))
        assert [tensor.nbytes for weight in weights for tensor in weight.cached()] == [48 * 80, 48 * 32]
    assert launched == ["_transpose"] * 2


@everywhere
@given(
    st.tuples(st.integers(0, 2**31), st.integers(1, 150), st.integers(1, 150)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([E4M3, E5M2]),
    st.sampled_from([Scaling.TENSOR, Scaling.ROWS, Scaling.LINES]),
    st.sampled_from(["dense", "transposed", "expanded"]),
)
def test_activations_have_the_casts_of_tensor_code(
    device: torch.device, drawn: tuple[int, int, int], source: Any, target: Any, scaling: Scaling, view: str
) -> None:
    x = numbers(*drawn).to(source).to(device)
    x = {"dense": x, "transposed": x.t(), "expanded": x[:1].expand(x.shape)}[view]
    want = eager.quantized_both(x, target, scaling)
    for got, expected in zip(quantize(x, target, scaling.value, both=True), want, strict=True):
        assert_same(got, expected)
        assert got.is_contiguous() or got.t().is_contiguous()
        assert got.data_ptr() % 16 == 0, "[Note: rules of scaled_mm]"
    for got, expected in zip(quantize(x, target, scaling.value, both=False)[:2], want[:2], strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_an_engine_trains_to_the_same_bits_with_one_launch_for_all_weights(
    recipe: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels run in the interpreter, around torch's own products."""
    if torch.cuda.is_available():
        pytest.skip("on a GPU, the kernels do not take an engine on the CPU")
    needs.products_on_cpu(recipe)
    monkeypatch.setattr(options, "has_float8_tensor_cores", lambda device: True)
    monkeypatch.setattr(options, "has_compiler", lambda device: True)
    digests = []
    for compiled in (False, True):
        float8 = Float8(recipe, emulate=False, choice="all", compile=compiled)
        engine = start("native", 2, PrecisionPolicy.named("fp8", float8=float8))
        assert len(engine.contract.float8_modules) == 4
        launched.clear()
        for _ in range(2):
            assert train_step(engine, 1).applied
        assert launched == (2 * ["_transpose", "_measure", "_cast"] if compiled else [])
        digests.append(state_digests(engine))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("target", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_a_cast_by_way_of_fp16_rounds_once(target: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute capability 8.9 casts so."""
    if torch.cuda.is_available():
        pytest.skip("the hardware casts as it does")
    from triton.runtime import interpreter

    directly, fp16 = interpreter._convert_float, interpreter.tl.float16

    def convert(values: Any, source: Any, to: Any, rounding: Any) -> Any:
        if str(to).startswith("fp8"):
            values, source = directly(values, source, fp16, rounding), fp16
        return directly(values, source, to, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    for seed in range(1, 5):
        x = numbers(seed, 60, 40)
        want = eager.quantized_both(x, target, Scaling.ROWS)
        for got, expected in zip(quantize(x, target, (1, 0), both=True), want, strict=True):
            assert_same(got, expected)

"""The analysis of modules against direct computations, and its predictions against single modules in the format."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.config.model import ModelConfig
from dtrain.errors import ModelError
from dtrain.measure.probe.flips import flip
from dtrain.measure.probe.records import Analysis, ProductResult
from dtrain.measure.probe.sensitivity import analyze, constant_scale
from dtrain.models.transformer import build as build_transformer
from dtrain.precision.histogram import Histogram

FORMATS = ("tf32", "bf16", "fp16", "fp8")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """The sum of squares of what `body` computes."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).float().square().sum()


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def only(analysis: Analysis, module: str, product: str, format_name: str) -> ProductResult:
    (found,) = [r for r in analysis.products if (r.module, r.product, r.format) == (module, product, format_name)]
    return found


def db(exact: Tensor, computed: Tensor) -> float:
    exact, computed = exact.detach(), computed.detach()
    return float(10 * torch.log10(exact.square().sum() / (computed - exact).square().sum()))


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BODIES = {
    "linear": (lambda: nn.Linear(24, 16), (2, 5, 24)),
    "convolution": (lambda: nn.Conv2d(3, 8, 3, stride=2, padding=1, groups=1), (2, 3, 8, 8)),
    "circular": (lambda: nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular", groups=2), (2, 4, 9)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 9)),
}


@pytest.mark.parametrize("name", BODIES)
def test_products_against_a_module_in_the_dtype(name: str) -> None:
    build, shape = BODIES[name]
    model = seeded(lambda: Net(nn.Sequential(nn.Tanh(), build())))
    x = randn(*shape)
    analysis = analyze(model, [{"x": x}], ("bf16", "fp16"))
    exact = model.body[1]
    y = exact(torch.tanh(x))
    dy = 2 * y.detach()
    (dw,) = torch.autograd.grad(y, (exact.weight,), dy)
    for format_name, dtype in DTYPES.items():
        module, inputs = copy.deepcopy(exact).to(dtype), torch.tanh(x).to(dtype)
        scale = analysis.loss_scale if format_name == "fp16" else 1.0
        gradient = (dy * scale).to(dtype)
        if isinstance(exact, nn.Linear):
            out = module(inputs)
            (low_dw,) = torch.autograd.grad(out, (module.weight,), gradient)
        else:  # some CPUs have no convolution that sums numbers of 16 bits in FP32
            out = module.float()(inputs.float())
            (low_dw,) = (g.to(dtype) for g in torch.autograd.grad(out, (module.weight,), gradient.float()))
            out = out.to(dtype)
        fprop = only(analysis, "body.1", "fprop", format_name)
        assert fprop.sqnr_db == pytest.approx(db(y, out.float()), abs=0.5)
        predicted = float((dy * (out.float() - y).detach()).sum())
        assert fprop.predicted == pytest.approx(abs(predicted), rel=0.1, abs=1e-3 * float(dy.square().sum()) * 2**-8)
        wgrad = only(analysis, "body.1", "wgrad", format_name)
        assert wgrad.sqnr_db == pytest.approx(db(dw, low_dw.float() / scale), abs=1.5)
        error = low_dw.float() / scale - dw
        cost = 1e-3 * float((error * dw / (dw.abs() + 1e-8)).sum())
        assert wgrad.predicted == pytest.approx(abs(cost), rel=0.2, abs=1e-3 * float(dw.abs().sum()) * 2**-11)
    assert not any(r.product == "dgrad" for r in analysis.products)  # the model's input needs no gradient


def test_shares_are_those_of_a_direct_count() -> None:
    model = seeded(lambda: Net(nn.Linear(8, 4, bias=False)))
    x = randn(6, 8) * torch.tensor([1.0, 1e-7, 3e-8, 2e-8, 1e-8, 0.0, 7e4, 1.0])
    with torch.no_grad():
        model.body.weight[:, 4:7] = 0
    result = only(analyze(model, [{"x": x}], ["fp16"]), "body", "fprop", "fp16")
    w = model.body.weight.detach()
    lost = sum(int(((t != 0) & (t.half() == 0)).sum()) for t in (x, w))
    assert lost > 5
    assert result.underflow == pytest.approx(lost / sum(int((t != 0).sum()) for t in (x, w)), rel=1e-12)
    overflows = sum(int(t.half().isinf().sum()) for t in (x, w))
    assert overflows
    assert result.saturation == pytest.approx(overflows / (x.numel() + w.numel()), rel=1e-12)
    assert (result.cause, result.predicted) == ("range", math.inf)


def test_constant_scale() -> None:
    for largest, scale in [(1.0, 4096.0), (0.9, 8192.0), (2.0**-30, 2.0**42), (1e9, 2.0**-17)]:
        assert constant_scale(largest) == scale
        assert scale * largest * 8 <= 65504 < 2 * scale * largest * 8
    assert constant_scale(0.0) is None


def test_what_cannot_be_examined_is_named() -> None:
    class Strict(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("only float32")
            return x * 2

    model = seeded(lambda: Net(nn.Sequential(nn.Linear(8, 8), Strict())))
    analysis = analyze(model, [{"x": randn(4, 8)}], ["bf16"])
    assert analysis.unexamined["body.1"] == "the model fails in bf16: only float32"
    assert "body.0" not in analysis.unexamined
    with pytest.raises(ModelError, match="returns no loss"):
        analyze(nn.Linear(4, 4), [{"input": randn(2, 4)}], ["bf16"])


class Odd(nn.Module):
    """Dropout, running statistics, a shared and an in-place module, and a container."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.shared = nn.Linear(16, 16)
        self.drop, self.act = nn.Dropout(0.5), nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(self.shared(self.act(layer(self.norm(x)))))
        return F.cross_entropy(x.float(), torch.arange(len(x)) % 16)


def test_the_model_is_as_before_and_results_repeat() -> None:
    model = seeded(Odd)
    model.shared.weight.grad = torch.ones(16, 16)
    before = {name: tensor.clone() for name, tensor in model.state_dict(keep_vars=False).items()}
    attributes = {name: (type(m), set(m.__dict__), len(m._forward_hooks)) for name, m in model.named_modules()}
    random_state = torch.get_rng_state()
    micro_batches = [{"x": randn(8, 16, seed=seed)} for seed in range(2)]
    analysis = analyze(model, micro_batches, FORMATS)
    flips = {name: flip(model, micro_batches, analysis, name) for name in ("bf16", "fp16", "fp8")}
    assert analyze(model, micro_batches, FORMATS) == analysis
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name: (type(m), set(m.__dict__), len(m._forward_hooks)) for name, m in model.named_modules()} == attributes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(model.shared.weight.grad, torch.ones(16, 16))
    assert not analysis.unexamined
    # dropout repeats, or a flip would change the loss by another mask
    assert all(f.measured < 0.05 for name in ("bf16", "fp16") for f in flips[name])


def test_gradients_are_those_of_all_micro_batches() -> None:
    model = seeded(lambda: Net(nn.Linear(8, 4)))
    micro_batches = [{"x": randn(3, 8, seed=seed)} for seed in range(2)]
    analysis = analyze(model, micro_batches, ["bf16"])
    first, second = (torch.autograd.grad(model(**micro_batch), model.body.weight)[0] for micro_batch in micro_batches)
    assert analysis.gradients["body.weight"] == Histogram.of(first) + Histogram.of(second)
    assert set(analysis.gradients) == {"body.weight", "body.bias"}


def ranks(values: list[float]) -> Tensor:
    order = torch.tensor(values, dtype=torch.float64).argsort().argsort().double()
    return (order - order.mean()) / order.std()


@pytest.fixture(scope="module")
def transformer() -> tuple[nn.Module, list[dict[str, Tensor]], Analysis]:
    """The default model, narrower, a few steps into training."""
    config = ModelConfig(hidden_dim=64, num_heads=4, num_layers=4)
    model = seeded(lambda: build_transformer(config, 64))
    generator = torch.Generator().manual_seed(0)

    def draw() -> dict[str, Tensor]:
        tokens = torch.randint(0, 64, (4, 33), generator=generator)
        tokens[:, 1::2] = (tokens[:, :-1:2] * 5 + 1) % 64  # every second token follows from the one before
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(20):
        optimizer.zero_grad()
        model(**draw()).loss.backward()
        optimizer.step()
    micro_batches = [draw() for _ in range(3)]
    return model, micro_batches, analyze(model, micro_batches, ("bf16", "fp16", "fp8"))


@pytest.mark.parametrize(
    "format_name", ["bf16", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("fp16", "fp8"))]
)
def test_predictions_rank_modules_as_measurements_do(
    format_name: str, transformer: tuple[nn.Module, list[dict[str, Tensor]], Analysis]
) -> None:
    flips = flip(*transformer, format_name, None)
    assert len(flips) >= (16 if format_name == "fp8" else 29)
    predicted, measured = ranks([f.predicted for f in flips]), ranks([f.measured for f in flips])
    assert float((predicted * measured).sum()) / (len(flips) - 1) >= 0.7
    assert [f.predicted for f in flips] == sorted((f.predicted for f in flips), reverse=True)

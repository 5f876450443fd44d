"""torchao's FP8 training: how near casts and products are, what is padded, what flows back, scales under sharding.

An FP8 product is emulated on CPUs: its operands are rounded to FP8, and multiplied in FP32. Each model has one Linear,
which a rule puts into FP8, so that a reference can be written by hand.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dtrain.config.precision import Float8
from dtrain.precision.policy import PrecisionPolicy
from tests.corpus.assertions.megatron_steps import squared_error, start_sgd, total
from tests.corpus.rows import assertion
from tests.corpus.training import seeded, step_of
from tests.engines.checks.float8 import RECIPES
from tests.engines.matrix import Trial

BASE = "pytorch/ao test/float8/test_base.py"
FSDP2 = "pytorch/ao test/float8/test_fsdp2/test_fsdp2.py"
NUMERICS = "pytorch/ao test/float8/test_numerics_integration.py"
LARGEST = 448.0  # of E4M3


class Product(nn.Module):
    """One Linear, without a bias if that is not wanted."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.product = nn.Linear(in_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


def start_float8(trial: Trial, model: nn.Module, lr: float = 1.0, **options: Any) -> Any:
    """The model with SGD; all its Linears are FP8, also the first and the last, which would stay in BF16."""
    policy = PrecisionPolicy.named("fp8", float8=Float8(**{**trial.options, **options}), rules={"*": "fp8"})
    engine = start_sgd(trial, model, lr, precision=policy)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert sorted(engine.contract.float8_modules) == sorted(linears)
    return engine


def decibels(want: Tensor, got: Tensor) -> float:
    """The signal to noise ratio of ``got``."""
    noise = (want.double() - got.double()).norm().item()
    return 20 * math.log10(want.double().norm().item() / noise) if noise else math.inf


def rounded(x: Tensor, *, rowwise: bool = False) -> Tensor:
    """E4M3's nearest numbers, divided by the smallest power of two that makes the largest fit; by hand."""
    largest = x.abs().amax(dim=-1, keepdim=True) if rowwise else x.abs().amax()
    scale = torch.exp2(torch.ceil(torch.log2(largest.double() / LARGEST))).float()
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@assertion(
    f"{BASE}::TestFloat8TrainingTensor::test_axiswise_dynamic_cast",
    "A cast to FP8 with a scale of its own for each row keeps at least 25 dB between signal and rounding noise.",
    precisions=("fp8",),
    variants=RECIPES,
)
def a_cast_of_a_weight_keeps_25_db(trial: Trial) -> None:
    """An identity as input shows the FP8 weight itself; the rows differ by up to 2^12, which one scale cannot span."""
    rowwise = trial.case.variant.startswith("rowwise")
    model = seeded(lambda: Product(16, 32))
    weight = drawn(32, 16).bfloat16().float()
    weight *= torch.exp2(torch.arange(32) % 13.0).unsqueeze(1) if rowwise else 1.0
    model.product.weight.data.copy_(weight)
    engine = start_float8(trial, model)
    with engine.eval():
        seen = engine(torch.eye(16)).t()
    assert torch.equal(seen, rounded(weight, rowwise=rowwise))
    assert decibels(weight, seen) >= 25
    # of each row too, if it has a scale of its own
    assert not rowwise or min(map(decibels, weight, seen)) >= 25


@assertion(
    f"{BASE}::TestFloat8Linear::test_linear_from_config_params",
    "The signal-to-noise ratio of a Linear in FP8 is at least 18 dB in its output and 17 dB in its weight gradient.",
    precisions=("fp8",),
    variants=RECIPES,
)
def an_fp8_linear_keeps_18_db_of_output_and_17_db_of_gradient(trial: Trial) -> None:
    """The bias is not rounded to FP8, so its gradient is nearer."""
    plain, x, target = seeded(lambda: Product(16, 32, bias=True)), drawn(6, 3, 16), drawn(6, 3, 32, seed=2)
    engine = start_float8(trial, seeded(lambda: Product(16, 32, bias=True)))
    with engine.eval():
        assert decibels(plain(x), engine(x)) >= 18
    given = [({"x": x[i], "target": target[i]}, 1.0) for i in range(6)]
    step_of(engine, given, squared_error)
    (plain(x) - target).square().mean().backward()
    if masters := engine.master_state():
        before = plain.state_dict()
        moved = {name: before[name] - masters[name] for name in before}
        assert decibels(plain.product.weight.grad, moved["product.weight"]) >= 17
        torch.testing.assert_close(moved["product.bias"], plain.product.bias.grad, rtol=0.05, atol=2e-3)


@assertion(
    f"{BASE}::TestScaledMM::test_pad_inner_dim",
    "Matrices whose inner dimension is not a multiple of 16 are padded, and the product is unchanged.",
    precisions=("fp8",),
)
def an_fp8_product_of_a_dimension_16_does_not_divide_is_padded(trial: Trial) -> None:
    """41 numbers an output and 43 rows, so that every dimension of all three products is odd."""
    model = seeded(lambda: Product(41, 37))
    weight = model.product.weight.data.bfloat16().float()
    model.product.weight.data.copy_(weight)
    engine, x = start_float8(trial, model), drawn(43, 41)
    with engine.eval():
        assert decibels(rounded(x) @ rounded(weight).t(), engine(x)) > 50
    step_of(engine, [({"x": x}, 1.0)] * trial.ranks, total)
    for moved in engine.master_state().values():
        want = weight - rounded(x).sum(0)  # the gradient of the output is 1
        assert decibels(want, moved) > 50


@assertion(
    f"{BASE}::TestNumerics::test_small_amax_float16",
    "The scale of a tensor of very small numbers is finite, though the plain quotient overflows.",
    precisions=("fp8",),
    variants=RECIPES,
)
def very_small_numbers_have_a_finite_scale(trial: Trial) -> None:
    """448 / 2^-124 is above the largest FP32 number; the output is checked, and the gradient of a zero input."""
    model, small = seeded(lambda: Product(16, 32)), 2.0**-124
    weight = (drawn(32, 16) * 0.25).clamp(-1, 1).bfloat16().float()
    model.product.weight.data.copy_(weight * small)
    engine, x = start_float8(trial, model), drawn(8, 16, seed=2).bfloat16().float()
    with engine.eval():
        y = engine(x / small)
    assert decibels(x @ weight.t(), y) >= 18
    outcome = step_of(engine, [({"x": x * small}, 1.0)] * trial.ranks, total)
    assert outcome.applied
    assert math.isfinite(outcome.loss)


@assertion(
    f"{BASE}::TestFloat8TrainingTensor::test_differentiable_casts",
    "A cast to FP8 passes its gradient through unchanged.",
    precisions=("fp8",),
    variants=RECIPES,
)
def a_gradient_passes_unchanged_through_a_cast(trial: Trial) -> None:
    """Also that of the largest element, which a clamp would stop. Inputs and gradients are exact in FP8."""
    model = seeded(lambda: Product(16, 32))
    model.product.weight.data[0, 0] = 449.0
    before, x = model.product.weight.data.clone(), torch.exp2(torch.arange(16) % 3.0).expand(4, 16)
    engine = start_float8(trial, model, lr=0.5)
    step_of(engine, [({"x": x}, 1.0)] * trial.ranks, total)
    for weight in engine.master_state().values():
        assert torch.equal(weight, before - 0.5 * x.sum(0))


@assertion(
    f"{FSDP2}::TestFloat8MultiProcess::test_transformer_parity",
    "Sharded weights that are cast to FP8 equal weights that are cast whole.",
    precisions=("fp8",),
    ranks=(2, 3, 1),
    variants=RECIPES,
)
def a_sharded_fp8_weight_has_the_scale_of_the_whole(trial: Trial) -> None:
    """A large number lies in one rank's share; before and after a step the weight is as if cast in one place."""
    rowwise = trial.case.variant.startswith("rowwise")  # a block of 128 x 128 has the whole weight
    model = seeded(lambda: Product(32, 48))
    weight = model.product.weight.data.bfloat16().float()
    weight[1, 3] = 100.0
    model.product.weight.data.copy_(weight)
    engine = start_float8(trial, model, lr=2.0**-3)
    x = torch.exp2(torch.arange(32) % 3.0).expand(4, 32)  # so the gradient, and the weight after it, is exact
    for _ in range(2):
        with engine.eval():
            seen = engine(torch.eye(32)).t()
        # fsdp2 rounds to BF16 before it gathers and casts
        source = weight.bfloat16().float() if trial.case.engine == "fsdp2" else weight
        assert torch.equal(seen, rounded(source, rowwise=rowwise))
        step_of(engine, [({"x": x}, 1.0)] * trial.ranks, total)
        weight = weight - 2.0**-3 * x.sum(0)


class FeedForward(nn.Module):
    """SwiGLU, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*sizes, bias=False) for sizes in ((32, 64), (64, 32), (32, 64)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


@assertion(
    f"{NUMERICS}::TestFloat8NumericsIntegrationTest::test_encoder_fw_bw_from_config_params",
    "The signal-to-noise ratio of a gated feed-forward network in FP8 is at least 20 dB in output and gradients.",
    precisions=("fp8",),
    variants=RECIPES,
)
def a_gated_network_in_fp8_keeps_20_db_in_every_gradient(trial: Trial) -> None:
    plain, x = seeded(FeedForward), drawn(6, 8, 32)
    engine = start_float8(trial, seeded(FeedForward))
    with engine.eval():
        assert decibels(plain(x), engine(x)) > 20
    step_of(engine, [({"x": x[i]}, 1.0) for i in range(6)], total)
    (plain(x).sum() / 6).backward()
    if masters := engine.master_state():
        for name, parameter in plain.named_parameters():
            assert decibels(parameter.grad, parameter.detach() - masters[name]) > 20, name

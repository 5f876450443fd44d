"""Shadow steps on one rank: the gap against FP8 emulated by hand, and what they refuse, leave out and leave alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtrain
from dtrain.errors import ConfigError
from dtrain.precision.contract import earlier_decisions
from tests.helpers.net import Net

DIM = 32
X = torch.randn(24, DIM, generator=torch.Generator().manual_seed(3))


def start(model: nn.Module, engine: str = "native", **float8: Any) -> Any:
    policy = dtrain.PrecisionPolicy.named("fp8", float8=dtrain.Float8(**{"shadow_every": 1, **float8}))
    return dtrain.initialize(model, engine=engine, precision=policy, seed=0)


def build(**parts: nn.Module) -> nn.Module:
    """Three Linears without biases, of which the inner one is FP8; returns the loss."""
    torch.manual_seed(1)
    linears = {name: nn.Linear(DIM, DIM, bias=False) for name in ("first", "inner", "last")}
    between = list(parts)

    def forward(net: Any, x: Tensor) -> Tensor:
        for name in ("first", *between, "inner", "last"):
            x = getattr(net, name)(x)
        return x.float().square().mean()

    return Net(forward, **linears, **parts)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What an FP8 cast with one power of two as scale represents."""
    scale = 2.0 ** math.ceil(math.log2(x.abs().max().item() / torch.finfo(dtype).max))
    return (x.float() / scale).to(dtype).float() * scale


def by_hand(weights: dict[str, Tensor], *, in_fp8: bool) -> tuple[float, Tensor]:
    """Loss and gradient, by the chain rule written out: matrices in BF16, products summed in FP32."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    bf16 = {name: weight.bfloat16().float() for name, weight in weights.items()}
    bf16["inner"] = inner = rounded(weights["inner"], e4m3)

    def short(x: Tensor) -> Tensor:
        return x.bfloat16().float()

    x = short(X)
    a = short(x @ bf16["first"].t())
    a8 = rounded(a, e4m3) if in_fp8 else a
    b = short(a8 @ inner.t())
    y = short(b @ bf16["last"].t())
    loss = y.square().mean()
    dy = short(2 * y / y.numel())
    db = short(dy @ bf16["last"])
    db8 = rounded(db, e5m2) if in_fp8 else db
    da = short(db8 @ inner)
    gradients = da.t() @ x, db8.t() @ a8, dy.t() @ b
    return loss.item(), torch.cat([short(gradient).double().flatten() for gradient in gradients])


def test_the_gap_is_that_of_fp8_emulated_by_hand() -> None:
    engine = start(build())
    assert engine.contract.float8_modules == ("inner",)
    weights = {name.removesuffix(".weight"): master for name, master in engine.master_state().items()}
    engine.backward(engine(X))
    engine.step()
    (loss8, gradient8), (loss16, gradient16) = (by_hand(weights, in_fp8=in_fp8) for in_fp8 in (True, False))
    gap = engine.float8_gap
    assert gap.loss == pytest.approx((loss8 - loss16) / loss16, rel=0.02)
    cosine = (gradient8 @ gradient16 / (gradient8.norm() * gradient16.norm())).item()
    assert 1 - gap.cosine == pytest.approx(1 - cosine, rel=0.02)
    assert gap.norm_ratio - 1 == pytest.approx((gradient8.norm() / gradient16.norm()).item() - 1, rel=0.05)


def test_running_statistics_are_those_of_the_training() -> None:
    engines = [start(build(norm=nn.BatchNorm1d(DIM)), shadow_every=every) for every in (0, 1)]
    for engine in engines:
        for _ in range(2):
            for micro in engine.accumulate([X, 2 * X]):
                engine.backward(engine(micro))
            engine.step()
    buffers = [dict(engine.module.named_buffers()) for engine in engines]
    assert buffers[0].keys() == buffers[1].keys() != set()
    assert all(torch.equal(buffers[0][name], buffers[1][name]) for name in buffers[0])
    assert engines[1].float8_gap.step == 2


def test_a_weight_without_gradient_in_one_of_the_formats_counts_as_zero() -> None:
    """Such as that of an expert to which FP8 has sent no token."""
    in_fp8 = False

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ParameterList([torch.ones(DIM), torch.ones(DIM)])

        def forward(self, x: Tensor) -> Tensor:
            nonlocal in_fp8
            in_fp8 = not in_fp8  # the training, FP8 again, BF16
            return x * self.experts[0] if in_fp8 else x * self.experts[1]

    engine = start(build(routed=Routed()))
    engine.backward(engine(X))
    in_fp8 = False
    engine.step()
    gap = engine.float8_gap
    assert gap.cosine < 0.995
    assert gap.norm_ratio == pytest.approx(1, abs=0.05)


def test_gradients_that_come_in_parts_are_summed() -> None:
    """A reentrant checkpoint runs a backward of its own; the weight is used inside and outside."""
    gaps = []
    for reentrant in (False, True):

        def forward(net: Any, x: Tensor, reentrant: bool = reentrant) -> Tensor:
            x = net.inner(net.first(x))
            x = checkpoint(net.inner, x, use_reentrant=reentrant)
            return net.last(x).float().square().mean()

        torch.manual_seed(1)
        net = Net(forward, **{name: nn.Linear(DIM, DIM) for name in ("first", "inner", "last")})
        engine = start(net, "ddp")  # engine=native refuses it
        engine.backward(engine(X))
        engine.step()
        gaps.append(engine.float8_gap)
    assert gaps[0].loss == gaps[1].loss
    assert 1 - gaps[0].cosine == pytest.approx(1 - gaps[1].cosine, rel=0.05)
    assert gaps[0].norm_ratio == pytest.approx(gaps[1].norm_ratio, abs=1e-3)


def test_dummies_do_not_count_and_a_skipped_step_has_a_gap_of_nan() -> None:
    engine = start(build())
    engine.backward(engine(X), weight=0.0)
    assert not engine.step().applied
    assert engine.float8_gap is None
    engine.backward(engine(X * math.inf))
    assert not engine.step().applied
    assert math.isnan(engine.float8_gap.cosine)


def test_a_model_without_a_loss_is_refused_and_one_without_fp8_has_no_gap() -> None:
    torch.manual_seed(0)
    engine = start(nn.Sequential(*[nn.Linear(DIM, DIM) for _ in range(3)]))
    engine.backward(engine(X).square().mean())
    with pytest.raises(ConfigError, match=r"shadow_every failed on rank 0: the model returns no loss"):
        engine.step()
    narrow = start(nn.Sequential(*[nn.Linear(5, 5) for _ in range(3)]))
    narrow.backward(narrow(X[:, :5]).square().mean())
    assert narrow.step().applied
    assert narrow.float8_gap is None


def test_the_interval_is_in_no_contract() -> None:
    """A checkpoint is the same with it and without, and a resumed run keeps its decisions if it changes."""
    contracts = [start(build(), shadow_every=every).contract for every in (0, 7)]
    assert contracts[0].to_dict() == contracts[1].to_dict()
    decisions = earlier_decisions(contracts[0].to_dict(), contracts[1].policy)
    assert decisions == contracts[1].decisions != ()

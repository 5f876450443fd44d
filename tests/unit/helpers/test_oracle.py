"""The oracle judges everything else, so torch's own optimizer and clipping test it here, and it trains the zoo."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers.oracle import AdamWSettings, Oracle, assert_close_to_largest, normwise_error
from tests.helpers.zoo import ZOO, ZooEntry


class Regression(nn.Module):
    """Every kind of parameter the oracle treats differently: matrix, bias, norm, frozen, unused."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.ones(2, 2))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        prediction: Tensor = self.head(self.norm(self.frozen(x)))
        return (prediction - y).square().mean()


class Root(nn.Module):
    """sqrt has an infinite slope at 0: a finite loss with a gradient that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 4.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sqrt().sum()


def regression() -> Regression:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Regression()


def batch(index: int, size: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {"x": torch.randn(size, 3, generator=generator), "y": torch.randn(size, 2, generator=generator)}


def torch_reference(hyper: AdamWSettings, max_grad_norm: float | None) -> tuple[dict[str, Tensor], list[float]]:
    """The same training by torch.optim.AdamW, one micro-batch a step, in FP64; the masters and the norms."""
    model = regression().double()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p], "weight_decay": hyper.weight_decay if p.ndim > 1 else 0.0} for p in trained]
    optimizer = torch.optim.AdamW(groups, lr=hyper.lr, betas=hyper.betas, eps=hyper.eps)
    norms = []
    for step in range(6):
        optimizer.zero_grad()
        model(**{name: tensor.double() for name, tensor in batch(step).items()}).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, max_grad_norm or math.inf)))
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


BETAS, EPS = st.tuples(st.floats(0.0, 0.99), st.floats(0.5, 0.9999)), st.sampled_from([1e-10, 1e-8, 1e-3])
HYPER = st.builds(AdamWSettings, st.floats(1e-4, 0.1), BETAS, EPS, st.floats(0.0, 1.0))


@settings(max_examples=20)
@given(HYPER, st.sampled_from([None, 0.1, 1e3]))
def test_update_and_clipping_are_those_of_torch(hyper: AdamWSettings, max_grad_norm: float | None) -> None:
    oracle = Oracle(regression(), optimizer=hyper, max_grad_norm=max_grad_norm, dtype=torch.float64)
    norms = [oracle.step([(batch(step), 1.0)]).grad_norm for step in range(6)]
    masters, torch_norms = torch_reference(hyper, max_grad_norm)
    assert_close_to_largest(oracle.masters(), masters, 1e-12)
    assert norms == pytest.approx(torch_norms, rel=1e-12)


def test_weights_by_size_give_the_gradient_of_the_whole_batch() -> None:
    parts = [batch(0, size=2), batch(1, size=7), batch(2, size=1)]
    whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    assert Oracle(regression()).masters()["head.weight"].dtype == torch.float32
    # a third of the sizes: weights are relative
    split = Oracle(regression(), dtype=torch.float64).step([(part, torch.tensor(len(part["x"]) / 3)) for part in parts])
    joint = Oracle(regression(), dtype=torch.float64).step([(whole, 1.0)])
    assert split.loss == pytest.approx(joint.loss, rel=1e-6)
    assert split.grad_norm == pytest.approx(joint.grad_norm, rel=1e-6)
    assert_close_to_largest(split.gradients, joint.gradients, 1e-6)


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([(torch.ones(2), 0.0), (torch.ones(2), 0.0)], "empty"),
        ([], "empty"),
        ([(torch.ones(2), 1.0), (-torch.ones(2), 1.0)], "nonfinite_loss"),
        ([(torch.ones(2), 1.0), (torch.tensor([0.0, 1.0]), 1.0)], "overflow"),
    ],
)
def test_skipped_step_leaves_no_trace(pairs: list[tuple[Tensor, float]], reason: str) -> None:
    good: list[tuple[dict[str, Any], float]] = [({"x": torch.tensor([1.0, 2.0])}, 1.0)]
    disturbed, calm = (Oracle(Root(), schedule=lambda applied_steps: 0.5**applied_steps) for _ in range(2))
    disturbed.step(good)
    outcome = disturbed.step([({"x": x}, weight) for x, weight in pairs])
    assert (outcome.applied, outcome.reason) == (False, reason)
    assert (disturbed.applied_steps, disturbed.attempted_steps) == (1, 2)
    disturbed.step(good)
    calm.step(good)
    calm.step(good)
    assert torch.equal(disturbed.masters()["w"], calm.masters()["w"])


def test_closeness_is_relative_to_the_largest_element() -> None:
    want = torch.tensor([[1e-6, 100.0], [2.0, -3.0]])
    got = want + torch.tensor([[0.0, 0.0], [0.9e-3, 0.0]])
    assert_close_to_largest(got, want, 1e-5)
    with pytest.raises(AssertionError, match=r"weight\[1, 0\]: got 2\.0009.*, want 2; off by"):
        assert_close_to_largest({"weight": got}, {"weight": want}, 1e-6)
    assert normwise_error(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0])) == pytest.approx(0.08)
    assert normwise_error({"a": torch.ones(3), "b": torch.zeros(0)}, {"a": torch.ones(3), "b": torch.zeros(0)}) == 0


@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}, r"missing: \['b'\], unexpected: \['a'\]"),
        (torch.ones(2), torch.ones(1, 2), r"got shape \(2,\), want \(1, 2\)"),
        (torch.tensor([1.0, math.nan]), torch.ones(2), r"tensor\[1\]: got nan"),
        (torch.ones(1), torch.full((1,), math.inf), "the reference itself is not finite"),
        (torch.full((2,), 1e-30), torch.zeros(2), "off by 1e-30"),
    ],
)
def test_what_is_not_close(got: Any, want: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_close_to_largest(got, want, 0.1)


@pytest.mark.parametrize("entry", ZOO.values(), ids=ZOO)
def test_oracle_trains_it(entry: ZooEntry) -> None:
    model = entry.build(0)
    assert sum(p.numel() for p in model.parameters()) < 5000
    pairs = [(entry.batch(index), 1.0 + index) for index in range(2)]
    seeded: dict[str, Any] = {"loss": entry.loss, "before_forward": lambda step, index: torch.manual_seed(index)}
    oracle = Oracle(model, optimizer=AdamWSettings(lr=1e-2), **seeded)
    outcomes = [oracle.step(pairs) for _ in range(6)]
    assert all(outcome.applied for outcome in outcomes)
    assert outcomes[-1].loss < outcomes[0].loss
    unused = {name for name, gradient in outcomes[0].gradients.items() if not gradient.any()}
    expected = {"unused": {"unused", "unused_layer.weight", "unused_layer.bias"}, "odd_sizes": {"empty"}}
    assert unused == expected.get(entry.name, set())
    double = Oracle(entry.build(0), dtype=torch.float64, **seeded).step(pairs)
    assert all(gradient.dtype == torch.float64 for gradient in double.gradients.values())
    if entry.name != "transformer":  # its dropout draws other masks in FP64
        assert 0 < normwise_error(outcomes[0].gradients, double.gradients) < 1e-5

"""Ranges of tensors, and what the recorder of modules sees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dtrain.precision import module_values
from dtrain.precision.module_values import Measured, ModuleRecorder, named_tensors
from tests.helpers.net import Net

SPECIAL = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-45, 3e38, -65504.0]


@settings(max_examples=60)
@given(
    values=st.lists(st.sampled_from(SPECIAL) | st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    chunk=st.integers(1, 50),
)
def test_ranges_equal_those_counted_one_by_one(values: list[float], dtype: torch.dtype, chunk: int) -> None:
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_values, "_CHUNK", chunk)
        got = Measured.of(x).read("x")
    items = x.double().tolist()
    finite = [item for item in items if math.isfinite(item)]
    assert (got.min, got.max) == (min(finite, default=None), max(finite, default=None))
    assert got.num_inf == sum(map(math.isinf, items))
    assert got.num_minus_inf == items.count(-math.inf)
    assert got.num_nan == sum(map(math.isnan, items))
    assert got.numel == len(items)
    assert got.is_finite == (len(finite) == len(items))


def test_only_minus_infinity_may_be_a_mask() -> None:
    inf, nan = math.inf, math.nan
    cases = [([0.0, -inf], True), ([0.0], False), ([-inf, inf], False), ([-inf, nan], False), ([inf], False)]
    for values, expected in cases:
        assert Measured.of(torch.tensor(values)).read("x").may_be_mask == expected
    assert Measured.of(torch.tensor([1e300], dtype=torch.float64)).read("x").is_finite, "beyond FP32"
    assert str(Measured.of(torch.tensor([0.0, inf, nan, nan])).read("x")) == "x [0, 0] and 1 Inf and 2 NaN"


class Pair(NamedTuple):
    logits: Tensor
    loss: Tensor | None


@dataclass
class Output:
    hidden: list[Tensor]


def test_tensors_are_found_in_what_modules_take_and_return() -> None:
    x = torch.ones(2)
    cases: list[tuple[Any, list[str]]] = [
        (x, ["a"]),
        (Pair(x, None), ["a.logits"]),
        ({"u": x, "v": [x, (x,)]}, ["a.u", "a.v.0", "a.v.1.0"]),
        (Output([x]), ["a.hidden.0"]),
        ([x.int(), torch.empty(0), "text", 3.0], []),
    ]
    for value, names in cases:
        assert [name for name, _ in named_tensors("a", value)] == names


def make_model() -> Any:
    parts = {name: nn.Linear(3, 3) for name in ("a", "b", "side")}
    return Net(lambda net, x, *, scale: (net.b(net.a(x) * scale).relu_() + net.side(x)).sum(), **parts)


def record(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[ModuleRecorder, Tensor]:
    recorder = ModuleRecorder(model)
    with recorder.recording():
        loss = model(*args, **kwargs)
    return recorder, loss


def test_records_are_in_the_order_of_time_and_name_the_caller() -> None:
    x, scale = torch.randn(2, 3), torch.tensor(2.0)
    recorder, _ = record(make_model(), x, scale=scale)
    linears = [row for name in ("a", "b", "side") for row in ((name, "", False, "0"), (name, "", True, "output"))]
    given = [("", None, False, "0"), ("", None, False, "scale")]
    found = [(r.module, r.caller, r.is_output, r.name) for r in recorder.records]
    assert found == [*given, *linears, ("", None, True, "output")]
    weights = {name: [key for key, _ in own] for name, own in recorder.weights.items() if own}
    assert weights == {name: ["weight", "bias"] for name in ("a", "b", "side")}
    assert not recorder.failures


def test_hooks_are_gone_afterwards_and_change_no_bit() -> None:
    model, x, scale = make_model(), torch.randn(2, 3), torch.tensor(2.0)
    model(x, scale=scale).backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    recorder, loss = record(model, x, scale=scale)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, want[name])
    count = len(recorder.records)
    model(x, scale=scale)
    assert len(recorder.records) == count
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_a_backward_reaches_every_tensor_and_no_parameter() -> None:
    model = make_model()
    recorder, loss = record(model, torch.randn(2, 3), scale=torch.tensor(2.0))
    recorder.run_backward(loss * 8)
    got = {(r.module, r.is_output): r.gradient for r in recorder.records if r.forward.numel and r.gradient is not None}
    assert set(got) == {("a", True), ("b", False), ("b", True), ("side", True), ("", True)}
    assert got[("", True)].read("").max == 8.0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_error_in_a_hook_is_noted_and_the_forward_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measured, "of", mock.Mock(side_effect=RuntimeError("no memory")))
    recorder, loss = record(make_model(), torch.randn(2, 3), scale=torch.tensor(2.0))
    assert loss.isfinite()
    assert "'': RuntimeError: no memory" in recorder.failures

"""A skipped step names the module where it went wrong, and the run stays the same bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtrain
from dtrain.engine.outcome import Culprit, Origin
from dtrain.engine.parts.explain import SkipExplainer
from dtrain.engine.parts.forward_calls import KeptForwards
from tests.helpers import planted_faults as planted
from tests.helpers.host_reads import forbidden, like_a_gpu

FP8 = dtrain.PrecisionPolicy.named("bf16", rules={"middle": "fp8", "square": "fp32"})


def explained(fault: str, *, reads_late: bool = False, **options: Any) -> Culprit:
    """The culprit, after a check that nothing else depends on the explanation."""
    results = []
    for explains in (True, False):
        engine = planted.start(fault, **options)
        if reads_late:
            like_a_gpu(engine)
        engine.explain_skips = explains
        outcomes = planted.train(engine)
        results.append((planted.culprit_of(outcomes), planted.bits(engine, outcomes)))
    (culprit, with_explanation), (plain, without) = results
    assert with_explanation == without
    assert {**asdict(culprit), "origin": None} == asdict(plain)
    return culprit


def origin_of(culprit: Culprit) -> Origin:
    assert culprit.origin is not None
    return culprit.origin


@pytest.mark.parametrize(
    ("fault", "precision", "expected"),
    [
        ("module", "fp32", ("output", "square", "Square")),
        ("between", "fp32", ("input", "middle", "Linear")),
        ("linear", "fp16", ("output", "middle", "Linear")),
        ("float8", FP8, ("output", "middle", "Float8Linear")),
        ("module", FP8, ("output", "square", "Square")),
    ],
)
def test_the_first_module_in_the_forward_is_named(fault: str, precision: Any, expected: tuple[str, str, str]) -> None:
    origin = origin_of(explained(fault, precision=precision, loss_scale=dtrain.LossScale("static", init=8.0)))
    assert (origin.place, origin.module, origin.class_name) == expected
    assert origin.values.num_inf > 0
    assert [values.numel for values in origin.inputs] == [origin.values.numel, 1][: 1 + (expected[1] == "square")]
    if origin.place == "output":
        assert all(values.is_finite for values in origin.inputs)
        assert [values.num_inf for values in origin.outputs] == [origin.values.num_inf]
    if expected[1] == "square":
        assert origin.inputs[1].max == pytest.approx(1e30, rel=1e-2), "the factor, which is 1 in other steps"
    if expected[1] == "middle":
        weight = origin.weights[0]
        assert (weight.name, weight.numel) == ("weight", planted.DIM**2)
        assert (1 if fault == "float8" else 0) < (weight.max or 0) < (100 if fault == "float8" else 1)
    assert Origin.from_dict(asdict(origin)) == origin


def test_fsdp2_says_that_it_does_not_search_the_backward() -> None:
    culprit = explained("root", engine=dtrain.FSDP2())
    assert str(culprit).endswith("; the forward is finite; engine=fsdp2 does not search the backward")


def test_a_gradient_that_overflows_by_the_loss_scale_is_named() -> None:
    engine = planted.start("none", precision="fp16", loss_scale=dtrain.LossScale("static", init=2.0**40))
    engine.explain_skips = True
    culprit: Any = planted.train(engine)[0].culprit
    origin = origin_of(culprit)
    assert (culprit.tensor, origin.place, origin.module) == ("head.bias", "output gradient", "head")


class Small(nn.Module):
    """A body under a loss; ``body`` takes and returns [4, DIM]."""

    def __init__(self, body: nn.Module, has_loss: bool) -> None:
        super().__init__()
        self.body, self.head, self.has_loss = body, nn.Linear(planted.DIM, 1), has_loss

    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss = (self.head(self.body(x)).squeeze(-1) - y).square().mean()
        return {"loss": loss} if self.has_loss else loss[None]


class Overflowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        large = torch.where((x == planted.TRIGGER).any(), 1e30, 1.0)
        return self.linear(x) * large * large


def linear() -> nn.Linear:
    return nn.Linear(planted.DIM, planted.DIM)


def small(body: nn.Module, *, has_loss: bool = True, **options: Any) -> Any:
    engine = planted.start("", Small(body, has_loss), **options)
    engine.explain_skips = True
    return engine


class Act(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_bad_data_is_the_model_s_input() -> None:
    engine = small(linear())
    x, y = torch.full((4, planted.DIM), torch.nan), torch.zeros(4)
    engine.backward(engine(x, y))
    culprit = engine.step().culprit
    origin = origin_of(culprit)
    assert (origin.place, origin.module, origin.class_name, origin.caller) == ("input", "", "Small", None)
    assert "first in the input of the model (Small): input 0 64 NaN" in str(culprit)


def test_a_loss_outside_of_the_model_is_told() -> None:
    engine = small(linear(), has_loss=False)
    x, y = next(planted.batches())[0]
    engine.backward((engine(x, y).sum() * 0).log())
    assert "the forward of the model is finite, so the loss went wrong after it" in str(engine.step().culprit)
    engine.backward((engine(x, y).sum() * 0).sqrt())
    assert "its loss is computed outside of the model, so the backward was not searched" in str(engine.step().culprit)


class Recomputed(nn.Module):
    """A mask of -Inf is no fault; the root at 0 behind it is, which backward recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.root, self.out = linear(), planted.Root(), linear()
        self.mask = Act(lambda x: x.masked_fill(torch.arange(planted.DIM) % 2 == 0, -torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(torch.where(x == planted.TRIGGER, 1.0, x))
        h = h + torch.softmax(self.mask(h), dim=-1)
        return checkpoint(self._second, h, (x == planted.TRIGGER).any(), use_reentrant=False)

    def _second(self, h: Tensor, is_bad: Tensor) -> Tensor:
        return self.out(self.root(h, is_bad))


def compiled() -> nn.Module:
    body = nn.Sequential(Overflowing())
    body._compiled_call_impl = body._call_impl  # as torch.compile does, without the compiler
    return body


def after_log() -> nn.Module:
    return nn.Sequential(Act(lambda x: torch.where(x == planted.TRIGGER, 0.0, 1 + x * x).log()), linear())


@pytest.mark.parametrize(
    ("make", "stage", "place", "module", "text"),
    [
        (Recomputed, 3, "input gradient", "body.root", "(Root)"),
        (compiled, 2, "output", "body", "(Sequential)"),  # a compiled module is named as a whole
        (after_log, 2, "output", "body.1", "before it, -Inf in the output of 'body.0' (Act)"),
    ],
)
def test_origin_in_other_models(make: Callable[[], nn.Module], stage: int, place: str, module: str, text: str) -> None:
    engine = small(make(), engine=dtrain.Native(zero_stage=stage))
    origin = origin_of(planted.culprit_of(planted.train(engine)))
    assert (origin.place, origin.module) == (place, module)
    assert text in str(origin)


def test_several_forwards_of_a_micro_batch() -> None:
    engine = small(nn.Sequential(Overflowing(), nn.Dropout(0.5)))
    (x, y), _ = next(planted.batches())
    bad = x.clone()
    bad[0, 0] = planted.TRIGGER
    for first, second in ((x, bad), (bad, x)):
        engine.backward(engine(first, y)["loss"] + engine(second, y)["loss"])
        assert origin_of(engine.step().culprit).module == "body.0"


def test_random_numbers_are_those_of_the_step() -> None:
    engine = small(nn.Sequential(linear(), Act(lambda x: x * torch.where(torch.rand(()) < 0.5, 1e30, 1.0).square())))
    outcomes = [outcome for _ in range(3) for outcome in planted.train(engine)]
    skipped = [outcome.culprit for outcome in outcomes if not outcome.applied]
    assert len(skipped) > 4
    assert {origin_of(culprit).module for culprit in skipped if culprit is not None} == {"body.1"}


def test_an_error_in_the_explanation_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    def once(x: Tensor) -> Tensor:
        if (x == planted.TRIGGER).any():
            seen.append(x)
            if len(seen) > 1:
                raise RuntimeError("called again")
        return x

    engine = small(nn.Sequential(Act(once), Overflowing()))
    culprit = planted.culprit_of(planted.train(engine))
    assert (culprit.phase, culprit.origin) == ("forward loss", None)
    assert "the skip of step 2 is not explained further: rank 0: RuntimeError: called again" in caplog.text


def test_a_step_that_is_read_late_is_explained_by_its_own_batch() -> None:
    assert origin_of(explained("module", reads_late=True)).module == "square"


def test_steps_that_are_not_skipped_read_nothing() -> None:
    engine = planted.start("none")
    like_a_gpu(engine)
    engine.explain_skips = True
    for batch in planted.batches():
        with forbidden():
            for x, y in engine.accumulate(batch):
                engine.backward(engine(x.abs().clamp(max=1.0), y))
            engine.step()
    assert engine.applied_steps == planted.STEPS


def test_a_rank_whose_dummy_ran_no_forward_takes_part() -> None:
    """The backward of a dummy may do without a forward (``weight=0``), so that there is nothing to run again."""
    found = {"origin": asdict(Origin("output", "middle", "Linear")), "error": None}
    comm = SimpleNamespace(rank=1, exchange_text=lambda text: [json.dumps(found), text])
    forward: Any = SimpleNamespace(engine="native", module=nn.Linear(2, 2), comm=comm, searches_backward=True)
    forward.discard = lambda: None
    culprit = Culprit(rank=0, step=0, phase="forward loss", micro_batch=0)
    explained = SkipExplainer(forward, KeptForwards(dtrain.Audit())).explain(culprit, 1.0)
    assert origin_of(explained).module == "middle"

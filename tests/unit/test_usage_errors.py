"""An engine of one process, used wrongly: every mistake is named, and none of them changes a weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.errors import ConfigError, ContractError, ModelError, NonFiniteError, UsageError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def build() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def start(model: nn.Module | None = None, **options: Any) -> Any:
    return dtrain.initialize(model or build(), **{"precision": "fp32", "seed": 0, **options})


@pytest.fixture
def engine() -> Any:
    return start()


def loss_of(engine: Any, x: Tensor = X) -> Tensor:
    return engine(x).square().mean()


def train_step(engine: Any, **options: Any) -> dtrain.StepOutcome:
    engine.backward(loss_of(engine), **options)
    return engine.step()


def masters(engine: Any) -> dict[str, Tensor]:
    return engine.master_state()


def unchanged(engine: Any, before: dict[str, Tensor]) -> bool:
    after = masters(engine)
    return all(torch.equal(after[name], before[name]) for name in before)


# -- the order of calls ------------------------------------------------------------------------------------------------


def test_step_without_backward(engine: Any) -> None:
    with pytest.raises(UsageError, match=r"engine\.step without engine\.backward"):
        engine.step()
    assert engine.attempted_steps == 0
    train_step(engine)
    with pytest.raises(UsageError, match=r"engine\.step without engine\.backward"):
        engine.step()


def test_a_second_backward_on_one_micro_batch(engine: Any) -> None:
    engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match=r"for micro in engine\.accumulate\(batch\)"):
        engine.backward(loss_of(engine))
    assert engine.step().loss == pytest.approx(loss_of(start()).item()), "the first backward still counts"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_second_backward_after_a_micro_batch_that_was_left_out(stage: int) -> None:
    engine = start(zero_stage=stage)
    for micro in engine.accumulate(range(2)):
        if micro == 0:
            continue
        engine.backward(loss_of(engine))
        with pytest.raises(UsageError, match="a second engine.backward"):
            engine.backward(loss_of(engine))


def test_backward_called_on_the_loss_itself(engine: Any) -> None:
    before = masters(engine)
    with pytest.raises(UsageError, match=r"call engine\.backward\(loss\) instead"):
        loss_of(engine).backward()
    assert all(p.grad is None for p in engine.module.parameters())
    assert unchanged(engine, before)
    assert train_step(engine).applied, "and the engine goes on"


def test_accumulate_called_twice(engine: Any) -> None:
    for _ in engine.accumulate(range(2)):
        engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match="called again before engine.step"):
        list(engine.accumulate(range(2)))
    assert engine.step().applied
    for _ in engine.accumulate(range(2)):
        engine.backward(loss_of(engine))
    assert engine.step().applied


def test_an_empty_batch_is_named_and_the_next_one_is_taken(engine: Any) -> None:
    with pytest.raises(UsageError, match="empty batch"):
        list(engine.accumulate([]))
    for _ in engine.accumulate(iter([1])):
        engine.backward(loss_of(engine))
    assert engine.step().applied


def test_micro_batches_of_one_step_are_one_gradient() -> None:
    whole, parts = start(), start()
    train_step(whole)
    for x in parts.accumulate(X.unbind()):
        parts.backward(loss_of(parts, x[None]))
    assert parts.step().loss == pytest.approx(loss_of(start()).item())
    for name, tensor in masters(whole).items():
        torch.testing.assert_close(masters(parts)[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("verb", ["save", "load"])
def test_save_and_load_between_backward_and_step(engine: Any, verb: str, tmp_path: Path) -> None:
    engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match=f"engine.{verb} between backward and step; call it after engine.step"):
        getattr(engine, verb)(tmp_path)
    assert not list(tmp_path.iterdir())
    engine.step()
    assert engine.save(tmp_path).is_dir()


@pytest.mark.parametrize("lr", [math.nan, math.inf, -1.0])
def test_a_learning_rate_that_is_none(engine: Any, lr: float) -> None:
    before = masters(engine)
    engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match="learning rate of step 0 is"):
        engine.step(lr=lr)
    assert unchanged(engine, before)
    assert engine.step(lr=0.5).lr == 0.5


# -- the loss ----------------------------------------------------------------------------------------------------------


def test_a_low_loss_is_refused_with_the_cure() -> None:
    engine = start(nn.Linear(4, 1), precision="bf16")
    low = engine.module(X.bfloat16()).square().mean()
    assert low.dtype == torch.bfloat16
    with pytest.raises(
        ContractError, match=r"the loss is torch\.bfloat16; .* F\.cross_entropy\(logits\.float\(\), tar"
    ):
        engine.backward(low)
    assert train_step(engine).applied


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (torch.ones(1), r"of shape \[1\]"),
        (torch.ones(2, 3), r"of shape \[2, 3\]"),
        (1.5, "a float"),
        (None, "a NoneType"),
        ((torch.tensor(1.0),), "a tuple"),
        ({"lost": torch.tensor(1.0)}, "a dict"),
    ],
)
def test_a_loss_that_is_no_scalar(engine: Any, loss: Any, said: str) -> None:
    with pytest.raises(UsageError, match=f"expected a 0-dim loss tensor.*got one {said}"):
        engine.backward(loss)
    assert train_step(engine).applied


def test_a_loss_may_come_in_an_output(engine: Any) -> None:
    engine.backward({"loss": loss_of(engine), "logits": None})
    assert engine.step().loss == pytest.approx(loss_of(start()).item())


def test_what_the_caller_does_to_the_loss_afterwards_does_not_count(engine: Any) -> None:
    total = None
    for scale in engine.accumulate([1.0, 2.0]):
        loss = loss_of(engine) * scale
        engine.backward(loss)
        total = loss.detach() if total is None else total.add_(loss.detach())
    assert engine.step().loss == pytest.approx(1.5 * loss_of(start()).item())


# -- weights -----------------------------------------------------------------------------------------------------------


def weighted(weights: list[Any], stage: int = 2) -> tuple[dtrain.StepOutcome, dict[str, Tensor]]:
    engine = start(zero_stage=stage)
    for x, weight in engine.accumulate(zip(X.unbind(), weights, strict=True)):
        engine.backward(loss_of(engine, x[None]), weight=weight)
    return engine.step(), masters(engine)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("make", [float, torch.tensor, lambda w: torch.tensor([float(w)], dtype=torch.float64)])
def test_a_weight_is_a_number_or_a_tensor(make: Callable[[int], Any], stage: int) -> None:
    outcome, after = weighted([make(weight) for weight in (1, 5, 2)], stage)
    losses = [loss_of(start(), x[None]).item() for x in X.unbind()]
    assert outcome.loss == pytest.approx((losses[0] + 5 * losses[1] + 2 * losses[2]) / 8)
    want, wanted = weighted([1.0, 5.0, 2.0], stage)
    assert want == outcome
    assert all(torch.equal(after[name], wanted[name]) for name in wanted)


def test_a_weight_tensor_may_be_used_again(engine: Any) -> None:
    tokens = torch.zeros(())
    for x, count in engine.accumulate(zip(X.unbind(), [1.0, 5.0, 2.0], strict=True)):
        tokens.fill_(count)
        engine.backward(loss_of(engine, x[None]), weight=tokens)
    assert engine.step() == weighted([1.0, 5.0, 2.0])[0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_dummy_of_weight_zero_counts_for_nothing(stage: int) -> None:
    outcome, after = weighted([1.0, 0.0, 1.0], stage)
    engine = start(zero_stage=stage)
    for x in engine.accumulate([X[0], X[2]]):
        engine.backward(loss_of(engine, x[None]))
    want = engine.step()
    assert (outcome.applied, outcome.loss) == (True, pytest.approx(want.loss))
    assert outcome.grad_norm == pytest.approx(want.grad_norm)
    assert all(torch.allclose(after[name], tensor) for name, tensor in masters(engine).items())


def test_weights_that_are_all_zero_skip_the_step() -> None:
    engine = start(loss_scale="dynamic")
    before = masters(engine)
    outcome = train_step(engine, weight=0.0)
    assert (outcome.applied, outcome.reason, outcome.culprit) == (False, "empty", None)
    assert math.isnan(outcome.loss)
    assert unchanged(engine, before)
    assert (engine.attempted_steps, engine.applied_steps) == (1, 0)
    assert engine.loss_scale.scale == 65536.0
    assert engine.loss_scale.clean_steps == 0


# -- steps that are skipped --------------------------------------------------------------------------------------------


def overflow(engine: Any) -> dtrain.StepOutcome:
    """A finite loss whose gradient is not: the root of zero."""
    engine.backward((loss_of(engine) * 0).sqrt())
    return engine.step()


def test_an_overflow_skips_backs_off_and_names_the_tensor() -> None:
    engine = start(loss_scale=dtrain.LossScale("dynamic", init=8.0))
    before = masters(engine)
    outcome = overflow(engine)
    assert (outcome.applied, outcome.reason, outcome.loss_scale) == (False, "overflow", 8.0)
    assert outcome.culprit is not None
    assert (outcome.culprit.phase, outcome.culprit.rank, outcome.culprit.step) == ("reduced gradient", 0, 0)
    assert outcome.culprit.tensor in dict(engine.module.named_parameters())
    assert f"reduced gradient not finite in '{outcome.culprit.tensor}' on rank 0" in str(outcome.culprit)
    assert unchanged(engine, before)
    assert not engine.state.exp_avg.any()
    assert engine.loss_scale.scale == 4.0
    assert train_step(engine).applied


def test_a_nonfinite_loss_skips_and_leaves_the_scale() -> None:
    engine = start(loss_scale=dtrain.LossScale("dynamic", init=8.0))
    before = masters(engine)
    for factor in engine.accumulate([1.0, math.nan, math.inf]):
        engine.backward(loss_of(engine) * factor)
    outcome = engine.step()
    assert (outcome.applied, outcome.reason) == (False, "nonfinite_loss")
    assert "forward loss not finite in micro-batch 1 on rank 0" in str(outcome.culprit)
    assert (outcome.culprit.step, outcome.culprit.tensor) == (0, None)
    assert unchanged(engine, before)
    assert engine.loss_scale.scale == 8.0


def test_hysteresis_and_growth_through_the_engine() -> None:
    rule = dtrain.LossScale("dynamic", init=8.0, growth_interval=2, hysteresis=2)
    engine = start(loss_scale=rule)
    seen = []
    for bad in (True, False, True, True, False, False, True):
        outcome = overflow(engine) if bad else train_step(engine)
        assert outcome.applied is not bad
        seen.append(engine.loss_scale.scale)
    assert seen == [8, 8, 4, 2, 2, 4, 4]


@pytest.mark.parametrize("init", [1024, 1024.0])
@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_a_scale_given_as_a_whole_number_changes_no_gradient(mode: str, init: float) -> None:
    plain, scaled = start(), start(loss_scale=dtrain.LossScale(mode, init=init))
    want, got = train_step(plain), train_step(scaled)
    assert got.applied
    assert got.loss_scale == 1024.0
    assert got.grad_norm == pytest.approx(want.grad_norm)
    assert all(torch.allclose(masters(scaled)[name], tensor) for name, tensor in masters(plain).items())


def test_too_many_skips_end_the_run_with_a_diagnosis() -> None:
    engine = start(max_consecutive_skips=3, loss_scale=dtrain.LossScale("dynamic", init=8.0))
    overflow(engine)
    train_step(engine)
    overflow(engine)
    train_step(engine, weight=0.0)
    before = masters(engine)
    engine.backward((loss_of(engine) * 0).sqrt())
    with pytest.raises(NonFiniteError) as caught:
        engine.step()
    message = str(caught.value)
    assert message.startswith("3 steps in a row were skipped (1 x empty, 2 x overflow); loss scale 4 -> 1; ")
    assert "reduced gradient not finite in" in message
    assert "keep that module in FP32" in message
    assert unchanged(engine, before)


def test_one_applied_step_starts_the_count_anew() -> None:
    engine = start(max_consecutive_skips=2)
    for _ in range(3):
        overflow(engine)
        train_step(engine)
    assert (engine.attempted_steps, engine.applied_steps) == (6, 3)


# -- the model after initialize ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.half(),
        lambda model: model.double(),
        lambda model: model.to(torch.bfloat16),
        lambda model: setattr(model[2].weight, "data", model[2].weight.data.clone()),
    ],
    ids=["half", "double", "to", "data"],
)
def test_a_model_changed_behind_the_engine_is_found_at_the_next_step(change: Callable[[nn.Module], Any]) -> None:
    engine = start()
    train_step(engine)
    change(engine.module)
    with pytest.raises(ContractError, match=r"no longer lies in its flat buffer .*do not call \.to\(\), \.half\(\)"):
        engine.backward(engine.module(X.to(engine.module[0].weight.dtype)).float().square().mean())
        engine.step()


def test_what_changes_nothing_is_allowed(engine: Any) -> None:
    engine.module.float().to("cpu").train()
    assert train_step(engine).applied


# -- eval --------------------------------------------------------------------------------------------------------------


def test_eval_consumes_no_micro_batch_number() -> None:
    def masks(look: bool) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        nn.init.ones_(model[0].weight)
        seen: list[Tensor] = []
        model[1].register_forward_hook(lambda module, args, out: seen.append(out.detach()) if module.training else None)
        engine = start(model, optimizer=dtrain.AdamW(lr=0.0, weight_decay=0.0))
        for _ in engine.accumulate(range(3)):
            if look:
                with engine.eval():
                    assert not engine(X).requires_grad
            engine.backward(loss_of(engine, torch.ones(8, 4)))
        engine.step()
        return [mask != 0 for mask in seen]

    plain, looked = masks(False), masks(True)
    assert len(plain) == len(looked) == 3
    assert all(torch.equal(a, b) for a, b in zip(plain, looked, strict=True))
    assert not torch.equal(plain[0], plain[1])


def test_eval_restores_the_mode_of_every_module(engine: Any) -> None:
    engine.module[1].eval()  # as one does with a frozen norm
    with engine.eval():
        assert not any(module.training for module in engine.module.modules())
    assert [module.training for module in engine.module] == [True, False, True]
    engine.module.eval()
    with engine.eval():
        pass
    assert not engine.module.training


def test_eval_restores_the_mode_after_an_error(engine: Any) -> None:
    with pytest.raises(KeyError), engine.eval():
        raise KeyError
    assert engine.module.training
    assert torch.is_grad_enabled()


# -- what initialize refuses -------------------------------------------------------------------------------------------


def two_over_one_storage() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
        (lambda: nn.LazyLinear(2), "'weight' is a lazy parameter"),
        (lambda: nn.Linear(2, 2).double(), "'weight' is torch.float64"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "nothing to train"),
        (nn.ReLU, "nothing to train"),
        (two_over_one_storage, r"'1\.weight' and '0\.weight' are two parameters over one storage"),
    ],
    ids=["meta", "lazy", "float64", "frozen", "empty", "storage"],
)
def test_models_that_cannot_be_trained(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        start(model())


@pytest.fixture
def kernels() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf61"}, "precision 'bf61' is not one of .*; did you mean 'bf16'"),
        ({"precision": "tf32"}, "needs an NVIDIA GPU"),
        ({"engine": "nativ"}, "engine 'nativ' is not one of .*; did you mean 'native'"),
        ({"zero_stage": 7}, "zero_stage=7 is not one of 0, 1, 2"),
        ({"loss_scale": "dynamc"}, "loss scale mode 'dynamc'"),
        ({"loss_scale": 0.0}, "loss scale needs"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0, or None"),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be above 0"),
        ({"grad_reduction": "mean"}, "grad_reduction 'mean' is not one of"),
        ({"grad_reduction": "all_reduce"}, "concerns zero_stage=1 only; got zero_stage=2"),
        ({"groups": ["block.*"]}, "groups pattern 'block.*' matches no module"),
    ],
)
def test_values_that_cannot_be_honoured(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(**options)


@pytest.mark.usefixtures("kernels")
def test_batch_norm_cannot_be_reproducible() -> None:
    with pytest.raises(ConfigError, match=r"cannot hold with '1' \(BatchNorm1d\).*use GroupNorm or LayerNorm"):
        start(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), reproducible=True)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_torchs_default_dtype_has_no_say(dtype: torch.dtype, stage: int) -> None:
    want = start(zero_stage=stage)
    outcome = train_step(want)
    engine = start(zero_stage=stage)
    torch.set_default_dtype(dtype)
    try:
        assert train_step(engine) == outcome
    finally:
        torch.set_default_dtype(torch.float32)
    assert unchanged(engine, masters(want))

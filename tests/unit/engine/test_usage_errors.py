"""Wrong use of an engine on a single rank: every error is named, and none changes a weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.errors import ConfigError, ContractError, ModelError, UsageError
from tests.helpers.one_rank import X, loss_of, masters, start, train_step, unchanged


@pytest.fixture
def engine() -> Any:
    return start()


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
        with pytest.raises(UsageError, match="a second engine"):
            engine.backward(loss_of(engine))


def test_backward_called_on_the_loss_itself(engine: Any) -> None:
    before = masters(engine)
    with pytest.raises(UsageError, match=r"call engine\.backward\(loss\) instead"):
        loss_of(engine).backward()
    assert all(p.grad is None for p in engine.module.parameters())
    assert unchanged(engine, before)
    assert train_step(engine).applied, "and the engine continues"


def test_accumulate_called_twice(engine: Any) -> None:
    for _ in engine.accumulate(range(2)):
        engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match="called again before"):
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
def test_invalid_learning_rate_is_refused(engine: Any, lr: float) -> None:
    before = masters(engine)
    engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match="learning rate of step 0 is"):
        engine.step(lr=lr)
    assert unchanged(engine, before)
    assert engine.step(lr=0.5).lr == 0.5


# -- the loss ----------------------------------------------------------------------------------------------------------


def test_loss_that_is_not_fp32_is_refused_with_the_fix() -> None:
    engine = start(nn.Linear(4, 1), precision="bf16")
    loss = engine.module(X.bfloat16()).square().mean()
    assert loss.dtype == torch.bfloat16
    with pytest.raises(
        ContractError, match=r"the loss is torch\.bfloat16; .* F\.cross_entropy\(logits\.float\(\), tar"
    ):
        engine.backward(loss)
    assert train_step(engine).applied


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.ones(1), r"of shape \[1\]"),
        (torch.ones(2, 3), r"of shape \[2, 3\]"),
        (1.5, "a float"),
        (None, "a NoneType"),
        ((torch.tensor(1.0),), "a tuple"),
        ({"lost": torch.tensor(1.0)}, "a dict"),
    ],
)
def test_loss_that_is_no_scalar_is_refused(engine: Any, loss: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"expected a 0-dim loss tensor.*got one {message}"):
        engine.backward(loss)
    assert train_step(engine).applied


def test_a_loss_may_come_in_an_output(engine: Any) -> None:
    engine.backward({"loss": loss_of(engine), "logits": None})
    assert engine.step().loss == pytest.approx(loss_of(start()).item())


def test_loss_changed_in_place_after_backward_does_not_count(engine: Any) -> None:
    total = None
    for scale in engine.accumulate([1.0, 2.0]):
        loss = loss_of(engine) * scale
        engine.backward(loss)
        total = loss.detach() if total is None else total.add_(loss.detach())
    assert engine.step().loss == pytest.approx(1.5 * loss_of(start()).item())


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
def test_model_changed_after_initialize_is_an_error_at_the_next_step(change: Callable[[nn.Module], Any]) -> None:
    engine = start()
    train_step(engine)
    change(engine.module)
    engine.backward(engine.module(X.to(engine.module[0].weight.dtype)).float().square().mean())
    with pytest.raises(ContractError, match=r"no longer lies in its flat buffer .*do not call \.to\(\), \.half\(\)"):
        engine.step()


def test_no_op_changes_of_the_model_are_allowed(engine: Any) -> None:
    engine.module.float().to("cpu").train()
    assert train_step(engine).applied


# -- eval --------------------------------------------------------------------------------------------------------------


def test_eval_consumes_no_micro_batch_number() -> None:
    def masks(evaluate: bool) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        nn.init.ones_(model[0].weight)
        seen: list[Tensor] = []
        model[1].register_forward_hook(lambda module, args, out: seen.append(out.detach()) if module.training else None)
        engine = start(model, optimizer=dtrain.AdamW(lr=0.0, weight_decay=0.0))
        for _ in engine.accumulate(range(3)):
            if evaluate:
                with engine.eval():
                    assert not engine(X).requires_grad
            engine.backward(loss_of(engine, torch.ones(8, 4)))
        engine.step()
        return [mask != 0 for mask in seen]

    plain, evaluated = masks(False), masks(True)
    assert len(plain) == len(evaluated) == 3
    assert all(torch.equal(a, b) for a, b in zip(plain, evaluated, strict=True))
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
        (two_over_one_storage, r"'0\.weight' and '1\.weight' are two parameters over one storage"),
    ],
    ids=["meta", "lazy", "float64", "frozen", "empty", "storage"],
)
def test_models_that_cannot_be_trained_are_refused(model: Callable[[], nn.Module], message: str) -> None:
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
        ({"precision": "bf61"}, "unknown precision 'bf61'; did you mean 'bf16'"),
        ({"precision": "tf32"}, "needs an NVIDIA GPU"),
        ({"engine": "nativ"}, "engine 'nativ' is not one of .*; did you mean 'native'"),
        ({"zero_stage": 7}, "zero_stage=7 is not one of 0, 1, 2, 3"),
        ({"loss_scale": "dynamc"}, "loss scale mode 'dynamc'"),
        ({"loss_scale": 0.0}, "loss scale needs"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0, or None"),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be above 0"),
        ({"grad_reduction": "mean"}, "grad_reduction=mean is not one of"),
        ({"grad_reduction": "all_reduce"}, "concerns zero_stage=1 only; got zero_stage=2"),
        ({"prefetch": 2}, "prefetch and keep_gathered concern zero_stage=3 only; got zero_stage=2"),
        ({"prefetch": -1, "zero_stage": 3}, "prefetch must be at least 0; got -1"),
        ({"keep_gathered": ["1.wieght"], "zero_stage": 3}, "matches no parameter .*; did you mean '1.weight'"),
        ({"groups": ["block.*"]}, "groups pattern 'block.*' matches no module"),
    ],
)
def test_unsupported_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(**options)


@pytest.mark.usefixtures("kernels")
def test_batch_norm_cannot_be_reproducible() -> None:
    with pytest.raises(ConfigError, match=r"cannot hold with '1' \(BatchNorm1d\).*use GroupNorm or LayerNorm"):
        start(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), reproducible=True)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_torch_default_dtype_has_no_effect(dtype: torch.dtype, stage: int) -> None:
    want = start(zero_stage=stage)
    outcome = train_step(want)
    engine = start(zero_stage=stage)
    torch.set_default_dtype(dtype)
    try:
        assert train_step(engine) == outcome
    finally:
        torch.set_default_dtype(torch.float32)
    assert unchanged(engine, masters(want))

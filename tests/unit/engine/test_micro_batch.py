"""Micro-batches told by ``engine.micro_batch``: their order, and what ends a batch early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.errors import CheckpointError, UsageError
from tests.helpers.one_rank import X, loss_of, masters, start, train_step, unchanged


@pytest.fixture
def engine() -> Any:
    return start()


def tell(engine: Any, *, last: bool) -> None:
    with engine.micro_batch(last=last):
        engine.backward(loss_of(engine))


def is_as_new(engine: Any) -> bool:
    """Whether the next step numbers its micro-batches, draws and trains as that of an engine without a history."""
    other = start()
    for each in (engine, other):
        tell(each, last=False)
        assert each._micro_batch == 0
        tell(each, last=True)
        assert each._micro_batch == 1
        assert each.step().applied
    return unchanged(engine, masters(other))


# -- the order of calls ------------------------------------------------------------------------------------------------


def test_micro_batches_are_numbered_from_0_in_each_step(engine: Any) -> None:
    for _ in range(2):
        for number in range(3):
            with engine.micro_batch(last=number == 2):
                assert (engine._micro_batch, engine._is_last) == (number, number == 2)
                engine.backward(loss_of(engine))
        assert engine.step().loss == pytest.approx(loss_of(start()).item(), rel=0.2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_without_a_last_micro_batch_is_reduced_by_step(stage: int) -> None:
    early, told = start(zero_stage=stage), start(zero_stage=stage)
    tell(early, last=False)
    tell(told, last=True)
    assert early.step() == told.step()
    assert unchanged(early, masters(told))
    tell(early, last=True)
    assert early.step().applied


def test_a_micro_batch_after_the_last_one(engine: Any) -> None:
    tell(engine, last=True)
    with pytest.raises(UsageError, match=r"after micro-batch 0, which was the last of this step .*call engine\.step"):
        tell(engine, last=True)
    assert engine.step().applied
    tell(engine, last=True)
    assert engine.step().applied


def test_a_micro_batch_inside_another(engine: Any) -> None:
    with engine.micro_batch(last=False):
        with pytest.raises(UsageError, match=r"inside micro-batch 0, which has not ended"):
            tell(engine, last=True)
        engine.backward(loss_of(engine))
    tell(engine, last=True)
    assert engine.step().applied
    for _ in engine.accumulate(range(2)):
        with pytest.raises(UsageError, match=r"leave its 'with' block, or the loop over engine\.accumulate"):
            tell(engine, last=True)
        engine.backward(loss_of(engine))
    assert engine.step().applied


def test_a_backward_outside_a_micro_batch(engine: Any) -> None:
    tell(engine, last=False)
    with pytest.raises(UsageError, match=r"outside a micro-batch, after micro-batch 0; put every backward"):
        engine.backward(loss_of(engine))
    tell(engine, last=True)
    with pytest.raises(UsageError, match=r"outside a micro-batch, after micro-batch 1"):
        engine.backward(loss_of(engine))
    assert engine.step().applied
    for micro in engine.accumulate(range(2)):
        if micro == 0:
            engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match=r"outside a micro-batch, after micro-batch 1"):
        engine.backward(loss_of(engine))
    assert engine.step().applied
    assert train_step(engine).applied


@pytest.mark.parametrize("verb", ["micro_batch", "accumulate"])
def test_a_micro_batch_after_a_backward_outside_of_any(engine: Any, verb: str) -> None:
    engine.backward(loss_of(engine))
    for _ in range(2):
        with pytest.raises(UsageError, match=r"after an engine\.backward outside of any, .* call engine\.step\(\) fi"):
            tell(engine, last=True) if verb == "micro_batch" else next(engine.accumulate([1]))
    assert engine.step() == train_step(start())


def test_a_second_backward_in_one_micro_batch(engine: Any) -> None:
    with engine.micro_batch(last=True):
        engine.backward(loss_of(engine))
        with pytest.raises(
            UsageError, match=r"a second engine\.backward .* 'with engine\.micro_batch\(last=\.\.\.\):'"
        ):
            engine.backward(loss_of(engine))
    assert engine.step() == train_step(start())


def test_accumulate_after_micro_batch_in_one_step(engine: Any) -> None:
    tell(engine, last=False)
    with pytest.raises(
        UsageError, match=r"before engine\.step, or after engine\.micro_batch; one batch makes one step"
    ):
        list(engine.accumulate(range(2)))
    with engine.micro_batch(last=True):
        with pytest.raises(UsageError, match=r"or after engine\.micro_batch"):
            list(engine.accumulate(range(2)))
        engine.backward(loss_of(engine))
    assert engine.step().applied


def test_micro_batch_after_accumulate_in_one_step(engine: Any) -> None:
    for _ in engine.accumulate(range(2)):
        engine.backward(loss_of(engine))
        break
    with pytest.raises(UsageError, match=r"after micro-batch 0, .* build a new engine and load a checkpoint"):
        tell(engine, last=True)


def test_step_inside_a_loop_that_continues(engine: Any) -> None:
    batch = engine.accumulate(range(3))
    next(batch)
    engine.backward(loss_of(engine))
    assert engine.step().applied
    with pytest.raises(UsageError, match=r"engine\.step was called inside a loop .* call it after the loop"):
        next(batch)
    assert train_step(engine).applied


def test_step_inside_the_last_micro_batch(engine: Any) -> None:
    with engine.micro_batch(last=True):
        engine.backward(loss_of(engine))
        first = engine.step()
    assert first == train_step(start())
    for _ in engine.accumulate([1]):
        engine.backward(loss_of(engine))
        assert engine.step().applied
    tell(engine, last=True)
    assert engine.step().applied


# -- what ends a batch early -------------------------------------------------------------------------------------------


def test_a_micro_batch_may_have_no_backward(engine: Any) -> None:
    with engine.micro_batch(last=False):
        pass
    with engine.micro_batch(last=True):
        engine.backward(loss_of(engine) * float("nan"))
    culprit = engine.step().culprit
    assert culprit is not None
    assert culprit.micro_batch == 1, "the one left out has a number"


@pytest.mark.parametrize("last", [False, True])
def test_a_batch_without_any_backward_has_no_effect(last: bool) -> None:
    engine = start()
    with engine.micro_batch(last=last):
        loss_of(engine)
    with pytest.raises(UsageError, match=r"engine\.step without engine\.backward"):
        engine.step()
    if not last:
        for _ in engine.accumulate(range(2)):
            assert engine._micro_batch == 0
            break
    assert is_as_new(engine)


@pytest.mark.parametrize("last", [False, True])
def test_an_exception_before_any_backward_begins_the_step_anew(last: bool) -> None:
    engine = start(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    other = start(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    other.module.load_state_dict(engine.module.state_dict())
    with engine.micro_batch(last=False):
        pass
    with pytest.raises(RuntimeError, match="shapes"), engine.micro_batch(last=last):
        engine(X.T)
    for each in (engine, other):
        with each.micro_batch(last=True):
            assert each._micro_batch == 0
            each.backward(loss_of(each))
    assert engine.step() == other.step(), "the same numbering and the same random numbers as if it had not been"


def test_an_exception_after_a_backward_leaves_an_incomplete_step(engine: Any) -> None:
    tell(engine, last=False)
    with pytest.raises(KeyError), engine.micro_batch(last=False):
        raise KeyError
    for begin in (lambda: tell(engine, last=True), lambda: next(engine.accumulate(range(2)))):
        with pytest.raises(UsageError, match=r"that step is incomplete on this rank: .* build a new engine and load"):
            begin()
    assert engine.step() == train_step(start()), "every rank stopped there"
    tell(engine, last=True)
    assert engine.step().applied


def test_a_failed_data_loader_ends_the_batch(engine: Any) -> None:
    def micro_batches(number: int) -> Any:
        yield from range(number)
        raise KeyError

    def loop(body: Callable[[], object]) -> None:
        for _ in engine.accumulate(micro_batches(2)):
            body()

    with pytest.raises(KeyError):
        loop(lambda: None)
    with pytest.raises(KeyError):
        loop(lambda: engine.backward(loss_of(engine)))  # of the first one
    with pytest.raises(UsageError, match=r"that step is incomplete on this rank"):
        tell(engine, last=True)
    assert engine.step().applied


def test_a_backward_that_failed_inside_a_micro_batch() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            raise KeyError("broken")

    engine = start()
    with pytest.raises(KeyError, match="broken"), engine.micro_batch(last=False):
        engine.backward(loss_of(engine, Broken.apply(X.clone().requires_grad_())))
    with pytest.raises(UsageError, match=r"build a new engine and load a checkpoint"):
        tell(engine, last=True)
    with pytest.raises(UsageError, match=r"engine\.step after an engine\.backward that failed half-way"):
        engine.step()


def test_an_old_batch_that_is_closed_late_leaves_the_new_one_alone(engine: Any) -> None:
    old = engine.accumulate(range(3))
    next(old)
    engine.backward(loss_of(engine))
    engine.step()
    with engine.micro_batch(last=False):
        old.close()
        assert engine._micro_batch == 0
        engine.backward(loss_of(engine))
    tell(engine, last=True)
    assert engine.step().applied


# -- forwards ----------------------------------------------------------------------------------------------------------


def test_eval_inside_a_micro_batch_consumes_nothing() -> None:
    def masks(evaluates: bool) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1))
        nn.init.ones_(model[0].weight)
        seen: list[Tensor] = []
        model[1].register_forward_hook(lambda module, args, out: seen.append(out != 0) if module.training else None)
        engine = start(model, optimizer=dtrain.AdamW(lr=0.0, weight_decay=0.0))
        for last in (False, True):
            with engine.micro_batch(last=last):
                if evaluates:
                    with engine.eval():
                        assert not engine(X).requires_grad
                engine.backward(loss_of(engine, torch.ones(8, 4)))
        engine.step()
        return seen

    plain, evaluated = masks(False), masks(True)
    assert len(plain) == len(evaluated) == 2
    assert all(torch.equal(a, b) for a, b in zip(plain, evaluated, strict=True))
    assert not torch.equal(plain[0], plain[1])


def test_a_forward_before_the_first_micro_batch_shares_no_mask_with_it() -> None:
    engine = start(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)))
    before = engine(torch.ones(8, 4))
    with engine.micro_batch(last=True):
        assert not torch.equal(before == 0, engine(torch.ones(8, 4)) == 0)


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [1, 0, None, "yes", torch.tensor(True)], ids=repr)
def test_last_is_a_bool(engine: Any, last: Any) -> None:
    with pytest.raises(UsageError, match=r"engine\.micro_batch\(last=.*\): expected True or False"):
        tell(engine, last=last)
    assert is_as_new(engine)


@pytest.mark.parametrize("batch", [None, 5, torch.tensor(1.0), {"tokens": X}, "batch"], ids=lambda b: type(b).__name__)
def test_accumulate_needs_an_iterable_of_micro_batches(engine: Any, batch: Any) -> None:
    with pytest.raises(UsageError, match=rf"engine\.accumulate got a {type(batch).__name__}; expected a list"):
        engine.accumulate(batch)
    assert is_as_new(engine)


@pytest.mark.parametrize("lr", ["x", "0.1", True, [1.0], 1j, torch.ones(2)], ids=repr)
def test_a_learning_rate_is_a_number(engine: Any, lr: Any) -> None:
    before = masters(engine)
    engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match=r"the learning rate of step 0 is .*; expected a finite number >= 0"):
        engine.step(lr=lr)
    assert unchanged(engine, before)
    assert engine.step(lr=torch.tensor(0.5)).lr == 0.5


@pytest.mark.parametrize("weight", ["x", "1", None, [1.0], 1j, torch.ones(2), torch.tensor(1j)], ids=repr)
def test_a_weight_is_a_number(engine: Any, weight: Any) -> None:
    with pytest.raises(UsageError, match=r"the weight of micro-batch 0 is .*; expected .* such as its token count"):
        engine.backward(loss_of(engine), weight=weight)
    assert is_as_new(engine)


@pytest.mark.parametrize("verb", ["save", "load"])
@pytest.mark.parametrize("path", [None, 5, b"run", ["run"]], ids=repr)
def test_a_directory_is_a_path(engine: Any, verb: str, path: Any) -> None:
    with pytest.raises(UsageError, match=rf"engine\.{verb}\(.*\): expected a directory as a string or a Path"):
        getattr(engine, verb)(path)
    assert train_step(engine).applied


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"extra": 5}, "a mapping"),
        ({"config": "x"}, "a mapping"),
        ({"metrics": [1.0]}, "a mapping"),
        ({"retention": 3}, r"a dtrain\.checkpoint\.Retention"),
        ({"asynchronous": 1}, "True or False"),
        ({"asynchronous": None}, "True or False"),
    ],
)
def test_options_of_save(engine: Any, option: dict[str, Any], words: str, tmp_path: Any) -> None:
    with pytest.raises(UsageError, match=rf"engine\.save\({next(iter(option))}=.*\): expected {words}"):
        engine.save(tmp_path, **option)
    assert not list(tmp_path.iterdir())
    assert engine.save(tmp_path, metrics={"val_loss": torch.tensor(1.0), "train_loss": None}).is_dir()


def test_a_metric_that_is_no_number_fails_the_save_on_every_rank(engine: Any, tmp_path: Any) -> None:
    """One rank may compute a wrong value; the ranks agree on the failure instead of waiting for that rank."""
    with pytest.raises(CheckpointError, match=r"val_loss.*expected a number or None"):
        engine.save(tmp_path, metrics={"val_loss": "x"})

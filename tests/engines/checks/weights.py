"""Weights that the user writes or copies between steps, and the contract on their dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.engine.step import StepEngine
from dtrain.errors import ContractError, DivergenceError, UsageError
from dtrain.sharding.group import HeldRange
from tests.engines.checks.optimizers import optimizers_of_torch
from tests.engines.helpers import Plain, batch, build, computed, state_digests, train_step
from tests.engines.matrix import Case, Trial, check

ADAMW = dtrain.AdamW(lr=1e-2, weight_decay=0.1)
NOWHERE = "/dev/null/nowhere"


def start(trial: Trial) -> Any:
    return trial.start(optimizer=ADAMW, schedule=dtrain.Constant(), max_grad_norm=None)


def weights_of(engine: StepEngine) -> dict[str, nn.Parameter]:
    return dict(engine.module.named_parameters())


def load_state_dict(model: nn.Module) -> None:
    model.load_state_dict(build(seed=6).state_dict())


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.2, 0.2)


@torch.no_grad()
def zero(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.zero_()


def write_modified(engine: StepEngine, write: Callable[[nn.Module], None]) -> None:
    kept, whole = weights_of(engine), build()
    with engine.modify_weights():
        for name, parameter in engine.module.named_parameters():
            assert parameter.shape == whole.get_parameter(name).shape
            assert parameter.dtype == torch.float32 or not parameter.requires_grad
            assert engine.name == "fsdp2" or parameter is kept[name]
        write(engine.module)
    for name, parameter in engine.module.named_parameters():
        assert parameter is kept[name], name


def zero_and(act: Callable[[], Any], engine: StepEngine) -> None:
    with engine.modify_weights():
        zero(engine.module)
        act()


def has_placeholders(case: Case) -> bool:
    """Whether the parameters are empty between steps, so that nobody can write to them."""
    return case.stage == 3 and (case.engine == "deepspeed" or (case.engine == "native" and case.ranks > 1))


@check(ranks=(2, 1))
def a_backward_of_a_forward_before_a_write_is_refused(trial: Trial) -> None:
    """Its weights are gone, and an engine that gathers in backward would take the new ones without a word."""
    engine = trial.start()
    engine.save(trial.folder)
    for write in (lambda: _halve(engine), lambda: engine.load(trial.folder)):
        loss = engine(tokens=batch(engine.rank))
        write()
        with pytest.raises(UsageError, match="of a forward before engine"):
            engine.backward(loss)
        assert train_step(engine, trial.ranks).applied


def _halve(engine: StepEngine) -> None:
    with engine.modify_weights():
        engine.module.scale.mul_(0.5)


@check(
    ranks=(2, 1),
    variants={"in_place": {}, "modify_weights": {}},
    unless=lambda case: case.variant == "in_place" and has_placeholders(case),
)
def trains_on_from_weights_that_were_written(trial: Trial) -> None:
    """As plain PyTorch does."""
    for write in (load_state_dict, clamp):
        engine = start(trial)
        plain = Plain(partial(optimizers_of_torch, ADAMW))
        train_step(engine, 2)
        plain.step(2)
        if trial.case.variant == "modify_weights":
            write_modified(engine, write)
        elif write is load_state_dict and engine.name == "fsdp2":
            with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
                write(engine.module)
            continue
        else:
            write(engine.module)
        write(plain.module)
        for _ in range(2):
            assert train_step(engine, 2).applied
            plain.step(2)
        masters = engine.master_state()
        for name, want in plain.masters().items() if trial.rank == 0 else ():
            torch.testing.assert_close(masters[name], want, rtol=1e-6, atol=1e-6)


@check(
    engines=("native", "ddp", "deepspeed"),
    precisions=("bf16",),
    ranks=(1,),
    variants={"": {}, "remainder": {"master": "remainder"}},
    unless=lambda case: (case.engine, case.stage) == ("deepspeed", 0) or bool(case.variant and case.engine != "native"),
)
@torch.no_grad()
def masters_keep_their_bits_where_nothing_was_written(trial: Trial) -> None:
    """Elsewhere they are what was written, though the replica that was written to has been rounded."""
    engine = trial.start()
    with torch.enable_grad():
        train_step(engine, 1)
    before = engine.master_state()
    assert any(not torch.equal(t, t.bfloat16().float()) for t in before.values())
    if not has_placeholders(trial.case) and not trial.case.variant:  # a remainder goes with the whole weight
        for parameter in engine.module.parameters():
            parameter[:1] = 0.3
        after = engine.master_state()
        for name, old in before.items():
            written = torch.full_like(old[:1], 0.3).to(engine.module.get_parameter(name).dtype)
            assert torch.equal(after[name][:1], written.float())
            assert torch.equal(after[name][1:], old[1:]), name
        before = after
    with engine.modify_weights("blocks.*"):
        for name, parameter in engine.module.named_parameters():
            if name.startswith("blocks"):
                assert torch.equal(parameter, before[name])
                parameter[:1].mul_(0.7)
    after = engine.master_state()
    for name, old in before.items():
        assert torch.equal(after[name][:1], old[:1] * 0.7 if name.startswith("blocks") else old[:1]), name
        assert torch.equal(after[name][1:], old[1:]), name


@check()
def refuses_writes_that_differ_between_ranks(trial: Trial) -> None:
    """Nothing is changed by those in ``modify_weights``, and nothing is updated after one in place."""
    engine = start(trial)
    train_step(engine, 2)
    before = state_digests(engine)
    for write in (lambda p: p.fill_(trial.rank), lambda p: p.fill_(1.0 / trial.rank if trial.rank else 0.5)):
        message = "the values written to parameter 'scale' differ on rank 0 and rank 1"
        with pytest.raises(DivergenceError, match=message), engine.modify_weights("scale"):
            write(weights_of(engine)["scale"])

    with pytest.raises(KeyError if trial.rank else UsageError, match="a_mistake"):
        zero_and(lambda: trial.rank and {}["a_mistake"], engine)
    assert state_digests(engine) == before
    train_step(engine, 2)
    if has_placeholders(trial.case):
        return
    if trial.rank == 1:
        with torch.no_grad():
            weights_of(engine)["scale"].mul_(2.0)
    for together in (engine.master_state, lambda: engine.save(NOWHERE)):
        with pytest.raises(DivergenceError, match="'scale' was written to on rank 1 and not on rank 0"):
            together()
    engine.backward(engine(tokens=batch(0)))
    with pytest.raises(DivergenceError, match=r"nothing was updated. parameter 'scale' was written to on rank 1"):
        engine.step()


@check(engines=("native", "deepspeed"), stages=(3,))
def refuses_writes_to_sharded_weights(trial: Trial) -> None:
    engine = start(trial)
    train_step(engine, 2)
    before = state_digests(engine)
    if trial.case.engine == "native":
        with pytest.raises(UsageError, match=r"load_state_dict while 'scale' is sharded .* engine.modify_weights"):
            load_state_dict(engine.module)
    with pytest.raises(UsageError, match=r"'mix.weight' is read outside .* engine.modify_weights"):
        engine.module.get_submodule("mix").weight.data.zero_()
    with pytest.raises(UsageError, match=r"'\S+' is read outside .* engine.modify_weights"):
        clamp(engine.module)
    for name, write in (("scale", Tensor.exp_), ("frozen.weight", Tensor.zero_)):
        with torch.no_grad(), pytest.raises(UsageError, match=rf"'{name}' is read outside .* engine.modify_weights"):
            write(weights_of(engine)[name])
    assert state_digests(engine) == before
    assert train_step(engine, 2).applied


@check(engines=("native", "fsdp2"), precisions=("bf16",), ranks=(1,))
def modify_weights_keeps_everything_after_an_error(trial: Trial) -> None:
    engine = trial.start()
    train_step(engine, 1)
    before, output = state_digests(engine, buffers=False), computed(engine)

    other = build(seed=6).state_dict()
    for fault, error, message in (
        (lambda: {}["missing"], KeyError, "missing"),
        (lambda: engine.module.load_state_dict(other, assign=True), UsageError, "' was replaced inside"),
        (lambda: setattr(engine.module.scale, "data", torch.ones(1)), UsageError, "'scale' was replaced inside"),
        (lambda: engine(tokens=batch(0)), UsageError, "inside engine.modify_weights"),
        (lambda: engine.backward(torch.ones(())), UsageError, "engine.backward inside"),
        (engine.step, UsageError, "engine.step inside"),
        (lambda: engine.save(NOWHERE), UsageError, "engine.save inside"),
        (engine.master_state, UsageError, "engine.master_state inside"),
        (lambda: engine.eval().__enter__(), UsageError, "engine.eval inside"),
        (lambda: engine.modify_weights().__enter__(), UsageError, "engine.modify_weights inside"),
    ):
        with pytest.raises(error, match=message):
            zero_and(fault, engine)
        assert state_digests(engine, buffers=False) == before, message
        assert torch.equal(computed(engine), output)
    train_step(engine, 1)


@check(precisions=("fp32", "bf16", "fp8"), unless=lambda case: case.engine == "deepspeed" and case.stage < 3)
def full_model_is_a_whole_copy_that_a_rank_runs_alone(trial: Trial) -> None:
    engine = trial.start(wide=True)
    train_step(engine, 2)
    expected, before = computed(engine), engine.memory()
    with engine.full_model() as model:
        assert not model.training
        assert model.head.weight is model.embedding.weight
        for _ in range(1 + 2 * trial.rank):  # ranks that communicated here would wait for each other
            loss = model(tokens=batch(0))
            assert not loss.requires_grad
        if trial.case.precision != "fp8":
            is_bf16 = trial.case.precision == "bf16" and engine.name != "ddp"
            assert model.mix.weight.dtype == (torch.bfloat16 if is_bf16 else torch.float32)
        assert torch.equal(loss, expected)
    after = engine.memory()  # caches, and weights that FSDP2 keeps between uses, may be gone
    assert all(after[kind] <= before[kind] for kind in before)
    engine.backward(engine(tokens=batch(trial.rank)))
    with pytest.raises(UsageError, match="between backward and step"), engine.full_model():
        pass
    assert engine.step().applied, "the copy leaves the engine as it was"
    assert not torch.equal(computed(engine), expected)


def lower_a_moment(engine: Any) -> None:
    """Replaces a moment by a BF16 copy of it, wherever this engine keeps it."""
    if engine.name == "native":
        states: Any = engine.sharded.buffers[0].states
        held = states["exp_avg"]
        states["exp_avg"] = HeldRange(held.start, held.values.bfloat16())
    elif engine.name == "deepspeed":
        state = engine._optimizer.state[engine._zero.partitions[0].master]
        state["exp_avg"] = state["exp_avg"].bfloat16()
    else:
        moments = engine.states.local._values["exp_avg"]
        moments[0] = moments[0].bfloat16()


@contextmanager
def autocast_inside(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, ``module`` runs under an autocast of its own, as a user's forward may have it."""
    autocast = torch.autocast("cpu", dtype=dtype)
    # after a library's own hook, which may gather weights
    before = module.register_forward_pre_hook(lambda *_: autocast.__enter__() and None)
    after = module.register_forward_hook(lambda *_: autocast.__exit__(None, None, None), always_call=True)
    yield
    before.remove()
    after.remove()


@check(precisions=("bf16", "fp32"), unless=lambda case: case.precision == "fp32" and case.engine in ("native", "fsdp2"))
def raises_if_a_dtype_is_not_that_of_the_contract(trial: Trial) -> None:
    """In a forward at the start and after a load, in a moment, and in a weight between two steps."""
    engine = trial.start()
    engine.save(trial.folder)
    wrong = torch.float16 if trial.case.precision == "bf16" else torch.bfloat16
    for _ in range(2):
        with autocast_inside(engine.module.mix, wrong), pytest.raises(ContractError, match=f"'mix'.*{wrong}"):
            engine(tokens=batch(0))
        assert train_step(engine, trial.ranks).applied
        engine.load(trial.folder)

    def after_two_steps(trained: StepEngine, halved: str | None = None) -> dict[str, str]:
        trained.load(trial.folder)
        train_step(trained, trial.ranks)
        if halved is not None:
            trained.module.get_submodule(halved).half()
        train_step(trained, trial.ranks)
        return state_digests(trained)

    for part in ("mix", "frozen") if engine.policy.is_reduced_precision else ():  # else PyTorch itself refuses it
        halved = trial.start()
        undisturbed = after_two_steps(halved)
        try:
            disturbed = after_two_steps(halved, part)
        except UsageError:
            assert trial.case.stage == 3
        except (ContractError, RuntimeError, AssertionError):  # the engine, PyTorch or DeepSpeed
            with pytest.raises(ContractError, match=f"'{part}.weight'.*float16"):
                halved.check_contract()
        else:
            assert trial.case.stage == 3, f"{part}.half() went unnoticed"
            assert disturbed == undisturbed, f"{part}.half() changed the run, although weights are unsharded again"
    lower_a_moment(engine)
    with pytest.raises(ContractError, match="bfloat16; the contract says float32"):
        engine.check_contract()

"""Weights that the user writes between steps are trained on, as in plain PyTorch, or refused by a named error."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dtrain
from dtrain.distributed.host_memory import _CopyRead
from dtrain.engine.deepspeed import config as deepspeed_config
from dtrain.engine.step import StepEngine
from dtrain.errors import DivergenceError, UsageError
from dtrain.parameters.groups import decayed_names
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

LR, DECAY = 1e-2, 0.1
NOWHERE = "/dev/null/nowhere"
X, Y = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
# ZeRO shards nothing on a single rank, except with fsdp2 and deepspeed
SINGLE = [("native", 0), ("native", 2), ("ddp", 0), ("fsdp2", 2), ("fsdp2", 3)]
SEVERAL = [("native", 0), ("native", 1), ("native", 2), ("native", 3), ("ddp", 0), ("fsdp2", 3)]


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """``fsdp2`` creates a process group for a single rank too."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Net(nn.Module):
    """Units, tied and frozen weights, and a parameter of one element."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)])
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.head = nn.Linear(4, 4)
            self.last = nn.Linear(4, 4)
        self.last.weight = self.head.weight
        self.gain = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(torch.tanh(self.head(self.frozen(x)))) * self.gain


def loss_of(model: Any) -> Tensor:
    return nn.functional.mse_loss(model(X), Y)


def start(engine: str, stage: int, precision: str = "fp32", **options: Any) -> StepEngine:
    torch.set_num_threads(1)
    built = dtrain.initialize(
        Net(0), optimizer=dtrain.AdamW(lr=LR, weight_decay=DECAY), engine=engine, zero_stage=stage,
        precision=precision, max_grad_norm=None, seed=0, **options,
    )  # fmt: skip
    assert isinstance(built, StepEngine)
    return built


def train_step(engine: StepEngine) -> None:
    engine.backward(loss_of(engine))
    assert engine.step().applied


class Reference:
    """The same training in plain PyTorch."""

    def __init__(self) -> None:
        self.module = Net(0)
        decayed = decayed_names(self.module)
        groups = [
            {"params": [p for n, p in self.trained() if (n in decayed) is decays], "weight_decay": DECAY * decays}
            for decays in (True, False)
        ]
        betas = dtrain.AdamW().betas
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=betas, eps=dtrain.AdamW().eps)

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss_of(self.module).backward()
            self.optimizer.step()

    def require_equal(self, engine: StepEngine) -> None:
        masters = engine.master_state()
        for name, parameter in self.trained() if engine.rank == 0 else ():
            torch.testing.assert_close(masters[name], parameter.detach(), rtol=1e-6, atol=1e-6, msg=f"{name} differs")


# -- ways to write -----------------------------------------------------------------------------------------------------


def load_state_dict(model: nn.Module) -> None:
    model.load_state_dict(Net(1).state_dict())


@torch.no_grad()
def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.2, 0.2)


@torch.no_grad()
def zero(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.zero_()


def write_modified(engine: StepEngine, write: Callable[[nn.Module], None]) -> None:
    kept = dict(engine.module.named_parameters())
    with engine.modify_weights():
        for name, parameter in engine.module.named_parameters():
            assert parameter.shape == Net(0).get_parameter(name).shape
            assert parameter.dtype == torch.float32 or not parameter.requires_grad
            assert engine.name == "fsdp2" or parameter is kept[name]
        write(engine.module)
    for name, parameter in engine.module.named_parameters():
        assert parameter is kept[name], name


def follow(engine: StepEngine, write: Callable[[nn.Module], None], *, modifies: bool) -> None:
    """Trains, writes and trains again, beside plain PyTorch."""
    reference = Reference()
    train_step(engine)
    reference.train(1)
    if modifies:
        write_modified(engine, write)
    else:
        write(engine.module)
    write(reference.module)
    for _ in range(3):
        train_step(engine)
    reference.train(3)
    reference.require_equal(engine)


@pytest.mark.parametrize("modifies", [False, True], ids=["in_place", "modify_weights"])
@pytest.mark.parametrize("write", [load_state_dict, clamp])
@pytest.mark.parametrize(("name", "stage"), SINGLE)
def test_training_goes_on_from_what_was_written(
    name: str, stage: int, write: Callable[[nn.Module], None], modifies: bool
) -> None:
    engine = start(name, stage)
    if name == "fsdp2" and write is load_state_dict and not modifies:
        with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
            write(engine.module)
        return
    follow(engine, write, modifies=modifies)


def deepspeed_cases(rank: int, world: int, stage: int) -> None:
    for write in (load_state_dict, clamp):
        follow(start("deepspeed", stage), write, modifies=True)
        if stage < 3:
            follow(start("deepspeed", stage), write, modifies=False)
    if stage:
        require_unrounded(start("deepspeed", stage, "bf16"), in_place=stage < 3)
    if stage == 3:
        engine = start("deepspeed", stage)
        train_step(engine)
        clamp(engine.module)  # of empty tensors, so it does nothing
        with pytest.raises(UsageError, match=r"was written to .* engine.modify_weights"):
            engine.save(NOWHERE)
        train_step(engine)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeed_goes_on_from_what_was_written(stage: int) -> None:
    run_ranks(1, deepspeed_cases, stage)


def write_after_evaluation(rank: int, world: int) -> None:
    deepspeed_config.PERSISTENT = 0  # else the small weights would stay gathered
    engine = start("deepspeed", 3, "bf16")
    for _ in range(3):
        train_step(engine)
    computed(engine)  # leaves weights unsharded
    with engine.modify_weights():
        zero(engine.module)
    zero(reference := Net(0))
    torch.testing.assert_close(computed(engine), loss_of(reference))


def test_deepspeed_forgets_weights_that_it_left_unsharded() -> None:
    run_ranks(2, write_after_evaluation)


# -- in BF16: rounding -------------------------------------------------------------------------------------------------


@torch.no_grad()
def require_unrounded(engine: StepEngine, *, in_place: bool) -> None:
    """Writes a part of each parameter; elsewhere the masters keep what their replicas round off."""
    with torch.enable_grad():
        train_step(engine)
    before = engine.master_state()
    assert any(not torch.equal(t, t.bfloat16().float()) for t in before.values())
    if in_place:
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


@pytest.mark.parametrize(("name", "stage"), [("native", 0), ("native", 2), ("ddp", 0)])
def test_masters_keep_their_bits_where_nothing_was_written(name: str, stage: int) -> None:
    require_unrounded(start(name, stage, "bf16"), in_place=True)


class Halves(nn.Module):
    """Two units share a parameter, which ``fully_shard`` therefore replicates, here in BF16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.blocks[1].weight = self.blocks[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](torch.tanh(self.blocks[0](x)))  # type: ignore[no-any-return]


def test_fsdp2_takes_over_low_precision_parameters_that_it_replicates() -> None:
    engine = dtrain.initialize(Halves(), engine="fsdp2", precision="bf16", seed=0)
    assert isinstance(engine, StepEngine)
    weight = engine.module.get_parameter("blocks.0.weight")
    assert type(weight) is nn.Parameter
    assert weight.dtype == torch.bfloat16
    train_step(engine)
    before = engine.master_state()["blocks.0.weight"]
    with torch.no_grad():
        weight[:1] = 2.0  # no master rounds to it, so each takes it
    after = engine.master_state()["blocks.0.weight"]
    assert torch.equal(after[0], torch.full((4,), 2.0))
    assert torch.equal(after[1:], before[1:])


# -- refused -----------------------------------------------------------------------------------------------------------


def test_fsdp2_refuses_writes_to_weights_that_are_unsharded() -> None:
    engine = start("fsdp2", 2)
    with engine.eval():
        loss_of(engine)  # stage 2 leaves the weights unsharded
    masters = engine.master_state()
    clamp(engine.module)
    with pytest.raises(UsageError, match=r"'blocks.0.weight' was written to"):
        computed(engine)
    computed(engine)
    clamp(engine.module)
    engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match=r"'blocks.0.weight' was written to .* engine.modify_weights"):
        engine.step()
    assert all(torch.equal(values, masters[name]) for name, values in engine.master_state().items())
    assert engine.step().applied


@pytest.mark.parametrize("name", ["native", "ddp"])  # fully_shard refuses it itself
def test_a_replaced_parameter_is_refused(name: str) -> None:
    engine = start(name, 0 if name == "ddp" else 2)
    engine.module.load_state_dict(Net(1).state_dict(), assign=True)
    with pytest.raises(UsageError, match=r"'gain' was replaced after dtrain.initialize"):
        engine.save(NOWHERE)


@pytest.mark.parametrize("name", ["native", "fsdp2"])
def test_modify_weights_keeps_everything_after_an_error(name: str) -> None:
    engine = start(name, 2, "bf16")
    train_step(engine)
    before, frozen = engine.master_state(), engine.module.get_parameter("frozen.weight").clone()
    output = computed(engine)

    def write(fault: Callable[[], Any]) -> None:
        with engine.modify_weights():
            zero(engine.module)
            fault()

    def replace() -> None:
        engine.module.load_state_dict(Net(1).state_dict(), assign=True)

    def assign() -> None:
        engine.module.get_parameter("gain").data = torch.ones(1)

    for fault, error, message in (
        (lambda: {}["missing"], KeyError, "missing"),
        (replace, UsageError, "'gain' was replaced inside"),
        (assign, UsageError, "'gain' was replaced inside"),
        (lambda: engine(X), UsageError, "inside engine.modify_weights"),
        (lambda: engine.backward(torch.ones(())), UsageError, "engine.backward inside"),
        (engine.step, UsageError, "engine.step inside"),
        (lambda: engine.save(NOWHERE), UsageError, "engine.save inside"),
        (lambda: engine.load(NOWHERE), UsageError, "engine.load inside"),
        (engine.master_state, UsageError, "engine.master_state inside"),
        (lambda: engine.eval().__enter__(), UsageError, "engine.eval inside"),
        (lambda: engine.modify_weights().__enter__(), UsageError, "engine.modify_weights inside"),
    ):
        with pytest.raises(error, match=message):
            write(fault)
        after = engine.master_state()
        assert all(torch.equal(after[key], values) for key, values in before.items()), message
        assert torch.equal(engine.module.get_parameter("frozen.weight"), frozen)
        assert torch.equal(computed(engine), output)
    train_step(engine)


def computed(engine: StepEngine) -> Tensor:
    with engine.eval():
        return loss_of(engine)


def test_modify_weights_is_refused_outside_of_its_place() -> None:
    engine = start("native", 2)
    for pattern in ("decoder.*", ""):
        with (
            pytest.raises(UsageError, match=f"modify_weights pattern '{re.escape(pattern)}' matches no parameter"),
            engine.modify_weights(pattern),
        ):
            pass
    with engine.eval(), pytest.raises(UsageError, match=r"inside engine.eval"), engine.modify_weights():
        pass
    for _ in engine.accumulate([X]):
        with pytest.raises(UsageError, match="a micro-batch; call it between steps"), engine.modify_weights():
            pass
    engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match="between backward and step"), engine.modify_weights():
        pass
    assert engine.step().applied


def test_a_pattern_selects_what_is_taken() -> None:
    engine = start("native", 2, "bf16")
    with torch.no_grad():
        before = engine.master_state()
        with engine.modify_weights("head", "gain"):  # the head's weight is tied
            assert engine.module.get_parameter("blocks.0.weight").dtype == torch.bfloat16
            assert engine.module.get_parameter("last.weight").dtype == torch.float32
            zero(engine.module.get_submodule("head"))
            engine.module.get_parameter("gain").mul_(1.001)
        after = engine.master_state()
        changed = {name for name, old in before.items() if not torch.equal(after[name], old)}
        assert changed == {"head.weight", "head.bias", "gain"}
        assert torch.equal(after["gain"], before["gain"] * 1.001)
        assert not engine.module.get_parameter("last.weight").any()
        with (
            pytest.raises(UsageError, match=r"'gain' was written to inside .* do not match it"),
            engine.modify_weights("head"),
        ):
            zero(engine.module)
    # the write itself was one in place, which is noticed
    assert not engine.master_state()["blocks.0.weight"].any()


# -- several ranks -----------------------------------------------------------------------------------------------------


def follow_together(rank: int, world: int, name: str, stage: int) -> None:
    engine = start(name, stage)
    for write in (load_state_dict, clamp):
        follow(engine if write is load_state_dict else start(name, stage), write, modifies=True)
    if (name, stage) == ("native", 3):
        refuses_placeholders(engine)
        engine = start(name, stage, "bf16")
        frozen = Net(0).frozen.weight.detach()
        with engine.modify_weights("frozen", "gain"):
            assert torch.equal(engine.module.get_parameter("frozen.weight"), frozen.bfloat16())
            engine.module.get_submodule("frozen").weight.mul_(2.0)
        with engine.modify_weights():
            assert torch.equal(engine.module.get_parameter("frozen.weight"), frozen.bfloat16() * 2)
    else:
        engine = start(name, stage)
        follow(engine, clamp, modifies=False)
    train_step(engine)
    diverge(engine, rank)


def refuses_placeholders(engine: StepEngine) -> None:
    model = engine.module
    with pytest.raises(UsageError, match=r"load_state_dict while 'gain' is sharded .* engine.modify_weights"):
        load_state_dict(model)
    with pytest.raises(UsageError, match=r"'blocks.0.weight' is read outside .* engine.modify_weights"):
        model.blocks[0].weight.data.zero_()  # type: ignore[index,union-attr]
    with pytest.raises(RuntimeError, match="more than one element"):
        clamp(model)
    parameters = dict(model.named_parameters())
    for name, write in (("gain", Tensor.exp_), ("frozen.weight", Tensor.zero_)):
        with torch.no_grad():
            write(parameters[name])
        engine.backward(loss_of(engine))
        with pytest.raises(UsageError, match=rf"'{name}' was written to .* engine.modify_weights"):
            engine.step()
        assert parameters[name].isnan().all()
        assert engine.step().applied


def fail_on(failing: int, rank: int) -> None:
    if rank == failing:
        raise KeyError("a mistake of this rank")


def diverge(engine: StepEngine, rank: int) -> None:
    """Writes that the ranks do not agree on are refused, and in modify_weights changes nothing."""
    before = engine.master_state()
    for write, message in (
        (lambda p: p.fill_(rank), "the values written to parameter 'gain' differ on rank 0 and rank 1"),
        (lambda p: p.fill_(1.0 / rank if rank else 0.5), "the values written to parameter 'gain' differ"),
    ):
        with pytest.raises(DivergenceError, match=message), engine.modify_weights("gain"):
            write(dict(engine.module.named_parameters())["gain"])
    with pytest.raises(KeyError if rank else UsageError, match="a mistake"), engine.modify_weights():
        fail_on(1, rank)
    after = engine.master_state()
    assert all(torch.equal(after[name], old) for name, old in before.items())
    train_step(engine)
    if (engine.name, engine.options.zero_stage) == ("native", 3):
        return
    parameter = dict(engine.module.named_parameters())["gain"]
    if rank == 1:
        with torch.no_grad():
            parameter.mul_(2.0)
    for together in (engine.master_state, lambda: engine.save(NOWHERE)):
        with pytest.raises(DivergenceError, match="'gain' was written to on rank 1 and not on rank 0"):
            together()
    engine.backward(loss_of(engine))
    with pytest.raises(
        DivergenceError, match=r"nothing was updated. parameter 'gain' was written to on rank 1 and not"
    ):
        engine.step()


@pytest.mark.parametrize(("name", "stage"), SEVERAL)
def test_several_ranks_agree_on_what_was_written(name: str, stage: int) -> None:
    run_ranks(2, follow_together, name, stage)


def write_differently(rank: int, world: int) -> None:
    engine = start("native", 1, "bf16")
    with torch.no_grad():
        engine.module.get_parameter("head.weight")[0] = rank
    engine.backward(loss_of(engine))
    with pytest.raises(DivergenceError, match=r"values written to parameter 'head.weight' differ on rank 0 and rank 1"):
        engine.step()


def test_ranks_that_write_different_values_do_not_step() -> None:
    run_ranks(2, write_differently)


def write_at_once(rank: int, world: int) -> None:
    """Rank 0 writes after each step while rank 1 still reads its parameters to refresh its own."""
    read = _CopyRead._use

    def read_late(self: Any, tensors: list[Tensor], output: Tensor) -> None:
        time.sleep(0.05 * rank)
        read(self, tensors, output)

    _CopyRead._use = read_late  # type: ignore[method-assign]
    engine, reference = start("native", 1), Reference()
    for _ in range(3):
        for model in (engine.module, reference.module):
            with torch.no_grad():
                torch._foreach_mul_([p for p in model.parameters() if p.requires_grad], 1.5)
        train_step(engine)
        reference.train(1)
    reference.require_equal(engine)


def test_a_write_waits_for_ranks_that_still_read() -> None:
    run_ranks(2, write_at_once)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_what_was_written(tmp_path: Path) -> None:
    engine = start("native", 2, "bf16")
    train_step(engine)
    zero(engine.module)
    engine.save(tmp_path)
    again = start("native", 2, "bf16")
    zero(again.module)  # a load overwrites what was written before it
    again.load(tmp_path)
    assert all(not values.any() for values in again.master_state().values())
    train_step(again)

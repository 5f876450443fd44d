"""Optimizers of torch over cut masters: their states are found, and the bits are torch's own; others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtrain.config.optim import TorchOptimizer
from dtrain.errors import ConfigError
from dtrain.optim.rule import StateSpec, UpdateGroup, UpdateScalars
from dtrain.optim.rules import rule_of
from dtrain.optim.torch_optimizer import TorchRule

STEPS = 10
NUMELS = (1024, 2048, 700)
TAKEN: list[tuple[type[Optimizer], dict[str, Any], list[str]]] = [
    (torch.optim.Adam, {"betas": (0.8, 0.9)}, ["exp_avg", "exp_avg_sq"]),
    (torch.optim.Adam, {"fused": True, "amsgrad": True}, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
    (torch.optim.AdamW, {"weight_decay": 0.3}, ["exp_avg", "exp_avg_sq"]),
    (torch.optim.NAdam, {"momentum_decay": 0.1}, ["exp_avg", "exp_avg_sq"]),
    (torch.optim.RAdam, {"betas": (0.9, 0.9), "decoupled_weight_decay": True}, ["exp_avg", "exp_avg_sq"]),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.25, "lr_decay": 0.1}, ["sum"]),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}, ["square_avg", "momentum_buffer", "grad_avg"]),
    (torch.optim.Adamax, {}, ["exp_avg", "exp_inf"]),
    (torch.optim.Adadelta, {}, ["square_avg", "acc_delta"]),
    (torch.optim.Rprop, {}, ["prev", "step_size"]),
    (torch.optim.SGD, {}, []),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, ["momentum_buffer"]),
]


class Updating(Optimizer):
    """Base of the classes below: an update of one parameter."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.built_lr = lr

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.move(group, p, self.state[p])

    def move(self, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Averaged(Updating):
    """Keeps FP64 counts, a state that starts from the masters, and puts each result into a new tensor."""

    def move(self, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
        if not state:
            state.update(num_updates=0, Weight_Sum=1.0, Slow=p.clone())
        state["num_updates"] += 1
        state["Weight_Sum"] = state["Weight_Sum"] * 0.9 + 1.0
        state["Slow"] = state["Slow"] + (p - state["Slow"]) / state["Weight_Sum"]
        p.data = p - group["lr"] * (p.grad + group["weight_decay"] * p + 0.1 * (p - state["Slow"]))


class Training:
    """Masters in blocks, trained by the rule as an engine does it, and by the class alone."""

    def __init__(self, record: TorchOptimizer, blocks: tuple[int, ...] = NUMELS) -> None:
        self.record = record
        self.rule = rule_of(record.without_decay())
        assert isinstance(self.rule, TorchRule)
        generator = torch.Generator().manual_seed(1)
        self.start, *self.grads = (torch.randn(sum(NUMELS), generator=generator) for _ in range(1 + STEPS))
        self.arena = self.start.clone()
        self.states = [spec.like(self.arena) for spec in self.rule.states]
        self.blocks = blocks

    def update(self, number: int, lr: float, *, skip: bool = False) -> None:
        grad = 3.0 * self.grads[number - 1]
        found_inf = torch.tensor(float(skip))
        scalars = UpdateScalars(lr, number, torch.tensor(3.0), found_inf)
        cuts = [tensor.split(list(self.blocks)) for tensor in (self.arena, grad, *self.states)]
        for master, block_grad, *states in zip(*cuts, strict=True):
            group = UpdateGroup(self.record.decay, [master], tuple([state] for state in states), [(0, 0)])
            self.rule.apply(group, [block_grad], scalars)

    def run(self, first: int = 1, last: int = STEPS) -> Tensor:
        for number in range(first, last + 1):
            self.update(number, rate(number))
        return self.arena

    def alone(self) -> dict[str, Tensor]:
        """Returns masters and states of the class on the undivided masters."""
        parameter = nn.Parameter(self.start.clone())
        optimizer = self.record.load()([parameter], lr=self.record.lr, **self.record.options)
        for number, grad in enumerate(self.grads, start=1):
            optimizer.param_groups[0]["lr"] = rate(number)
            parameter.grad = 3.0 * grad / 3.0
            optimizer.step()
        return {"master": parameter.detach(), **optimizer.state[parameter]}


def rate(number: int) -> float:
    return 0.01 / number


@pytest.mark.parametrize(("optimizer", "options", "names"), [*TAKEN, (Averaged, {"weight_decay": 0.1}, ["slow"])])
def test_blocks_have_the_bits_of_the_class_itself(optimizer: Any, options: dict[str, Any], names: list[str]) -> None:
    training = Training(TorchOptimizer(optimizer, lr=0.01, **options))
    assert [spec.name for spec in training.rule.states] == names
    expected = training.alone()
    assert torch.equal(training.run(), expected["master"])
    assert not torch.equal(training.arena, training.start)
    for name, state in zip(names, training.states, strict=True):
        assert torch.equal(state, expected["Slow" if name == "slow" else name]), name
    numbers = {name: expected[name] for name in ("mu_product", "Weight_Sum") if name in expected}
    values = {key: float(value) for key, value in numbers.items()}
    assert training.rule.state_dict() == ({"applied_steps": STEPS, **values} if numbers else {})


def test_states_have_their_values_before_the_first_update() -> None:
    assert rule_of(TorchOptimizer(torch.optim.Rprop, lr=0.5)).states[1] == StateSpec("step_size", init=0.5)
    assert rule_of(TorchOptimizer(torch.optim.Adagrad, initial_accumulator_value=0.25)).states[0].init == 0.25
    assert rule_of(TorchOptimizer(Averaged)).states == (StateSpec("slow", init=None),)


@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.RAdam, Averaged])
@pytest.mark.parametrize("saved", ["numbers", "old numbers", "nothing"])
def test_a_resumed_run_has_the_same_bits_over_other_blocks(optimizer: Any, saved: str) -> None:
    record = TorchOptimizer(optimizer, lr=0.01)
    training = Training(record)
    numbers = training.rule.state_dict()
    for number in range(1, 6):
        training.update(number, rate(number))
        if saved == "numbers" or (saved == "old numbers" and number == 3):
            numbers = json.loads(json.dumps(training.rule.state_dict()))
    resumed = Training(record, blocks=(sum(NUMELS) - 5, 5))
    resumed.arena.copy_(training.arena)
    for state, own in zip(resumed.states, training.states, strict=True):
        state.copy_(own)
    resumed.rule.load_state_dict({} if saved == "nothing" else numbers)
    assert torch.equal(resumed.run(6), training.alone()["master"])
    # an earlier checkpoint, in the same engine
    training.rule.load_state_dict({})
    training.arena.copy_(training.start)
    for spec, state in zip(training.rule.states, training.states, strict=True):
        spec.fill(state, training.arena)
    assert torch.equal(training.run(), resumed.arena)


def test_the_host_reads_the_skip_once_for_all_learning_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    given = UpdateScalars(0.1, 1, torch.tensor(1.0), torch.tensor(0.0), rule_lrs=((1, 0.2),))
    every = [given.of_rule(1).scaled(0.5), given.scaled(0.5), given.of_rule(1), given.of_rule(0)]
    assert [one.lr for one in every] == [0.1, 0.05, 0.2, 0.1]
    reads: list[Tensor] = []
    monkeypatch.setattr(Tensor, "__bool__", lambda tensor: bool(reads.append(tensor)))
    assert not any(one.is_skipped for one in every)
    assert len(reads) == 1


def test_a_skipped_update_changes_nothing() -> None:
    training = Training(TorchOptimizer(torch.optim.NAdam, lr=0.01))
    for number in (1, 2, 3):
        training.update(number, rate(number))
        if number == 2:
            before = [tensor.clone() for tensor in (training.arena, *training.states)]
            numbers = training.rule.state_dict()
            training.update(3, rate(3), skip=True)
            assert all(map(torch.equal, before, (training.arena, *training.states)))
            assert training.rule.state_dict() == numbers
    assert torch.equal(training.run(4), training.alone()["master"])


def test_several_masters_in_a_call_and_tensors_at_other_addresses() -> None:
    training = Training(TorchOptimizer(torch.optim.NAdam, lr=0.01))
    for number in range(1, STEPS + 1):
        # copies, as from an engine that allocates its shards again
        cuts = [tensor.clone().split(list(NUMELS)) for tensor in (training.arena, *training.states)]
        scalars = UpdateScalars(rate(number), number, torch.tensor(1.0), torch.tensor(0.0))
        group = UpdateGroup(0.0, [*cuts[0]], tuple([*cut] for cut in cuts[1:]), [(0, 0)] * len(NUMELS))
        training.rule.apply(group, [*training.grads[number - 1].clone().split(list(NUMELS))], scalars)
        training.arena = torch.cat(cuts[0])
        training.states = [torch.cat(cut) for cut in cuts[1:]]
    expected = training.alone()["master"]
    torch.testing.assert_close(training.arena, expected, rtol=1e-6, atol=1e-7)
    assert len(training.rule._bound) == 1
    assert len(training.rule._earlier) <= 1, "instances of tensors that are gone are dropped"


Move = Callable[[Any, dict[str, Any], Any, dict[str, Any]], Any]


def updating(name: str, move: Move) -> type[Updating]:
    return type(name, (Updating,), {"move": move})


def lamb(self: Updating, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
    """LAMB without its second moment."""
    state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.1)
    update = state["exp_avg"] + group["weight_decay"] * p
    p.sub_(group["lr"] * p.norm() / update.norm() * update)


def lars(self: Updating, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
    """Needs whole tensors only for a weight that decays."""
    if group["weight_decay"]:
        lamb(self, group, p, state)
    else:
        p.sub_(group["lr"] * p.grad)
        state["exp_avg"] = torch.zeros_like(p)


def count(self: Updating, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
    group["k"] = group.get("k", 0) + 1
    p.sub_(group["lr"] / group["k"] * p.grad)


def estimate(self: Updating, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
    """Estimates its step size, one for a parameter."""
    state["d"] = state.get("d", 1.0) + p.grad.abs().max().item()
    p.sub_(group["lr"] * state["d"] * p.grad)


def center(self: Updating, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
    """Elementwise on vectors; centers the gradients of matrices."""
    p.sub_(group["lr"] * (p.grad - p.grad.mean(1, keepdim=True) if p.dim() == 2 else p.grad))


def shuffle(self: Updating, group: dict[str, Any], p: Any, state: dict[str, Any]) -> None:
    p.sub_(group["lr"] * state.setdefault("noise", torch.rand_like(p)) * p.grad)


Lamb, Lars, Counting = updating("Lamb", lamb), updating("Lars", lars), updating("Counting", count)
Distance, Centered = updating("Distance", estimate), updating("Centered", center)
Shuffled = updating("Shuffled", shuffle)
FixedRate = updating("FixedRate", lambda self, group, p, state: p.sub_(self.built_lr * p.grad))
Noisy = updating("Noisy", lambda self, group, p, state: p.sub_(group["lr"] * (p.grad + torch.randn_like(p))))


class Hidden(torch.optim.AdamW):
    """Its signature has no weight decay."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


@pytest.mark.parametrize(
    ("optimizer", "options", "reason"),
    [
        (torch.optim.Adafactor, {}, "is not elementwise.*weight of shape.*the states are variance and row_var, col"),
        (torch.optim.LBFGS, {}, "closure that computes the loss again"),
        (torch.optim.Muon, {}, "fails on 1-D FP32 tensors.*Muon only supports 2D parameters"),
        (torch.optim.SparseAdam, {}, "does not support dense gradients"),
        (torch.optim.ASGD, {}, "its state 'eta' is one number for a parameter, and depends on .* the learning rate"),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}, "first update differs from later ones.*set dampening=0"),
        (torch.optim.RAdam, {"betaz": (0.9, 0.99)}, "has no option betaz; did you mean 'betas'"),
        (torch.optim.RAdam, {"betas": (2.0, 3.0)}, r"betas=\[2,3\] it fails.*Invalid beta parameter at index 0"),
        (Lamb, {}, "is not elementwise: .* the masters differ. It needs whole tensors"),
        (Lars, {}, "is not elementwise: .* the masters differ"),
        (Centered, {}, r"is not elementwise: .*weight of shape \[128, 136\] .* the masters differ"),
        (Counting, {}, "keeps more than its states"),
        (FixedRate, {}, "reads lr or weight_decay when it is built, not from param_groups"),
        (Distance, {}, "is not elementwise: .*in two parts"),
        (Noisy, {}, "is not elementwise"),
        (Shuffled, {}, "its state 'noise' starts neither from one value nor from the masters"),
        (Hidden, {}, "its signature hides its weight_decay; give weight_decay="),
    ],
)
def test_others_are_refused_with_the_reason(optimizer: Any, options: dict[str, Any], reason: str) -> None:
    random_state = torch.get_rng_state()
    with pytest.raises(ConfigError, match=rf"TorchOptimizer cannot take {optimizer.__name__}: (?s:.*){reason}"):
        rule_of(TorchOptimizer(optimizer, lr=1e-4, **options))
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_class_with_free_options_is_taken_once_they_are_given() -> None:
    record = TorchOptimizer(Hidden, weight_decay=0.1)
    assert record.decay == 0.1
    assert record.without_decay().options == {"weight_decay": 0.0}
    assert [spec.name for spec in rule_of(record).states] == ["exp_avg", "exp_avg_sq"]

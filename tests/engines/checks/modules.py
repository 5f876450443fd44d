"""Modules of other kinds than a plain layer: masks and buffers made from weights in a forward."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

import dtrain
from dtrain.checkpoint.names import plain_name
from dtrain.engine.parts.checkpoint import checkpointer
from dtrain.errors import ContractError, ModelError, UsageError
from dtrain.integrations.weights import whole_state_dict
from dtrain.parameters.escapes import tensors_in
from tests.engines import helpers
from tests.engines.matrix import Trial, check
from tests.helpers.net import Net

MASK, ORDER = torch.eye(4, dtype=torch.bool), torch.tensor([2, 0, 3, 1])


def masked(scores: Tensor, hidden: Tensor) -> Tensor:
    """As models do that take the minimum of a mask from the dtype of their hidden states."""
    return scores.masked_fill(MASK, torch.finfo(hidden.dtype).min)


def clamped(scores: Tensor, hidden: Tensor) -> Tensor:
    bounds = torch.finfo(hidden.dtype)
    return torch.where(MASK, bounds.min, scores).clamp(bounds.min, bounds.max)


def filled(scores: Tensor, hidden: Tensor) -> Tensor:
    mask = torch.full_like(scores, torch.finfo(hidden.dtype).min).triu(1)
    return torch.maximum(scores + mask, torch.full((4, 4), torch.finfo(hidden.dtype).min, dtype=scores.dtype))


def scattered(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores.new_zeros(4, 4).index_add_(0, ORDER, hidden) + scores


def assigned(scores: Tensor, hidden: Tensor) -> Tensor:
    out = torch.zeros_like(scores)
    out[ORDER] = hidden
    return torch.lerp(out, scores, 0.5)


class Attend(nn.Module):
    """Its norm returns FP32, and the product with its parameter has the dtype of that: FP32 under plain autocast."""

    def __init__(self, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.inner, self.scale = nn.LayerNorm(4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        scores = self.scale * F.softplus(self.inner(hidden))
        return self.combine(scores, hidden).softmax(-1)


@check(precisions=("bf16", "fp16"), ranks=(1, 2))
def fp32_of_norms_meets_what_weights_have_made(trial: Trial) -> None:
    torch.manual_seed(0)
    units = nn.ModuleList(map(Attend, (masked, clamped, filled, scattered, assigned)))
    model = Net(lambda net, x: torch.stack([unit(x) for unit in net.units]), units=units)
    x = torch.randn(4, 4)
    expected = model(x).square().mean()
    engine = trial.engine(model, loss_scale=1.0)
    engine.backward(engine(x).square().mean())
    outcome = engine.step()
    assert outcome.applied
    assert outcome.loss == pytest.approx(expected.item(), rel=1e-2)


class Wrapped(nn.Module):
    """Has a buffer, a frozen and a tied weight inside of what may be wrapped."""

    def __init__(self, wrap: str) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6))
        self.inner[2].requires_grad_(False)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.inner[3].weight
        if wrap == "child":
            self.inner[0] = torch.compile(self.inner[0], backend="eager")
        elif wrap == "checkpoint":
            self.inner = checkpoint_wrapper(self.inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.inner(x))


def wrapped(wrap: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = Wrapped(wrap)
    return torch.compile(model, backend="eager") if wrap == "all" else model


def plain_digests(engine: Any) -> dict[str, str]:
    return {plain_name(key.replace(":", ":.")): value for key, value in helpers.state_digests(engine).items()}


@check(
    ranks=(2, 1),
    variants={wrap: {} for wrap in ("child", "all", "checkpoint")},
    unless=lambda case: (case.engine, case.stage) == ("deepspeed", 3),  # refuses a compiled module
)
def a_checkpoint_knows_no_wrapper(trial: Trial) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(trial.rank))
    wrap, names = trial.case.variant, {}
    for number, (first, second) in enumerate(((wrap, ""), ("", wrap), (wrap, wrap))):
        saving, loading = trial.engine(wrapped(first, 1)), trial.engine(wrapped(second, 2))
        saving.backward(saving(x).square().mean())
        assert saving.step().applied
        saving.copy_buffers()
        folder = trial.folder / str(number)
        if number == 2:  # as older versions have saved it
            with mock.patch.object(checkpointer, "plain_names", lambda names: {name: name for name in names}):
                saving.save(folder)
        else:
            saving.save(folder)
        loading.load(folder)
        assert plain_digests(loading) == plain_digests(saving)
        names[number] = {label.partition(":")[2] for label in helpers.fingerprints(folder)}
    assert names[0] == names[1] == {plain_name(name) for name in names[2]}
    assert any(plain_name(name) != name for name in names[2]), "a control"


@dataclass
class Output:
    x: Tensor
    weight: Tensor


class Box:
    def __init__(self, x: Tensor, weight: Tensor) -> None:
        self.x, self.weight = x, weight


RETURNED: dict[str, Callable[[Tensor, nn.Parameter], Any]] = {
    "itself": lambda x, weight: (x, weight),
    "cast": lambda x, weight: (x, weight.to(x.dtype)),
    "in a list": lambda x, weight: [x, {"weight": weight}],
    "in a dataclass": Output,
    "in an object": Box,
    "a view": lambda x, weight: (x, weight.view(-1)),
    "a row": lambda x, weight: (x, weight[0]),
    "detached": lambda x, weight: (x, weight.detach()),
    "a copy": lambda x, weight: (x, weight.clone()),
}
KEPT: dict[str, Callable[[nn.Parameter], Any]] = {
    "kept": lambda weight: weight,
    "kept in a list": lambda weight: [weight],
    "kept view": lambda weight: weight.view(-1),
    "kept copy": lambda weight: weight.clone(),
}
SGD = dtrain.SGD(lr=0.1, momentum=0.0, weight_decay=0.0)
BY_NAME = {"itself", "cast", "in a list", "in a dataclass", "in an object", "kept", "kept in a list"}
REFUSED = {
    "native": BY_NAME,  # what has no name is a tensor of its own
    "fsdp2": {"kept", "kept in a list", "kept view"},
    "deepspeed": {"in a list", "kept in a list"},
}


class Giving(nn.Module):
    """A unit whose weight leaves its forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.eye(5) + torch.rand(5, 5) / 10), kind

    def forward(self, x: Tensor) -> Any:
        if self.kind in RETURNED:
            return RETURNED[self.kind](x @ self.weight, self.weight)
        self.kept = KEPT[self.kind](self.weight)
        return x @ self.weight


class Taking(nn.Module):
    """Reads each weight after all units have run; more units than any engine keeps gathered."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.units = nn.ModuleList(Giving(kind) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        taken = []
        for unit in self.units:
            given = unit(x)
            leaves = (
                list(tensors_in(given))
                if isinstance(given, tuple | list | Output | Box)
                else [given, *tensors_in(unit.kept)]
            )
            x, weight = leaves
            taken.append(weight)
        return x.square().mean() + sum(weight.square().mean() for weight in taken)


@check(ranks=(2, 1))
def a_weight_that_leaves_its_unit_has_its_values_or_is_refused(trial: Trial) -> None:
    engine_name, stage = trial.case.engine, trial.case.stage
    is_freed = stage == 3 and (trial.ranks > 1 or engine_name != "native")
    refused = REFUSED[engine_name] if is_freed else set()
    x = torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    # DeepSpeed frees what an object holds too, and some operations read it before
    kinds = [kind for kind in (*RETURNED, *KEPT) if (engine_name, kind) != ("deepspeed", "in an object")]
    for kind in kinds:
        torch.manual_seed(0)
        model = Taking(kind)
        plain, engine = deepcopy(model), trial.engine(model, optimizer=SGD, max_grad_norm=None)
        if kind in refused:
            with pytest.raises(ModelError, match="parameter"):
                engine.backward(engine(x))
            continue
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(3):
            sgd.zero_grad()
            expected = plain(x)
            expected.backward()
            sgd.step()
            engine.backward(engine(x))
            assert engine.step().loss == pytest.approx(expected.item(), rel=1e-6), kind
        with engine.eval():
            assert engine(x).item() == pytest.approx(plain(x).item(), rel=1e-6), kind
        held = engine.states.unsharded_parameters().values()
        assert all(len(weight._backward_hooks or ()) <= 1 for weight in held), "a library's hooks do not add up"


class Direct(nn.Module):
    """Calls parts of its units, and not the units."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.method = method

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            if self.method == "forward":
                x = unit.forward(x)
            elif self.method == "part":
                x = unit[1](unit[0](x))
            else:
                x = F.linear(x, unit[0].weight).tanh()
        return x.square().mean()


@check(precisions=("fp32", "bf16"))
def a_unit_that_is_not_called_trains_or_is_refused_in_every_precision(trial: Trial) -> None:
    is_refused = trial.case.engine == "fsdp2" or (trial.case.engine, trial.case.stage) == ("native", 3)
    for method in ("forward", "part", "weight"):
        torch.manual_seed(0)
        engine = trial.engine(Direct(method))
        if not is_refused:
            engine.backward(engine(torch.ones(2, 4)))
            assert engine.step().applied
            continue
        with pytest.raises(ModelError, match=r"outside (the forward of 'units.0'|a call of that unit)"):
            engine(torch.ones(2, 4))


class Changing(nn.Module):
    """Changes itself in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.first = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
        self.units = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.spare = nn.Linear(4, 4, bias=False)
        self.register_buffer("steps", torch.zeros(1))
        self.change: Callable[[Changing], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        change, self.change = self.change, None
        if change is not None:
            change(self)
        x = self.first(x)
        for unit in self.units:
            x = unit(x)
        scale = getattr(self, "scale", None)
        return (x if scale is None else x * scale).square().mean() + 0 * self.steps.float().sum()


REFUSED_CHANGES: dict[str, Callable[[Changing], Any]] = {
    "'scale' was (replaced|removed)": lambda model: delattr(model, "scale"),
    "'scale' was replaced": lambda model: model._parameters.update(scale=nn.Parameter(torch.ones(4))),
    "'units.0.0.weight' was replaced": lambda model: model.units[0][0]._parameters.update(
        weight=nn.Parameter(torch.eye(4))
    ),
    "'first.weight' was replaced": lambda model: setattr(model, "first", nn.Linear(4, 4)),
    "'units.1.0.weight' was removed": lambda model: model.units.__delitem__(1),
    "'spare.weight' was removed": lambda model: delattr(model, "spare"),
    "'late' was added": lambda model: setattr(model, "late", nn.Parameter(torch.ones(4))),
    "'spare.bias' was added": lambda model: setattr(model.spare, "bias", nn.Parameter(torch.ones(4))),
    "'units.2.weight' was added": lambda model: model.units.append(nn.Linear(4, 4)),
}


def passing(inner: nn.Module) -> nn.Module:
    """A wrapper of a user's own."""
    return Net(lambda net, x: net.inner(x), inner=inner)


HARMLESS_CHANGES: list[Callable[[Changing], Any]] = [
    lambda model: setattr(model, "first", passing(model.first)),
    lambda model: setattr(model, "spare", torch.compile(model.spare, backend="eager")),
    lambda model: model.units.__setitem__(0, checkpoint_wrapper(model.units[0])),
    lambda model: setattr(model, "teacher", nn.Linear(4, 4).requires_grad_(False)),
    lambda model: model.units[0].__setitem__(1, nn.GELU()),
    lambda model: model.add_module("meter", nn.Identity()),
    lambda model: model.units.append(nn.Dropout()),
    lambda model: setattr(model, "steps", torch.ones(3)),
    lambda model: setattr(model, "steps", torch.ones(1, dtype=torch.float64)),
    lambda model: model.register_buffer("late", torch.ones(2)),
    lambda model: model.register_buffer("cache", torch.ones(2), persistent=False),
]


@check(
    ranks=(2, 1),
    variants={"between": {}, "inside": {}},
    unless=lambda case: (case.engine, case.stage) == ("deepspeed", 3),  # its own error
)
def a_parameter_that_appears_or_disappears_is_refused(trial: Trial) -> None:
    x = torch.ones(2, 4)

    def begin(change: Callable[[Changing], Any]) -> Any:
        torch.manual_seed(0)
        model = Changing()
        engine = trial.engine(model)
        engine.backward(engine(x))
        engine.step()
        if trial.case.variant == "between":
            change(model)
        else:
            model.change = change
        return engine

    for message, change in REFUSED_CHANGES.items():
        engine = begin(change)
        with pytest.raises((UsageError, ContractError), match=f"parameter {message} after dtrain.initialize"):
            step(engine, x)
    for change in HARMLESS_CHANGES:
        assert step(begin(change), x).applied


class Wrapping(nn.Module):
    """Has units with buffers, a frozen weight and two tied ones, to be wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.units[1][0].requires_grad_(False)
        self.tied, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return self.head(self.tied(x)).square().mean()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "checkpoint": checkpoint_wrapper,
    "own": passing,
}


@check(
    ranks=(2, 1),
    variants={wrap: {} for wrap in WRAPPERS},
    unless=lambda case: (case.engine, case.stage) == ("deepspeed", 3),  # knows no module that it has not prepared
)
def modules_that_are_wrapped_later_train_and_are_saved_as_before(trial: Trial) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(trial.rank))

    def begin(steps: int) -> Any:
        torch.manual_seed(1)
        engine = trial.engine(Wrapping(), audit=1)
        for _ in range(steps):
            step(engine, x)
        return engine

    for steps in (0, 1):  # the contract is observed in the first forward
        plain, wrapped = begin(steps), begin(steps)
        model, wrap = wrapped.module, WRAPPERS[trial.case.variant]
        model.units[0], model.units[1], model.head = wrap(model.units[0]), wrap(model.units[1]), wrap(model.head)
        model.teacher = nn.Linear(4, 4).requires_grad_(False)
        for engine in (plain, wrapped):
            for _ in range(2):
                assert step(engine, x).applied
            engine.copy_buffers()
            engine.memory()
            with engine.modify_weights("units.0.0.weight", "head.weight"):
                engine.module.tied.weight.mul_(0.5)
        folders = [trial.folder / f"{steps}-{name}" for name in ("plain", "wrapped")]
        plain.save(folders[0])
        wrapped.save(folders[1])
        prints = [helpers.fingerprints(folder) for folder in folders]
        others = {label for label, print_ in prints[0].items() if prints[1].get(label) != print_}
        assert prints[0].keys() == prints[1].keys()
        if trial.case.variant == "checkpoint":  # counts what it computes twice
            others = {label for label in others if not label.startswith("buffer:")}
        assert not others
        plain.load(folders[1])
        for engine in (plain, wrapped):
            engine.load(folders[0])
        with plain.full_model() as some, wrapped.full_model() as other:
            assert torch.equal(some(x), other(x))
        assert step(plain, x).loss == step(wrapped, x).loss
        state = whole_state_dict(wrapped)
        if trial.rank == 0 and trial.case.variant != "checkpoint":  # which hides its own name
            assert state.keys() == model.state_dict().keys()
        model.teacher.requires_grad_(True)
        with pytest.raises(UsageError, match=r"'teacher.weight' was added"):
            step(wrapped, x)


@check(ranks=(2, 1), unless=lambda case: (case.engine, case.stage) == ("deepspeed", 3))  # gathers it anywhere
def a_second_name_of_a_weight_is_its_values_or_refused(trial: Trial) -> None:
    x, model = torch.ones(2, 4), Changing()
    engine = trial.engine(model)
    step(engine, x)
    model.register_parameter("scale_too", model.scale)
    model.units[1].register_parameter("first", model.units[0][0].weight)
    if engine.states.unshared_parameters():
        with pytest.raises(UsageError, match=r"was given a second name after dtrain\.initialize"):
            step(engine, x)
    else:
        assert step(engine, x).applied


def step(engine: Any, x: Tensor) -> Any:
    engine.backward(engine(x))
    return engine.step()

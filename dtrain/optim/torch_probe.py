"""Finds the states of an optimizer of torch, and proves that it updates each element by itself."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer

from dtrain.config.fields import shown
from dtrain.config.optim import TorchOptimizer
from dtrain.errors import ConfigError, nearest
from dtrain.optim.rule import StateSpec
from dtrain.optim.torch_states import BoundOptimizer, KeptStates

_CHUNK = 1024
_NUMEL = 17 * _CHUNK
_SHAPES = ((128, 136), (8, 17, 32, 4))
"""A matrix and a convolution's weight; some optimizers factor nothing below 128 rows and columns."""
_DECAY = 0.1
"""Weight decay of the proof. It is not 0, because LARS needs whole tensors for parameters that decay only."""
_KINDS = ("master", "main_grad", "ema", "buffer", "frozen")  # what a checkpoint names so


def probe(record: TorchOptimizer, device: torch.device) -> KeptStates:
    """Returns what the class of ``record`` keeps, after the proof that it is elementwise on ``device``.

    Raises:
        ConfigError: the reason why dtrain cannot give it shards of the masters.
    """
    if active_fake_mode() is not None:  # a plan has no values; what is proven on real tensors of the CPU is planned
        with unset_fake_temporarily():
            return probe(record, torch.device("cpu"))
    parameters = inspect.signature(record.load()).parameters
    choices: list[dict[str, Any]] = [{}]
    if device.type != "cpu" and "foreach" in parameters and "foreach" not in record.options:
        choices.append({"foreach": False})  # its kernels may round by position
    for choice in choices:
        try:
            with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
                return _Proof(replace(record, options={**record.options, **choice}), device).run()
        except ConfigError:
            if choice is choices[-1]:
                raise
    raise AssertionError("unreachable")


class _Proof:
    """Three updates with the same random data, in different cuts and shapes: all must give equal bits."""

    def __init__(self, record: TorchOptimizer, device: torch.device) -> None:
        self._class = record.load()
        self._options = record.options
        self._lr = record.lr or 1e-3
        generator = torch.Generator().manual_seed(0)
        scale = torch.logspace(-4, 0, _NUMEL)  # a small learning rate shows in the bits of small masters
        masters, *grads = ((scale * torch.randn(_NUMEL, generator=generator)).to(device) for _ in range(7))
        self._masters = masters
        self._grads, self._other_grads = grads[:3], grads[3:]

    def run(self) -> KeptStates:
        self._check_signature()
        try:
            kept = self._discover()
            self._prove(kept)
        except ConfigError:
            raise
        except Exception as error:
            given = ", ".join(f"{key}={shown(value)}" for key, value in self._options.items())
            raise self._refused(
                f"with {given or 'its default options'} it fails on 1-D FP32 tensors, which are what a rank holds of "
                f"any weight: {type(error).__name__}: {error}"
            ) from error
        return kept

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError(f"TorchOptimizer cannot take {self._class.__name__}: {reason}")

    def _check_signature(self) -> None:
        parameters = inspect.signature(self._class).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for key in ("lr", *self._options):
            if key not in parameters and not takes_all:
                raise self._refused(f"it has no option {key}{nearest(key, list(parameters))}")
        closure = inspect.signature(self._class.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise self._refused(
                "its step needs a closure that computes the loss again; a step of dtrain has computed it"
            )

    def _build(self, parameters: list[nn.Parameter], **changes: Any) -> Optimizer:
        built: Optimizer = self._class(parameters, **{"lr": self._lr, **self._options, **changes})
        return built

    # -- which states --------------------------------------------------------------------------------------------------

    def _discover(self) -> KeptStates:
        """Finds the states, and their values before the first update, by an update with gradients of 0."""
        parameter = nn.Parameter(self._masters.clone())
        optimizer = self._build([parameter])
        self._check_decay(optimizer)
        first = _record_first_values(optimizer, parameter)
        counts: list[dict[str, float]] = []
        for grad in (torch.zeros_like(parameter), *self._grads[:2]):
            parameter.grad = grad.clone()
            optimizer.step()
            state = {key: value for key, value in optimizer.state[parameter].items() if value is not None}
            if not counts:
                first = {key: _copy(value) if first.get(key) is None else first[key] for key, value in state.items()}
            counts.append({key: float(value) for key, value in state.items() if _is_number(value)})
        tensors = {key: self._spec(key, value) for key, value in first.items() if not _is_number(value)}
        names = [spec.name for spec in tensors.values()]
        if len({*names}) < len(names):
            raise self._refused(f"two of its states have one name in lower case: {', '.join(tensors)}")
        shared = {key: _copy(value) for key, value in state.items() if key not in tensors and _is_number(value)}
        numbers = {key: float(first[key]) for key in shared if [count[key] for count in counts] != [1.0, 2.0, 3.0]}
        return KeptStates(self._build, tensors, shared, numbers)

    def _check_decay(self, optimizer: Optimizer) -> None:
        group = optimizer.param_groups[0]
        if "weight_decay" not in group:
            return
        if "weight_decay" not in {*self._options, *inspect.signature(self._class).parameters}:
            raise self._refused("its signature hides its weight_decay; give weight_decay=..., 0 for none")
        group["weight_decay"] = 0.0  # while the states are searched

    def _spec(self, key: str, start: Any) -> StateSpec:
        name = re.sub(r"[^a-z0-9]+", "_", key.lower()).strip("_")
        name = f"state_{name}" if name in _KINDS or not name[:1].isalpha() else name
        if not isinstance(start, Tensor) or start.shape != self._masters.shape:
            held = f"shape {list(start.shape)}" if isinstance(start, Tensor) else f"type {type(start).__name__}"
            raise self._refused(f"its state '{key}' of a vector of {_NUMEL} elements has {held}, not one for each")
        if (start == start[0]).all():
            return StateSpec(name, start.dtype, float(start[0]))
        if torch.equal(start.to(self._masters.dtype), self._masters):
            return StateSpec(name, start.dtype, None)
        raise self._refused(f"its state '{key}' starts neither from one value nor from the masters")

    # -- the proof -----------------------------------------------------------------------------------------------------

    def _prove(self, kept: KeptStates) -> None:
        alone = self._alone(kept, (_NUMEL,))
        for shape in _SHAPES:
            self._require_elementwise(
                f"of a weight of shape {list(shape)} and of the same elements as a vector",
                _difference(alone, self._alone(kept, shape)),
            )
        if different := _difference(alone, self._bound(kept, [_NUMEL])):
            raise self._refused(
                f"its first update differs from later ones, with states that start as {_starts(kept)}: {different}. "
                f"dtrain prepares the states before the first gradient (SGD: set dampening=0)"
            )
        if different := _difference(alone, self._bound(kept, [_NUMEL], rebuilds=True)):
            raise self._refused(
                f"it keeps more than its states: if a new instance takes over after each update, {different}. A "
                f"checkpoint could not restore it"
            )
        for together in (True, False):
            cut = self._bound(kept, [_CHUNK, _NUMEL - _CHUNK], together=together)
            self._require_elementwise("of a tensor as a whole and in two parts", _difference(alone, cut))
        self._require_settable(kept, alone)

    def _require_elementwise(self, what: str, different: str) -> None:
        if different:
            raise self._refused(
                f"it is not elementwise: after three updates {what}, {different}. It needs whole tensors, and a rank "
                f"holds shards of the masters. Choose one that updates each element by itself, or dtrain.Muon"
            )

    def _require_settable(self, kept: KeptStates, alone: Mapping[str, Tensor]) -> None:
        """Checks that updates follow param_groups, and that no shared number depends on what they follow."""
        lr, names = self._lr / 2, ["lr"]
        build: partial[Optimizer] = partial(self._build, lr=lr)
        if "weight_decay" in self._build([nn.Parameter(self._masters[:1].clone())]).param_groups[0]:
            build, names = partial(build, weight_decay=0.0), ["lr", "weight_decay"]
        changed = self._bound(kept, [_NUMEL], grads=self._other_grads, lr=lr, decay=0.0)
        for key in kept.numbers:
            if not torch.equal(changed[key], alone[key]):
                raise self._refused(
                    f"its state '{key}' is one number for a parameter, and depends on the gradient, the learning rate "
                    f"or the weight decay; ranks could not share it"
                )
        built = self._bound(replace(kept, build=build), [_NUMEL], grads=self._other_grads, lr=lr, decay=0.0)
        if different := _difference(built, changed):
            raise self._refused(
                f"it reads {' or '.join(names)} when it is built, not from param_groups at each update: {different}"
            )

    def _alone(self, kept: KeptStates, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Returns masters and states after three updates by the class alone, as torch runs it."""
        parameter = nn.Parameter(self._masters.clone().view(shape))
        optimizer = self._build([parameter])
        if "weight_decay" in optimizer.param_groups[0]:
            optimizer.param_groups[0]["weight_decay"] = _DECAY
        for grad in self._grads:
            parameter.grad = grad.clone().view(shape)
            optimizer.step()
        found = {"the masters": parameter.detach().view(-1)}
        for key, value in optimizer.state[parameter].items():
            if _is_number(value) and (key in kept.numbers or key not in kept.shared):  # else it counts the updates
                found[key] = torch.tensor(float(value), dtype=torch.float64)
            elif isinstance(value, Tensor) and not _is_number(value):
                found[key] = value.reshape(-1)
        return found

    def _bound(
        self,
        kept: KeptStates,
        sizes: Sequence[int],
        *,
        grads: Sequence[Tensor] | None = None,
        lr: float | None = None,
        decay: float = _DECAY,
        together: bool = True,
        rebuilds: bool = False,
    ) -> dict[str, Tensor]:
        """Returns masters and states after three updates by ``BoundOptimizer``, the masters cut into ``sizes``."""
        masters = self._masters.clone()
        states = {key: spec.like(masters) for key, spec in kept.tensors.items()}
        cuts = [tensor.split(list(sizes)) for tensor in (masters, *states.values())]
        parts = [[*range(len(sizes))]] if together else [[part] for part in range(len(sizes))]
        bound: list[BoundOptimizer] = []
        numbers = kept.numbers
        for number, grad in enumerate(self._grads if grads is None else grads, start=1):
            if rebuilds or not bound:
                tensors = [[[cut[part] for part in own] for cut in cuts] for own in parts]
                bound = [BoundOptimizer(kept, own[0], own[1:]) for own in tensors]
            cut_grad = grad.clone().split(list(sizes))
            for instance, own in zip(bound, parts, strict=True):
                own_grads = [cut_grad[part] for part in own]
                after = instance.update(own_grads, number, self._lr if lr is None else lr, decay, numbers)
            numbers = after
        shared = {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()}
        return {"the masters": masters, **states, **shared}


class _Recorded(dict[str, Any]):
    """The state of a parameter, which copies each value when it is first set."""

    def __init__(self, first: dict[str, Any], values: Mapping[str, Any]) -> None:
        super().__init__()
        self._first = first
        self.update(values)

    def __setitem__(self, key: str, value: Any) -> None:
        self._first.setdefault(key, _copy(value))
        super().__setitem__(key, value)

    def update(self, *values: Any, **more: Any) -> None:
        for key, value in dict(*values, **more).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


def _record_first_values(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Returns a dict that gets a copy of each state of ``parameter`` when the optimizer first sets it."""
    first: dict[str, Any] = {}
    earlier = optimizer.state.get(parameter)  # what it has set when it was built
    optimizer.state = defaultdict(lambda: _Recorded(first, {}))
    if earlier:
        optimizer.state[parameter] = _Recorded(first, earlier)
    return first


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _starts(kept: KeptStates) -> str:
    return ", ".join(f"{key}={'the masters' if spec.init is None else spec.init}" for key, spec in kept.tensors.items())


def _difference(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str:
    """Returns the first difference, or an empty string."""
    if expected.keys() != got.keys():
        return f"the states are {', '.join([*expected][1:])} and {', '.join([*got][1:])}"
    for key, tensor in expected.items():
        if not torch.equal(tensor.to(got[key].device), got[key]):
            return f"{key if key == 'the masters' else f'state {key}'} differ{'' if key == 'the masters' else 's'}"
    return ""

"""The optimizers' records: ``dtrain.Muon(lr=1e-3)`` in a script, the keys of ``optim`` on the command line."""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, make_dataclass, replace
from typing import Any, ClassVar

from dtrain.config.fields import CheckedRecord, above, at_least, between, one_of, option, setting, shown
from dtrain.config.imports import NAMED, NamedClass, load_named
from dtrain.errors import ConfigError, nearest

_COMPILE = "Compile the update (on a GPU norm and vote too), which takes seconds; auto: on a GPU with a compiler."
_BETAS = "Decay rates of the two moments, each in [0, 1)."
_DECOUPLED = "Decoupled weight decay; norms and biases are not decayed."
_ADDED = "Weight decay, added to the gradient; norms and biases are not decayed."
_LR = "Peak learning rate."


@dataclass(frozen=True)
class Optimizer(CheckedRecord):
    """Optimizer on the FP32 masters. `dtrain doctor engines` tells which engine takes which."""

    group_keys: ClassVar[tuple[str, ...]] = ("weight_decay",)
    """Fields that an entry of ``groups`` may change, beside ``lr_factor`` and ``schedule``."""

    name: str = option("adamw")
    lr: float = at_least(1e-3, 0.0, _LR)
    _: KW_ONLY
    groups: dict[str, Any] = setting(
        {},
        "Other hyper-parameters by name pattern of parameters or modules, the first that matches: "
        "{'*.embed*': {lr_factor: 0.1, weight_decay: 0}}.",
        kind=dict[str, dict[str, Any]],
        what="a mapping {name pattern: {setting: value}}",
    )

    def _check(self) -> None:
        betas = getattr(self, "betas", None)
        if betas is not None and (len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas)):
            raise ConfigError(f"{self._key('betas')}={list(betas)} must be two numbers in [0, 1), such as [0.9, 0.95]")
        if getattr(self, "momentum", 0.0) == 1.0:
            raise ConfigError(f"{self._entry('momentum')} never forgets a gradient; it must be below 1, such as 0.9")
        for pattern, changes in self.groups.items():
            self.with_changes(pattern)
            lr_factor = changes.get("lr_factor", 1.0)
            is_number = isinstance(lr_factor, (int, float)) and not isinstance(lr_factor, bool)
            if not (is_number and 0 <= lr_factor < math.inf):
                raise ConfigError(
                    f"{self._key('groups')}: lr_factor={shown(lr_factor)} of '{pattern}' must be a finite number >= 0"
                )

    @property
    def decay(self) -> float:
        """The weight decay; 0 if the optimizer has none."""
        return getattr(self, "weight_decay", 0.0)

    def without_decay(self) -> Optimizer:
        """Returns the record with a weight decay of 0: what parameters with different weight decays share."""
        changes: dict[str, Any] = {"weight_decay": 0.0} if hasattr(self, "weight_decay") else {}
        return replace(self, **changes)

    def with_changes(self, pattern: str) -> Optimizer:
        """Returns the record as the entry ``pattern`` of ``groups`` changes it, without ``groups``.

        Raises:
            ConfigError: a key that a group cannot change, or a value that the record refuses.
        """
        changes = {key: value for key, value in self.groups[pattern].items() if key not in ("lr_factor", "schedule")}
        for key in changes:
            if key not in self.group_keys:
                known = ("lr_factor", "schedule", *self.group_keys)
                raise ConfigError(
                    f"{self._key('groups')}: '{pattern}' sets {key}; a group of {self.name} can set "
                    f"{', '.join(known)}{nearest(key, known)}"
                )
        try:
            return replace(self, groups={}, **changes)
        except ConfigError as error:
            raise ConfigError(f"{self._key('groups')}, '{pattern}': {error}") from None


@dataclass(frozen=True)
class AdamW(Optimizer):
    """AdamW on the FP32 masters (Loshchilov and Hutter, 2019)."""

    group_keys: ClassVar[tuple[str, ...]] = ("weight_decay", "betas", "eps")

    name: str = option("adamw")
    lr: float = at_least(1e-3, 0.0, _LR)
    betas: tuple[float, float] = setting((0.9, 0.95), _BETAS)
    eps: float = at_least(1e-8, 0.0, "Term added to the denominator.")
    weight_decay: float = at_least(0.1, 0.0, _DECOUPLED)
    compile: bool | str = one_of("auto", True, False, doc=_COMPILE)


@dataclass(frozen=True)
class AdamWBF16(AdamW):
    """AdamW with both moments in BF16, rounded stochastically: 4 bytes a parameter instead of 8."""

    name: str = option("adamw-bf16")


@dataclass(frozen=True)
class Adam(AdamW):
    """Adam (Kingma and Ba, 2015): weight decay is added to the gradient."""

    name: str = option("adam")
    betas: tuple[float, float] = setting((0.9, 0.999), _BETAS)
    weight_decay: float = at_least(0.0, 0.0, _ADDED)


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, by the formula of ``torch.optim.SGD``."""

    group_keys: ClassVar[tuple[str, ...]] = ("weight_decay", "momentum")

    name: str = option("sgd")
    lr: float = at_least(0.1, 0.0, _LR)
    momentum: float = between(0.9, 0.0, 1.0, "Factor of the previous steps' momentum.")
    nesterov: bool = setting(False, "Look ahead by Nesterov's momentum.")
    weight_decay: float = at_least(0.0, 0.0, _ADDED)
    compile: bool | str = one_of("auto", True, False, doc=_COMPILE)

    def _check(self) -> None:
        super()._check()
        if self.nesterov and not self.momentum:
            raise ConfigError(f"{self._entry('nesterov')} needs {self._key('momentum')} above 0")


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion (Chen et al., 2023): the sign of an interpolated momentum; takes a third of AdamW's lr or less."""

    group_keys: ClassVar[tuple[str, ...]] = ("weight_decay", "betas")

    name: str = option("lion")
    lr: float = at_least(3e-4, 0.0, _LR)
    betas: tuple[float, float] = setting((0.9, 0.99), "Weight of the momentum in the sign, and its decay rate.")
    weight_decay: float = at_least(0.3, 0.0, _DECOUPLED)
    compile: bool | str = one_of("auto", True, False, doc=_COMPILE)


@dataclass(frozen=True)
class Muon(Optimizer):
    """Muon (Jordan et al., 2024) for matrices of hidden layers; AdamW for embeddings, output layers and vectors.

    An output layer is known by having as many rows as an embedding; name others, such as a classifier's, in ``adamw``.
    ``match_rms_adamw`` is the rule of Liu et al., Muon is Scalable for LLM Training (2025).

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 4, bias=False))
        >>> engine = dtrain.initialize(model, optimizer=dtrain.Muon(lr=1e-3, adamw=["1"]))
        >>> engine.memory_formula()["moments"]  # 64 elements x 4 bytes of momentum, 32 x 8 of AdamW's moments
        512
    """

    group_keys: ClassVar[tuple[str, ...]] = ("weight_decay", "momentum", "betas", "eps")

    name: str = option("muon")
    lr: float = at_least(3e-3, 0.0, _LR)
    momentum: float = between(0.95, 0.0, 1.0, "Decay rate of the momentum of matrices.")
    nesterov: bool = setting(True, "Look ahead by Nesterov's momentum.")
    weight_decay: float = at_least(0.1, 0.0, _DECOUPLED)
    adjust_lr: str = one_of(
        "match_rms_adamw",
        "original",
        doc="Learning rate of a matrix [a, b]: match_rms_adamw: 0.2 sqrt(max(a, b)) x lr, so that AdamW's lr and "
        "weight decay carry over; original: sqrt(max(1, a / b)) x lr.",
    )
    ns_steps: int = between(5, 1, 99, "Newton-Schulz iterations.")
    adamw: list[str] = setting([], "Name patterns of more matrices that AdamW updates, such as ['head'].")
    splits: dict[str, Any] = setting(
        {},
        "Sizes along the first dim of the matrices that a fused weight holds, by name pattern: "
        "{'*.qkv.weight': [256, 64, 64]}; dtrain's models name theirs.",
        kind=dict[str, list[int]],
        what="a mapping {name pattern: [sizes]}",
    )
    betas: tuple[float, float] = setting((0.9, 0.95), "Decay rates of AdamW's moments, each in [0, 1).")
    eps: float = at_least(1e-8, 0.0, "Term added to AdamW's denominator.")
    compile: bool | str = one_of(
        "auto", True, False, doc="Compile AdamW's part, which takes seconds; auto: on a GPU with a compiler."
    )

    @property
    def for_vectors(self) -> AdamW:
        """AdamW's hyper-parameters."""
        return AdamW(lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, compile=self.compile)


@dataclass(frozen=True, init=False)
class TorchOptimizer(Optimizer):
    """Any optimizer of torch, or of your own, that updates each element by itself; proven when the run starts.

    ``factory`` is the class, or its name as ``package.module:Class``; its options may be given by name.

    Examples:
        >>> dtrain.TorchOptimizer(torch.optim.RAdam, lr=1e-3, betas=(0.9, 0.99)).options
        {'betas': (0.9, 0.99)}
    """

    name: str = option("torch")
    factory: str = setting("torch.optim:RAdam", "Class of the optimizer, as package.module:Class.")
    lr: float = at_least(1e-3, 0.0, _LR)
    _: KW_ONLY
    options: dict[str, Any] = setting({}, "The class's other options, such as {betas: [0.9, 0.99]}.")

    def __init__(
        self,
        factory: str | type,
        lr: float = 1e-3,
        *,
        options: Mapping[str, Any] | None = None,
        groups: Mapping[str, Any] | None = None,
        name: str = "torch",
        **more: Any,
    ) -> None:
        values = {"factory": NamedClass(factory) if isinstance(factory, type) else factory, "lr": lr, "name": name}
        values |= {"options": {**(options or {}), **more}, "groups": dict(groups or {})}
        for key, value in values.items():
            object.__setattr__(self, key, value)
        self.__post_init__()

    def _check(self) -> None:
        if not NAMED.fullmatch(self.factory) and not isinstance(self.factory, NamedClass):
            raise ConfigError(f"{self._entry('factory')} must be package.module:Class, such as torch.optim:RAdam")
        if isinstance(self.factory, NamedClass):
            self.load()
        for key in ("lr", "params"):
            if key in self.options:
                raise ConfigError(f"{self._key('options')} sets {key}; give {self._key('lr')}, or lr_factor in a group")
        try:
            json.dumps(self.options)
        except TypeError as error:
            raise ConfigError(
                f"{self._key('options')}={shown(self.options)} must be numbers, text, or lists of them, which the "
                f"ranks can compare ({error})"
            ) from None
        pairs = {key: tuple(value) if isinstance(value, list) else value for key, value in self.options.items()}
        object.__setattr__(self, "options", pairs)  # as a script writes them
        super()._check()

    def load(self) -> type[Any]:
        """Returns the class; raises ``ConfigError`` if it cannot be imported or is no ``torch.optim.Optimizer``."""
        named = self.factory
        found = named.loaded if hasattr(named, "loaded") else load_named(named, self._key("factory"))
        base = getattr(sys.modules.get("torch.optim"), "Optimizer", ())
        if not isinstance(found, type) or not issubclass(found, base):
            raise ConfigError(
                f"{self._key('factory')}={shown(found)} is not a class derived from torch.optim.Optimizer; give the "
                f"class and its options: dtrain.TorchOptimizer(torch.optim.RAdam, lr=1e-3, betas=(0.9, 0.99))"
            )
        return found

    @property
    def decay(self) -> float:
        """The option ``weight_decay``, else the class's default; 0 if it has none."""
        found = inspect.signature(self.load()).parameters.get("weight_decay")
        value = self.options.get("weight_decay", getattr(found, "default", 0.0))
        return float(value) if isinstance(value, (int, float)) else 0.0

    def without_decay(self) -> TorchOptimizer:
        """Returns the record with a weight decay of 0, if the class has one."""
        takes = "weight_decay" in {*self.options, *inspect.signature(self.load()).parameters}
        return replace(self, options={**self.options, "weight_decay": 0.0}) if takes else self

    def with_changes(self, pattern: str) -> TorchOptimizer:
        """Returns the record with the options that the entry ``pattern`` of ``groups`` changes, without ``groups``."""
        changes = {key: value for key, value in self.groups[pattern].items() if key not in ("lr_factor", "schedule")}
        try:
            return replace(self, groups={}, options={**self.options, **changes})
        except ConfigError as error:
            raise ConfigError(f"{self._key('groups')}, '{pattern}': {error}") from None


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "adamw-bf16": AdamWBF16,
    "adam": Adam,
    "sgd": SGD,
    "lion": Lion,
    "muon": Muon,
    "torch": TorchOptimizer,
}
"""Records by the name that ``optim=`` takes."""


@dataclass(frozen=True)
class OptimKeys(Optimizer):
    """Keys of ``optim``: an optimizer's record, the clipping threshold, and what a missing gradient means."""

    max_grad_norm: float | None = above(1.0, 0.0, "Norm to which the gradient is clipped; null: no clipping.")
    missing_grad: str = one_of(
        *("skip", "zero"),
        doc="A parameter without a gradient in a step keeps its bits (skip, as in torch), or has a gradient of zero.",
    )

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer's record alone."""
        record = OPTIMIZERS[self.name]
        return record(**{item.name: getattr(self, item.name) for item in fields(record)})


@dataclass(frozen=True)
class OptimConfig(AdamW, OptimKeys):
    __doc__ = AdamW.__doc__


def _keys_of(record: type[Optimizer]) -> type[OptimKeys]:
    return make_dataclass(
        f"{record.__name__}Keys",
        [],
        bases=(record, OptimKeys),
        frozen=True,
        namespace={"__doc__": record.__doc__, "__module__": __name__},
    )


OPTIM_KEYS: dict[str, type[OptimKeys]] = {
    name: OptimConfig if record is AdamW else _keys_of(record) for name, record in OPTIMIZERS.items()
}
"""Records of the keys of ``optim`` by option."""


@dataclass(frozen=True)
class EmaConfig(CheckedRecord):
    """Exponential moving average of the weights, which validation reports beside the weights' own loss."""

    decay: float | None = between(None, 0.0, 1.0, "Decay of the average in an applied step, such as 0.999; null: none.")

    def _check(self) -> None:
        if self.decay == 1.0:
            raise ConfigError(f"{self._entry('decay')} keeps the first weights; it must be below 1, such as 0.999")

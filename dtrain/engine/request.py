"""The validated arguments of ``dtrain.initialize``, passed to the module of the chosen engine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from weakref import WeakSet

from torch import nn

from dtrain.checkpoint.frozen_source import FrozenSource
from dtrain.config.audit import Audit
from dtrain.config.blocks import Blocks
from dtrain.config.engines import EngineConfig
from dtrain.config.optim import Optimizer
from dtrain.config.schedule import AnySchedule
from dtrain.parameters.model_states import ManagedModel
from dtrain.precision.loss_scale import LossScaleState


@dataclass(frozen=True)
class StepOptions:
    """Settings of a step; equal on all ranks.

    Attributes:
        engine: the record of the chosen engine.
        max_grad_norm: clipping threshold of the global norm, or None.
        ema_decay: decay of the moving average of the weights; None: no average.
        audit: which steps are audited.
        blocks: what is done to the blocks of the model.
        missing_grad: whether a parameter without a gradient in a step is left alone, or updated with zeros.
    """

    engine: EngineConfig
    optimizer: Optimizer
    schedule: AnySchedule
    max_grad_norm: float | None
    ema_decay: float | None = None
    audit: Audit = field(default_factory=Audit)
    blocks: Blocks = field(default_factory=Blocks)
    missing_grad: str = "skip"

    @property
    def zero_stage(self) -> int:
        return self.engine.zero_stage

    @property
    def reproducible(self) -> bool:
        return self.engine.reproducible

    @property
    def max_consecutive_skips(self) -> int:
        return self.engine.max_consecutive_skips


@dataclass(frozen=True)
class RunIdentity:
    """The name of a run and the seed of its random numbers."""

    run_id: str
    seed: int


@dataclass(frozen=True)
class EngineRequest(ManagedModel):
    """Everything that an engine is built from.

    Attributes:
        step: settings of a step.
        loss_scale: initial state of the loss-scale machine.
        identity: run id and seed; a load replaces both with the saved ones.
        config_text: everything that must be equal on all ranks, as canonical JSON.
        frozen_source: the folder of the frozen weights, with its hash; None: they come from nowhere else.
    """

    step: StepOptions
    loss_scale: LossScaleState
    identity: RunIdentity
    config_text: str
    frozen_source: FrozenSource | None = None

    @property
    def config_hash(self) -> int:
        """Hash of ``config_text``, of 7 bytes: integers of the vote's records have 63 bits."""
        return int.from_bytes(hashlib.sha256(self.config_text.encode()).digest()[:7], "big")


_MANAGED: WeakSet[nn.Module] = WeakSet()  # weak, so that it keeps no model alive


def manage(model: nn.Module, *, is_managed: bool = True) -> None:
    """Notes that an engine has taken ``model`` over, or has left it."""
    (_MANAGED.add if is_managed else _MANAGED.discard)(model)


def is_managed(model: nn.Module) -> bool:
    return model in _MANAGED

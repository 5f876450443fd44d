"""The validated arguments of :func:`dtrain.initialize`, passed to the module of the chosen engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from dtrain.distributed.communicator import Communicator
from dtrain.optim.adamw import AdamW
from dtrain.optim.schedule import Schedule
from dtrain.precision.contract import Contract
from dtrain.precision.loss_scale import LossScaleState


@dataclass(frozen=True)
class StepOptions:
    """Options of a step; equal on all ranks.

    Attributes:
        max_grad_norm: clipping threshold of the global norm, or None.
        reproducible: whether sums are formed in canonical order.
        max_consecutive_skips: number of skipped steps in a row that ends the run.
    """

    optimizer: AdamW
    schedule: Schedule
    max_grad_norm: float | None
    zero_stage: int
    reproducible: bool
    max_consecutive_skips: int


@dataclass(frozen=True)
class UnshardOptions:
    """When sharded groups are unsharded and resharded."""

    reshard_after_forward: bool = True
    prefetch: int = 1
    keep_gathered: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineOptions:
    """Options of some engines only; :mod:`dtrain.config.capabilities` refuses them for the others.

    Attributes:
        groups: units of sharding, see :func:`dtrain.parameters.groups.find_groups`.
        grad_reduction: ``auto``, ``all_reduce`` or ``reduce_scatter``: how stage 1 sums gradients (native).
        unshard: when stage 3 unshards and reshards groups (native).
        offload: ``none``, or ``cpu`` for masters and moments in host memory (deepspeed).
    """

    groups: str | Sequence[str] = "auto"
    grad_reduction: str = "auto"
    unshard: UnshardOptions = field(default_factory=UnshardOptions)
    offload: str = "none"


@dataclass(frozen=True)
class RunIdentity:
    """The name of a run and the seed of its random numbers."""

    run_id: str
    seed: int


@dataclass(frozen=True)
class EngineRequest:
    """Everything that an engine is built from.

    Attributes:
        model: on its device, its values equal on all ranks and not rounded yet.
        contract: the precision policy resolved on it.
        loss_scale: initial state of the loss-scale machine.
        identity: run id and seed; a load replaces both with the saved ones.
        config_text: everything that must be equal on all ranks, as canonical JSON.
    """

    model: nn.Module
    contract: Contract
    comm: Communicator
    step: StepOptions
    engine: EngineOptions
    loss_scale: LossScaleState
    identity: RunIdentity
    config_text: str

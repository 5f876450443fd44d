"""What :func:`dtrain.initialize` has decided, handed to the module of the engine that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from dtrain.distributed.communicator import Communicator
from dtrain.optim.adamw import AdamW
from dtrain.optim.schedule import Schedule
from dtrain.precision.contract import Contract
from dtrain.precision.loss_scale import LossScaleState
from dtrain.sharding.unshard import UnshardOptions


@dataclass(frozen=True)
class StepOptions:
    """What makes a step; equal on all ranks.

    Attributes:
        optimizer: AdamW's hyper-parameters.
        schedule: of the learning rate.
        max_grad_norm: clipping threshold of the global norm, or None.
        zero_stage: what is sharded, 0 to 3.
        reproducible: the canonical order of sums.
        max_consecutive_skips: skipped steps in a row that end the run.
    """

    optimizer: AdamW
    schedule: Schedule
    max_grad_norm: float | None
    zero_stage: int
    reproducible: bool
    max_consecutive_skips: int


@dataclass(frozen=True)
class EngineOptions:
    """What only some engines know; :mod:`dtrain.config.capabilities` refuses it for the others.

    Attributes:
        groups: units of sharding, see :func:`dtrain.parameters.groups.find_groups`.
        grad_reduction: ``auto``, ``all_reduce`` or ``reduce_scatter``: how stage 1 sums gradients (native).
        gather: when stage 3 gathers and frees replicas (native).
        offload: ``none``, or ``cpu`` for masters and moments in host memory (deepspeed).
    """

    groups: str | Sequence[str] = "auto"
    grad_reduction: str = "auto"
    gather: UnshardOptions = field(default_factory=UnshardOptions)
    offload: str = "none"


@dataclass(frozen=True)
class RunIdentity:
    """What names a run and keys its random numbers."""

    run_id: str
    seed: int


@dataclass(frozen=True)
class EngineRequest:
    """All that an engine is built from.

    Attributes:
        model: on its device, its values equal on all ranks and not rounded yet.
        contract: the precision policy resolved on it.
        comm: the ranks that train together.
        step: what makes a step.
        engine: what only some engines know.
        loss_scale: the machine at its start.
        identity: run id and seed; a load replaces both by the saved ones.
        config_text: what must be equal on all ranks, as text that can be shown.
    """

    model: nn.Module
    contract: Contract
    comm: Communicator
    step: StepOptions
    engine: EngineOptions
    loss_scale: LossScaleState
    identity: RunIdentity
    config_text: str

"""The parts of an engine, and their order.

[Note: order of the parts] Most parts do not know of each other, and could stand anywhere. The order matters here:

- ``phases`` comes first, so that a watcher sees the right phase while a later part waits; ``busy`` comes last, so that
  what all others do counts as busy time.
- ``checkpointer`` raises the failure of a save before any part has changed the step, so the caller can repeat it.
- ``gradients`` comes before the parts that change something in ``before_reduction``, so the caller can repeat the step.
- ``written`` takes over the user's writes before ``audit``, which leaves written parameters out, looks at the masters.
- ``samples`` comes before ``replay`` and ``shadow``, so that its counting has ended when they run forwards again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from dtrain.config.audit import Audit
from dtrain.engine.blocks.compiled import CompiledBlocks
from dtrain.engine.forward import ModelForward
from dtrain.engine.observation import ForwardObserver
from dtrain.engine.parts.audit.state_audit import StateAudit
from dtrain.engine.parts.buffers import SharedBuffers
from dtrain.engine.parts.checkpoint.checkpointer import Checkpointer
from dtrain.engine.parts.forward_calls import KeptForwards
from dtrain.engine.parts.missed_updates import MissedUpdates
from dtrain.engine.parts.part import StepPart
from dtrain.engine.parts.phases import Phases
from dtrain.engine.parts.replay import MicroBatchReplay
from dtrain.engine.parts.running_statistics import RunningStatistics
from dtrain.engine.parts.samples import PrecisionSamples
from dtrain.engine.parts.shadow import ShadowStep
from dtrain.engine.parts.stragglers import BusyMeter
from dtrain.engine.parts.taken_gradients import TakenGradients
from dtrain.engine.parts.written_weights import WrittenWeights
from dtrain.engine.run_state import RunState
from dtrain.engine.vote.finalize import StepFinalizer
from dtrain.engine.vote.losses import LossAccumulator
from dtrain.parameters.model_states import ModelStates


@dataclass(frozen=True)
class EngineParts:
    """The parts by name, in their order: [Note: order of the parts]."""

    phases: Phases
    checkpointer: Checkpointer
    gradients: TakenGradients
    written: WrittenWeights
    statistics: RunningStatistics
    buffers: SharedBuffers
    observer: ForwardObserver
    forwards: KeptForwards
    samples: PrecisionSamples
    missed: MissedUpdates
    audit: StateAudit
    replay: MicroBatchReplay
    shadow: ShadowStep
    compiled: CompiledBlocks | None
    busy: BusyMeter

    def in_order(self) -> list[StepPart]:
        """Returns the parts that there are."""
        parts = (getattr(self, field.name) for field in fields(self))
        return [part for part in parts if part is not None]


def build_parts(
    states: ModelStates,
    run: RunState,
    settings: Audit,
    finalizer: StepFinalizer,
    forward: ModelForward,
    losses: LossAccumulator,
    samples: PrecisionSamples,
    missed: MissedUpdates,
    gradients: TakenGradients,
    compiled: CompiledBlocks | None,
    busy: BusyMeter,
) -> EngineParts:
    """Returns the parts of an engine; ``settings`` are those of audits."""
    audit, contract = StateAudit(states, run, settings, finalizer), states.contract
    forwards = KeptForwards(settings.replays, contract.is_shadowed)
    replay = MicroBatchReplay(settings, forward, states, forwards)
    return EngineParts(
        phases=Phases(states.comm.schedule.progress),
        checkpointer=Checkpointer(states, run, finalizer, audit.noting),
        gradients=gradients,
        written=WrittenWeights(states, run),
        statistics=RunningStatistics(states.module),
        buffers=SharedBuffers(states.module, states.comm),
        observer=forward.observer,
        forwards=forwards,
        samples=samples,
        missed=missed,
        audit=audit,
        replay=replay,
        shadow=ShadowStep(contract, replay, losses),
        compiled=compiled,
        busy=busy,
    )

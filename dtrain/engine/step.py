"""The step that all engines share: forward, backward, one vote of all ranks, and an update on all ranks or on none.

An adapter (``dtrain.engine.adapters``) defines how gradients are reduced and how masters are sharded and updated. So
a skipped step, a culprit, a loss scale and a checkpoint mean the same with every library below. What watches or guards
a step is a part (``dtrain.engine.parts.part.StepPart``), which the step calls at fixed places:

    forward    before_forward . the model
    backward   before_backward . the model's backward, which starts the reductions . after_backward
    step       before_reduction . the reductions end . before_update . the vote . the update . after_update . end_step

Besides, ``loaded`` is called when the states are complete, and ``finalized`` when the decision on a step is known. A
new guard is a new part: a class with some of these methods, and its field and value in
``dtrain.engine.parts.order``.

[Note: finalize before the next collective] On a GPU the host reads the decision on a step late, so that it never waits
for the device. To finalize a step is to read its decision and to act on it: loss scale, applied steps, skips. If the
step was skipped, all ranks search for the culprit together, so finalizing may communicate. Every rank must therefore
finalize at the same point of the sequence of collectives: before the first collective after the step. Therefore
backward, a forward that communicates, ``eval`` (whose forwards may communicate), saving and loading finalize the last
step first. A single rank may read any field of an outcome except ``culprit`` at any time. To read ``culprit``, and to
compare, print or copy an outcome, finalizes the step.

[Note: the update is always launched] The decision is a tensor on the device, and the update reads it there: if
``found_inf`` is set, every element keeps its bits. If the host asked first, it would wait for the whole step; if it
multiplied the update by zero, 0 x inf would be NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dtrain.engine.arguments import checked_grad_factor, checked_lr, checked_max_grad_norm
from dtrain.engine.between_steps import BetweenSteps, names_collectives
from dtrain.engine.blocks.install import compile_blocks
from dtrain.engine.forward import ModelForward
from dtrain.engine.hooks import EngineHooks
from dtrain.engine.micro_batch import MicroBatches
from dtrain.engine.outcome import Culprit, StepOutcome
from dtrain.engine.parts.explain import SkipExplainer
from dtrain.engine.parts.missed_updates import MissedUpdates
from dtrain.engine.parts.order import build_parts
from dtrain.engine.parts.part import Forward, StepParts, StepUnderWay, StepWork
from dtrain.engine.parts.samples import PrecisionSamples
from dtrain.engine.parts.stragglers import BusyMeter
from dtrain.engine.parts.taken_gradients import TakenGradients
from dtrain.engine.request import EngineRequest, manage
from dtrain.engine.rng import rng_key
from dtrain.engine.run_state import RunState
from dtrain.engine.vote.ballot import Ballot
from dtrain.engine.vote.culprit import locate_culprit
from dtrain.engine.vote.decide import Decision, DecodedDecision
from dtrain.engine.vote.evidence import CalibrationEvidence
from dtrain.engine.vote.finalize import StepFinalizer
from dtrain.engine.vote.losses import LossAccumulator, checked_loss, refuse_options
from dtrain.engine.vote.skips import SkipCounter
from dtrain.errors import DtrainError, UsageError
from dtrain.optim.rule import UpdateScalars
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.parameters.model_states import MAIN_GRAD, ModelStates
from dtrain.parameters.running_backward import backward_of


class StepEngine(EngineHooks):
    """Implements the step of ``dtrain.engine.interface.Engine`` over ``EngineHooks``.

    A subclass calls ``check_contract`` at the end of its constructor, when all states exist.

    Args:
        request: the validated arguments of ``initialize``.
        states: of the model; they may be completed after this constructor.
        backward_names: the names of all trainable parameters, about in the order in which backward reaches them.
        monitor: records every gradient as it leaves this rank's backward, numbered as in ``backward_names``; None
            builds one.
    """

    def __init__(
        self,
        request: EngineRequest,
        states: ModelStates,
        backward_names: Sequence[str],
        monitor: GradientMonitor | None = None,
    ) -> None:
        manage(request.model)  # first: a constructor that fails half-way has changed the model already
        super().__init__(request, states)
        states.frozen_source = request.frozen_source
        self.options = request.step
        self.monitor = monitor or GradientMonitor(len(backward_names))
        self._backward_names = tuple(backward_names)
        self._run = RunState(request.identity.run_id, request.identity.seed)
        self._losses = LossAccumulator(self.device)
        self._batch = MicroBatches(self._losses)
        self._forward = ModelForward(
            self.module,
            self.comm,
            self.contract,
            self._call_model,
            self._discard_forward,
            engine=self.name,
            searches_backward=self.searches_backward,
        )
        compiled = compile_blocks(self.module, self.options, self.comm)
        run, names = self._run, self._backward_names
        self._missed = MissedUpdates(names, self.monitor, run, self.comm, self.options)
        self._ballot = Ballot(self.comm, request.config_hash, self._losses, self.monitor, self._missed)
        self._finalizer = StepFinalizer(
            *(self.comm, run, request.loss_scale),
            SkipCounter(self.options.max_consecutive_skips),
            *(self._locate_culprit, self._on_finalized),
            request.config_text,
            is_synchronous=self.device.type == "cpu",
            evidence=CalibrationEvidence(self.comm, self.monitor),
        )
        self.busy = BusyMeter(self.comm, self.timed_phases)
        samples = PrecisionSamples(states, run, self._batch, self._finalizer, names, self.monitor)
        self._taken = TakenGradients(states, self.monitor, names, keeps=self.keeps_gradients)
        watching = samples, self._missed, self._taken, compiled, self.busy
        parts = build_parts(states, run, self.options.audit, self._finalizer, self._forward, self._losses, *watching)
        self._parts = StepParts(parts.in_order())
        self._between = BetweenSteps(
            states, self._run, self._batch, parts, self._forward, self._finalize_step, self.check_contract
        )
        self.work = StepWork(self.finish_gradients, self._cast_vote, self._launch_update)

    def check_contract(self) -> None:
        """Checks the contract on live tensors: states and weights now, the next forward and reductions as they run.

        Raises:
            ContractError: naming the tensor whose dtype or storage is another one.
        """
        with self.states.reads:
            self.states.check()
            self._watch_reductions()
            self._parts.loaded()

    # -- forward and backward ----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._between.refuse_ended("forward")
        call = self._call(args, kwargs)
        with self.states.reads:
            self._parts.before_forward(call)
            if call.key is not None:
                self._batch.current.num_forwards += 1  # a second forward draws other numbers
            if self.forward_communicates:
                self._finalize_step()  # [Note: finalize before the next collective]
            with self.comm.schedule.method("eval" if call.is_evaluating else "forward"):
                return self._forward(call)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Forward:
        """Returns a call of the engine; its RNG key follows from the micro-batch's number among those of all ranks."""
        batch, current, step = self._batch, self._batch.current, self._run.attempted_steps
        is_training = not batch.is_evaluating and torch.is_grad_enabled()
        key = None
        if not batch.is_evaluating and self.module.training:
            index = current.number * self.world_size + self.rank
            key = rng_key(self._run.seed, step, index, current.num_forwards)
        return Forward(
            step=step,
            micro_batch=current.number,
            key=key,
            args=args,
            kwargs=kwargs,
            is_first=not current.num_forwards,
            begins_step=not current.num_forwards and not current.number and not batch.has_backward,
            is_evaluating=batch.is_evaluating,
            is_training=is_training,
            belongs_to_step=is_training or (not batch.is_evaluating and current.state == "open"),
            is_explained=self.explain_skips,
        )

    @names_collectives("backward")
    def backward(self, loss: Any, *, weight: float | Tensor = 1.0, **options: Any) -> None:
        """Runs the backward of the mean loss of one micro-batch; reductions start as its gradients complete."""
        self._between.require_usable("backward")
        refuse_options(options)
        self._finalize_step()  # [Note: finalize before the next collective]; also clears the old gradients
        factor = Weight.of(weight, self.device, micro_batch=self._batch.number)
        is_dummy = not isinstance(weight, Tensor) and weight == 0
        value = checked_loss(loss, is_dummy=is_dummy)
        del loss  # a model's output holds the logits, and the caller may hold no other reference
        self._batch.current.require_open()
        if not value.requires_grad and self.dummies_need_graph:
            raise UsageError(
                f"a dummy loss without a graph with engine={self.name} at zero_stage={self.options.zero_stage}, where "
                f"all ranks communicate in every micro-batch; take the loss of any input, with weight=0"
            )
        self._parts.before_backward()
        self._losses.add(self._batch.number, value, factor.value)
        # the gradient of a step's only micro-batch is the main grad, which alone shows the culprit
        is_only = self._batch.current.is_last and self._batch.number == 0 and self.world_size == 1
        self.monitor.begin(
            self.device, is_only=is_only, is_dummy=is_dummy, calibrates=self._finalizer.scale.is_calibrating
        )
        with self._batch.backward(), backward_of(self), self._forward.backward_precision():
            self._backward(value, factor)
        self._parts.after_backward()

    # -- vote and update ---------------------------------------------------------------------------------------------

    @names_collectives("step")
    def step(
        self, *, lr: float | None = None, max_grad_norm: float | None = None, grad_factor: float = 1.0
    ) -> StepOutcome:
        """Reduces, votes, and updates on all ranks or on none; on a GPU the host does not wait for it."""
        self._finalize_step()
        step = self._begin_step(lr, max_grad_norm, grad_factor)
        self._parts.before_reduction(step)
        self.work.reduce()
        try:
            self._parts.before_update(step)
        except DtrainError:  # on all ranks
            self._batch.end_step()
            self._parts.end_step(step)
            raise
        decision = step.decision = self._vote(step)
        self.work.update(step, decision)  # [Note: the update is always launched]
        self._run.attempted_steps += 1
        self._parts.after_update(step)
        self._batch.end_step()
        if self.is_synchronous:  # reading costs nothing on CPU, so an error is raised by the step that causes it
            self._finalize_step()
        step.outcome = self._finalizer.outcome()
        self._parts.end_step(step)
        return step.outcome

    def _begin_step(self, lr: float | None, max_grad_norm: float | None, grad_factor: float) -> StepUnderWay:
        """Checks what can be checked before anything of the step is done, so that the caller can call it again."""
        self._between.require_usable("step")
        max_norm = checked_max_grad_norm(max_grad_norm, self.options.max_grad_norm)
        factor = checked_grad_factor(grad_factor)
        if not self._batch.has_backward:
            raise UsageError("engine.step without engine.backward before it; a step needs at least one micro-batch")
        self.states.check_step()
        run = self._run
        if lr is None:
            lr = self.options.optimizer.lr * self.options.schedule.factor(run.applied_steps)
        return StepUnderWay(
            number=run.attempted_steps,
            update=run.applied_steps + 1,
            lr=checked_lr(lr, run.attempted_steps),
            rule_lrs=self.states.plan.rule_lrs(self.options.optimizer.lr, run.applied_steps),
            max_grad_norm=max_norm,
            grad_factor=factor,
            loss_scale=self._finalizer.scale.scale,
            data_cursor=run.data_cursor,
            stop_requested=self._batch.stop_requested,
            is_saved=self._batch.save_expected,
        )

    def _vote(self, step: StepUnderWay) -> Decision:
        """Derives the same decision on every rank; the host reads it when the step is finalized."""
        decision, packed = self.work.vote(step)
        self._finalizer.post(packed, tuple(self.comm.schedule.log), step.written_text)
        self.comm.schedule.begin_step()  # after the copy: an error message names the collectives of this step
        return decision

    def _cast_vote(self, step: StepUnderWay) -> tuple[Decision, Tensor]:
        return self._ballot.cast(step, self._squares(), self._canonical_sums)

    def _launch_update(self, step: StepUnderWay, decision: Decision) -> None:
        # as if the step were applied; a skipped step's are not used
        scalars = UpdateScalars(
            lr=step.lr,
            step=step.update,
            grad_divisor=decision.grad_divisor,
            found_inf=decision.code,
            rule_lrs=step.rule_lrs,
            sent=self._ballot.numbers,
        )
        self._update(self._missed.set_apart(scalars, decision))

    def _finalize_step(self) -> None:
        with self.states.reads:
            self._finalizer.finalize_step()
            # only now: the search for a culprit reads the gradients
            if self._batch.has_old_gradients:
                self._batch.has_old_gradients = False
                self.monitor.clear()
                self._clear_gradients()

    def _locate_culprit(self, decision: DecodedDecision) -> Culprit | None:
        # in one replica of hybrid sharding, because the others hold the same
        shards = self.states.owned_shards(MAIN_GRAD) if self.states.mesh.replicate.rank == 0 else ()
        is_only_backward = not self.monitor.is_enabled
        found = locate_culprit(decision, self.comm, shards, self._backward_names, is_only_backward=is_only_backward)
        if not self.explain_skips:
            return found
        explainer = SkipExplainer(self._forward, self._between.parts.forwards)
        return explainer.explain(found, decision.hosts[0].loss_scale)

    def _on_finalized(self, outcome: StepOutcome, decision: DecodedDecision) -> None:
        self._parts.finalized(outcome, decision)

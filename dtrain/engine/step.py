"""The step that all engines share: forward, backward, one vote of all ranks, and an update on all ranks or on none.

A subclass defines how its gradients are reduced, how its masters are sharded, and how they are updated. So a skipped
step, a culprit, a loss scale and a checkpoint mean the same with every library below.

[Note: finalize before the next collective] On a GPU the host reads the decision on a step late, so that it never waits
for the device. To finalize a step is to read its decision and to act on it: loss scale, applied steps, skips. If the
step was skipped, all ranks search for the culprit together, so finalizing may communicate. Every rank must therefore
finalize at the same point of the sequence of collectives: before the first collective after the step. A loop may read
an outcome at any time, on one rank only. Therefore backward, a forward that communicates, ``eval`` (whose forwards may
communicate), saving and loading finalize the last step first.

[Note: the update is always launched] The decision is a tensor on the device, and the update reads it there: if
``found_inf`` is set, every element keeps its bits. If the host asked first, it would wait for the whole step; if it
multiplied the update by zero, 0 x inf would be NaN.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dtrain.distributed.progress import Phase
from dtrain.engine.arguments import checked_grad_factor, checked_lr, checked_max_grad_norm
from dtrain.engine.blocks.compiled import CompiledBlocks
from dtrain.engine.blocks.install import install_blocks
from dtrain.engine.measurement.sample import PrecisionSample
from dtrain.engine.model_state import MAIN_GRAD, names_collectives
from dtrain.engine.observation import observe_forward
from dtrain.engine.outcome import Culprit, StepOutcome
from dtrain.engine.parts.audit.state_audit import StateAudit
from dtrain.engine.parts.buffers import SharedBuffers
from dtrain.engine.parts.checkpoint.checkpointer import Checkpointer
from dtrain.engine.parts.explain import SkipExplainer
from dtrain.engine.parts.forward_calls import ForwardCalls
from dtrain.engine.parts.replay import MicroBatchReplay
from dtrain.engine.parts.running_statistics import RunningStatistics
from dtrain.engine.parts.stragglers import PHASES, BusyMeter
from dtrain.engine.parts.written_weights import WrittenWeights
from dtrain.engine.request import EngineRequest
from dtrain.engine.rng import keyed_rng, rng_key
from dtrain.engine.stored import StoredEngine
from dtrain.engine.vote.culprit import locate_culprit
from dtrain.engine.vote.decide import Decision, DecodedDecision
from dtrain.engine.vote.evidence import CalibrationEvidence
from dtrain.engine.vote.finalize import StepFinalizer
from dtrain.engine.vote.losses import LossAccumulator, checked_loss
from dtrain.engine.vote.record import HostRecord
from dtrain.engine.vote.skips import SkipCounter
from dtrain.engine.vote.tensors import VoteTensors
from dtrain.errors import DtrainError, UsageError
from dtrain.optim.rule import UpdateScalars
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.parameters.magnitudes import MagnitudeCounts
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.parameters.running_backward import backward_of
from dtrain.precision.forward import Autocast
from dtrain.precision.loss_scale import LossScaleState


class StepEngine(StoredEngine):
    """Implements the step of :class:`dtrain.engine.interface.Engine` over the hooks at the end of this class.

    Args:
        request: the validated arguments of ``initialize``.
        backward_names: the names of all trainable parameters, about in the order in which backward reaches them.
        monitor: records every gradient as it leaves this rank's backward, numbered as in ``backward_names``; None
            builds one.

    Attributes:
        monitor: see above.
        sample: measures the step under way; None: nothing does.
        forward_communicates: whether a forward issues collectives, so that all ranks run it together.
        searches_backward: whether a backward can be repeated without its gradients reaching a main grad.
        busy: compares how long the ranks are busy.
    """

    forward_communicates = False
    searches_backward = False

    def __init__(
        self, request: EngineRequest, backward_names: Sequence[str], monitor: GradientMonitor | None = None
    ) -> None:
        super().__init__(request)
        self.backward_names = tuple(backward_names)
        self.monitor = monitor or GradientMonitor(len(self.backward_names))
        # 7 bytes: integers of the vote's records have 63 bits
        self._config_hash = int.from_bytes(hashlib.sha256(request.config_text.encode()).digest()[:7], "big")
        self._autocast = Autocast(self.contract, self.module, self.device)
        self._compiled = self._install_blocks()
        self._losses = LossAccumulator(self.device)
        self._vote_tensors = VoteTensors()
        self._finalizer = StepFinalizer(
            self.comm,
            request.loss_scale,
            SkipCounter(self.options.max_consecutive_skips),
            self._locate_culprit,
            request.config_text,
            is_synchronous=self.device.type == "cpu",
            evidence=CalibrationEvidence(self.comm, self.monitor),
        )
        self.busy = BusyMeter(self.comm, self.timed_phases)
        self._finalizer.on_decision = self._compare_busy
        self._checkpointer = Checkpointer(self, self._finalizer)
        self._written = WrittenWeights(self)
        self._statistics = RunningStatistics(self.module)
        self._buffers = SharedBuffers(self.module, self.comm)
        self._audit = StateAudit(self, self.options.audit)
        self._calls = ForwardCalls()
        self._explainer = SkipExplainer(self, self._calls)
        self._replay = MicroBatchReplay(self, self._calls)
        self._has_old_gradients = False  # of the last step
        self._backward_failed = False  # a backward has begun and not ended
        self._is_averaged = False  # inside ``ema``
        self.sample: PrecisionSample | None = None

    def _install_blocks(self) -> CompiledBlocks | None:
        """Makes the blocks recomputed or compiled ones, as the options say."""
        blocks = self.options.blocks
        compiled = None
        if blocks.compile != "none":
            compiled = CompiledBlocks(self.comm, measures=blocks.compile == "auto")
        has_hooks = self.options.zero_stage == 3 or self.name == "fsdp2"  # on the units of sharding
        units = getattr(self.options.engine, "sharding_units", []) if has_hooks else []
        install_blocks(self.module, blocks, units, compiled)
        return compiled

    @property
    def compiled_graphs(self) -> int | None:
        return None if self._compiled is None or not self._compiled.is_on else self._compiled.num_graphs

    # -- forward and backward ----------------------------------------------------------------------------------------

    @contextmanager
    def eval(self) -> Iterator[None]:
        self._written.refuse_lost("eval")
        with self.progress.during(Phase.EVALUATION):
            self._finalize_step()  # [Note: finalize before the next collective]
            with self.comm.schedule.method("eval"), super().eval():
                yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._written.require_closed("__call__")
        self.progress.begin(Phase.EVALUATION if self._evaluating else Phase.FORWARD, self.attempted_steps)
        if self.forward_communicates:
            self._finalize_step()  # [Note: finalize before the next collective]
        is_training = not self._evaluating and torch.is_grad_enabled()
        is_first = not self._current.num_forwards
        # one without gradients outside of a micro-batch is the caller's own, as when statistics are measured again
        if is_training or (not self._evaluating and self._current.state == "open"):
            self._statistics.keep(begins=is_first and not self._micro_batch and not self._has_backward())
        key = self._forward_key() if not self._evaluating and self.module.training else None
        if is_training and (self.explain_skips or (self._replays and self._replay.keeps(self._micro_batch))):
            self._calls.remember(self._micro_batch, key, args, kwargs, is_first=is_first)
        # a forward without gradients would show only half of the dtypes
        observes = self._is_unobserved and torch.is_grad_enabled()
        observed: Any = observe_forward(self.module, self.contract) if observes else nullcontext()
        with observed, self.comm.schedule.method("eval" if self._evaluating else "forward"):
            output = self.run_forward(key, args, kwargs)
        self._is_unobserved = self._is_unobserved and not observes
        return output

    def run_forward(self, key: int | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the model's forward under the contract; ``key`` seeds its random numbers, None leaves them."""
        keyed: Any = nullcontext() if key is None else keyed_rng(self.device, key)
        with keyed, self._autocast():
            return self._autocast.cast_output(self._forward(args, kwargs))

    def backward_precision(self) -> AbstractContextManager[None]:
        """Context of a backward: forwards that recomputation repeats there follow the contract."""
        return self._autocast.backward()

    def _forward_key(self) -> int:
        """Returns a key of what is computed, not of who computes it: equal at any world size."""
        calls = self._current.num_forwards  # a second forward draws other numbers
        self._current.num_forwards += 1
        index = self._micro_batch * self.world_size + self.rank
        return rng_key(self.seed, self.attempted_steps, index, calls)

    @names_collectives("backward")
    def backward(self, loss: Any, *, weight: float | Tensor = 1.0) -> None:
        """Runs the backward of the mean loss of one micro-batch; reductions start as its gradients complete."""
        self._require_usable("backward")
        self.progress.begin(Phase.BACKWARD)
        if self.sample is not None:
            self.sample.require_single_step()
        self._finalize_step()  # [Note: finalize before the next collective]; also clears the old gradients
        factor = Weight.of(weight, self.device, micro_batch=self._micro_batch)
        is_dummy = not isinstance(weight, Tensor) and weight == 0
        value = checked_loss(loss, is_dummy=is_dummy)
        del loss  # a model's output holds the logits, and the caller may hold no other reference
        self._current.require_open()
        if not value.requires_grad and self.dummies_need_graph:
            raise UsageError(
                f"a dummy loss without a graph with engine={self.name} at zero_stage={self.options.zero_stage}, where "
                f"all ranks communicate in every micro-batch; take the loss of any input, with weight=0"
            )
        self._losses.add(self._micro_batch, value, factor.value)
        # the gradient of a step's only micro-batch is the main grad, which alone shows the culprit
        num_micro_batches = (self._micro_batch + 1) * self.world_size  # so far, of all ranks
        self.monitor.is_enabled = not (self._is_last and num_micro_batches == 1)
        self._watch_magnitudes(is_dummy=is_dummy)
        # until it ends: after an error this rank has issued fewer reductions than the others
        self._backward_failed = True
        with backward_of(self), self.backward_precision():
            self._backward(value, factor)
        self._backward_failed = False
        self.progress.begin(Phase.DATA)

    def _watch_magnitudes(self, *, is_dummy: bool) -> None:
        """Tells the monitor which magnitudes this micro-batch records: none, unless calibrating or measured."""
        is_calibrating = self._finalizer.scale.is_calibrating
        if (is_calibrating or self.sample is not None) and self.monitor.magnitudes is None:
            self.monitor.magnitudes = MagnitudeCounts(len(self.backward_names), self.device)
        self.monitor.records_magnitude, self.monitor.is_dummy = is_calibrating, is_dummy

    @contextmanager
    def measure_precision(self, activations: Sequence[str] = ()) -> Iterator[PrecisionSample]:
        self._require_usable("measure_precision")
        if self.sample is not None:
            raise UsageError("engine.measure_precision inside itself; one context measures one step")
        names, scale = self.backward_names, self.loss_scale
        sample = PrecisionSample(self, activations, backward_names=names, monitor=self.monitor, scale=scale)
        self.sample = sample
        try:
            with sample.hooks():
                yield sample
            if self._has_backward():
                raise UsageError("engine.measure_precision ended between backward and step; it measures a whole step")
        finally:
            self.sample = None

    # -- vote and update ---------------------------------------------------------------------------------------------

    @names_collectives("step")
    def step(
        self, *, lr: float | None = None, max_grad_norm: float | None = None, grad_factor: float = 1.0
    ) -> StepOutcome:
        """Reduces, votes, and updates on all ranks or on none; on a GPU the host does not wait for it."""
        self.progress.begin(Phase.UPDATE)
        self._finalize_step()
        # before anything of this step is done, so that the caller can call step again
        with self._noting_corruption():
            self._checkpointer.raise_failed_save()
        self._require_usable("step")
        max_grad_norm = checked_max_grad_norm(max_grad_norm, self.options.max_grad_norm)
        grad_factor = checked_grad_factor(grad_factor)
        if not self._losses:
            raise UsageError("engine.step without engine.backward before it; a step needs at least one micro-batch")
        self._check_step()
        self._written.take()
        # before the vote, which carries the squares of the reduced gradients
        self.finish_gradients()
        self._audit_before_update()
        peak = self.options.optimizer.lr
        if lr is None:
            lr = peak * self.options.schedule.factor(self.applied_steps)
        lr = checked_lr(lr, self.attempted_steps)
        decision = self._vote(lr, max_grad_norm, grad_factor)
        self._statistics.restore(decision.code)
        if self.sample is not None:
            self.sample.begin_update()
        if self._audit.is_pending:  # not before: if the step fails, the record still protects what is saved
            self._audit.forget()
        # [Note: the update is always launched]
        self._update(
            UpdateScalars(
                lr=lr,
                # not self.applied_steps, which would wait for the decision on this very step
                step=self._finalizer.applied_steps + 1,
                grad_divisor=decision.grad_divisor,
                found_inf=decision.code,
                # not self.applied_steps, as above; a skipped step's are not used
                rule_lrs=self.plan.rule_lrs(peak, self._finalizer.applied_steps),
            )
        )
        self._written.remember()
        if self.sample is not None:
            self.sample.end_update()
        self.attempted_steps += 1
        audit = self._audit.settings
        if audit.is_due(self.attempted_steps) or (audit.every and self._save_expected):
            self._audit.record()
        self._end_step()
        if self.is_synchronous:  # reading costs nothing on CPU, so an error is raised by the step that causes it
            self._finalize_step()
            self._written.expect_more()
        outcome = self._finalizer.outcome()
        # a stop is saved; on a GPU the host does not know of it yet
        if audit.every and self.is_synchronous and outcome.stop_requested and not self._audit.is_pending:
            self._audit.record()
        if self.sample is not None:
            self.sample.outcome = outcome
        self.progress.end_step(self.attempted_steps)
        self.busy.begin_step(self.attempted_steps)
        return outcome

    def _audit_before_update(self) -> None:
        """Checks the record of an earlier update, and replays a micro-batch, if due; an error ends the step."""
        try:
            if self._audit.is_pending:
                with self._noting_corruption():
                    self._audit.check(self._written.names, self._written.hash)
            if self._replays:
                if self.sample is not None:
                    self.sample.close_hooks()
                self._replay.check(self.loss_scale.scale)
        except DtrainError:
            self._statistics.restore()
            self._end_step()
            raise

    @property
    def _replays(self) -> bool:
        """Whether a micro-batch of the step under way is computed twice more before its update."""
        return self._audit.settings.replays(self.attempted_steps + 1)

    def _end_step(self) -> None:
        """Ends the step under way, whether it was taken or not; its gradients are cleared later."""
        if self._compiled is not None:
            self._compiled.end_step(self.attempted_steps)
        self._losses.clear()
        self._stop_requested = self._save_expected = False
        self._end_batch()
        self._calls.end_step()
        self._has_old_gradients = True

    def _vote(self, lr: float, max_grad_norm: float, grad_factor: float) -> Decision:
        """Gathers a row of each rank and derives the same decision on every rank."""
        squares = self._squares()
        host = HostRecord(
            step=self.attempted_steps,
            config_hash=self._config_hash,
            num_micro_batches=len(self._losses),
            schedule_hash=self.comm.schedule.hash,
            data_cursor=self.data_cursor,
            lr=lr,
            loss_scale=self.loss_scale.scale,
            max_grad_norm=max_grad_norm,
            grad_factor=grad_factor,
            written_weights=self._written.hash,
            stop_requested=int(self._stop_requested),
            save_failed=int(self._checkpointer.has_failed),
            busy_s=self.busy.end_step(self.attempted_steps),
        )
        sums = self._canonical_sums(squares)  # after the record: it communicates, and the hash is of what came before
        row = self._vote_tensors.record(host, self._losses, self.monitor, squares)
        rows = self.comm.gather_rows(row, label="vote")
        decision, packed = self._vote_tensors.decide(rows, **sums)
        self._finalizer.post(packed, tuple(self.comm.schedule.log), self._written.text)
        self.comm.schedule.begin_step()  # after the copy: an error message names the collectives of this step
        return decision

    def _compare_busy(self, decision: DecodedDecision) -> None:
        self.busy.compare(decision.step, decision.hosts.column("busy_s"))

    def _locate_culprit(self, decision: DecodedDecision) -> Culprit | None:
        # in one replica of hybrid sharding, because the others hold the same
        shards = self.owned_shards(MAIN_GRAD) if self.mesh.replicate.rank == 0 else ()
        is_only_backward = not self.monitor.is_enabled
        found = locate_culprit(decision, self.comm, shards, self.backward_names, is_only_backward=is_only_backward)
        return self._explainer.explain(found, decision.hosts[0].loss_scale) if self.explain_skips else found

    def _finalize_step(self) -> None:
        self._finalizer.finalize_step()
        # only now: the search for a culprit reads the gradients
        if self._has_old_gradients:
            self._has_old_gradients = False
            self.monitor.clear()
            self._clear_gradients()
            self._calls.forget()

    @property
    def is_synchronous(self) -> bool:
        return self._finalizer.is_synchronous

    @property
    def applied_steps(self) -> int:
        self._finalizer.finalize_step()
        return self._finalizer.applied_steps

    @property
    def loss_scale(self) -> LossScaleState:
        """The loss-scale machine after the last step; on a GPU this waits for its decision."""
        self._finalizer.finalize_step()
        return self._finalizer.scale

    def _has_backward(self) -> bool:
        return bool(self._losses)

    # -- hooks for subclasses ----------------------------------------------------------------------------------------

    @property
    def timed_phases(self) -> Sequence[Phase]:
        """The phases of a step in which this engine sees each of its waits for other ranks."""
        return PHASES

    @property
    def dummies_need_graph(self) -> bool:
        """Whether each rank must run the backward of every micro-batch, because it communicates there."""
        return self.forward_communicates

    @abstractmethod
    def _forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the model's own forward; called under autocast, with keyed random numbers."""

    @abstractmethod
    def _backward(self, loss: Tensor, weight: Weight) -> None:
        """Runs the backward of ``loss`` times the loss scale; gradients enter the main grads times ``weight``.

        Records each gradient in ``monitor`` as it leaves this rank's backward. A dummy's loss may have no graph.
        """

    def discard_forward(self) -> None:
        """Releases what the engine holds of a forward that gets no backward."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Completes the main grads: all reductions of this step have arrived, still scaled and weighted; idempotent."""

    @abstractmethod
    def _update(self, scalars: UpdateScalars) -> None:
        """Runs one update of masters and optimizer states from the main grads, then refreshes the compute weights.

        If ``scalars.found_inf`` is 1, all keep their bits.
        """

    @abstractmethod
    def _clear_gradients(self) -> None:
        """Clears all gradients after a step, applied or skipped."""

    def _canonical_sums(self, squares: Tensor) -> dict[str, Tensor]:
        """Returns the ``sum_squares`` and ``sum_weights`` of :func:`decide` formed in canonical order, if any are."""
        return {}

"""The step that all engines share: forward, backward, one vote, an update on all ranks or on none, and the state.

An engine says how its gradients are reduced, where its masters lie and how they are updated; nothing here knows which
library does that. So a skip, a culprit, a loss scale or a checkpoint means the same whatever trains.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from dtrain.checkpoint import Retention, Saver, Snapshot
from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.consensus import on_every_rank
from dtrain.distributed.logging import logger
from dtrain.engine import checkpointing
from dtrain.engine.interface import Engine, StepOutcome
from dtrain.engine.observation import observe_forward
from dtrain.engine.request import EngineRequest
from dtrain.engine.rng import keyed_rng, rng_key
from dtrain.engine.vote.culprit import Finding, search
from dtrain.engine.vote.decide import Decision, decide
from dtrain.engine.vote.finalize import CulpritSearch, StepFinalizer
from dtrain.engine.vote.losses import LossAccumulator, check_weight
from dtrain.engine.vote.record import Observations, VoteRecord, fill, first_index, upload
from dtrain.engine.vote.skips import SkipCounter
from dtrain.errors import CheckpointError, ContractError, UsageError
from dtrain.optim.adamw import UpdateScalars
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.parameters.micro_batch_weight import Weight
from dtrain.precision.forward import Autocast, find_loss
from dtrain.precision.loss_scale import LossScaleState

MASTER, MAIN_GRAD = "master", "main_grad"
MOMENTS = ("exp_avg", "exp_avg_sq")

_MANAGED: WeakSet[nn.Module] = WeakSet()


def is_managed(model: nn.Module) -> bool:
    """Whether an engine has taken ``model`` over; one that was refused before is what it was."""
    return model in _MANAGED


class StepEngine(Engine):
    """See :class:`dtrain.engine.interface.Engine`; built by :func:`dtrain.initialize`.

    Args:
        request: what ``initialize`` has decided.
        backward_names: the names of all trainable parameters, about in the order in which backward reaches them.
        monitor: records every gradient as it leaves this rank's backward, numbered as in ``backward_names``; None
            makes one.

    Attributes:
        options: what makes a step.
        run_id: of the run, kept by its checkpoints.
        seed: keys the random numbers of forwards.
        monitor: see above.
        forward_communicates: whether a forward issues collectives, so that all ranks take it together.
    """

    forward_communicates = False

    def __init__(
        self, request: EngineRequest, backward_names: Sequence[str], monitor: GradientMonitor | None = None
    ) -> None:
        super().__init__()
        _MANAGED.add(request.model)
        self.module = request.model
        self.comm = request.comm
        self.policy = request.contract.policy
        self.contract = request.contract
        self.options = request.step
        self.run_id = request.identity.run_id
        self.seed = request.identity.seed
        self.backward_names = tuple(backward_names)
        self.monitor = monitor or GradientMonitor(len(self.backward_names))
        # taken now: a library below may cut the parameters into shards
        self.shapes = {name: tuple(p.shape) for name, p in self.module.named_parameters() if p.requires_grad}
        self.num_parameters = sum(map(math.prod, self.shapes.values()))
        self._frozen = [(name, p) for name, p in self.module.named_parameters() if not p.requires_grad]
        self._config_hash = int.from_bytes(hashlib.sha256(request.config_text.encode()).digest()[:7], "big")
        self._autocast = Autocast(self.contract, self.module, self.device)
        self._losses = LossAccumulator()
        self._last_forward = (-1, -1)  # micro-batch and how many forwards it has had
        self._finalizer = StepFinalizer(
            self.comm,
            request.loss_scale,
            SkipCounter(self.options.max_consecutive_skips),
            CulpritSearch(self._search, self.monitor.clear, self.backward_names),
            request.config_text,
            is_synchronous=self.device.type == "cpu",
        )
        self._saver = Saver(self.comm)
        self._has_old_gradients = False  # of a step that is done
        self._is_unseen = True  # no forward since set-up or load has been observed
        self._half_loaded = False
        self._backward_failed = False  # a backward has begun and not come to its end

    # -- what an engine says -----------------------------------------------------------------------------------------

    @property
    def dummies_need_graph(self) -> bool:
        """Whether each rank must run the backward of every micro-batch, because it communicates there."""
        return self.forward_communicates

    @abstractmethod
    def _forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's own forward; called under autocast, its random numbers keyed."""

    @abstractmethod
    def _backward(self, loss: Tensor, weight: Weight) -> None:
        """Backward of ``loss`` times the loss scale; its gradients enter the main grads times ``weight``.

        Shows each gradient to ``monitor`` as it leaves this rank's backward. A dummy's loss may have no graph.
        """

    @abstractmethod
    def finish_gradients(self) -> None:
        """Completes the main grads: all reductions of this step have arrived, still scaled and weighted; idempotent."""

    @abstractmethod
    def owned_shards(self, kind: str) -> Iterator[TensorShard]:
        """This rank's share of ``master``, ``exp_avg``, ``exp_avg_sq`` or ``main_grad``: FP32 views of live storage.

        At most one interval a parameter; over all ranks they hold every element once. Of a state that all ranks hold,
        each rank owns a part.
        """

    @abstractmethod
    def local_shards(self, kind: str) -> Iterator[TensorShard]:
        """All of ``kind`` that lies on this rank and that a load must fill."""

    @abstractmethod
    def _update(self, scalars: UpdateScalars) -> None:
        """One AdamW update of masters and moments from the main grads, then of the compute weights.

        Always called: where ``scalars.found_inf`` is 1 all keep their bits.
        """

    @abstractmethod
    def _refresh(self) -> None:
        """Makes the compute weights what the masters are."""

    @abstractmethod
    def _clear_gradients(self) -> None:
        """After a step, applied or not: nothing of its gradients reaches the next."""

    @abstractmethod
    def _check_live(self) -> None:
        """Asserts the contract on the live tensors; raises ``ContractError`` naming the tensor."""

    @abstractmethod
    def _storages(self) -> dict[str, list[Tensor]]:
        """The tensors that hold this rank's model states, by the kinds of :meth:`memory` but for buffers."""

    def saved_state(self) -> dict[str, Any]:
        """What a checkpoint's ``engine_state`` holds of this engine alone; plain values."""
        return {}

    def restore_state(self, saved: Mapping[str, Any]) -> None:
        """Takes back from an ``engine_state`` what :meth:`saved_state` gave, if it did; masters are loaded by then."""

    def _check_step(self) -> None:
        """Asserts before each update what is cheap to ask: that the model still computes with the engine's weights."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ContractError(
                    f"'{name}' was frozen at dtrain.initialize and now requires a gradient; it has no master, so "
                    f"build a new engine to train it"
                )
            want = self.contract.replica_dtypes[name]
            if parameter.dtype != want:
                raise ContractError(
                    f"frozen '{name}' is {parameter.dtype}, the contract says {want}; do not call .to(), .half() or "
                    f".float() on a model after dtrain.initialize"
                )

    def _squares(self) -> Tensor:
        """FP64 [n], n >= 1: their sum is that of the squares of this rank's own main grads."""
        grads = [piece.data for piece in self.owned_shards(MAIN_GRAD) if piece.data.numel()]
        if not grads:
            return torch.zeros(1, dtype=torch.float64, device=self.device)
        return torch.stack(torch._foreach_norm(grads)).double().square_()

    # -- forward and backward ----------------------------------------------------------------------------------------

    @contextmanager
    def eval(self) -> Iterator[None]:
        """Forwards inside consume no micro-batch number and build no graph; the module is in eval mode."""
        self._finalize_step()  # what is computed inside may be exchanged
        with super().eval():
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, under the precision policy; returns what the model returns."""
        if self.forward_communicates:
            self._finalize_step()  # before the first collective of this forward: ranks may look at other times
        keyed: Any = nullcontext()
        if not self._evaluating and self.module.training:
            keyed = keyed_rng(self.device, self._forward_key())
        observes = self._is_unseen and torch.is_grad_enabled()  # gradients too
        seen: Any = observe_forward(self.module, self.contract) if observes else nullcontext()
        with keyed, self._autocast(), seen:
            output = self._autocast.cast_output(self._forward(args, kwargs))
        self._is_unseen = self._is_unseen and not observes
        return output

    def _forward_key(self) -> int:
        """Keyed by what is computed, never by who computes it; the second forward of a micro-batch draws anew."""
        micro_batch, calls = self._last_forward
        calls = calls + 1 if micro_batch == self._micro_batch else 0
        self._last_forward = (self._micro_batch, calls)
        index = self._micro_batch * self.world_size + self.rank
        return rng_key(self.seed, self.attempted_steps, index, calls)

    def backward(self, loss: Any, *, weight: float | Tensor = 1.0) -> None:
        """Backward of the mean loss of one micro-batch; reductions start as its gradients complete."""
        self._require_whole("backward")
        self._finalize_step()
        factor = self._factor(weight)
        value = self._checked_loss(loss, is_dummy=not isinstance(weight, Tensor) and weight == 0)
        self._losses.add(self._micro_batch, value, factor)
        self._backward_failed = True
        alone = self._is_last and self._micro_batch == 0 and self.world_size == 1  # then there is nothing to tell apart
        self.monitor.is_enabled, self.monitor.records_magnitude = not alone, self._finalizer.scale.is_calibrating
        with self._autocast.backward():
            self._backward(value, Weight(factor, is_one=not isinstance(weight, Tensor) and weight == 1))
        self._backward_failed = False

    def _factor(self, weight: float | Tensor) -> Tensor:
        """A weight on the device: 0-dim FP32. A number is filled in there, because copying it would wait."""
        if isinstance(weight, Tensor):
            return weight.detach().to(self.device, torch.float32, non_blocking=True).reshape(())
        check_weight(float(weight), f"micro-batch {self._micro_batch}")
        return torch.full((), float(weight), dtype=torch.float32, device=self.device)

    def _checked_loss(self, loss: Any, *, is_dummy: bool) -> Tensor:
        value = find_loss(loss)
        if value is None:
            shape = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UsageError(
                f"engine.backward expected a 0-dim loss tensor, or an output with a 0-dim 'loss'; got one {shape}"
            )
        if value.dtype != torch.float32:
            raise ContractError(
                f"the loss is {value.dtype}; the contract says float32. Compute it in FP32, for instance "
                f"F.cross_entropy(logits.float(), targets)"
            )
        if not value.requires_grad and not is_dummy:
            raise UsageError(
                "the loss has no graph, so there is nothing to train on; was it detached, or computed in "
                "engine.eval()? Only a dummy with weight=0 may come without one"
            )
        if not value.requires_grad and self.dummies_need_graph:
            raise UsageError(
                f"a dummy loss without a graph with engine={self.name} at zero_stage={self.options.zero_stage}, where "
                f"all ranks communicate in every micro-batch; take the loss of any input, with weight=0"
            )
        if self._losses.has(self._micro_batch):
            raise UsageError(
                "a second engine.backward on one micro-batch; for gradient accumulation write "
                "'for micro in engine.accumulate(batch):', and add up several losses before one backward"
            )
        return value

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(self, *, lr: float | None = None) -> StepOutcome:
        """Reduces, votes, and updates on all ranks or on none; on a GPU the host waits for nothing of it."""
        self._finalize_step()
        self._raise_failed_save()
        self._require_whole("step")
        if not self._losses:
            raise UsageError("engine.step without engine.backward before it; a step needs at least one micro-batch")
        self._check_step()
        self.finish_gradients()
        if lr is None:
            lr = self.options.optimizer.lr * self.options.schedule.factor(self.applied_steps)
        if not 0 <= lr < math.inf:
            raise UsageError(f"the learning rate of step {self.attempted_steps} is {lr}; expected a finite number >= 0")
        decision = self._vote(float(lr))
        # always launched: the device decides whether it writes
        self._update(
            UpdateScalars.of(
                lr=float(lr),
                step=self._finalizer.applied_steps + 1,  # not settled: that would wait for this step's decision
                grad_divisor=decision.grad_divisor,
                found_inf=decision.code != 0,
                device=self.device,
            )
        )
        self.attempted_steps += 1
        self._losses.clear()
        self._stop_requested = False
        self._end_batch()
        self._has_old_gradients = True
        outcome = self._finalizer.outcome()
        if self.is_synchronous:
            self._finalize_step()
        return outcome

    def _raise_failed_save(self) -> None:
        """Raises the failure of a save that the vote has told of: the ranks take note of a vote in one place."""
        if self._finalizer.save_failed:
            self._finalizer.save_failed = False
            self._saver.fail()

    def _vote(self, lr: float) -> Decision:
        squares = self._squares()
        known = VoteRecord(
            step=self.attempted_steps,
            config_hash=self._config_hash,
            num_micro_batches=len(self._losses),
            schedule_hash=self.comm.schedule_hash,
            data_cursor=self.data_cursor,
            lr=lr,
            loss_scale=self.loss_scale.scale,
            stop_requested=int(self._stop_requested),
            save_failed=int(self._saver.has_failed),
            sum_weights=0.0,
            sum_weighted_loss=0.0,
            sum_squares=0.0,
        )
        sums = self._canonical_sums(squares)  # communicates: the schedule in the record is the one before it
        rows = self.comm.gather_rows(fill(known, self._observe(squares)), label="vote")
        decision = decide(rows, max_grad_norm=self.options.max_grad_norm, **sums)
        self._finalizer.post(decision, rows, known, tuple(self.comm.schedule_log))
        self.comm.begin_schedule()
        return decision

    def _canonical_sums(self, squares: Tensor) -> dict[str, Tensor]:
        """What :func:`decide` takes as formed in canonical order: ``sum_squares`` and ``sum_weights``; none here."""
        return {}

    def _observe(self, squares: Tensor) -> Observations:
        losses = self._losses.summary()
        numbers, bad = self.monitor.finiteness()
        max_abs_grad = self.monitor.max_abs(self.device)
        bad_gradient = upload([-1], self.device)[0] if bad is None else first_index(bad, upload(numbers, self.device))
        return Observations(
            torch.stack((losses.sum_weights, losses.sum_weighted_loss, squares.sum(), losses.bad_loss, max_abs_grad)),
            torch.stack((losses.num_bad_losses, losses.bad_micro_batch, losses.bad_weight, bad_gradient)),
        )

    def _search(self) -> list[Finding]:
        return [
            finding
            for piece in self.owned_shards(MAIN_GRAD)
            for finding in search(piece.name, self.rank, piece.start, piece.data)
        ]

    def _finalize_step(self) -> None:
        """Takes note of the last step; then its gradients have served."""
        self._finalizer.finalize_step()
        if self._has_old_gradients:
            self._has_old_gradients = False
            self._clear_gradients()

    @property
    def is_synchronous(self) -> bool:
        """Whether looking at an outcome costs nothing; else it waits for the device."""
        return self._finalizer.is_synchronous

    @property
    def applied_steps(self) -> int:
        """Updates of the masters; on a GPU this waits for the last step's decision."""
        self._finalizer.finalize_step()
        return self._finalizer.applied_steps

    @applied_steps.setter
    def applied_steps(self, count: int) -> None:
        self._finalizer.applied_steps = count

    @property
    def loss_scale(self) -> LossScaleState:
        """The loss-scale machine after the last step; on a GPU this waits for its decision."""
        self._finalizer.finalize_step()
        return self._finalizer.scale

    @loss_scale.setter
    def loss_scale(self, state: LossScaleState) -> None:
        self._finalizer.scale = state

    def _has_backward(self) -> bool:
        return bool(self._losses)

    def _end_batch(self) -> None:
        super()._end_batch()
        self._last_forward = (-1, -1)

    # -- state -------------------------------------------------------------------------------------------------------

    def check_contract(self) -> None:
        """Asserts the contract on live tensors: now the weights, masters and moments, in the next forward the rest.

        Raises:
            ContractError: naming the tensor whose dtype or storage is another one.
        """
        self._check_step()
        self._check_live()
        storages = self._storages()
        for kind in ("master", "moments"):
            for tensor in storages[kind]:
                if tensor.dtype != torch.float32:
                    shape = list(tensor.shape)
                    raise ContractError(f"{kind} of shape {shape} is {tensor.dtype}; the contract says float32")
        self._is_unseen = True

    def save(
        self,
        directory: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float | None] | None = None,
        retention: Retention | None = None,
        asynchronous: bool = False,
        when_busy: str = "wait",
    ) -> Path | None:
        """Writes a checkpoint under ``directory``; all ranks call. Returns its path."""
        self._require_whole("save")
        self._require_between_steps("save")
        if when_busy not in ("wait", "skip"):
            raise UsageError(f"engine.save(when_busy={when_busy!r}): expected 'wait' or 'skip'")
        if when_busy == "skip" and self.is_saving():
            return None
        self.wait_for_save()
        snapshots: list[Snapshot] = []

        def take() -> None:
            snapshots.append(checkpointing.snapshot_of(self, extra=extra, config=config, metrics=metrics))

        on_every_rank(self.comm, f"saving step {self.attempted_steps}", take, CheckpointError)
        save = self._saver.start if asynchronous else self._saver.save
        return save(Path(directory), snapshots[0], retention)

    def prepare_saves(self) -> None:
        """Connects the threads that save, so that the first asynchronous save need not; all ranks call."""
        self._saver.prepare()

    def is_saving(self) -> bool:
        """Whether an asynchronous save is under way on any rank; all ranks call."""
        self._finalize_step()
        return self._saver.is_busy()

    def wait_for_save(self) -> Path | None:
        """Returns the path of the last asynchronous save once it is committed, None before any; all ranks call."""
        self._finalize_step()
        self._finalizer.save_failed = False  # what the vote has told of is raised here
        return self._saver.wait()

    def leave_save(self, *, give_up: bool = False) -> None:
        """Returns when an asynchronous save under way has ended on this rank; asks no other rank."""
        self._saver.leave(give_up=give_up)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Restores the newest checkpoint under ``path`` that verifies, or that at ``path``; returns its ``extra``."""
        self._require_no_failed_backward("load")
        self._require_between_steps("load")
        self.wait_for_save()
        reader = checkpointing.open_checkpoint(self, Path(path))
        self._half_loaded = True
        extra = checkpointing.fill(self, reader)
        self._half_loaded = False
        self._finalizer.skips.reset()
        self._refresh()
        self.check_contract()
        logger.info(f"loaded step {self.attempted_steps} ({self.applied_steps} applied)")
        return extra

    def _require_between_steps(self, verb: str) -> None:
        if self._losses:
            raise UsageError(f"engine.{verb} between backward and step; call it after engine.step")

    def _require_whole(self, verb: str) -> None:
        self._require_no_failed_backward(verb)
        if self._half_loaded:
            raise UsageError(
                f"engine.{verb} after an engine.load that failed half-way: the weights are part old, part loaded; load "
                f"a checkpoint that can be read, or build a new engine"
            )

    def _require_no_failed_backward(self, verb: str) -> None:
        if self._backward_failed:
            raise UsageError(
                f"engine.{verb} after an engine.backward that failed half-way: this rank's gradients are incomplete, "
                f"and its reductions out of step with the others'; build a new engine and load a checkpoint"
            )

    def memory(self) -> dict[str, int]:
        """Bytes on this rank by kind, counted on the tensors themselves."""
        kinds = {kind: sum(map(_nbytes, tensors)) for kind, tensors in self._storages().items()}
        kept = [*self.module.buffers(), *(parameter for _, parameter in self._frozen)]
        return {**kinds, "buffers": sum(map(_nbytes, kept))}

    def master_state(self) -> dict[str, Tensor]:
        """{name: FP32 full tensor on CPU} on rank 0, empty elsewhere; gathered one by one; all ranks call."""
        self._finalize_step()
        pairs = ((name, tensor.clone().cpu() if self.rank == 0 else None) for name, tensor in self.full_state(MASTER))
        return {name: tensor for name, tensor in pairs if tensor is not None}

    def full_state(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """(name, full FP32 tensor) of ``master``, ``exp_avg``, ``exp_avg_sq`` or ``main_grad``; all ranks call."""
        pieces = {piece.name: piece for piece in self.owned_shards(kind)}
        for name, shape in self.shapes.items():
            piece = pieces.get(name)
            own = torch.empty(0) if piece is None else piece.data
            start = 0 if piece is None else piece.start
            bounds = torch.tensor([start, start + own.numel()], dtype=torch.int64, device=self.device)
            intervals = self.comm.gather_rows(bounds, label=f"intervals of {name}").tolist()
            row = torch.zeros(max(stop - start for start, stop in intervals), device=self.device)
            row[: own.numel()] = own
            full = torch.empty(math.prod(shape), device=self.device)
            for values, (start, stop) in zip(self.comm.gather_rows(row, label=f"full {name}"), intervals, strict=True):
                full[start:stop] = values[: stop - start]
            yield name, full.view(shape)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

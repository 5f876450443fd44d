"""dtrain's own engine: sharded FP32 masters, reductions that overlap backward, one vote a step, one update."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.distributed.collectives import Communicator
from dtrain.distributed.logging import logger
from dtrain.engine import persistence
from dtrain.engine.base import Culprit, Engine, StepOutcome
from dtrain.engine.divergence import explain
from dtrain.engine.rng import keyed_rng, rng_key
from dtrain.engine.skips import SkipCounter
from dtrain.engine.tally import Tally, check_weight
from dtrain.engine.vote import Flags, Verdict, VoteRecord, collect, decide, find_disagreement
from dtrain.errors import ContractError, DivergenceError, UsageError
from dtrain.optim.adamw import AdamW, FlatAdamW, UpdateScalars
from dtrain.optim.schedule import Schedule
from dtrain.precision.forward import Autocast, find_loss
from dtrain.precision.loss_scale import LossScaleState
from dtrain.precision.policy import Contract
from dtrain.sharding.layout import ParamSpec
from dtrain.sharding.placement import STAGES, memory_formula
from dtrain.sharding.state import ShardedState


@dataclass(frozen=True)
class NativeOptions:
    """What makes the native engine's step; equal on all ranks.

    Attributes:
        optimizer: AdamW's hyper-parameters.
        schedule: of the learning rate.
        max_grad_norm: clipping threshold of the global norm, or None.
        zero_stage: the row of the stage table.
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
class RunIdentity:
    """What names a run and keys its random numbers."""

    run_id: str
    seed: int


class NativeEngine(Engine):
    """See :class:`dtrain.engine.base.Engine`; built by :func:`dtrain.initialize`.

    Args:
        model: on its device, its weights equal on all ranks.
        contract: the precision policy resolved on it.
        state: the model states, which have taken the parameters over.
        comm: the ranks that train together.
        options: what makes the step.
        loss_scale: the machine at its start.
        identity: run id and seed; a load replaces both by the saved ones.
        config_text: what must be equal on all ranks, as text that can be shown.
    """

    name = "native"

    def __init__(
        self,
        model: nn.Module,
        contract: Contract,
        state: ShardedState,
        comm: Communicator,
        options: NativeOptions,
        loss_scale: LossScaleState,
        identity: RunIdentity,
        config_text: str,
    ) -> None:
        super().__init__()
        self.module = model
        self.comm = comm
        self.policy = contract.policy
        self.contract = contract
        self.state = state
        self.options = options
        self.loss_scale = loss_scale
        self.run_id = identity.run_id
        self.seed = identity.seed
        self.num_parameters = sum(spec.numel for spec in self._specs())
        self._config_text = config_text
        self._config_hash = int.from_bytes(hashlib.sha256(config_text.encode()).digest()[:7], "big")
        self._autocast = Autocast(contract, model, comm.device)
        self._optimizer = FlatAdamW(options.optimizer, state.update_slices())
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._tally = Tally()
        self._last_forward = (-1, -1)  # micro-batch and how many forwards it has had
        self._skips = SkipCounter(options.max_consecutive_skips)
        self._half_loaded = False
        self.check_contract()

    # -- forward and backward --------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, under the precision policy; returns what the model returns."""
        keyed: Any = nullcontext()
        if not self._evaluating and self.module.training:
            keyed = keyed_rng(self.device, self._forward_key())
        with keyed, self._autocast():
            return self._autocast.cast_output(self.module(*args, **kwargs))

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
        if not isinstance(weight, Tensor):
            check_weight(float(weight), f"micro-batch {self._micro_batch}")
        value = self._checked_loss(loss, is_dummy=not isinstance(weight, Tensor) and weight == 0)
        factor = torch.as_tensor(weight, dtype=torch.float32, device=self.device).detach().reshape(())
        self._tally.add(self._micro_batch, value, factor)
        state = self.state
        state.weight = factor
        state.reducer.begin_micro_batch(factor, last=self._is_last)
        if value.requires_grad:
            state.in_backward = True
            try:
                with self._autocast.backward():
                    (value * self.loss_scale.scale).backward()
            finally:
                state.in_backward = False
        state.reducer.end_micro_batch()

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
        if self._tally.has(self._micro_batch):
            raise UsageError(
                "a second engine.backward on one micro-batch; for gradient accumulation write "
                "'for micro in engine.accumulate(batch):', and add up several losses before one backward"
            )
        return value

    # -- the step --------------------------------------------------------------------------------------------------

    def step(self, *, lr: float | None = None) -> StepOutcome:
        """Reduces, votes, and updates on all ranks or on none."""
        if not self._tally:
            raise UsageError("engine.step without engine.backward before it; a step needs at least one micro-batch")
        self._check_model()
        self.finish_gradients()
        if lr is None:
            lr = self.options.optimizer.lr * self.options.schedule.factor(self.applied_steps)
        if not 0 <= lr < math.inf:
            raise UsageError(f"the learning rate of step {self.attempted_steps} is {lr}; expected a finite number >= 0")
        verdict = self._vote(float(lr))
        if verdict.reason is None:
            self._update(verdict, lr)
        outcome = self._outcome(verdict, lr)
        self._advance(outcome)
        return outcome

    def finish_gradients(self) -> None:
        """Completes the main grads: all reductions of this step have arrived, still scaled and weighted."""
        self.state.reducer.finish()

    def _vote(self, lr: float) -> Verdict:
        squares = self.state.chunk_squares()
        canonical_squares = self.state.canonical_sum(squares) if self.options.reproducible else None
        record = self._record(squares, lr)
        records = collect(self.comm, record)
        disagreement = find_disagreement(records)
        if disagreement is not None:
            raise DivergenceError(
                explain(self.comm, disagreement, step=self.attempted_steps, config_text=self._config_text)
            )
        self.comm.begin_schedule()
        return decide(records, sum_squares=canonical_squares, sum_weights=self._canonical_weights())

    def _record(self, squares: Tensor, lr: float) -> VoteRecord:
        seen = self._tally.summary()
        sum_squares = float(squares.sum())  # of numbers >= 0: finite if and only if each of them is
        bad_tensor = -1 if math.isfinite(sum_squares) else self.state.first_bad_parameter()
        flags = Flags(0)
        if seen.bad_micro_batch >= 0:
            flags |= Flags.NONFINITE_LOSS
        if bad_tensor >= 0:
            flags |= Flags.NONFINITE_GRADIENT
        if self._stop_requested:
            flags |= Flags.STOP_REQUESTED
        return VoteRecord(
            step=self.attempted_steps,
            config_hash=self._config_hash,
            schedule_hash=self.comm.schedule_hash,
            data_cursor=self.data_cursor,
            num_micro_batches=seen.num_micro_batches,
            lr=lr,
            loss_scale=self.loss_scale.scale,
            sum_weights=seen.sum_weights,
            sum_weighted_loss=seen.sum_weighted_loss,
            sum_squares=sum_squares,
            flags=int(flags),
            bad_tensor=bad_tensor,
            bad_micro_batch=seen.bad_micro_batch,
        )

    def _canonical_weights(self) -> float | None:
        """The sum of all weights of all ranks, correctly rounded, so it does not depend on who held which."""
        if not self.options.reproducible:
            return None
        return math.fsum(torch.cat(self.state.reducer.micro_batch_weights).tolist())

    def _update(self, verdict: Verdict, lr: float) -> None:
        limit = self.options.max_grad_norm
        clip = 1.0 if limit is None else min(1.0, limit / (verdict.grad_norm + 1e-6))
        scalars = UpdateScalars.of(
            lr=lr, step=self.applied_steps + 1, grad_divisor=verdict.grad_divisor / clip, device=self.device
        )
        self.state.refresh_replicas(before_each=lambda number: self._optimizer.update(number, scalars))

    def _outcome(self, verdict: Verdict, lr: float) -> StepOutcome:
        culprit = None
        if verdict.bad_micro_batch >= 0:
            culprit = Culprit(
                verdict.bad_rank, self.attempted_steps, "forward loss", micro_batch=verdict.bad_micro_batch
            )
        elif verdict.bad_tensor >= 0:
            name = self.state.parameter_names[verdict.bad_tensor]
            culprit = Culprit(verdict.bad_rank, self.attempted_steps, "reduced gradient", tensor=name)
        return StepOutcome(
            applied=verdict.reason is None,
            reason=verdict.reason,
            loss=verdict.loss,
            grad_norm=verdict.grad_norm,
            loss_scale=self.loss_scale.scale,
            lr=lr,
            culprit=culprit,
            stop_requested=verdict.stop_requested,
        )

    def _advance(self, outcome: StepOutcome) -> None:
        self.attempted_steps += 1
        if outcome.applied:
            self.applied_steps += 1
        # a non-finite forward loss is no fault of the scale: no scale cures it
        if outcome.reason in (None, "overflow"):
            self.loss_scale = self.loss_scale.update(found_inf=not outcome.applied)
        self._tally.clear()
        self.state.reducer.micro_batch_weights.clear()
        self._stop_requested = False
        self._end_batch()
        self._skips.count(outcome, loss_scale=self.loss_scale.scale)

    def _has_backward(self) -> bool:
        return bool(self._tally)

    def _end_batch(self) -> None:
        super()._end_batch()
        self._last_forward = (-1, -1)

    # -- state -----------------------------------------------------------------------------------------------------

    def check_contract(self) -> None:
        """Asserts the contract on live tensors: replicas, masters, moments, main grads.

        Raises:
            ContractError: naming the tensor whose dtype or storage is another one.
        """
        self.contract.check_parameters(self.module)
        self._check_model()
        for kind in ("master", "moments", "main_grad"):
            for tensor in self.state.storages()[kind]:
                if tensor.dtype != torch.float32:
                    raise ContractError(f"{kind} is {tensor.dtype}; the contract says float32")

    def _check_model(self) -> None:
        """Asserts that the model still computes with the replicas, and that the same parameters are trained."""
        for replica in self.state.replicas:
            replica.check()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ContractError(
                    f"'{name}' was frozen at dtrain.initialize and now requires a gradient; it has no master, so "
                    f"build a new engine to train it"
                )

    def save(
        self,
        directory: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        keep_last: int = 2,
    ) -> Path:
        """Writes a checkpoint under ``directory``; all ranks call. Returns its path."""
        self._require_between_steps("save")
        self._require_whole("save")
        return persistence.save(self, Path(directory), extra=extra, config=config, keep_last=keep_last)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Restores the newest checkpoint under ``path`` that verifies, or that at ``path``; returns its ``extra``."""
        self._require_between_steps("load")
        reader = persistence.open_checkpoint(self, Path(path))
        self._half_loaded = True
        extra = persistence.fill(self, reader)
        self._half_loaded = False
        self._skips.reset()
        self.state.refresh_replicas()
        self.check_contract()
        logger.info(f"loaded step {self.attempted_steps} ({self.applied_steps} applied)")
        return extra

    def _require_between_steps(self, verb: str) -> None:
        if self._tally:
            raise UsageError(f"engine.{verb} between backward and step; call it after engine.step")

    def _require_whole(self, verb: str) -> None:
        if self._half_loaded:
            raise UsageError(
                f"engine.{verb} after an engine.load that failed half-way: the weights are part old, part loaded; load "
                f"a checkpoint that can be read, or build a new engine"
            )

    def memory(self) -> dict[str, int]:
        """Bytes on this rank by kind, counted on the tensors themselves."""
        kinds = {kind: sum(map(_nbytes, tensors)) for kind, tensors in self.state.storages().items()}
        kept = [*self.module.buffers(), *(parameter for _, parameter in self._frozen)]
        return {**kinds, "buffers": sum(map(_nbytes, kept))}

    def memory_formula(self) -> dict[str, int]:
        """Bytes on a rank by the ZeRO formula in force, without padding and buffers."""
        specs = self._specs()
        low = sum(spec.numel for spec in specs if spec.replica_dtype != torch.float32)
        return memory_formula(
            STAGES[self.options.zero_stage],
            low_numel=low,
            fp32_numel=self.num_parameters - low,
            low_bytes=self.policy.compute_dtype.itemsize,
            world_size=self.world_size,
        )

    def master_state(self) -> dict[str, Tensor]:
        """{name: FP32 full tensor on CPU} on rank 0, empty elsewhere; gathered buffer by buffer; all ranks call."""
        full = self.state.gather_full(self.state.master)
        pairs = ((spec.name, tensor.clone().cpu() if self.rank == 0 else None) for spec, tensor in full)
        return {name: tensor for name, tensor in pairs if tensor is not None}

    def _specs(self) -> list[ParamSpec]:
        return [slot.spec for layout in self.state.layouts for slot in layout.slots]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

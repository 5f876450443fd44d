"""dtrain's own engine: sharded FP32 masters, reductions that overlap backward, one vote a step, one update."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.distributed.collectives import Communicator
from dtrain.distributed.consensus import on_every_rank
from dtrain.distributed.logging import logger
from dtrain.engine import persistence
from dtrain.engine.base import Engine, StepOutcome
from dtrain.engine.culprit import Finding, search
from dtrain.engine.rng import keyed_rng, rng_key
from dtrain.engine.settlement import Settlement, Suspects
from dtrain.engine.skips import SkipCounter
from dtrain.engine.tally import Tally, check_weight
from dtrain.engine.vote import Decision, Observations, VoteRecord, decide, fill, first_index, upload
from dtrain.errors import ConfigError, ContractError, UsageError
from dtrain.optim.adamw import AdamW, FlatAdamW, UpdateScalars
from dtrain.optim.schedule import Schedule
from dtrain.precision.forward import Autocast, find_loss
from dtrain.precision.loss_scale import LossScaleState
from dtrain.precision.policy import Contract
from dtrain.sharding.accumulate import Weight
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
        self.run_id = identity.run_id
        self.seed = identity.seed
        self.num_parameters = sum(spec.numel for spec in self._specs())
        self._config_hash = int.from_bytes(hashlib.sha256(config_text.encode()).digest()[:7], "big")
        self._autocast = Autocast(contract, model, comm.device)
        self._build_optimizer()
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._tally = Tally()
        self._last_forward = (-1, -1)  # micro-batch and how many forwards it has had
        self._settlement = Settlement(
            comm,
            loss_scale,
            SkipCounter(options.max_consecutive_skips),
            Suspects(self._search, state.watch.clear, state.backward_names),
            config_text,
            at_once=comm.device.type == "cpu",
        )
        self._half_loaded = False
        self._is_torn = False  # a backward has begun and not come to its end
        self.check_contract()

    def _build_optimizer(self) -> None:
        def build() -> None:
            self._optimizer = FlatAdamW(self.options.optimizer, self.state.update_slices())

        # a compiler may fail on one rank alone
        on_every_rank(self.comm, "", build, ConfigError, expected=(ConfigError,))

    # -- forward and backward --------------------------------------------------------------------------------------

    @contextmanager
    def eval(self) -> Iterator[None]:
        """Forwards inside consume no micro-batch number and build no graph; the module is in eval mode."""
        self._settlement.settle()  # what is computed inside may be exchanged
        with super().eval():
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, under the precision policy; returns what the model returns."""
        if self.state.gathering is not None:
            self._settlement.settle()  # before the first collective of this forward: ranks may look at other times
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
        self._settlement.settle()
        factor = self._factor(weight)
        value = self._checked_loss(loss, is_dummy=not isinstance(weight, Tensor) and weight == 0)
        self._tally.add(self._micro_batch, value, factor)
        state = self.state
        state.weight = Weight(factor, is_one=not isinstance(weight, Tensor) and weight == 1)
        self._is_torn = True
        state.reducer.begin_micro_batch(state.weight, number=self._micro_batch, last=self._is_last)
        if value.requires_grad:
            with state.backward(), self._autocast.backward():
                (value * self.loss_scale.scale).backward()
        state.reducer.end_micro_batch()
        self._is_torn = False

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
        if not value.requires_grad and self.state.gathering is not None:
            raise UsageError(
                "a dummy loss without a graph at zero_stage=3, where all ranks gather weights in the forward and "
                "backward of every micro-batch; take the loss of any input, with weight=0"
            )
        if self._tally.has(self._micro_batch):
            raise UsageError(
                "a second engine.backward on one micro-batch; for gradient accumulation write "
                "'for micro in engine.accumulate(batch):', and add up several losses before one backward"
            )
        return value

    # -- the step --------------------------------------------------------------------------------------------------

    def step(self, *, lr: float | None = None) -> StepOutcome:
        """Reduces, votes, and updates on all ranks or on none; on a GPU the host waits for nothing of it."""
        self._settlement.settle()
        self._require_whole("step")
        if not self._tally:
            raise UsageError("engine.step without engine.backward before it; a step needs at least one micro-batch")
        self._check_model()
        self.finish_gradients()
        if lr is None:
            lr = self.options.optimizer.lr * self.options.schedule.factor(self.applied_steps)
        if not 0 <= lr < math.inf:
            raise UsageError(f"the learning rate of step {self.attempted_steps} is {lr}; expected a finite number >= 0")
        self._update(self._vote(float(lr)), float(lr))
        self.attempted_steps += 1
        self._tally.clear()
        self.state.reducer.micro_batch_weights.clear()
        self._stop_requested = False
        self._end_batch()
        return self._settlement.outcome()

    def finish_gradients(self) -> None:
        """Completes the main grads: all reductions of this step have arrived, still scaled and weighted."""
        self.state.reducer.finish()

    def _vote(self, lr: float) -> Decision:
        squares = self.state.chunk_squares()
        canonical = self.options.reproducible
        canonical_squares = self.state.canonical_sum(squares) if canonical else None
        known = VoteRecord(
            step=self.attempted_steps,
            config_hash=self._config_hash,
            num_micro_batches=len(self._tally),
            schedule_hash=self.comm.schedule_hash,
            data_cursor=self.data_cursor,
            lr=lr,
            loss_scale=self.loss_scale.scale,
            stop_requested=int(self._stop_requested),
            sum_weights=0.0,
            sum_weighted_loss=0.0,
            sum_squares=0.0,
        )
        rows = self.comm.gather_rows(fill(known, self._observe(squares)), label="vote")
        decision = decide(
            rows,
            max_grad_norm=self.options.max_grad_norm,
            sum_squares=canonical_squares,
            # equal weights in an equal order, whoever held which
            sum_weights=torch.cat(self.state.reducer.micro_batch_weights).double().sum() if canonical else None,
        )
        self._settlement.post(decision, rows, known, tuple(self.comm.schedule_log))
        self.comm.begin_schedule()
        return decision

    def _observe(self, squares: Tensor) -> Observations:
        losses = self._tally.summary()
        numbers, bad = self.state.watch.seen()
        bad_gradient = upload([-1], self.device)[0] if bad is None else first_index(bad, upload(numbers, self.device))
        return Observations(
            torch.stack((losses.sum_weights, losses.sum_weighted_loss, squares.sum(), losses.bad_loss)),
            torch.stack((losses.num_bad_losses, losses.bad_micro_batch, losses.bad_weight, bad_gradient)),
        )

    def _update(self, decision: Decision, lr: float) -> None:
        """Always launched: the device decides whether it writes."""
        scalars = UpdateScalars.of(
            lr=lr,
            step=self._settlement.applied_steps + 1,  # not settled: that would wait for this step's verdict
            grad_divisor=decision.grad_divisor,
            found_inf=decision.code != 0,
            device=self.device,
        )
        self.state.refresh_replicas(lambda number: self._optimizer.update(number, scalars))

    def _search(self) -> list[Finding]:
        return [finding for layout, grad in self.state.own_main_grads() for finding in search(layout, self.rank, grad)]

    @property
    def settles_at_once(self) -> bool:
        """Whether looking at an outcome costs nothing; else it waits for the device."""
        return self._settlement.at_once

    @property
    def applied_steps(self) -> int:
        """Updates of the masters; on a GPU this waits for the last step's verdict."""
        self._settlement.settle()
        return self._settlement.applied_steps

    @applied_steps.setter
    def applied_steps(self, count: int) -> None:
        self._settlement.applied_steps = count

    @property
    def loss_scale(self) -> LossScaleState:
        """The loss-scale machine after the last step; on a GPU this waits for its verdict."""
        self._settlement.settle()
        return self._settlement.scale

    @loss_scale.setter
    def loss_scale(self, state: LossScaleState) -> None:
        self._settlement.scale = state

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
        self._require_whole("save")
        self._require_between_steps("save")
        self._settlement.settle()
        return persistence.save(self, Path(directory), extra=extra, config=config, keep_last=keep_last)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Restores the newest checkpoint under ``path`` that verifies, or that at ``path``; returns its ``extra``."""
        self._require_untorn("load")
        self._require_between_steps("load")
        self._settlement.settle()
        reader = persistence.open_checkpoint(self, Path(path))
        self._half_loaded = True
        extra = persistence.fill(self, reader)
        self._half_loaded = False
        self._settlement.skips.reset()
        self.state.refresh_replicas()
        self.check_contract()
        logger.info(f"loaded step {self.attempted_steps} ({self.applied_steps} applied)")
        return extra

    def _require_between_steps(self, verb: str) -> None:
        if self._tally:
            raise UsageError(f"engine.{verb} between backward and step; call it after engine.step")

    def _require_whole(self, verb: str) -> None:
        self._require_untorn(verb)
        if self._half_loaded:
            raise UsageError(
                f"engine.{verb} after an engine.load that failed half-way: the weights are part old, part loaded; load "
                f"a checkpoint that can be read, or build a new engine"
            )

    def _require_untorn(self, verb: str) -> None:
        if self._is_torn:
            raise UsageError(
                f"engine.{verb} after an engine.backward that failed half-way: this rank's gradients are incomplete, "
                f"and its reductions out of step with the others'; build a new engine and load a checkpoint"
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
        self._settlement.settle()
        full = self.state.gather_full(self.state.master)
        pairs = ((spec.name, tensor.clone().cpu() if self.rank == 0 else None) for spec, tensor in full)
        return {name: tensor for name, tensor in pairs if tensor is not None}

    def _specs(self) -> list[ParamSpec]:
        return [slot.spec for layout in self.state.layouts for slot in layout.slots]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

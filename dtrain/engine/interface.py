"""The interface of every engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from dtrain.checkpoint import Retention
from dtrain.distributed.communicator import Communicator
from dtrain.engine.arguments import iterated
from dtrain.engine.micro_batch import INCOMPLETE, MicroBatch
from dtrain.engine.outcome import StepOutcome
from dtrain.engine.parts.stragglers import BusyMeter
from dtrain.errors import UsageError
from dtrain.precision.contract import Contract
from dtrain.precision.policy import PrecisionPolicy
from dtrain.precision.report import PrecisionMeasurement

Batch = TypeVar("Batch")

_END = object()  # of a batch


class Engine(ABC):
    """One training step on all ranks: forward, backward, reduction, vote, update.

    Attributes:
        module: the user's model, whose parameters the engine manages.
        comm: the ranks that train together.
        policy: the precision policy in force.
        contract: that policy resolved on the model.
        attempted_steps: steps taken, skipped ones included.
        data_cursor: samples consumed so far; advanced by the caller, saved, and compared in each vote.
        ema_decay: decay of the moving average of the weights; None: none is kept.
        library_config: configuration of the library below, as plain values; None if it takes none.
        busy: compares how long the ranks are busy; set ``busy.every``, the same on all ranks, for other windows.
        explain_skips: whether the culprit of a skipped step names the module where it went wrong
            (:class:`dtrain.engine.outcome.Origin`), which runs the micro-batch at fault again. Set it before a step,
            the same on all ranks. The arguments of a step's forwards are kept until the next; do not overwrite them.
    """

    name: str
    busy: BusyMeter
    module: nn.Module
    comm: Communicator
    policy: PrecisionPolicy
    contract: Contract
    num_parameters: int
    attempted_steps: int = 0
    data_cursor: int = 0
    ema_decay: float | None = None
    library_config: Mapping[str, Any] | None = None
    explain_skips: bool = False

    def __init__(self) -> None:
        self._current = MicroBatch()
        self._evaluating = False
        self._stop_requested = False
        self._save_expected = False

    @property
    def is_synchronous(self) -> bool:
        """Whether reading an outcome costs nothing; else it waits for the device."""
        return True

    @property
    @abstractmethod
    def applied_steps(self) -> int:
        """Number of updates of the masters.

        On a GPU this waits for the last step's decision, and ranks that skipped the step search for the culprit
        together.
        """

    @property
    def compiled_graphs(self) -> int | None:
        """Number of graphs into which the blocks were compiled so far; None: they are not compiled."""
        return None

    @property
    def rank(self) -> int:
        """Index of this rank."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.comm.world_size

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.comm.device

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Holds the forward and the backward of the next micro-batch of this step.

        ::

            for index, (x, y) in enumerate(batch):
                with engine.micro_batch(last=index == len(batch) - 1):
                    engine.backward(loss_of(engine(x), y))
            engine.step()

        Every rank runs the same number of micro-batches; a rank with fewer adds finite dummies with ``weight=0``. If
        none was marked as the last, :meth:`step` reduces. An exception ends the batch: if no backward came before it,
        the next micro-batch is the first again.

        Args:
            last: whether it is this rank's last one before :meth:`step`; its backward starts the reductions that need
                all micro-batches.

        Raises:
            UsageError: inside another micro-batch, after the last one, or after a backward outside of any.
        """
        if not isinstance(last, bool):
            raise UsageError(f"engine.micro_batch(last={last!r}): expected True or False")
        self._current = current = self._current.following(is_last=last, has_backward=self._has_backward())
        ended = False
        try:
            yield
            ended = True
        finally:
            self._close(current, is_over=last or not ended)

    def accumulate(self, batch: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the micro-batches of ``batch``, each inside :meth:`micro_batch`.

        Every rank gives the same number of micro-batches; a rank with fewer adds finite dummies with ``weight=0``.

        Raises:
            UsageError: ``batch`` is empty or no iterable; called again before ``step``, unless the last loop ended
                before any backward; or ``step`` was called inside the loop.
        """
        return self._accumulate(iterated(batch))

    def _accumulate(self, items: Iterator[Batch]) -> Iterator[Batch]:
        before = self._current.state
        if before == "open" or (before != "unmarked" and self._has_backward()):
            # two batches in one step would give two micro-batches one number, and with it one RNG key
            raise UsageError(
                f"engine.accumulate was called again before engine.step, or after engine.micro_batch; one batch makes "
                f"one step. {INCOMPLETE}"
            )
        # one item is read ahead: the last micro-batch is known before its backward, which reduces
        following: Batch | object = next(items, _END)
        if following is _END:
            raise UsageError("engine.accumulate got an empty batch; every rank gives at least one micro-batch")
        if before != "unmarked":
            self._end_batch()  # micro-batches without any backward: as if they had not been
        current: MicroBatch | None = None
        try:
            while following is not _END:
                if current is not None and self._current is not current:
                    raise UsageError(
                        "engine.step was called inside a loop over engine.accumulate that has more micro-batches; one "
                        "batch makes one step, so call it after the loop"
                    )
                micro, following = cast(Batch, following), next(items, _END)
                with self.micro_batch(last=following is _END):
                    current = self._current
                    yield micro
        finally:
            if current is not None:
                self._close(current, is_over=True)

    def _close(self, current: MicroBatch, *, is_over: bool) -> None:
        """Ends ``current``, and the batch too if it is over and nothing of it counts."""
        current.state = "over" if is_over else "closed"
        # an abandoned generator is closed late: a newer batch may have begun
        if is_over and self._current is current and not self._has_backward():
            self._end_batch()

    def _end_batch(self) -> None:
        """Resets the numbering for the next batch."""
        self._current = MicroBatch()

    @property
    def _micro_batch(self) -> int:
        return self._current.number

    @property
    def _is_last(self) -> bool:
        return self._current.is_last

    @abstractmethod
    def _has_backward(self) -> bool:
        """Whether the current step has had a backward."""

    @contextmanager
    def eval(self) -> Iterator[None]:
        """Context of forwards that consume no micro-batch number and build no graph; the module is in eval mode."""
        # of each module: a user may keep some in eval mode while the others train
        modes = [(module, module.training) for module in self.module.modules()]
        outer = self._evaluating
        self.module.eval()
        self._evaluating = True
        try:
            with torch.no_grad():
                yield
        finally:
            self._evaluating = outer
            for module, mode in modes:
                module.training = mode

    @abstractmethod
    def copy_buffers(self) -> None:
        """Copies rank 0's persistent buffers, such as running statistics of BatchNorm, to all ranks, which all call.

        Ranks differ in them, because each updates them from its own samples. A checkpoint has rank 0's, so call this
        before an evaluation that all ranks share. Buffers that were never written are left out. A single rank does
        nothing.

        Raises:
            UsageError: inside ``modify_weights``, or after a backward or a load that failed half-way.
        """

    @abstractmethod
    def ema(self) -> AbstractContextManager[None]:
        """Context in which the weights are their exponential moving averages; all ranks call.

        For evaluation: no backward, step, save or load. Afterwards the weights have their own bits again. The averages
        follow applied steps: ``average += (1 - ema_decay) * (master - average)``, in FP32.

        Raises:
            UsageError: the engine keeps no average; between backward and step; or a parameter was written to inside.
        """

    def request_stop(self) -> None:
        """Requests, through the next vote, that all ranks stop after that step; the request holds for one step."""
        self._stop_requested = True  # a rank that stopped alone would leave the others waiting in a collective

    def expect_save(self) -> None:
        """Declares that the weights after the next :meth:`step` will be saved; the same on all ranks, for one step.

        Ranks that differ in it end in a :class:`dtrain.DivergenceError`.

        The update then leaves fingerprints of what it wrote, which the save compares with what reaches the file.
        Without it a save still audits all but the masters and optimizer states that only one rank holds.
        """
        self._save_expected = True

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's own forward under the precision policy; returns what the model returns."""

    @abstractmethod
    def backward(self, loss: Any, *, weight: float | Tensor = 1.0) -> None:
        """Runs the backward of the mean ``loss`` of one micro-batch, times the loss scale.

        Args:
            loss: a 0-dim FP32 tensor, or a model output with a ``loss`` entry or attribute.
            weight: of this loss in the global mean; a number or a 0-dim device tensor, for instance the micro-batch's
                token count.

        Raises:
            ContractError: the loss is not FP32.
            UsageError: a second backward on one micro-batch, or a weight that is negative or not finite.
        """

    @abstractmethod
    def step(
        self, *, lr: float | None = None, max_grad_norm: float | None = None, grad_factor: float = 1.0
    ) -> StepOutcome:
        """Reduces, votes, and updates on all ranks or on none.

        All arguments must be the same on all ranks.

        Args:
            lr: overrides the schedule for this step, except of groups with a schedule of their own.
            max_grad_norm: overrides the clipping threshold of :func:`dtrain.initialize` for this step; ``math.inf``
                clips nothing, None keeps that threshold.
            grad_factor: factor of this step's gradient, before its norm is taken. For loops that add the gradients of
                their micro-batches instead of averaging them: the number of micro-batches.

        Raises:
            CorruptionError: the audit found wrong bits; nothing was updated. Load a checkpoint.
            DivergenceError: the ranks no longer do the same thing; nothing was updated.
            NonFiniteError: too many consecutive steps were skipped.
            UsageError: without a backward before it.
        """

    @abstractmethod
    def measure_precision(self, activations: Sequence[str] = ()) -> AbstractContextManager[PrecisionMeasurement]:
        """Context around one whole step, from its first forward to ``step``, that measures what precision costs it.

        ::

            with engine.measure_precision() as measurement:
                for micro in engine.accumulate(batch):
                    engine.backward(loss_of(engine(micro)))
                engine.step()
            report = measurement.report()

        All ranks enter it. It counts the magnitudes of every gradient, compares the masters before and after the
        update, and casts the operands of FP8 products once more. The weights get the same bits as without it. It takes
        4 bytes an owned master, and 4 KiB a parameter. Other steps pay nothing.

        Args:
            activations: names (``fnmatch``) of modules whose outputs, and gradients of these, are counted too.

        Raises:
            ConfigError: a pattern matches no module, or only compiled ones.
            UsageError: between backward and step, inside itself, at a second step inside, or at its end if that is
                between backward and step.
        """

    @abstractmethod
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
        """Writes a checkpoint under ``directory``; all ranks call. Returns its path.

        An asynchronous save returns once this rank's part is copied to host memory, which is reused by the next one; a
        thread of each rank writes it. One save is under way at a time. If it fails, every rank raises the same
        ``CheckpointError``, once: from the :meth:`step` after the one whose vote reports it, from the next
        :meth:`save` or :meth:`load`, or from :meth:`wait_for_save`. Training can continue: the step that raises it has
        done nothing and can be called again. A process that ends without :meth:`wait_for_save` waits for the thread,
        which logs a failure; the exit code does not show it.

        Args:
            directory: usually ``run/checkpoints``.
            extra: the caller's own JSON.
            config: the run's configuration, stored redacted.
            metrics: losses to list; those that are None or not finite are left out. ``keep_best`` compares
                ``val_loss``.
            retention: which checkpoints are kept; None: ``Retention()``, the newest two.
            asynchronous: see above.
            when_busy: if the save before it is still under way, ``wait`` for it, or ``skip`` this one.

        Returns:
            The path, where an asynchronous save is not visible yet; None if it is skipped.

        Raises:
            CheckpointError: any rank failed; no checkpoint became visible.
            CorruptionError: the audit found wrong bits; no checkpoint became visible.
        """

    @abstractmethod
    def prepare_saves(self) -> None:
        """Connects the threads that save, so that the first asynchronous save need not; all ranks call.

        Raises:
            CommunicationError: a rank has died or hangs.
        """

    @abstractmethod
    def is_saving(self) -> bool:
        """Whether an asynchronous save is under way on any rank; all ranks call."""

    @abstractmethod
    def wait_for_save(self) -> Path | None:
        """Returns the path of the last asynchronous save once it is committed, None before any; all ranks call.

        Raises:
            CheckpointError: it failed on any rank.
        """

    @abstractmethod
    def leave_save(self, *, cancel: bool = False) -> None:
        """Returns when an asynchronous save under way has ended on this rank, however it does; asks no other rank.

        For a rank that stops training by an exception and is about to leave the process group.

        Args:
            cancel: stop writing at once: a rank has gone, so that it cannot be committed.
        """

    @abstractmethod
    def load(self, path: str | Path) -> dict[str, Any]:
        """Restores the newest checkpoint under ``path`` that verifies, or the one at ``path``; returns its ``extra``.

        Raises:
            CheckpointError: none verifies, or it is of another model.
        """

    @abstractmethod
    def modify_weights(self, *patterns: str) -> AbstractContextManager[None]:
        """Context in which the model's parameters are whole FP32 masters on every rank, for writing; all ranks call.

        Frozen parameters are whole too, in their own dtype. Gradients are off inside. At the end all ranks compare the
        new values, take them over into masters, frozen shards and compute weights, and free the copies. Optimizer
        states stay, and so does the moving average, except before the first update. After an exception no weight is
        changed. Parameters are written in place: ``load_state_dict``, ``copy_``, ``clamp_``. The whole weights
        take 4 bytes an element on every rank.

        Args:
            *patterns: names (``fnmatch``) of parameters or modules; all by default.

        Raises:
            DivergenceError: the ranks have written different values; no weight was changed.
            UsageError: between backward and step, inside itself or ``eval``; a pattern matches nothing; a parameter was
                replaced; or another rank failed inside.
        """

    @abstractmethod
    def full_model(self) -> AbstractContextManager[nn.Module]:
        """Context of a copy of the model that has its whole weights on every rank; all ranks enter.

        ::

            with engine.full_model() as model:
                tokens = model.hf.generate(prompt, max_new_tokens=50)  # of model=hf

        The copy is in eval mode, records no graph and runs under the precision policy, with weights in their compute
        dtypes: 2 bytes an element under ``bf16``; of FP8 weights, which each forward casts, 4 if they are trained,
        else 2. Inside, its forward needs no other rank: each may call it as often as it likes. Writes to it are lost.
        Drop all references to it at the end, which frees it.

        Raises:
            UsageError: between backward and step, or inside ``eval``, ``ema`` or ``modify_weights``.
        """

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes on this rank by kind.

        ``compute``, ``main_grad``, ``master``, ``moments`` (all states of the optimizer) and ``frozen`` (frozen
        parameters) are in the formula. ``buffers`` are the model's own. ``unsharded`` are the full replicas that stage
        3 holds now, none between steps, and ``unreduced_grad`` micro-batch gradients before their reduction.
        ``matrices``, if the optimizer needs whole matrices (Muon), are the buffers in which they travel. ``transfer``
        and ``staging``, with ``offload=cpu`` on a GPU, are those of copies, on the device and on the host.
        """

    @property
    @abstractmethod
    def host_kinds(self) -> Collection[str]:
        """The kinds of :meth:`memory` that lie in the host's memory beside a GPU (``offload=cpu``)."""

    @abstractmethod
    def memory_formula(self) -> dict[str, int]:
        """Bytes on this rank by the ZeRO formula: compute, main_grad, master, moments, frozen."""

    @abstractmethod
    def master_state(self) -> dict[str, Tensor]:
        """Returns {name: FP32 full tensor on CPU} on rank 0, {} elsewhere; gathered one by one; all ranks call."""

"""The interface of every engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dtrain.checkpoint import Retention
from dtrain.engine.between_steps import BetweenSteps
from dtrain.engine.loop import TrainingLoop
from dtrain.engine.parts.shadow import Float8Gap
from dtrain.parameters.model_states import ManagedModel, ModelStates
from dtrain.precision.report import PrecisionMeasurement


class Engine(TrainingLoop):
    """Trains a model on all ranks; ``dtrain.initialize`` builds it.

    Attributes:
        module: the user's model, whose parameters the engine manages.
        comm: the ranks that train together.
        policy: the precision policy in force.
        contract: that policy resolved on the model.
        states: the model states on this rank.
        ema_decay: decay of the moving average of the weights; None: none is kept.
        num_parameters: elements of all trained parameters.
        library_config: configuration of the library below, as plain values; None if it takes none.
        busy: compares how long the ranks are busy; set ``busy.every``, the same on all ranks, for other windows.
        explain_skips: whether the culprit of a skipped step names the module where it went wrong
            (``dtrain.engine.outcome.Origin``), which runs the micro-batch at fault again. Set it before a step,
            the same on all ranks. The arguments of a step's forwards are kept until the next; do not overwrite them.
    """

    _between: BetweenSteps

    def __init__(self, managed: ManagedModel, states: ModelStates) -> None:
        self.module, self.comm, self.contract = managed.model, managed.comm, managed.contract
        self.policy, self.ema_decay = managed.contract.policy, managed.plan.ema_decay
        self.states, self.num_parameters = states, states.num_parameters

    def eval(self) -> AbstractContextManager[None]:
        """Returns a context of forwards in eval mode that build no graph and belong to no micro-batch.

        Examples:
            >>> engine = dtrain.initialize(torch.nn.Linear(2, 1))
            >>> with engine.eval():
            ...     engine(torch.ones(1, 2)).requires_grad
            False
        """
        return self._between.eval()

    def copy_buffers(self) -> None:
        """Copies rank 0's persistent buffers, such as running statistics of BatchNorm, to all ranks, which all call.

        Each rank updates them from its own samples, and a checkpoint has rank 0's, so call this before an evaluation
        that all ranks share. Buffers that were never written are left out.

        Raises:
            UsageError: inside ``modify_weights``, or after a backward or a load that failed half-way.
        """
        self._between.copy_buffers()

    def ema(self) -> AbstractContextManager[None]:
        """Returns a context in which the weights are their exponential moving averages; all ranks call.

        For evaluation: no backward, step, save or load. Afterwards the weights have their own bits again. The averages
        follow applied steps: ``average += (1 - ema_decay) * (master - average)``, in FP32.

        Raises:
            UsageError: the engine keeps no average; between backward and step; or a parameter was written to inside.

        Examples:
            >>> engine = dtrain.initialize(torch.nn.Linear(2, 1), ema_decay=0.999)
            >>> with engine.ema(), engine.eval():
            ...     engine(torch.ones(1, 2)).dtype
            torch.float32
        """
        return self._between.ema()

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
        """Writes a checkpoint under ``directory``; all ranks call.

        An asynchronous save returns once this rank's part is copied to host memory, which is reused by the next one; a
        thread of each rank writes it. One save is under way at a time. If it fails, every rank raises the same
        ``CheckpointError``, once: from the ``step`` after the one whose vote reports it, the next ``save`` or ``load``,
        or ``wait_for_save``. Training can continue: a step that raises it has done nothing and can be called again. A
        process that ends before waits for the thread, which logs a failure; the exit code does not show it.

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
            UsageError: between backward and step, or inside ``ema`` or ``modify_weights``.

        Examples:
            >>> engine = dtrain.initialize(torch.nn.Linear(4, 1))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     engine.save(folder, extra={"epoch": 3}).name
            ...     engine.load(folder)
            'step-00000000'
            {'epoch': 3}
        """
        return self._between.save(
            directory,
            extra=extra,
            config=config,
            metrics=metrics,
            retention=retention,
            asynchronous=asynchronous,
            when_busy=when_busy,
        )

    def prepare_saves(self) -> None:
        """Connects the threads that save, so that the first asynchronous save need not; all ranks call.

        Raises:
            CommunicationError: a rank has died or hangs.
        """
        self._between.prepare_saves()

    def is_saving(self) -> bool:
        """Whether an asynchronous save is under way on any rank; all ranks call."""
        return self._between.is_saving()

    def wait_for_save(self) -> Path | None:
        """Returns the path of the last asynchronous save once it is committed, None before any; all ranks call.

        Raises:
            CheckpointError: it failed on any rank.
        """
        return self._between.wait_for_save()

    def leave_save(self, *, cancel: bool = False) -> None:
        """Returns when an asynchronous save under way has ended on this rank, however it does; asks no other rank.

        For a rank that stops training by an exception and is about to leave the process group.

        Args:
            cancel: stop writing at once: a rank has gone, so that it cannot be committed.
        """
        self._between.leave_save(cancel=cancel)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Restores the newest checkpoint under ``path`` that verifies; returns its ``extra``; all ranks call.

        Args:
            path: a run directory, a directory of checkpoints, or one checkpoint, of any engine and number of ranks.

        Raises:
            CheckpointError: none verifies, or it is of another model.
            UsageError: between backward and step, or inside ``ema`` or ``modify_weights``.
        """
        return self._between.load(path)

    def modify_weights(self, *patterns: str) -> AbstractContextManager[None]:
        """Returns a context in which parameters are whole FP32 masters on every rank, for writing; all ranks call.

        Frozen parameters are whole too, in their own dtype. Write in place: ``load_state_dict``, ``copy_``, ``clamp_``.
        Gradients are off inside, and the whole weights take 4 bytes an element on every rank. At the end all ranks
        compare the new values, take them over and free the copies. Optimizer states stay, and so does the moving
        average, except before the first update. After an exception no weight is changed.

        Args:
            *patterns: names (``fnmatch``) of parameters or modules; all by default.

        Raises:
            DivergenceError: the ranks have written different values; no weight was changed.
            UsageError: between backward and step, inside itself or ``eval``; a pattern matches nothing; a parameter was
                replaced; or another rank failed inside.

        Examples:
            >>> engine = dtrain.initialize(torch.nn.Linear(2, 2), precision="bf16")
            >>> with engine.modify_weights("bias"):
            ...     engine.module.bias.fill_(0.1).dtype  # of the master; afterwards it is BF16 again
            torch.float32
        """
        return self._between.modify_weights(*patterns)

    def full_model(self) -> AbstractContextManager[nn.Module]:
        """Returns a context of a copy of the model that has its whole weights on every rank; all ranks enter.

        The copy is in eval mode, records no graph and runs under the precision policy, with weights in their compute
        dtypes: 2 bytes an element under ``bf16``; of FP8 weights, which each forward casts, 4 if trained, else 2. No
        call of it needs another rank, such as ``model.hf.generate`` of model=hf. Writes to it are lost. Drop all
        references to it at the end, which frees it.

        Raises:
            UsageError: between backward and step, or inside ``eval``, ``ema`` or ``modify_weights``.
        """
        return self._between.full_model()

    def memory(self) -> dict[str, int]:
        """Returns the bytes on this rank by kind.

        ``compute``, ``main_grad``, ``master``, ``moments`` (all states of the optimizer) and ``frozen`` (frozen
        parameters) are in the formula. ``buffers`` are the model's own. ``unsharded`` are the full replicas that stage
        3 holds now, none between steps, and ``unreduced_grad`` micro-batch gradients before their reduction.
        ``matrices``, if the optimizer needs whole matrices (Muon), are the buffers in which they travel. ``transfer``
        and ``staging``, with ``offload=cpu`` on a GPU, are those of copies, on the device and on the host.
        """
        return self.states.memory()

    def memory_formula(self) -> dict[str, int]:
        """Returns bytes by ZeRO's formula (Rajbhandari et al., 2020): compute, main_grad, master, moments, frozen."""
        return self.states.memory_formula()

    def master_state(self) -> dict[str, Tensor]:
        """Returns {name: FP32 full tensor on CPU} on rank 0, {} elsewhere; gathered one by one; all ranks call."""
        return self._between.master_state()

    def guard_reads(self, *, shows_masters: bool = False) -> None:
        """Guards weights that ``module`` does not hold between calls of the engine; called once it is complete.

        Args:
            shows_masters: for wrappers of other loops: reads of values give whole FP32 masters, and a forward of
                ``module`` follows the policy. The first read gathers 4 bytes an element on every rank until the
                engine's next call, so all read together. False: reads of what ``module`` does not hold are errors.
        """
        self._between.guard_reads(shows_masters=shows_masters)

    @property
    def host_kinds(self) -> Collection[str]:
        """The kinds of ``memory`` that lie in the host's memory beside a GPU (``offload=cpu``)."""
        return self.states.host_kinds

    @property
    def compiled_graphs(self) -> int | None:
        """Number of graphs into which the blocks were compiled so far; None: they are not compiled."""
        return self._between.compiled_graphs

    @property
    def float8_gap(self) -> Float8Gap | None:
        """What FP8 has changed in the last step that was computed in BF16 too (``Float8.shadow_every``)."""
        return self._between.parts.shadow.latest

    def measure_precision(self, activations: Sequence[str] = ()) -> AbstractContextManager[PrecisionMeasurement]:
        """Returns a context around one whole step, first forward to ``step``, that measures what precision costs it.

        All ranks enter it. It counts the magnitudes of every gradient, compares the masters before and after the
        update, and casts the operands of FP8 products once more. The weights get the same bits as without it. It takes
        4 bytes an owned master, and 4 KiB a parameter. Other steps pay nothing.

        Args:
            activations: names (``fnmatch``) of modules whose outputs, and gradients of these, are counted too.

        Raises:
            ConfigError: a pattern matches no module, or only compiled ones.
            UsageError: between backward and step, inside itself, at a second step inside, or at its end if that is
                between backward and step.

        Examples:
            >>> engine = dtrain.initialize(torch.nn.Linear(2, 1), precision="bf16")
            >>> with engine.measure_precision() as measurement:
            ...     engine.backward(engine(torch.ones(1, 2)).mean())
            ...     outcome = engine.step()
            >>> [(own.name, own.format, own.largest) for own in measurement.report().parameters]  # of gradients
            [('bias', 'bf16', 1.0), ('weight', 'bf16', 1.0)]
        """
        return self._between.measure_precision(activations)

"""Saving, loading, moving averages and writing of weights, between the steps of an engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.distributed.logging import logger
from dtrain.distributed.progress import Phase
from dtrain.engine.arguments import check_save_options, checked_path
from dtrain.engine.averaged import averaged_weights
from dtrain.engine.full_model import whole_copy
from dtrain.engine.model_state import MASTER, StateEngine, names_collectives
from dtrain.engine.parts.audit.state_audit import StateAudit
from dtrain.engine.parts.buffers import SharedBuffers
from dtrain.engine.parts.checkpoint.checkpointer import Checkpointer
from dtrain.engine.parts.running_statistics import RunningStatistics
from dtrain.engine.parts.written_weights import WrittenWeights
from dtrain.errors import CorruptionError, UsageError
from dtrain.precision.forward import Autocast


class StoredEngine(StateEngine):
    """The part of an engine that reads and writes whole states; every call finalizes the last step first.

    A subclass sets the attributes below in its constructor.
    """

    _audit: StateAudit
    _checkpointer: Checkpointer
    _written: WrittenWeights
    _statistics: RunningStatistics
    _buffers: SharedBuffers
    _backward_failed: bool  # a backward has begun and not ended
    _is_averaged: bool  # inside ``ema``
    _autocast: Autocast

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @names_collectives("save")
    def save(self, directory: str | Path, *, when_busy: str = "wait", **options: Any) -> Path | None:
        self._require_usable("save")
        if when_busy not in ("wait", "skip"):
            raise UsageError(f"engine.save(when_busy={when_busy!r}): expected 'wait' or 'skip'")
        path = checked_path("save", directory)
        check_save_options(options)
        if when_busy == "skip" and self.is_saving():
            return None
        with self.progress.during(Phase.SAVE):
            self._finalize_step()
            self._take_written()
            with self._noting_corruption():
                if self._audit.settings.every or self.mesh.is_hybrid:  # replica 0 saves what the others have too
                    self._audit.check(saves=True)
                return self._checkpointer.save(path, expected=self._audit.expected(), **options)

    @names_collectives("prepare_saves")
    def prepare_saves(self) -> None:
        self._checkpointer.prepare()

    @names_collectives("is_saving")
    def is_saving(self) -> bool:
        self._finalize_step()
        return self._checkpointer.is_saving()

    @names_collectives("wait_for_save")
    def wait_for_save(self) -> Path | None:
        with self.progress.during(Phase.SAVE), self._noting_corruption():
            self._finalize_step()
            return self._checkpointer.wait()

    def leave_save(self, *, cancel: bool = False) -> None:
        self._checkpointer.shut_down(cancel=cancel)

    @names_collectives("load")
    def load(self, path: str | Path) -> dict[str, Any]:
        self._require_usable("load")
        directory = checked_path("load", path)
        with self.progress.during(Phase.LOAD):
            self._finalize_step()
            # what a save under way found is about to be overwritten; if this load fails, it still counts
            with suppress(CorruptionError), self._noting_corruption():
                self._checkpointer.wait()
            extra = self._checkpointer.load(directory)
            self._refresh()  # only now: compute weights follow from the masters and the restored state
            self._audit.reset()
            self._statistics.forget()
            self.check_contract()
        logger.info(f"loaded step {self.attempted_steps} ({self.applied_steps} applied)")
        return extra

    def _require_usable(self, verb: str) -> None:
        self._written.require_closed(verb)
        if self._audit.error is not None and verb != "load":
            raise self._audit.error
        if self._backward_failed:
            raise UsageError(
                f"engine.{verb} after an engine.backward that failed half-way: this rank's gradients are incomplete, "
                f"and its reductions out of step with the others'; build a new engine and load a checkpoint"
            )
        if self._checkpointer.load_failed and verb != "load":
            raise UsageError(
                f"engine.{verb} after an engine.load that failed half-way: the weights are part old, part loaded; load "
                f"a checkpoint that can be read, or build a new engine"
            )
        if self._is_averaged and verb != "copy_buffers":
            raise UsageError(f"engine.{verb} inside engine.ema(), where the weights are averages; call it outside")
        if self._has_backward() and verb in (
            "save",
            "load",
            "ema",
            "modify_weights",
            "full_model",
            "measure_precision",
        ):
            raise UsageError(f"engine.{verb} between backward and step; call it after engine.step")

    @contextmanager
    def _noting_corruption(self) -> Iterator[None]:
        """Keeps a :class:`CorruptionError` of the block, which later calls raise again until a checkpoint is loaded."""
        try:
            yield
        except CorruptionError as error:
            self._audit.error = error
            raise

    def _take_written(self) -> None:
        self._audit.exclude(self._written.take_together())

    def check_contract(self) -> None:
        super().check_contract()
        self._written.remember()
        self._buffers.remember()

    @names_collectives("copy_buffers")
    def copy_buffers(self) -> None:
        if self.world_size == 1:
            return
        self._require_usable("copy_buffers")
        with self.progress.during(Phase.EVALUATION):
            self._finalize_step()
            self._buffers.copy()

    # -- weights -----------------------------------------------------------------------------------------------------

    @contextmanager
    def ema(self) -> Iterator[None]:
        self._require_usable("ema")
        self._finalize_step()
        with self.comm.schedule.method("ema"):
            self._take_written()
            with averaged_weights(self, self._refresh_averaged):
                self._is_averaged = True
                try:
                    yield
                    self._written.refuse_any("engine.ema()")
                finally:
                    self._is_averaged = False

    def _refresh_averaged(self) -> None:
        self._refresh()
        self._written.remember()

    @contextmanager
    def _named(self, name: str, block: AbstractContextManager[None]) -> Iterator[None]:
        with self.comm.schedule.method(name), block:
            yield

    def modify_weights(self, *patterns: str) -> AbstractContextManager[None]:
        self._require_usable("modify_weights")
        if self._evaluating or self._current.state == "open":
            raise UsageError("engine.modify_weights inside engine.eval or a micro-batch; call it between steps")
        self._finalize_step()
        if self._audit.is_pending:  # else a flipped bit would become one of the user's
            self._take_written()
            with self._noting_corruption():
                self._audit.check()
        return self._named("modify_weights", self._written.modified(patterns, self._refresh_modified))

    def _refresh_modified(self) -> None:
        self._refresh()
        self._audit.renew()
        self._statistics.forget()  # the user may have written them too

    @contextmanager
    def full_model(self) -> Iterator[nn.Module]:
        self._require_usable("full_model")
        if self._evaluating or self._current.state == "open":
            raise UsageError("engine.full_model inside engine.eval or a micro-batch; call it between steps")
        with self.progress.during(Phase.EVALUATION):
            self._finalize_step()
            with self.comm.schedule.method("full_model"):
                self._take_written()
                model = whole_copy(self)
            with torch.no_grad(), self._autocast():
                yield model

    @names_collectives("master_state")
    def master_state(self) -> dict[str, Tensor]:
        self._written.require_closed("master_state")
        self._finalize_step()
        self._take_written()
        # every rank takes every tensor, because gathering is collective; only rank 0 keeps copies
        pairs = ((name, tensor.clone().cpu() if self.rank == 0 else None) for name, tensor in self.full_state(MASTER))
        return {name: tensor for name, tensor in pairs if tensor is not None}

    # -- hooks for subclasses ----------------------------------------------------------------------------------------

    @abstractmethod
    def _finalize_step(self) -> None:
        """Reads the decision on the last step and acts on it; all ranks call."""

    @abstractmethod
    def _refresh(self) -> None:
        """Casts the masters into the compute weights."""

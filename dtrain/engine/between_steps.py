"""Saves, loads, averages and writes the whole states of an engine between two steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from dtrain.distributed.logging import logger
from dtrain.distributed.progress import Phase
from dtrain.engine.arguments import check_save_options, checked_path
from dtrain.engine.averaged import averaged_weights
from dtrain.engine.forward import ModelForward
from dtrain.engine.full_model import whole_copy
from dtrain.engine.micro_batch import MicroBatches
from dtrain.engine.module_calls import ModuleCalls
from dtrain.engine.parts.order import EngineParts
from dtrain.engine.run_state import RunState
from dtrain.errors import CorruptionError, UsageError
from dtrain.parameters.model_states import MASTER, ModelStates
from dtrain.precision.report import PrecisionMeasurement

F = TypeVar("F", bound=Callable[..., Any])

_WHOLE_STEPS = ("save", "load", "ema", "modify_weights", "full_model", "measure_precision")
"""Methods that are refused between backward and step."""


def names_collectives(name: str) -> Callable[[F], F]:
    """Returns a decorator for an engine's methods that read parameters as they are: the guards are open meanwhile.

    Their collectives carry ``name``, so that ranks in different methods fail by name.
    """

    def decorate(method: F) -> F:
        @wraps(method)
        def named(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.comm.schedule.method(name), self.states.reads:
                return method(self, *args, **kwargs)

        return cast(F, named)

    return decorate


class BetweenSteps:
    """The methods of an engine on its whole states; every call finalizes the last step first.

    See ``dtrain.engine.interface.Engine`` for what each method does.

    Args:
        states, run, batch, parts, forward: of the engine.
        finalize: finalizes the last step; all ranks call.
        check_contract: checks the states, and tells all parts that they are complete.
    """

    def __init__(
        self,
        states: ModelStates,
        run: RunState,
        batch: MicroBatches,
        parts: EngineParts,
        forward: ModelForward,
        finalize: Callable[[], None],
        check_contract: Callable[[], None],
    ) -> None:
        self.comm = states.comm
        self.parts = parts
        self.states, self._run, self._batch, self._forward = states, run, batch, forward
        self._finalize = finalize
        self._check_contract = check_contract
        self._is_averaged = False  # inside ``ema``
        self.has_ended = False
        self.num_loads = 0
        self._module_calls: ModuleCalls | None = None

    def require_usable(self, verb: str) -> None:
        """Raises the reason why ``engine.verb`` cannot be called now."""
        self.refuse_ended(verb)
        self.parts.written.require_closed(verb)
        if self.parts.audit.error is not None and verb != "load":
            raise self.parts.audit.error
        if self._batch.backward_failed:
            raise UsageError(
                f"engine.{verb} after an engine.backward that failed half-way: this rank's gradients are incomplete, "
                f"and its reductions out of step with the others'; build a new engine and load a checkpoint"
            )
        if self.parts.checkpointer.load_failed and verb != "load":
            raise UsageError(
                f"engine.{verb} after an engine.load that failed half-way: the weights are part old, part loaded; load "
                f"a checkpoint that can be read, or build a new engine"
            )
        if self._is_averaged and verb != "copy_buffers":
            raise UsageError(f"engine.{verb} inside engine.ema(), where the weights are averages; call it outside")
        if self._batch.has_backward and verb in _WHOLE_STEPS:
            raise UsageError(f"engine.{verb} between backward and step; call it after engine.step")

    def refuse_ended(self, verb: str) -> None:
        """Raises ``UsageError`` if another engine has the model; ends what an interrupted forward has left."""
        if self._module_calls is not None:
            self._module_calls.end()
        if self.has_ended:
            raise UsageError(f"engine.{verb} of an engine whose model was prepared again; use the newer engine")

    def _require_outside(self, verb: str) -> None:
        self.require_usable(verb)
        if self._batch.is_evaluating or self._batch.current.state == "open":
            raise UsageError(f"engine.{verb} inside engine.eval or a micro-batch; call it between steps")

    def _during(self, phase: Phase) -> AbstractContextManager[None]:
        return self.comm.schedule.progress.during(phase)

    def _take_written(self) -> None:
        with self.states.reads:
            self.parts.audit.exclude(self.parts.written.take_together())

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @names_collectives("save")
    def save(self, directory: str | Path, *, when_busy: str, **options: Any) -> Path | None:
        self.require_usable("save")
        if when_busy not in ("wait", "skip"):
            raise UsageError(f"engine.save(when_busy={when_busy!r}): expected 'wait' or 'skip'")
        path = checked_path("save", directory)
        check_save_options(options)
        if when_busy == "skip" and self.is_saving():
            return None
        audit = self.parts.audit
        with self._during(Phase.SAVE):
            self._finalize()  # [Note: finalize before the next collective]
            with self.states.whole_frozen():
                self._take_written()
                with audit.noting():
                    if audit.settings.every or self.states.mesh.is_hybrid:  # replica 0 saves what the others have too
                        audit.check(saves=True)
                    return self.parts.checkpointer.save(path, expected=audit.expected(), **options)

    @names_collectives("prepare_saves")
    def prepare_saves(self) -> None:
        self.parts.checkpointer.prepare()

    @names_collectives("is_saving")
    def is_saving(self) -> bool:
        self._finalize()
        return self.parts.checkpointer.is_saving()

    @names_collectives("wait_for_save")
    def wait_for_save(self) -> Path | None:
        with self._during(Phase.SAVE), self.parts.audit.noting():
            self._finalize()
            return self.parts.checkpointer.wait()

    def end(self) -> None:
        """Lets every method raise from now on: the model is about to become an ordinary one."""
        self.leave_save(cancel=False)
        self.states.reads.end()
        self.has_ended = True

    def leave_save(self, *, cancel: bool) -> None:
        self.parts.checkpointer.shut_down(cancel=cancel)

    @names_collectives("load")
    def load(self, path: str | Path) -> dict[str, Any]:
        self.require_usable("load")
        directory = checked_path("load", path)
        with self._during(Phase.LOAD):
            self._finalize()  # [Note: finalize before the next collective]
            self.states.release()  # after a search for a culprit, which runs forwards
            with self.states.whole_frozen():
                # what a save under way found is about to be overwritten; if this load fails, it still counts
                with suppress(CorruptionError), self.parts.audit.noting():
                    self.parts.checkpointer.wait()
                self.num_loads += 1
                extra = self.parts.checkpointer.load(directory)
                self._batch.current.num_stale = self._batch.current.num_forwards
                self.states.refresh()  # only now: compute weights follow from the masters and the restored state
                self._check_contract()
        logger.info(f"loaded step {self._run.attempted_steps} ({self._run.applied_steps} applied)")
        return extra

    # -- weights -----------------------------------------------------------------------------------------------------

    @names_collectives("copy_buffers")
    def copy_buffers(self) -> None:
        if self.comm.world_size == 1:
            return
        self.require_usable("copy_buffers")
        with self._during(Phase.EVALUATION):
            self._finalize()
            self.parts.buffers.copy()

    @contextmanager
    def eval(self) -> Iterator[None]:
        self.refuse_ended("eval")
        self.parts.written.refuse_lost("eval")
        with self._during(Phase.EVALUATION):
            self._finalize()  # [Note: finalize before the next collective]
            with self.comm.schedule.method("eval"), self._batch.evaluation(self.states.module):
                yield

    @contextmanager
    def measure_precision(self, activations: Sequence[str]) -> Iterator[PrecisionMeasurement]:
        self.require_usable("measure_precision")
        with self.parts.samples.measured(activations) as sample:
            yield sample

    @property
    def compiled_graphs(self) -> int | None:
        compiled = self.parts.compiled
        return None if compiled is None or not compiled.is_on else compiled.num_graphs

    @contextmanager
    def ema(self) -> Iterator[None]:
        self.require_usable("ema")
        self._finalize()
        written = self.parts.written
        with self.comm.schedule.method("ema"):
            self._take_written()
            try:
                with averaged_weights(self.states):
                    written.remember()
                    self._is_averaged = True
                    try:
                        yield
                    finally:  # drops averages that were read, also after an exception
                        with self.states.reads:
                            written.refuse_any("engine.ema()")
            finally:
                self._is_averaged = False
                written.remember()

    def modify_weights(self, *patterns: str) -> AbstractContextManager[None]:
        self._require_outside("modify_weights")
        self._finalize()
        if self.parts.audit.is_pending:  # else a flipped bit would become one of the user's
            self._take_written()
            with self.parts.audit.noting():
                self.parts.audit.check()
        return self._modified(patterns)

    @contextmanager
    def _modified(self, patterns: tuple[str, ...]) -> Iterator[None]:
        with self.comm.schedule.method("modify_weights"):
            with self.parts.written.modified(patterns):
                yield
            self._batch.current.num_stale = self._batch.current.num_forwards
            self.parts.audit.renew()
            self.parts.statistics.forget()  # the user may have written them too

    @contextmanager
    def full_model(self) -> Iterator[nn.Module]:
        self._require_outside("full_model")
        with self._during(Phase.EVALUATION):
            self._finalize()
            with self.comm.schedule.method("full_model"), self.states.reads:
                self._take_written()
                model = whole_copy(self.states)
            with torch.no_grad(), self._forward.autocast():
                yield model

    @names_collectives("master_state")
    def master_state(self) -> dict[str, Tensor]:
        self.refuse_ended("master_state")
        self.parts.written.require_closed("master_state")
        self._finalize()
        self._take_written()
        # every rank takes every tensor, because gathering is collective; only rank 0 keeps copies
        keeps = self.comm.rank == 0
        pairs = ((name, tensor.clone().cpu() if keeps else None) for name, tensor in self.states.full_state(MASTER))
        return {name: tensor for name, tensor in pairs if tensor is not None}

    def guard_reads(self, *, shows_masters: bool) -> None:
        reads, gather = self.states.reads, WeakMethod(self._whole_weights)

        def whole_weights(names: Collection[str]) -> dict[str, Tensor] | None:
            method = gather()
            return None if method is None else method(names)

        reads.begin(whole_weights if shows_masters else None)
        if self._module_calls is None and (shows_masters or reads.is_needed):
            self._module_calls = ModuleCalls(self.states.module, reads, self._forward.autocast)

    @names_collectives("a read of the weights")
    def _whole_weights(self, names: Collection[str]) -> dict[str, Tensor]:
        """Returns copies of the weights called ``names``, whole: masters, and frozen ones; all ranks call."""
        self.parts.written.require_closed("module")
        self._finalize()
        self._take_written()
        whole = chain(self.states.full_state(MASTER), self.states.full_frozen())
        return {name: values.detach().clone() for name, values in whole if name in names}

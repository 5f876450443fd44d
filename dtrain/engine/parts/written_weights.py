"""Weights that the user writes: noticed and taken over into the FP32 masters, or refused.

[Note: written weights] Every parameter of the model has a version counter, which an in-place operation on it, on a view
of it or on its ``detach()`` increments. The engines write flat buffers and ``.data``, which have counters of their own;
where a library does write parameters, the counters are read again after it. So a counter that has changed at the next
step shows a write of the user's. A write through ``parameter.data`` changes no counter and is not noticed.

Each rank takes over its own shard from the parameter, which it holds whole. So the ranks must have written the same:
they compare a hash of what they wrote in the vote, and in the other calls that all ranks make together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dtrain.checkpoint.format.fingerprint import fingerprint
from dtrain.distributed.consensus import describe, on_every_rank
from dtrain.distributed.logging import logger
from dtrain.engine.outcome import StepOutcome
from dtrain.engine.parts.parameter_places import ParameterPlaces
from dtrain.engine.parts.part import Forward, StepPart, StepUnderWay
from dtrain.engine.run_state import RunState
from dtrain.engine.vote.decide import DecodedDecision
from dtrain.engine.vote.divergence import written_difference
from dtrain.errors import CommunicationError, ConfigError, DivergenceError, UsageError
from dtrain.parameters.groups import matching_names
from dtrain.parameters.guarded_reads import lost_write
from dtrain.parameters.model_states import MASTER, ModelStates
from dtrain.precision.remainder import RemainderPair

_BITS = {2: torch.int16, 4: torch.int32}
_MODIFY = "write weights inside `with engine.modify_weights():`"


class WrittenWeights(StepPart):
    """Notices writes to an engine's parameters, takes them over, and shows whole masters for writing.

    Args:
        states: the parameters are read at the first ``remember``, when they are complete.
        run: its applied steps.

    Attributes:
        is_modifying: whether a block of ``modified`` is running.
    """

    def __init__(self, states: ModelStates, run: RunState) -> None:
        self._states = states
        self._run = run
        self._parameters: dict[str, nn.Parameter] = {}
        self._places: ParameterPlaces | None = None
        self._versions: list[int] = []
        self._unsharded_versions: dict[str, int] = {}
        self.is_modifying = False
        self._rounded: set[str] = set()  # parameters whose masters have lost their remainders by a write
        self._was_written = False  # on all ranks: they have agreed on a write

    # -- writes in place ---------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Counts all writes so far as the engine's own; called after each of them."""
        if self._places is None:
            self._parameters = self._states.parameters
            self._places = ParameterPlaces(self._states.module, self._parameters, self._states.unshared_parameters())
        self._versions = [parameter._version for parameter in self._parameters.values()]
        self._unsharded_versions = {name: p._version for name, p in self._states.unsharded_parameters().items()}

    def _remember(self, names: Collection[str]) -> None:
        """Does what ``remember`` does for the parameters called ``names``."""
        pairs = zip(self._parameters.items(), self._versions, strict=True)
        self._versions = [p._version if name in names else before for (name, p), before in pairs]
        for name, parameter in self._states.unsharded_parameters().items():
            if name in names:
                self._unsharded_versions[name] = parameter._version

    def loaded(self) -> None:
        if self._places is not None:
            self._check_places(self._states.unsharded_parameters())
        self.remember()

    def before_forward(self, call: Forward) -> None:
        self.require_closed("__call__")
        if unsharded := self._states.unsharded_parameters():  # which the library would put back in this forward
            self._check_places(unsharded)

    def before_reduction(self, step: StepUnderWay) -> None:
        """Takes over what this rank has written since ``remember``; the vote compares its hash.

        Raises:
            UsageError: the write cannot reach a master.
        """
        written = self._found()
        text = json.dumps(written, sort_keys=True)
        if written:
            step.written_text, step.written_names = text, tuple(written)
            # 7 bytes: integers of the vote's records have 63 bits
            step.written_weights = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") or 1
            self._was_written = True
        self._adopt(written)

    def after_update(self, step: StepUnderWay) -> None:
        self.remember()

    def finalized(self, outcome: StepOutcome, decision: DecodedDecision) -> None:
        """Waits for ranks that still read the weights, if the user has written before; the next write may follow."""
        if self._was_written:  # only then, because it takes a collective in each step
            self._states.await_readers()

    def take_together(self) -> Collection[str]:
        """Compares with the other ranks first, then takes over; all ranks call. Returns the names of what was written.

        Raises:
            DivergenceError: the ranks have written different values; nothing was taken over.
            UsageError: as in ``before_reduction``.
        """
        found = on_every_rank(self._states.comm, "", self._found, UsageError, expected=(UsageError,))
        if any(other != found[0] for other in found):
            raise DivergenceError(written_difference(found))
        if found[0]:
            self._was_written = True
            self._adopt(found[0])
            self.remember()
        names: Collection[str] = found[0]
        return names

    def refuse_any(self, place: str) -> None:
        """Raises ``UsageError`` if a parameter was written since ``remember``, inside ``place``."""
        if names := self._written_names():
            raise UsageError(
                f"parameter '{names[0]}' was written to inside {place}, where the weights are averages (written so: "
                f"{len(names)}); the write is lost, or in the average only: write it outside"
            )

    def refuse_lost(self, verb: str) -> None:
        """Raises ``UsageError`` inside ``modified``, or if a write cannot reach a master; asks no other rank."""
        self.require_closed(verb)
        self._written_names()

    def _found(self) -> dict[str, int]:
        """Returns the fingerprints of the parameters written since ``remember``; 0 for one that is sharded."""
        parameters = ((name, self._parameters[name]) for name in self._written_names())
        return {name: 0 if _is_dtensor(p) else _fingerprint(p.detach()) for name, p in parameters}

    def _written_names(self) -> list[str]:
        """Returns the parameters written since ``remember``.

        Raises:
            UsageError: a write is lost, because the engine holds the weight elsewhere, or the parameter was replaced.
        """
        states = self._states
        unsharded = states.unsharded_parameters()
        lost = [name for name, p in unsharded.items() if p._version != self._unsharded_versions.get(name, 0)]
        self._check_places(unsharded)
        versions = [parameter._version for parameter in self._parameters.values()]
        if versions == self._versions and not lost:
            return []
        pairs = zip(self._parameters, versions, self._versions, strict=True)
        names = [name for name, version, before in pairs if version != before]
        unreachable = states.unreachable_parameters() if names else ()
        lost += [name for name in names if name in unreachable]
        if lost:
            self._remember(lost)  # raised once; the other writes are taken over later
            kept = [name for name in names if name not in lost]
            raise lost_write(states, lost, kept)
        return names

    @property
    def _held(self) -> Sequence[tuple[nn.Module, str, nn.Parameter | None]]:
        assert self._places is not None
        return self._places.held

    def _check_places(self, unsharded: Mapping[str, nn.Parameter]) -> None:
        assert self._places is not None
        self._places.check(unsharded)

    @torch.no_grad()
    def _adopt(self, names: Collection[str]) -> None:
        """Copies the written values into this rank's masters where they differ from the cast of the master.

        Elsewhere a master keeps what the cast rounds off; but no second copy of a weight shows where one that is a part
        of its master was written, so all of that master becomes the weight.
        """
        self._disown_source(names)
        for shard in self._states.local_shards(MASTER) if names else ():
            parameter = self._parameters[shard.name]
            if shard.name not in names or _is_dtensor(parameter):  # a DTensor's values are the masters
                continue
            values, written = shard.values, parameter.detach().reshape(-1)[shard.start : shard.stop]
            if isinstance(values, RemainderPair):
                values.remainder.zero_()  # the rest of the master is the replica, which was written
                self._warn_of_rounding(shard.name)
                continue
            if written.data_ptr() == values.data_ptr():
                continue
            written = written.to(values.device)
            bits = _BITS[written.element_size()]  # bits, because -0.0 equals 0.0 and NaN no number
            is_written = values.to(written.dtype).view(bits) != written.view(bits)
            values.copy_(torch.where(is_written, written.to(values.dtype), values))
        self._restart_states(names)

    def _warn_of_rounding(self, name: str) -> None:
        if name not in self._rounded and self._states.comm.rank == 0:
            logger.warning(
                f"parameter '{name}' was written to; with engine.master=remainder all of its FP32 master is now the "
                f"written BF16 weight, also where the write changed nothing; {_MODIFY}, which keeps the rest"
            )
        self._rounded.add(name)

    @torch.no_grad()
    def _restart_states(self, names: Collection[str]) -> None:
        """Before the first update, a state that starts as the master (the moving average) follows what was written."""
        states = self._states
        kinds = [kind for kind, spec in states.plan.specs.items() if spec.init is None]
        if not names or not kinds or self._run.applied_steps:
            return
        masters = {shard.name: shard for shard in states.local_shards(MASTER)}
        for shard in (shard for kind in kinds for shard in states.local_shards(kind)):
            if shard.name in names:
                states.plan.specs[shard.kind].fill(shard.data, masters[shard.name].data)

    def _disown_source(self, names: Collection[str]) -> None:
        """Lets checkpoints hold the frozen weights again if some of them are among ``names``, which were written."""
        if not self._states.frozen.keys().isdisjoint(names):
            self._states.frozen_source = None

    # -- engine.modify_weights ---------------------------------------------------------------------------------------

    def require_closed(self, verb: str) -> None:
        """Raises ``UsageError`` inside ``modified``."""
        if self.is_modifying:
            raise UsageError(f"engine.{verb} inside engine.modify_weights; call it after the with block")

    @contextmanager
    def modified(self, patterns: Sequence[str]) -> Iterator[None]:
        """See ``dtrain.engine.interface.Engine.modify_weights``."""
        states = self._states
        with states.reads:
            self.take_together()
            chosen = self._chosen(patterns)
            states.open_weights(chosen)
            masters = ((name, tensor.clone()) for name, tensor in states.full_state(MASTER) if name in chosen)
            values = dict(masters) | {name: tensor.clone() for name, tensor in states.full_frozen() if name in chosen}
            frozen = [name for name in values if name in states.frozen and states.frozen_source]
            prints = {name: _fingerprint(values[name]) for name in frozen}
            before = {name: self._parameters[name].data for name in values if not _is_dtensor(self._parameters[name])}
            states.reads.open_names = values.keys()
        failure: Exception | None = None
        self.is_modifying = True
        try:
            shown = self._show(values)
            with torch.no_grad():
                yield
            self._require_in_place(shown, values)
        except CommunicationError:  # the other ranks cannot be asked
            raise
        except Exception as error:
            failure = error
        finally:
            with states.reads:
                self._put_back(before)
                states.open_weights(())
                states.reads.open_names = ()
                self.is_modifying = False
                self._remember(values)  # others may have been written too: that is noticed later
        with states.reads:
            self._agree(values, failure)
            for shard in states.local_shards(MASTER):
                if shard.name in values:
                    shard.write(values[shard.name].reshape(-1)[shard.start : shard.stop])
            self._restart_states(values)
            self._disown_source([name for name in frozen if _fingerprint(values[name]) != prints[name]])
            states.take_frozen({name: value for name, value in values.items() if name in states.frozen})
            self._was_written = True
            states.refresh()
            self.remember()

    def _chosen(self, patterns: Sequence[str]) -> set[str]:
        if not patterns:
            return set(self._parameters)
        assert self._places is not None
        states = self._states
        modules = [*states.modules, *(name for name, _ in states.module.named_modules(remove_duplicate=False))]
        names = {name: name for name in self._parameters} | states.aliases | self._places.names
        try:
            return matching_names(modules, names, patterns, "modify_weights")
        except ConfigError as error:
            raise UsageError(str(error)) from None

    def _show(self, values: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        """Makes the parameters ``values``; returns the parameters of the model by name."""
        shown = {}
        for name, value in values.items():
            parameter = self._parameters[name]
            if _is_dtensor(parameter):
                shown[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                for module, key, other in self._held:
                    if other is parameter:
                        module._parameters[key] = shown[name]
            else:
                parameter.data = value
                shown[name] = parameter
        return shown

    def _require_in_place(self, shown: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
        names = {id(self._parameters[name]): name for name in values}
        for module, key, parameter in self._held:
            name = names.get(id(parameter))
            if name is None:
                continue
            current, value = module._parameters.get(key), values[name]
            # by address: another forward or library may have given the parameter its old values
            if current is not shown[name] or current.data_ptr() != value.data_ptr() or current.dtype != value.dtype:
                raise UsageError(
                    f"parameter '{name}' was replaced inside engine.modify_weights; write it in place (copy_, "
                    f"load_state_dict without assign=True), and run no forward there"
                )
        for (name, parameter), before in zip(self._parameters.items(), self._versions, strict=True):
            if name not in values and parameter._version != before:
                raise UsageError(
                    f"parameter '{name}' was written to inside engine.modify_weights, whose patterns do not match it"
                )

    def _put_back(self, before: Mapping[str, Tensor]) -> None:
        for name, data in before.items():
            self._parameters[name].data = data
        for module, key, parameter in self._held:
            module._parameters[key] = parameter

    def _agree(self, values: Mapping[str, Tensor], failure: Exception | None) -> None:
        """Compares ``values`` over the ranks; a failure on one is raised on all."""
        report = {"error": describe(failure)} if failure else {name: _fingerprint(v) for name, v in values.items()}
        reports = [json.loads(text) for text in self._states.comm.exchange_text(json.dumps(report))]
        if failure is not None:
            raise failure
        rank = next((rank for rank, other in enumerate(reports) if "error" in other), None)
        if rank is None and all(other == reports[0] for other in reports):
            return
        if rank is not None:
            raise UsageError(
                f"engine.modify_weights failed on rank {rank}: {reports[rank]['error']}; no weight was changed on any "
                f"rank"
            )
        raise DivergenceError(written_difference(reports))


def _fingerprint(values: Tensor) -> int:
    return fingerprint(values.contiguous().view(-1))


def _is_dtensor(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "device_mesh")

"""Saves and loads the state of an engine: its shards become intervals of the logical tensors of a checkpoint."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import AsyncSaver, CheckpointReader, ReadTarget, Retention, Snapshot, open_newest
from dtrain.checkpoint.format.training_state import KEYED_BY
from dtrain.checkpoint.names import plain_name, plain_names
from dtrain.checkpoint.shared_folder import folder_names, require_one_folder
from dtrain.checkpoint.snapshot import TensorShard
from dtrain.distributed.consensus import on_every_rank
from dtrain.engine.arguments import checked_metrics
from dtrain.engine.parts.checkpoint.compatibility import (
    check_same_model,
    replicated_tensors,
    tensor_names,
    trained_kinds,
    training_state,
    warn_of_other_bits,
)
from dtrain.engine.parts.checkpoint.frozen_weights import proven_float8, read_float8, saved_float8
from dtrain.engine.parts.part import StepPart, StepUnderWay
from dtrain.engine.run_state import RunState
from dtrain.engine.vote.finalize import StepFinalizer
from dtrain.errors import CheckpointError
from dtrain.parameters.model_states import MASTER, ModelStates
from dtrain.precision.remainder import RemainderPair

_PAIR_ELEMENTS = 1 << 24  # of a master that is a pair, read at a time
_CAST_ELEMENTS = 1 << 20  # of a frozen tensor, compared with its saved values at a time


class Checkpointer(StepPart):
    """Saves and loads one engine; the last step is finalized before each call that all ranks make.

    Args:
        states: of the model, whose shards are saved.
        run: its counters are saved.
        finalizer: holds the loss scale, and learns from the vote that a save has failed.
        noting: context that keeps a ``CorruptionError``.

    Attributes:
        load_failed: whether the last load failed after it had begun to overwrite tensors.
    """

    def __init__(
        self,
        states: ModelStates,
        run: RunState,
        finalizer: StepFinalizer,
        noting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._states = states
        self._run = run
        self._comm = states.comm
        self._finalizer = finalizer
        self._noting = noting
        self._saver = AsyncSaver(states.comm)
        self.load_failed = False

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(
        self,
        directory: Path,
        *,
        extra: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float | None] | None = None,
        retention: Retention | None = None,
        asynchronous: bool = False,
        expected: Mapping[tuple[str, str, int], int] | None = None,
    ) -> Path:
        """Saves the state; ``expected``: fingerprints that intervals must have, as in ``Snapshot``."""
        self.wait()
        names = plain_names(tensor_names(self._states))
        snapshots: list[Snapshot] = []

        def take() -> tuple[str, str]:
            snapshots.append(_plain(self._snapshot(extra or {}, config or {}, metrics or {}, expected or {}), names))
            return folder_names(directory)

        # agreed on before the save: a rank without a snapshot would leave the others waiting in its collectives
        what = f"saving step {self._run.attempted_steps}"
        require_one_folder(what, on_every_rank(self._comm, what, take, CheckpointError))
        save = self._saver.start if asynchronous else self._saver.save
        return save(directory, snapshots[0], retention)

    def prepare(self) -> None:
        self._saver.prepare()

    def is_saving(self) -> bool:
        return self._saver.is_busy()

    def wait(self) -> Path | None:
        self._finalizer.save_failed = False  # the failure that the vote reported is raised here, and only once
        return self._saver.wait()

    def before_reduction(self, step: StepUnderWay) -> None:
        self.raise_reported()

    def raise_reported(self) -> None:
        """Raises the failure of a save if the last vote reported one.

        The vote is the only place where the ranks learn of it together. A rank that raised as soon as its own thread
        failed would leave the others waiting in the next collective.
        """
        if self._finalizer.save_failed:
            self._finalizer.save_failed = False
            with self._noting():
                self._saver.raise_failure()

    def before_update(self, step: StepUnderWay) -> None:
        step.save_failed = self._saver.has_failed

    def shut_down(self, *, cancel: bool) -> None:
        self._saver.shut_down(cancel=cancel)

    def _snapshot(
        self,
        extra: Mapping[str, Any],
        config: Mapping[str, Any],
        metrics: Mapping[str, float | None],
        expected: Mapping[tuple[str, str, int], int],
    ) -> Snapshot:
        states, run = self._states, self._run
        mesh, source = states.mesh, states.frozen_source
        shards: list[TensorShard] = []
        if mesh.replicate.rank == 0:  # the others hold the same
            shards += self._owned_shards(states.saved_dtypes)
            shards += chain(states.frozen_shards(), saved_float8(states)) if source is None else ()
        if self._comm.rank == 0:  # all ranks hold these, so one of them writes
            shards += _replicated_shards(states, has_frozen=source is None)
        state = {
            "run_id": run.run_id,
            "engine": states.engine,
            "world_size": self._comm.world_size,
            "zero_stage": states.zero_stage,
            "contract": states.contract.to_dict(),
            "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
            "optimizer": asdict(states.plan.record),
            "engine_state": {
                "attempted_steps": run.attempted_steps,
                "applied_steps": run.applied_steps,
                "loss_scale": self._finalizer.scale.to_dict(),
                "rules": [rule.state_dict() for rule in states.plan.rules],
            }
            | ({"missed_updates": dict(sorted(run.missed_updates.items()))} if run.missed_updates else {}),
            "rng": {"seed": run.seed, "keyed_by": KEYED_BY},
            "data_cursor": run.data_cursor,
            "aliases": states.aliases,
            "metrics": checked_metrics(metrics),
            "config": dict(config),
            "extra": dict(extra),
        } | ({} if source is None else {"frozen_source": asdict(source)})
        if mesh.is_hybrid:
            state["shard_size"] = mesh.shard.world_size
        return Snapshot(run.attempted_steps, tuple(shards), state, expected=expected, num_files=mesh.shard.world_size)

    def _owned_shards(self, kinds: Iterable[str]) -> Iterator[TensorShard]:
        """Yields this rank's share of masters and optimizer states, those of one parameter together."""
        found: dict[str, list[TensorShard]] = {}
        for shard in chain(*map(self._states.owned_shards, kinds)):
            found.setdefault(shard.name, []).append(shard)
        yield from chain(*found.values())

    # -- loading -----------------------------------------------------------------------------------------------------

    def load(self, path: Path) -> dict[str, Any]:
        """Fills the engine's shards and state; returns the checkpoint's ``extra``. If one rank fails, all raise.

        The compute weights are not refreshed.
        """
        self.wait()
        what = "loading a checkpoint"  # the same on all ranks, whose paths may differ
        require_one_folder(what, on_every_rank(self._comm, what, lambda: folder_names(path), CheckpointError))
        reader = open_newest(path, self._comm)
        # before anything is overwritten: a checkpoint of another model leaves the engine as it is
        training_state(reader)
        reader.take_names(tensor_names(self._states))
        check_same_model(reader, self._states)
        self._rule_states(reader)
        self.load_failed = True  # until all tensors are proven equal to the saved ones
        on_every_rank(self._comm, f"reading {reader.path}", lambda: self._read(reader), CheckpointError)
        if training_state(reader).source is None:
            read_float8(reader, self._states)
            self._states.frozen_source = None  # the frozen weights are the checkpoint's own
        # of the live tensors, so that a wrong read, cast or copy is found too; the ranks of each replica prove all
        shard_comm = self._states.mesh.shard
        if shard_comm is self._comm:
            reader.check_fingerprints(self._loaded_shards(reader), self._comm)
        else:  # a failure in one replica ends the load in all
            check = partial(reader.check_fingerprints, self._loaded_shards(reader), shard_comm)
            what = "checking each replica (ranks named below count within it)"
            on_every_rank(self._comm, what, check, CheckpointError, expected=(CheckpointError,))
        extra = self._restore(reader)
        self.load_failed = False
        return extra

    def _read(self, reader: CheckpointReader) -> None:
        kinds = trained_kinds(reader, self._states)
        has_frozen = training_state(reader).source is None
        # every rank fills all that it holds, also what another rank has saved
        shards = [*chain(*map(self._states.local_shards, kinds))]
        shards += self._states.frozen_shards() if has_frozen else ()
        pairs = [shard for shard in shards if isinstance(shard.values, RemainderPair)]
        sharded = (ReadTarget(s.kind, s.name, s.start, s.values) for s in shards if isinstance(s.values, Tensor))
        whole = replicated_tensors(self._states, has_frozen=has_frozen)
        reader.read_into(chain(sharded, (ReadTarget(kind, name, 0, data) for kind, name, data in whole)))
        for shard in pairs:
            for start in range(shard.start, shard.stop, _PAIR_ELEMENTS):
                part = shard.part(start, min(start + _PAIR_ELEMENTS, shard.stop))
                part.write(reader.read(part.kind, part.name, part.start, part.stop).to(part.device, part.dtype))
        masters = {shard.name: shard for shard in self._states.local_shards(MASTER)}
        for kind, spec in self._states.plan.specs.items():
            for shard in self._states.local_shards(kind) if kind not in kinds else ():
                spec.fill(shard.data, masters[shard.name].data)  # all that this rank holds of both

    def _loaded_shards(self, reader: CheckpointReader) -> Iterator[TensorShard]:
        """Yields what this rank proves: the live tensors; for frozen ones that were cast, their saved values.

        Raises:
            CheckpointError: a frozen tensor is not what its saved values give when they are cast.
        """
        # over the ranks of a replica every element once
        yield from self._owned_shards(trained_kinds(reader, self._states))
        has_frozen = training_state(reader).source is None
        if has_frozen:
            yield from proven_float8(reader, self._states)
        is_first = self._states.mesh.shard.rank == 0
        replicated = _replicated_shards(self._states, has_frozen=has_frozen) if is_first else ()
        dtypes = {(tensor.kind, tensor.name): tensor.dtype for tensor in reader.tensors}
        for shard in chain(self._states.frozen_shards() if has_frozen else (), replicated):
            dtype = dtypes.get((shard.kind, shard.name), shard.dtype)
            if dtype == shard.dtype:
                yield shard
                continue
            for start in range(shard.start, shard.stop, _CAST_ELEMENTS):
                live = shard.data[start - shard.start :][:_CAST_ELEMENTS]
                stop = start + live.numel()
                values = reader.read(shard.kind, shard.name, start, stop)
                if not torch.equal(values.to(shard.dtype).view(torch.uint8), live.cpu().view(torch.uint8)):
                    raise CheckpointError(
                        f"after loading {reader.path}, {shard.kind} '{shard.name}' differs from what was saved"
                    )
                yield replace(shard, dtype=dtype, start=start, stop=stop, values=values)

    def _rule_states(self, reader: CheckpointReader) -> list[dict[str, float]]:
        """Returns the numbers that each rule shares over all elements; empty ones from older checkpoints.

        Raises:
            CheckpointError: the checkpoint has them for other rules.
        """
        rules, saved = self._states.plan.rules, training_state(reader).engine_state.rules
        if len(saved) != len(rules) and any(saved):
            raise CheckpointError(
                f"{reader.path} holds the numbers of {len(saved)} optimizer groups, this run has {len(rules)}; resume "
                f"with the optimizer and the groups that it was saved with"
            )
        for number, (rule, values) in enumerate(zip(rules, saved, strict=False)):
            if values and values.keys() != rule.state_dict().keys():
                raise CheckpointError(
                    f"{reader.path} holds the numbers {sorted(values)} of optimizer group {number}, this run's "
                    f"optimizer keeps {sorted(rule.state_dict())}; resume with the optimizer that it was saved with"
                )
        return saved if len(saved) == len(rules) else [{} for _ in rules]

    def _restore(self, reader: CheckpointReader) -> dict[str, Any]:
        run, finalizer, saved = self._run, self._finalizer, training_state(reader)
        run.attempted_steps = saved.engine_state.attempted_steps
        run.applied_steps = saved.engine_state.applied_steps
        names = {plain: name for name, plain in plain_names(tensor_names(self._states)).items()}
        run.missed_updates = {names[n]: c for n, c in saved.engine_state.missed_updates.items() if n in names}
        warn_of_other_bits(reader, self._states)
        finalizer.scale = finalizer.scale.restored(saved.engine_state.loss_scale)
        for rule, values in zip(self._states.plan.rules, self._rule_states(reader), strict=True):
            rule.load_state_dict(values)
        finalizer.skips.reset()  # skips before the load say nothing about the loaded weights
        run.data_cursor = saved.data_cursor
        if saved.rng.seed is not None:  # an imported model has none
            run.seed = saved.rng.seed
        run.run_id = saved.run_id
        return saved.extra


def _plain(snapshot: Snapshot, names: Mapping[str, str]) -> Snapshot:
    """Returns ``snapshot`` with tensors called as in ``names``, and modules without the names of wrappers."""
    if all(name == plain for name, plain in names.items()):
        return snapshot
    state, contract = snapshot.state, snapshot.state["contract"]
    tables = {
        key: {plain_name(name): value for name, value in contract[key].items()} for key in ("modules", "replicas")
    }
    aliases = {plain_name(alias): names[name] for alias, name in state["aliases"].items()}
    engine_state = dict(state["engine_state"])
    if "missed_updates" in engine_state:
        engine_state["missed_updates"] = {names[n]: count for n, count in engine_state["missed_updates"].items()}
    return replace(
        snapshot,
        shards=tuple(replace(shard, name=names[shard.name]) for shard in snapshot.shards),
        expected={(kind, names[name], start): value for (kind, name, start), value in snapshot.expected.items()},
        state={**state, "contract": {**contract, **tables}, "aliases": aliases, "engine_state": engine_state},
    )


def _replicated_shards(states: ModelStates, *, has_frozen: bool) -> Iterator[TensorShard]:
    for kind, name, tensor in replicated_tensors(states, has_frozen=has_frozen):
        flat = tensor.contiguous().view(-1)
        yield TensorShard(name, kind, tuple(tensor.shape), tensor.dtype, 0, flat.numel(), flat)

"""The audit of an engine's states: bits that no update wrote are found before they are used or saved.

[Note: audit] After the update of an audited step each rank keeps fingerprints of its masters and optimizer states. They
are compared with the live tensors right before the next update, and, by the thread that writes a checkpoint, with what
it writes. At the same places compute weights are compared with the cast of their masters, and what several ranks hold
is compared across them: one small all-gather of sums. Only if these differ do the ranks exchange what each one found,
and the same judgment on every rank names the tensor and the rank. Under hybrid sharding the masters and states of a
rank are also compared with those of the ranks at its place in the other replicas; replica 0 saves them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dtrain.checkpoint.format.device_fingerprint import bits_of, fingerprint_tensor, signed
from dtrain.checkpoint.format.fingerprint import MASK
from dtrain.checkpoint.snapshot import TensorShard
from dtrain.config.audit import Audit
from dtrain.engine.outcome import StepOutcome
from dtrain.engine.parts.audit.constants import Constants
from dtrain.engine.parts.audit.judge import Copies, Key, RankFindings, judge
from dtrain.engine.parts.part import StepPart, StepUnderWay
from dtrain.engine.run_state import RunState
from dtrain.engine.vote.decide import DecodedDecision
from dtrain.engine.vote.finalize import StepFinalizer
from dtrain.errors import CorruptionError
from dtrain.parameters.compute_shard import ComputeShard
from dtrain.parameters.model_states import ModelStates


@dataclass(frozen=True)
class _Fingerprints:
    """Fingerprints of masters and optimizer states on this rank.

    Attributes:
        keys: (kind, name, first element) of each interval; those that this rank does not save come first. Ranks at one
            place of several replicas have the same intervals of what is not whole, in the same order.
        num_copies: their number.
        values: int64 [intervals].
    """

    keys: list[tuple[str, str, int]]
    num_copies: int
    values: Tensor


class StateAudit(StepPart):
    """Records and checks the bits of one engine's states.

    Args:
        states: they are read from the first call on, when they exist.
        run: its attempted steps.
        settings: which steps are audited; without ``every`` nothing is recorded, and only a save of several replicas
            is checked.
        finalizer: knows whether a step is finalized at its end.

    Attributes:
        settings: see above.
        error: the corruption that was found; the states must not be used until others are loaded.
    """

    def __init__(self, states: ModelStates, run: RunState, settings: Audit, finalizer: StepFinalizer) -> None:
        self.settings = settings
        self.error: CorruptionError | None = None
        self._states = states
        self._run = run
        self._finalizer = finalizer
        self._record: _Fingerprints | None = None
        self._constants = Constants(states)
        self._written: set[str] = set()  # parameters that the user has written since the record

    @property
    def is_pending(self) -> bool:
        """Whether there is a record, which the next update must check; equal on all ranks."""
        return self._record is not None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keeps a ``CorruptionError`` of the block, which later calls raise again until a checkpoint is loaded."""
        try:
            yield
        except CorruptionError as error:
            self.error = error
            raise

    # -- at each step ------------------------------------------------------------------------------------------------

    def before_update(self, step: StepUnderWay) -> None:
        """Checks the record of an earlier update."""
        if self.is_pending:
            with self.noting():
                self.check(step.written_names, step.written_weights)

    def after_update(self, step: StepUnderWay) -> None:
        if self.is_pending:  # not before: if the step fails, the record still protects what is saved
            self.forget()
        if self.settings.is_due(step.number + 1) or (self.settings.every and step.is_saved):
            self.record()

    def finalized(self, outcome: StepOutcome, decision: DecodedDecision) -> None:
        """Records what a stop saves; on a GPU the weights may be others by now."""
        is_current = self._finalizer.is_synchronous
        if self.settings.every and is_current and outcome.stop_requested and not self.is_pending:
            self.record()

    def loaded(self) -> None:
        """Drops everything, because all states are others."""
        self.error = None
        self._constants.forget()
        self.forget()

    # -- the record --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def record(self) -> None:
        """Keeps the fingerprints of what an update has just written; asks no other rank, and waits for no device."""
        self._written.clear()
        self._record = self._read()
        self._constants.record()

    def forget(self) -> None:
        """Drops the record, because an update follows."""
        self._record = None
        self._written.clear()

    def exclude(self, names: Collection[str]) -> None:
        """Leaves parameters out until the next record: the user has written to them."""
        if self.settings.every:  # else no record ends it
            self._written |= set(names)

    def renew(self) -> None:
        """Takes what the engine has just written outside of an update as right."""
        self._constants.forget()
        if self._record is not None:
            self.record()

    def expected(self) -> dict[tuple[str, str, int], int]:
        """Returns the fingerprint of each interval that this rank saves, by kind, name and first element."""
        record = self._record
        if record is None:
            return {}
        pairs = list(zip(record.keys, record.values.tolist(), strict=True))[record.num_copies :]
        return {key: value & MASK for key, value in pairs if key[1] not in self._written}

    def _intervals(self, names: Collection[str] | None) -> Iterator[tuple[bool, TensorShard]]:
        """Yields (whether this rank saves it, interval) of the masters and states of ``names``; None: of all."""
        states, replicated = self._states, self._states.replicated_masters()
        saves = states.mesh.replicate.rank == 0
        for kind in states.saved_dtypes:
            owned = {shard.name: shard for shard in states.owned_shards(kind)} if replicated and saves else {}
            for shard in states.local_shards(kind):
                if names is not None and shard.name not in names:
                    continue
                if shard.name not in replicated:
                    yield saves, shard
                    continue
                own = owned.get(shard.name)
                low, high = (shard.start, shard.start) if own is None else (own.start, own.stop)
                for is_owned, start, stop in ((False, shard.start, low), (True, low, high), (False, high, shard.stop)):
                    yield is_owned, shard.part(start, stop)

    def _read(self, names: Collection[str] | None = None, *, only_copies: bool = False) -> _Fingerprints:
        found = [item for item in self._intervals(names) if item[1].values.numel() and not (only_copies and item[0])]
        # the kinds of one interval together, because they share the weights of the fingerprint
        found.sort(key=lambda item: (item[0], item[1].name, item[1].start))
        values = fingerprint_tensor([(shard.values, shard.start) for _, shard in found], self._states.comm.device)
        keys = [(shard.kind, shard.name, shard.start) for _, shard in found]
        return _Fingerprints(keys, sum(not is_owned for is_owned, _ in found), values)

    # -- the check ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def check(self, written: Collection[str] = (), written_hash: int = 0, *, saves: bool = False) -> None:
        """Checks everything that is at hand; all ranks call, right before an update or a save.

        Args:
            written: parameters that the user has written since the record.
            written_hash: hash of what was written; if the ranks differ there, the vote that follows names it.
            saves: a save follows, which compares what this rank writes with ``expected``.

        Raises:
            CorruptionError: the same on every rank.
        """
        comm, mesh, record = self._states.comm, self._states.mesh, self._record
        excluded = self._written | set(written)
        replicated = set(self._states.replicated_masters()) - excluded
        reads_all = record is not None or mesh.is_hybrid
        live = self._read(None if reads_all else replicated, only_copies=saves and record is not None)
        saved = live if record is None or not saves else record
        # without audits only the replicas are compared, at a save. Not by owner: the fingerprint of a whole is the sum
        # of those of its parts, of which there are as many as ranks
        shards = list(self._states.whole_compute_shards()) if self.settings.every else []
        shards = [shard for shard in shards if shard.name not in excluded]
        gathered = [shard for shard in shards if shard.is_gathered]
        copies = self._fingerprints_of(gathered)
        constants, has_changed = self._constants.changed()
        strict = self._constants.strict
        differing = [_differing(shard).sum() for shard in shards if shard.source is not None]
        differing.append(self._weigh(has_changed, [int(name in strict) for _, name in constants]))
        if record is not None:
            differs = live.values != record.values[: len(live.keys)]
            differing.append(self._weigh(differs, [int(name not in excluded) for _, name, _ in live.keys]))
        replicas = {name for _, name, _ in saved.keys} - replicated - excluded if mesh.is_hybrid else set()
        # order of the columns: equal if the ranks can be compared; 0; then equal, the last at each place of a replica
        row = torch.stack(
            [
                torch.full((), written_hash, dtype=torch.int64, device=comm.device),
                torch.stack(differing).sum(),
                self._weigh(has_changed, [0 if name in strict else _salt(kind, name) for kind, name in constants]),
                self._weigh(saved.values, [_salt(k, n) if n in replicated else 0 for k, n, _ in saved.keys]),
                self._weigh(copies, [_salt(shard.kind, shard.name) for shard in gathered]),
                self._weigh(saved.values, [_salt(k, n) if n in replicas else 0 for k, n, _ in saved.keys]),
            ]
        )
        rows = comm.gather_rows(row, label="audit").tolist()
        if any(other[0] != rows[0][0] for other in rows):
            return
        places = mesh.shard.world_size
        if any(
            other[1] or other[2:-1] != rows[0][2:-1] or other[-1] != rows[rank % places][-1]
            for rank, other in enumerate(rows)
        ):
            shards = list(self._states.compute_shards()) if self.settings.every else []
            shards = [shard for shard in shards if shard.name not in excluded]
            copies = self._fingerprints_of([shard for shard in shards if shard.is_gathered])
            self._search(shards, copies, replicated, excluded)
        if rows[0][2]:  # changed on all ranks alike: written in a way that no counter shows
            for key in (key for key, is_changed in zip(constants, has_changed.tolist(), strict=True) if is_changed):
                self._constants.drop(key)

    def _fingerprints_of(self, shards: Sequence[ComputeShard]) -> Tensor:
        return fingerprint_tensor([(shard.data, shard.start) for shard in shards], self._states.comm.device)

    def _weigh(self, values: Tensor, weights: Sequence[int]) -> Tensor:
        """Returns the sum of ``values`` times ``weights`` mod 2^64, 0-dim int64."""
        factors = torch.tensor([signed(weight) for weight in weights], dtype=torch.int64)
        if values.device.type != "cpu":
            factors = factors.pin_memory().to(values.device, non_blocking=True)  # the host does not wait
        return (values * factors).sum()

    def _search(self, shards: Sequence[ComputeShard], copies: Tensor, replicated: set[str], excluded: set[str]) -> None:
        """Raises what all ranks find together; finds nothing if the bits that differ are of NaN."""
        comm, mesh, live = self._states.comm, self._states.mesh, self._read()
        evidence = self._evidence(live, shards, excluded, replicated)
        texts = comm.exchange_text(json.dumps(asdict(evidence)))
        everyone = [RankFindings.from_dict(json.loads(text)) for text in texts]
        # every rank holds these, so all have the same keys in the same order
        whole: dict[Key, int] = {}
        for (kind, name, _), value in zip(live.keys, live.values.tolist(), strict=True):
            if name in replicated:
                whole[kind, name] = whole.get((kind, name), 0) + value
        keys = sorted(whole)
        states = torch.tensor([signed(whole[key] & MASK) for key in keys], dtype=torch.int64, device=comm.device)
        values = comm.gather_rows(torch.cat([states, copies]), label="audited copies").T.tolist()
        held = [Copies(*key, dict(enumerate(of_ranks))) for key, of_ranks in zip(keys, values, strict=False)]
        intervals: dict[tuple[str, str, int], dict[int, int]] = {}
        for rank, own in enumerate(everyone):
            for kind, name, start, value in own.intervals:
                intervals.setdefault((kind, name, start), {})[rank] = value
        held += [Copies(kind, name, by_rank) for (kind, name, _), by_rank in intervals.items()]
        gathered, size = [shard for shard in shards if shard.is_gathered], mesh.shard.world_size
        for shard, of_ranks in zip(gathered, values[len(keys) :], strict=True):
            for first in range(0, comm.world_size, size):  # each replica gathers its own masters
                by_rank = {rank: of_ranks[rank] for rank in range(first, first + size)}
                held.append(Copies(shard.kind, shard.name, by_rank, first + shard.owner, shard.is_master))
        found = judge(everyone, held)
        if found:
            raise CorruptionError.of_state(self._run.attempted_steps, found)

    def _evidence(
        self, live: _Fingerprints, shards: Sequence[ComputeShard], excluded: set[str], replicated: set[str]
    ) -> RankFindings:
        record = self._record
        states: list[Key] = []
        if record is not None:
            differs = (live.values != record.values).tolist()
            states = [key[:2] for key, other in zip(live.keys, differs, strict=True) if other]
        compared = (shard for shard in shards if shard.source is not None)
        strict = self._constants.strict
        keys, has_changed = self._constants.changed()
        changed = [key for key, other in zip(keys, has_changed.tolist(), strict=True) if other]
        return RankFindings(
            states=tuple(key for key in dict.fromkeys(states) if key[1] not in excluded),
            casts=tuple(dict.fromkeys((s.kind, s.name) for s in compared if _is_corrupt(s))),
            shards=tuple(key for key in changed if key[1] in strict),
            constants=tuple(key for key in changed if key[1] not in strict),
            intervals=self._differing_intervals(live, replicated | excluded),
            has_record=record is not None,
        )

    def _differing_intervals(self, live: _Fingerprints, excluded: set[str]) -> tuple[tuple[str, str, int, int], ...]:
        """Returns those that another replica holds with other bits, without those of ``excluded``; all ranks call."""
        replicas = self._states.mesh.replicate
        if replicas.world_size == 1:
            return ()
        own = {key: value for key, value in zip(live.keys, live.values.tolist(), strict=True) if key[1] not in excluded}
        of_replicas = map(json.loads, replicas.exchange_text(json.dumps(list(own.values()))))
        by_interval = zip(own.items(), zip(*of_replicas, strict=True), strict=True)
        return tuple((*key, value) for (key, value), others in by_interval if len(set(others)) > 1)


def _salt(kind: str, name: str) -> int:
    """Returns an odd number, so that sums over several tensors catch every single-bit flip too."""
    return zlib.crc32(f"{kind}:{name}".encode()) * 0x9E3779B97F4A7C15 & MASK | 1


def _expected(shard: ComputeShard) -> Tensor:
    assert shard.source is not None
    return shard.source.to(shard.data.device, shard.data.dtype)


def _differing(shard: ComputeShard) -> Tensor:
    """Returns whether each element has other bits than it must have, bool [n]."""
    return bits_of(shard.data) != bits_of(_expected(shard))


def _is_corrupt(shard: ComputeShard) -> bool:
    # the bits of a NaN depend on the instruction that casts it
    differs = _differing(shard)
    return bool((differs & ~(shard.data.float().isnan() & _expected(shard).float().isnan())).any())

"""Fingerprints of what training does not change: frozen parameters, and buffers that no forward writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from dtrain.checkpoint.format.device_fingerprint import fingerprint_tensor, flat
from dtrain.engine.parts.audit.judge import Key
from dtrain.engine.parts.buffers import counts_writes
from dtrain.engine.parts.running_statistics import running_statistics
from dtrain.parameters.model_states import ModelStates


@dataclass(frozen=True)
class _Constant:
    """A tensor as it was: its version counter, which every visible write increments, and its fingerprint, 0-dim."""

    values: Tensor
    version: int
    fingerprint: Tensor

    def is_unwritten(self, values: Tensor | None) -> bool:
        same = self.values.data_ptr(), self.version
        return values is not None and (values.data_ptr(), values._version) == same


class Constants:
    """The frozen parameters and buffers of one model; those that were written since are left out.

    Args:
        states: the tensors are read at each call.
    """

    def __init__(self, states: ModelStates) -> None:
        self._states = states
        self._recorded: dict[Key, _Constant] = {}

    @property
    def strict(self) -> set[str]:
        """Names of the frozen parameters that only the engine can write, so that every change is a fault."""
        float8 = (name for weights in self._states.frozen_float8 for name in weights.names)
        return {*(shard.name for shard in self._states.frozen_shards()), *float8}

    def forget(self) -> None:
        """Drops all fingerprints, because the tensors were loaded or modified."""
        self._recorded.clear()

    def _tensors(self) -> Iterator[tuple[Key, Tensor]]:
        codes = (weights.codes() for weights in self._states.frozen_float8)
        for shard in chain(self._states.frozen_shards(), *codes):
            yield (shard.kind, shard.name), shard.data
        for name, values in self._states.replicated_frozen().items():
            yield ("frozen", name), values
        module = self._states.module
        # batch norm writes its running statistics without counting, and a rank without a forward does not write them
        statistics = set(map(id, running_statistics(module)))
        for name, buffer in module.named_buffers():
            if id(buffer) not in statistics:
                yield ("buffer", name), buffer.detach()

    def _live(self) -> dict[Key, Tensor]:
        return {key: values for key, values in self._tensors() if counts_writes(values)}

    def record(self) -> None:
        """Keeps the fingerprints of tensors that are new, or that were written since the last call."""
        live = self._live()
        kept = {key: old for key, old in self._recorded.items() if old.is_unwritten(live.get(key))}
        new = {key: values for key, values in live.items() if key not in kept}
        sums = self._fingerprints(list(new.values()))
        self._recorded = kept | {
            key: _Constant(values, values._version, one) for (key, values), one in zip(new.items(), sums, strict=True)
        }

    def changed(self) -> tuple[list[Key], Tensor]:
        """Returns the tensors that nothing has written since, and whether the bits of each are others, bool [n]."""
        live = self._live()
        keys = [key for key, old in self._recorded.items() if old.is_unwritten(live.get(key))]
        if not keys:
            return [], torch.zeros(0, dtype=torch.bool, device=self._states.comm.device)
        before = torch.stack([self._recorded[key].fingerprint for key in keys])
        return keys, self._fingerprints([live[key] for key in keys]) != before

    def drop(self, key: Key) -> None:
        """Leaves a tensor out until the next record."""
        self._recorded.pop(key, None)

    def _fingerprints(self, tensors: list[Tensor]) -> Tensor:
        return fingerprint_tensor([(flat(tensor), 0) for tensor in tensors], self._states.comm.device)

"""The buffers that a model's state dict holds, and how all ranks get rank 0's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dtrain.checkpoint.format.device_fingerprint import fingerprint_tensor, flat
from dtrain.distributed.communicator import Communicator
from dtrain.engine.parts.part import StepPart
from dtrain.engine.parts.running_statistics import running_statistics

_UNWRITTEN, _OTHER_BITS, _WRITTEN = range(3)


def persistent_buffers(
    model: nn.Module, modules: Mapping[str, nn.Module] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers of ``model`` that its state dict holds, such as running statistics, by name.

    ``modules``: by the names that they keep when they are wrapped.
    """
    own = {id(module): name for name, module in reversed(list((modules or {}).items()))}
    kept = {
        f"{prefix}.{key}".lstrip("."): f"{own.get(id(module), prefix)}.{key}".lstrip(".")
        for prefix, module in model.named_modules()
        for key in module._buffers
    }
    counts = Counter(kept.values())
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if name not in transient:
            yield kept[name] if counts[kept[name]] == 1 else name, buffer.detach()


def counts_writes(values: Tensor) -> bool:
    """Whether a tensor holds its bits itself, and counts its writes."""
    is_strided = type(values) is Tensor and values.layout == torch.strided and not values.is_quantized
    return is_strided and values.numel() > 0 and not values.is_inference() and not values.is_meta


@dataclass(frozen=True)
class _Shared:
    """A buffer when it was the same on all ranks: its address and version counter, and its fingerprint."""

    place: tuple[int, int]
    fingerprint: int


class SharedBuffers(StepPart):
    """Gives all ranks rank 0's persistent buffers: running statistics, and those written since all had the same.

    A buffer that nothing has written stays: a flipped bit in rank 0's would become a write on the others, which an
    audit accepts.

    Args:
        model: its buffers are read at each call.
        comm: the ranks.
    """

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self._model = model
        self._comm = comm
        self._shared: dict[str, _Shared] = {}

    def loaded(self) -> None:
        """Notes that all ranks have the same buffers."""
        if self._comm.world_size > 1:
            _, others = self._buffers()
            self._shared = self._read(others)

    def copy(self) -> None:
        """Overwrites the buffers with rank 0's; all ranks call."""
        statistics, others = self._buffers()
        written = self._written(others) if others else {}
        for name, buffer in (statistics | written).items():
            value = buffer.contiguous()
            self._comm.broadcast(value, label=name)
            buffer.copy_(value)
        self._shared |= self._read(written)

    def _buffers(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the running statistics, which are written without counting, and the other persistent buffers."""
        written = set(map(id, running_statistics(self._model)))
        names = {name for name, buffer in self._model.named_buffers() if id(buffer) in written}
        found = {name: buffer for name, buffer in persistent_buffers(self._model) if buffer.numel()}
        others = {name: buffer for name, buffer in found.items() if name not in names}
        return {name: buffer for name, buffer in found.items() if name in names}, others

    def _written(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the buffers that any rank has written; those that all wrote without counting too."""
        now = self._read(buffers)
        row = torch.tensor([self._mark(name, now.get(name)) for name in buffers], device=self._comm.device)
        marks = self._comm.gather_rows(row, label="written buffers").T.tolist()
        # other bits on a few ranks only are not written, but wrong
        return {
            name: buffer
            for (name, buffer), of_ranks in zip(buffers.items(), marks, strict=True)
            if _WRITTEN in of_ranks or _UNWRITTEN not in of_ranks
        }

    def _mark(self, name: str, now: _Shared | None) -> int:
        before = self._shared.get(name)
        if before is None or now is None or before.place != now.place:
            return _WRITTEN
        return _UNWRITTEN if before.fingerprint == now.fingerprint else _OTHER_BITS

    def _read(self, buffers: Mapping[str, Tensor]) -> dict[str, _Shared]:
        counted = {name: buffer for name, buffer in buffers.items() if counts_writes(buffer)}
        if not counted:
            return {}
        prints = fingerprint_tensor([(flat(buffer), 0) for buffer in counted.values()], self._comm.device).tolist()
        return {
            name: _Shared((buffer.data_ptr(), buffer._version), found)
            for (name, buffer), found in zip(counted.items(), prints, strict=True)
        }

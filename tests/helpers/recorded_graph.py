"""A CUDA graph on the CPU: operations are recorded with their tensors, and a replay runs them again on the same memory.

As on a device, what a capture launches changes nothing until a replay: all memory that it writes is put back at its
end. A number of the host is in the graph as it was, and a read of a value is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.engine.graphs import captured, step
from dtrain.optim import formula_rule
from dtrain.optim.rule import UpdateScalars
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.sharding import model

_READS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.nonzero)


class RecordedGraph(TorchDispatchMode):
    """Stands in for ``torch.cuda.CUDAGraph``; has what dtrain calls of it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_replays = 0
        self._ran: list[tuple[Any, Any, Any, Any]] = []  # with their results, which stay alive
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # what was written, by the address of its storage
        self._own: set[int] = set()  # storages that the capture has made

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)
        for live, before in self._before.values():
            live.copy_(before)

    def register_generator_state(self, generator: torch.Generator) -> None: ...

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _READS:
            raise RuntimeError(f"{func} reads a value while the step is captured")
        kwargs = kwargs or {}
        values = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                pytree.tree_map_only(Tensor, self._note_write, values.get(argument.name))
        result = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and not _is_alias(func):
                self._own.add(_storage(tensor))
        self._ran.append((func, args, kwargs, result))
        return result

    def _note_write(self, tensor: Tensor) -> None:
        place = _storage(tensor)
        if place not in self._before and place not in self._own:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._before[place] = whole, whole.clone()

    @torch.no_grad()
    def replay(self) -> None:
        self.num_replays += 1
        for func, args, kwargs, result in self._ran:
            again = func(*args, **kwargs)
            if _is_alias(func):
                continue
            for old, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)


def graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Lets steps be captured on the CPU; returns their graphs.

    An engine on a CPU reads some values, where one on a GPU computes with them: it is made to compute too.
    """
    made: list[RecordedGraph] = []

    def new() -> RecordedGraph:
        made.append(RecordedGraph())
        return made[-1]

    monkeypatch.setattr(captured, "_new_graph", new)
    monkeypatch.setattr(captured, "new_pool", object)
    monkeypatch.setattr(step, "_refuse", lambda engine: None)
    monkeypatch.setattr(GradientMonitor, "are_finite", lambda monitor, buffers: False)
    monkeypatch.setattr(UpdateScalars, "_has_factor", True)
    monkeypatch.setattr(model, "chunk_squares", _squares_of_device)
    monkeypatch.setattr(formula_rule, "_decides_on_host", lambda device: False)
    return made


def _squares_of_device(chunks: Sequence[Tensor], norms: Any = None, *, each: bool = True) -> Tensor:
    return torch.cat([torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) for rows in chunks]).square_()


def _is_alias(func: Any) -> bool:
    return any(value.alias_info is not None for value in func._schema.returns) or not func._schema.returns


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())

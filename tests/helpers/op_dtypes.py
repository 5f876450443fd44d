"""The operations that really ran, seen below autograd and autocast: their number, and the dtypes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
NAMES |= {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Short names of the recorded dtypes; others, such as those of indices, are not recorded."""


@dataclass(frozen=True)
class Ran:
    """A kernel of ``torch.ops.aten`` with the dtypes of its tensors, each once, sorted."""

    op: str
    module: str | None
    """The innermost one whose forward it ran in, empty for the model itself; None outside, as in backward."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class OpDtypes(TorchDispatchMode):
    """Records every kernel that runs inside, by module of ``model``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.ran: list[Ran] = []
        self._model = model
        self._open: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        module = self._open[-1] if self._open else None
        self.ran.append(Ran(func.overloadpacket.__name__, module, _dtypes((args, kwargs)), _dtypes(output)))
        return output

    def table(self, ops: Iterable[str], *, forward: bool) -> dict[str, set[str]]:
        """The input dtypes of those of ``ops`` that ran in the forward of the model, or outside it."""
        table: dict[str, set[str]] = {}
        for ran in self.ran:
            if ran.op in ops and (ran.module is not None) == forward:
                table.setdefault(ran.op, set()).update(ran.inputs)
        return table

    def dtypes(self, module: str, *ops: str) -> set[str]:
        """The input dtypes of all kernels named ``ops`` in the forward of ``module``."""
        return {dtype for ran in self.ran if ran.module == module and ran.op in ops for dtype in ran.inputs}

    @contextmanager
    def recording(self) -> Iterator[OpDtypes]:
        """Records kernels in the block."""

        def leave(*_: Any) -> None:
            self._open.pop()

        handles = []
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._open.append(name)))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            with self:
                yield self
        finally:
            for handle in handles:
                handle.remove()


class _Counter(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def operations_of(work: Callable[[], Any]) -> int:
    """Returns the number of operations in ``work``, views and allocations too."""
    with _Counter() as counter:
        work()
    return counter.number


def _dtypes(values: Any) -> tuple[str, ...]:
    dtypes = {value.dtype for value in pytree.tree_leaves(values) if isinstance(value, Tensor)}
    return tuple(sorted(NAMES[dtype] for dtype in dtypes if dtype in NAMES))

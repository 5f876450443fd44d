"""Records the operations of a step, with the module that issued each, on real or on fake tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Signature:
    """An operation and its arguments, in which tensors are :class:`TensorSpec`; equal ones take equal time."""

    func: Any
    values: tuple[Any, ...]
    structure: pytree.TreeSpec

    @property
    def args(self) -> tuple[Any, ...]:
        return self.arguments()[0]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = pytree.tree_unflatten(list(self.values), self.structure)
        return args, kwargs

    @property
    def name(self) -> str:
        """Name of the operation without its overload, such as ``addmm``."""
        return str(self.func).split(".")[1]


@dataclass(frozen=True)
class RecordedCall:
    """One call of an operation.

    Attributes:
        signature: the operation and its arguments.
        outputs: the tensors it returned.
        storages: identities of the storages of its tensor arguments, in order, valid while they live.
        module: name of the innermost module that was running, or whose forward made the node of backward.
        node: sequence number of the autograd node to which the call belongs.
        in_backward: whether the call is one of backward, recomputation included.
        is_recomputed: whether backward repeats a call of forward.
    """

    signature: Signature
    outputs: tuple[TensorSpec, ...]
    storages: tuple[int, ...]
    module: str
    node: int
    in_backward: bool
    is_recomputed: bool


class CallRecorder(TorchDispatchMode):
    """Records the calls inside it.

    Attributes:
        calls: in the order of their execution.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        """Args:
        model: whose modules have names; calls outside of them belong to the model, whose name is empty.
        """
        super().__init__()
        self.calls: list[RecordedCall] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        self._running: list[str] = []
        self._nodes: list[int] = []  # sequence numbers, ascending, of nodes that a call of forward made
        self._owners: list[str] = []  # the modules that made them
        self._stack = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # nothing is compiled here, and dynamo's guard costs more than the mode
        return False

    def __enter__(self) -> CallRecorder:
        for handle in (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),  # recomputation may stop early
        ):
            self._stack.callback(handle.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        self._running.append(name if name is not None else self._running[-1] if self._running else "")

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:  # the recorder may have started inside of a forward
            self._running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # the most frequent call
            return args[0].fake_device
        kwargs = kwargs or {}
        current: Any = torch._C._current_autograd_node()
        is_recomputed = current is not None and (bool(self._running) or torch.is_grad_enabled())
        if current is None or is_recomputed:
            node = torch._C._autograd._get_sequence_nr() - 1  # autograd makes the node before it calls the kernel
            module = self._running[-1] if self._running else ""
            if not self._nodes or node > self._nodes[-1]:
                self._nodes.append(node)
                self._owners.append(module)
        else:
            node = current._sequence_nr()
            index = bisect_right(self._nodes, node) - 1
            module = self._owners[index] if index >= 0 else ""
        signature, storages = _describe(func, args, kwargs)
        result = func(*args, **kwargs)
        outputs = tuple(TensorSpec.of(value) for value in pytree.tree_leaves(result) if isinstance(value, Tensor))
        self.calls.append(RecordedCall(signature, outputs, storages, module, node, current is not None, is_recomputed))
        return result


def _describe(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Signature, tuple[int, ...]]:
    values, structure = pytree.tree_flatten((tuple(args), kwargs))
    tensors = [value for value in values if isinstance(value, Tensor)]
    specs = tuple(TensorSpec.of(value) if isinstance(value, Tensor) else value for value in values)
    return Signature(func, specs, structure), tuple(tensor.untyped_storage()._cdata for tensor in tensors)

"""Records the steps of an engine, on real or on fake tensors: calls, storages with their lifetimes, and collectives."""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.engine.interface import Engine
from dtrain.planning.record.ranks import Transfer, TransferLog
from dtrain.train.session import MicroBatch, StepWatch

ACTIVATIONS, BACKWARD, UPDATE, OTHER, UNSHARDED = "activations", "backward", "update", "other", "unsharded"
"""Kinds of storages beside those of ``engine.memory()``: by the part of the step that allocates them; full weights."""

_DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Signature:
    """An operation and its arguments: tensors are ``TensorSpec``, lists tuples. Equal ones take equal time."""

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """Name of the operation without its overload, such as ``addmm``."""
        return str(self.func.__name__).split(".")[0]

    def map(self, change: Callable[[Any], Any]) -> Signature:
        """Returns the call with every argument changed, those in lists one by one."""
        return Signature(self.func, *pytree.tree_map(change, (self.args, self.kwargs)))


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of an operation, and its place ``at`` among all that is recorded.

    Attributes:
        storages: identities of the storages of its tensor arguments, in order, valid while they live.
        module: name of the innermost module that was running, or whose forward made the node of backward.
        node: sequence number of the autograd node to which the call belongs.
        in_backward: whether the call is one of backward, recomputation of forward's calls included.
        part: of the step: ``ACTIVATIONS`` for forward, ``BACKWARD``, ``UPDATE`` or ``OTHER``.
    """

    signature: Signature
    outputs: tuple[TensorSpec, ...]
    storages: tuple[int, ...]
    module: str
    node: int
    in_backward: bool
    is_recomputed: bool
    part: str
    at: int


@dataclass(slots=True)
class RecordedStorage:
    """Memory that an operation has allocated, and when it was first seen and freed.

    Its kind is one of ``engine.memory()`` or above; None: it does not count, such as states that are kept in host
    memory.
    """

    nbytes: int
    kind: str | None
    born: int
    died: int | None = None


@dataclass(slots=True)
class RecordedTransfer:
    """A collective, when it was started, and when the rank waited for it; None: it has not."""

    transfer: Transfer
    started: int
    waited: int | None = None


@dataclass(frozen=True)
class RecordedStep:
    """One step of a rank: its calls and transfers, and where it begins and ends in the order of all that is recorded.

    The transfers are by number; those that were started before the step and are waited for in it are not among them.
    """

    num_micro_batches: int
    begin: int
    end: int
    calls: Sequence[RecordedCall]
    transfers: dict[int, RecordedTransfer]


class StepRecorder(TorchDispatchMode, TransferLog, StepWatch):
    """Records what happens inside it; as the watch of a step it knows the part that is running.

    Memory that a kernel takes and frees within one operation is not seen. What is recorded is in the order of its
    beginning.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module | None = None, *, keeps_calls: bool = True) -> None:
        """Takes the model whose modules have names, and whether calls are kept; a plan of the memory needs none."""
        super().__init__()
        self._keeps_calls = keeps_calls
        self.calls: list[RecordedCall] = []
        self.storages: list[RecordedStorage] = []
        self.transfers: list[RecordedTransfer] = []
        self._now = 0
        self._part = OTHER
        self._known: dict[int, RecordedStorage] = {}  # those that live, by the identity of the storage
        self._names: dict[int, str] = {}
        self._running: list[str] = []
        self._nodes: list[int] = []  # sequence numbers, ascending, of nodes that a call of forward made
        self._owners: list[str] = []  # the modules that made them
        self._stack = ExitStack()
        if model is not None:
            self.name_modules(model)

    def name_modules(self, model: nn.Module) -> None:
        """Gives calls the names of the modules of ``model`` from now on."""
        self._names = {id(module): name for name, module in model.named_modules()}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # nothing is compiled here, and dynamo's guard costs more than the mode
        return False

    def __enter__(self) -> StepRecorder:
        self._stack.callback(register_module_forward_pre_hook(self._enter_module).remove)
        # always, because recomputation may stop early
        self._stack.callback(register_module_forward_hook(self._leave_module, always_call=True).remove)
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

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # the most frequent call
            return args[0].fake_device
        kwargs = kwargs or {}
        if not self._keeps_calls:
            return self._with_storages(func(*args, **kwargs))[0]
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
        storages: list[int] = []
        signature = Signature(func, _describe(args, storages), _describe(kwargs.items(), storages))
        result, outputs = self._with_storages(func(*args, **kwargs))
        place = (module, node, current is not None, is_recomputed, self._part, self._tick())
        self.calls.append(RecordedCall(signature, tuple(map(TensorSpec.of, outputs)), tuple(storages), *place))
        return result

    def _with_storages(self, result: Any) -> tuple[Any, list[Tensor]]:
        """Returns ``result`` and the tensors in it, whose storages are recorded."""
        found = (result,) if isinstance(result, Tensor) else pytree.tree_leaves(result)
        outputs = [value for value in found if isinstance(value, Tensor)]
        for output in outputs:
            self._add(output)
        return result, outputs

    def _add(self, tensor: Tensor) -> RecordedStorage:
        storage = tensor.untyped_storage()
        identity = storage._cdata
        found = self._known.get(identity)
        if found is None:
            found = self._known[identity] = RecordedStorage(storage.nbytes(), self._part, self._tick())
            self.storages.append(found)
            weakref.finalize(storage, self._free, identity).atexit = False
        return found

    def _free(self, identity: int) -> None:
        self._known.pop(identity).died = self._tick()

    def label(self, kind: str | None, tensors: Iterable[Tensor]) -> None:
        """Gives the storages of ``tensors`` a kind; None excludes them, such as states in host memory."""
        for tensor in tensors:
            self._add(tensor).kind = kind

    def start(self, transfer: Transfer) -> int:
        self.transfers.append(RecordedTransfer(transfer, self._tick()))
        return len(self.transfers) - 1

    def wait(self, number: int) -> None:
        self.transfers[number].waited = self._tick()

    def gathered(self, output: Tensor) -> None:
        self.label(UNSHARDED, [output])

    def record_steps(self, engine: Engine, step: Callable[..., object], counts: Sequence[int]) -> list[RecordedStep]:
        """Takes a step of ``engine`` for each of ``counts``, its micro-batches, and returns the steps."""
        self.name_modules(engine.module)
        steps = []
        for count in counts:
            self._label_states(engine)
            begin, first_call, first_transfer = self._tick(), len(self.calls), len(self.transfers)
            step(count, watch=self)
            transfers = dict(enumerate(self.transfers[first_transfer:], first_transfer))
            steps.append(RecordedStep(count, begin, self._tick(), self.calls[first_call:], transfers))
        self._label_states(engine)  # the last update has gathered replicas that stay, which are no full weights
        return steps

    def _label_states(self, engine: Engine) -> None:
        for kind, tensors in engine.states.storages().items():
            self.label(None if kind in engine.host_kinds else kind, (tensor for tensor in tensors if tensor.numel()))

    def forward(self, micro: MicroBatch) -> AbstractContextManager[None]:
        return self.in_part(ACTIVATIONS)

    def backward(self, micro: MicroBatch, output: Any, weight: float) -> AbstractContextManager[None]:
        return self.in_part(BACKWARD)

    def update(self) -> AbstractContextManager[None]:
        return self.in_part(UPDATE)

    @contextmanager
    def in_part(self, part: str) -> Iterator[None]:
        """Inside, what is called and allocated belongs to ``part`` of a step."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before


def _describe(values: Iterable[Any], storages: list[int]) -> tuple[Any, ...]:
    """Returns ``values`` with a ``TensorSpec`` for each tensor, whose storage is added to ``storages``."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            storages.append(value.untyped_storage()._cdata)
            value = TensorSpec.of(value)
        elif isinstance(value, (list, tuple)):
            value = _describe(value, storages)
        found.append(value)
    return tuple(found)

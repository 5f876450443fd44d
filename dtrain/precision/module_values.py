"""Records the ranges of what the modules of a model take and return, and of the gradients that reach those tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dtrain.precision.module_calls import ModuleCall, watch_calls
from dtrain.precision.rules import is_compiled

_CHUNK = 1 << 20  # elements at a time, so that the copies that are needed stay small


@dataclass(frozen=True)
class ValueRange:
    """Range of the elements of a tensor.

    Attributes:
        name: of the tensor in its module, such as ``weight``, or of the argument.
        numel: number of elements.
        min: least finite element; None without any.
        max: largest finite element; None without any.
        num_inf: infinite elements.
        num_minus_inf: those of them that are -Inf.
        num_nan: elements that are NaN.
    """

    name: str
    numel: int
    min: float | None
    max: float | None
    num_inf: int
    num_minus_inf: int
    num_nan: int

    @property
    def is_finite(self) -> bool:
        """Whether every element is finite."""
        return not (self.num_inf or self.num_nan)

    @property
    def may_be_mask(self) -> bool:
        """Whether -Inf are the only elements that are not finite, as in the mask of an attention."""
        return not self.is_finite and not self.num_nan and self.num_inf == self.num_minus_inf

    def __str__(self) -> str:
        bad = [f"{n} {kind}" for n, kind in ((self.num_inf, "Inf"), (self.num_nan, "NaN")) if n]
        interval = [] if self.min is None else [f"[{self.min:.4g}, {self.max:.4g}]"]
        return f"{self.name} {' and '.join([*interval, *bad])}"


@dataclass(frozen=True)
class Measured:
    """A range on its device: FP64 [5], so that measuring does not wait for it."""

    values: Tensor
    numel: int

    @staticmethod
    @torch.no_grad()
    def of(x: Tensor) -> Measured:
        """Measures ``x``, of any floating dtype, with at least one element."""
        rows = []
        for part in x.detach().reshape(-1).split(_CHUNK):
            part = part if part.dtype == torch.float64 else part.float()
            finite = part.isfinite()
            rows.append(
                torch.stack(
                    (
                        part.where(finite, torch.inf).amin().double(),
                        part.where(finite, -torch.inf).amax().double(),
                        (part == torch.inf).sum().double(),
                        (part == -torch.inf).sum().double(),
                        part.isnan().sum().double(),
                    )
                )
            )
        table = torch.stack(rows)
        return Measured(torch.cat((table[:, :1].amin(0), table[:, 1:2].amax(0), table[:, 2:].sum(0))), x.numel())

    def read(self, name: str) -> ValueRange:
        """Returns the range as that of the tensor ``name``; on a GPU this waits for the device."""
        low, high, plus, minus, nan = self.values.tolist()
        has_finite = low <= high
        return ValueRange(
            name,
            self.numel,
            low if has_finite else None,
            high if has_finite else None,
            int(plus + minus),
            int(minus),
            int(nan),
        )


@dataclass(eq=False)
class TensorRecord:
    """A floating tensor that a module took or returned.

    Attributes:
        module: path of the module; empty for the model itself.
        class_name: its class.
        caller: path of the module whose forward called it; None for the model itself.
        is_output: whether the module returned it.
        name: ``output``, ``output.loss``, or the name or number of the argument.
        forward: its range.
        gradient: the range of its gradient, once backward has reached it.
    """

    module: str
    class_name: str
    caller: str | None
    is_output: bool
    name: str
    forward: Measured
    gradient: Measured | None = None

    @property
    def side(self) -> str:
        """Returns ``input`` or ``output``."""
        return "output" if self.is_output else "input"

    def set_gradient(self, grad: Tensor | None) -> None:
        """Measures the gradient of this tensor; called by autograd."""
        if grad is not None and grad.numel():
            with suppress(Exception):  # out of memory; other ranks may wait for this backward
                self.gradient = Measured.of(grad)


class ModuleRecorder:
    """Records the floating tensors at the boundaries of all modules, in the order of time.

    A compiled module is recorded as a whole. A hook never raises: a forward that communicates must continue on every
    rank.

    Attributes:
        records: of all forwards inside ``recording``.
        weights: ranges of the own parameters of each module that was called, by path.
        failures: errors of the recorder itself, one line each.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.records: list[TensorRecord] = []
        self.weights: dict[str, list[tuple[str, Measured]]] = {}
        self.failures: list[str] = []
        self._edges: dict[GradientEdge, None] = {}

    def recording(self) -> AbstractContextManager[object]:
        """Returns the context of forwards that are recorded; gradients are recorded after it too."""
        compiled = [module for module in self._model.modules() if is_compiled(module)]
        inside = {part for module in compiled for part in list(module.modules())[1:]}
        modules = {name: module for name, module in self._model.named_modules() if module not in inside}
        return watch_calls(modules, self._begin, self._end, before_hooks=True)

    def _begin(self, call: ModuleCall) -> None:
        with self._guarded(call):
            if call.name not in self.weights:
                self.weights[call.name] = [(key, Measured.of(value)) for key, value in _weights(call.module)]
            for key, value in (*enumerate(call.args), *call.kwargs.items()):
                self._record(call, str(key), value)

    def _end(self, call: ModuleCall) -> None:
        with self._guarded(call):
            self._record(call, "output", call.output, is_output=True)

    def _record(self, call: ModuleCall, label: str, value: Any, *, is_output: bool = False) -> None:
        for key, tensor in named_tensors(label, value):
            kind = type(call.module).__name__
            record = TensorRecord(call.name, kind, call.caller, is_output, key, Measured.of(tensor))
            self.records.append(record)
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(record.set_gradient)
                self._edges[get_gradient_edge(tensor)] = None

    @contextmanager
    def _guarded(self, call: ModuleCall) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a tensor subclass, or out of memory
            self.failures.append(f"'{call.name}': {type(error).__name__}: {error}")

    def first_nonfinite(self) -> tuple[TensorRecord | None, TensorRecord | None]:
        """Returns the first tensor of the forward that is not finite, and the first output before that may be a mask.

        What may be a mask is not the first tensor.
        """
        mask = None
        for record in self.records:
            values = record.forward.read(record.name)
            if not (values.is_finite or values.may_be_mask):
                return record, mask
            if mask is None and record.is_output and values.may_be_mask:
                mask = record
        return None, mask

    def run_backward(self, loss: Tensor) -> None:
        """Runs the backward of ``loss`` down to the first recorded tensors; no gradient reaches a parameter."""
        edges = _last_reached(loss, self._edges)
        self._edges.clear()
        if edges:
            torch.autograd.grad(loss, edges, allow_unused=True)

    def drop_graph(self) -> None:
        """Releases the graph of the recorded forwards."""
        self._edges.clear()


def named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the floating tensors in ``value`` with their names: ``output``, ``output.loss``, ``output.0``."""
    if isinstance(value, Tensor):
        # a DTensor's ranges would take communication
        if value.is_floating_point() and value.numel() and not hasattr(value, "to_local"):
            yield name, value
        return
    items: Mapping[Any, Any] = {}
    if isinstance(value, Mapping):
        items = value
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        items = value._asdict()
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        items = dict(enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        items = {item.name: getattr(value, item.name) for item in fields(value)}
    for key, item in items.items():
        yield from named_tensors(f"{name}.{key}", item)


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for key, _ in module.named_parameters(recurse=False):
        # the attribute, because an FP8 Linear's parameter may be a placeholder
        yield from named_tensors(key, getattr(module, key))


def _last_reached(loss: Tensor, edges: Mapping[GradientEdge, None]) -> list[GradientEdge]:
    """Returns those of ``edges`` from which no other of them is reached: their gradients imply all others.

    autograd keeps the gradients that it is asked for, so that asking for all of them would take as much memory as the
    activations.
    """
    wanted = {edge.node for edge in edges}
    reaches: dict[Any, bool] = {}  # by node: whether it or a node below it is wanted
    last = set()
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack[-1]
        below = [following for following, _ in node.next_functions if following is not None]
        missing = [following for following in below if following not in reaches]
        if missing and node not in reaches:
            stack += missing
            continue
        stack.pop()
        if node in reaches:
            continue
        is_last = node in wanted and not any(reaches[following] for following in below)
        if is_last:
            last.add(node)
        reaches[node] = node in wanted or any(reaches[following] for following in below)
    return [edge for edge in edges if edge.node in last]

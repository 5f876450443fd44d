"""Steps of the real engine on fake tensors, which have shapes and dtypes and take no memory."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

from dtrain.distributed.communicator import Communicator
from dtrain.distributed.logging import logger
from dtrain.engine.interface import Engine
from dtrain.errors import ConfigError
from dtrain.planning.record.recorder import StepRecorder, TensorSpec

_ATEN = torch.ops.aten
_READ = _ATEN._local_scalar_dense.default
_NONZERO, _MASKED = _ATEN.nonzero.default, _ATEN.masked_select.default


class _StandInValues(FakeTensorMode):
    """Gives what the host reads of a fake tensor a value: 1, or false; a mask selects all elements.

    Views are made at once, and a result is remembered by the arguments: torch's own way to it takes four times as long.
    """

    _results: ClassVar[dict[Any, int | TensorSpec]] = {}
    """Position of the tensor among the arguments that is returned, or a new tensor."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # nothing is compiled here; the guard would import the compiler, for a second
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func in (_NONZERO, _MASKED):
            _tell_of_selection()
            if func is _NONZERO:
                return args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
            return args[0].new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape).numel())
        kwargs = kwargs or {}
        if _is_view(func) and isinstance(args[0], FakeTensor):
            with in_kernel_invocation_manager(self):
                found = func(*args, **kwargs)
            return self._fake(found) if isinstance(found, Tensor) else list(map(self._fake, found))
        tensors: list[Tensor] = []
        key = func, torch.get_default_dtype(), _key(args, tensors), _key(kwargs.items(), tensors)
        is_fixed = isinstance(func, OpOverload) and not func.is_view and torch.Tag.inplace_view not in func.tags
        is_fixed = is_fixed and all(isinstance(tensor, FakeTensor) for tensor in tensors)
        known = self._results.get(key) if is_fixed else None
        if isinstance(known, int):
            return tensors[known]
        if known is not None:
            with in_kernel_invocation_manager(self):
                found = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")
            return self._fake(found)
        result = self.dispatch(func, types, args, kwargs)
        if is_fixed and key[2:] == (_key(args, []), _key(kwargs.items(), [])):  # the arguments keep their shapes
            known = _remembered(result, tensors)
            if known is not None:
                self._results[key] = known
        return result

    def _fake(self, tensor: Tensor) -> FakeTensor:
        return FakeTensor(self, tensor, torch.device("cpu"))


@cache
def _is_view(func: Any) -> bool:
    """Whether the results of an operation, which is none of several others, share the memory of its first argument."""
    is_view = isinstance(func, OpOverload) and func.is_view and func.namespace == "aten" and not func._can_decompose()
    return is_view or func is _ATEN._unsafe_view.default  # of which the schema says that it is no view


def _key(values: Iterable[Any], tensors: list[Tensor]) -> tuple[Any, ...]:
    """Returns what the shapes of an operation's results depend on; appends its tensors to ``tensors``."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            found.append((value.shape, value.stride(), value.dtype))
        else:  # 1, 1.0 and True are equal
            found.append(_key(value, tensors) if isinstance(value, (list, tuple)) else (type(value), value))
    return tuple(found)


def _remembered(result: Any, tensors: Sequence[Tensor]) -> int | TensorSpec | None:
    if not isinstance(result, FakeTensor) or result.device.type != "cpu":
        return None
    for position, tensor in enumerate(tensors):
        if result is tensor:
            return position
    spec = TensorSpec.of(result)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    return spec if result.untyped_storage().nbytes() == extent * spec.dtype.itemsize else None


@cache
def _tell_of_selection() -> None:
    logger.warning(
        "the model selects elements by their values, such as with a mask; the plan has no values, so it counts all "
        "elements, more than a step selects"
    )


@contextmanager
def fake_engine(
    model: nn.Module, build: Callable[[nn.Module, Communicator], Engine], comm: Communicator, recorder: StepRecorder
) -> Iterator[Engine]:
    """Yields an engine that ``build`` makes of ``model``, whose parameters and buffers become fake tensors.

    Inside, new tensors are fake, and ``recorder`` records. The host may read them: a number is 1, a truth value false.
    What is selected by a mask is all. While the engine is built only warnings are logged.

    Args:
        model: on ``meta`` or with values.
        comm: from ``dtrain.planning.record.ranks.planned_ranks``.

    Raises:
        ConfigError: the model makes a tensor whose size depends on values in another way.
    """
    try:
        with _StandInValues(), recorder, warnings.catch_warnings():
            # a transport compares addresses, which are all 0 here
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            _drop_values(model)
            level = logger.level
            logger.setLevel(logging.WARNING)
            try:
                engine = build(model, comm)
            finally:
                logger.setLevel(level)
            yield engine
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise ConfigError(
            f"a plan runs the model on tensors without values, and the size of the result of {error.func} depends on "
            "them; replace the operation, or train some steps and read memory.json of the run"
        ) from error


def _drop_values(model: nn.Module) -> None:
    """Replaces parameters and buffers by fake ones; tied ones stay tied."""
    fakes: dict[Tensor, Any] = {}
    for held in (held for module in model.modules() for held in (module._parameters, module._buffers)):
        for name, tensor in held.items():
            if tensor is not None and tensor not in fakes:
                values = fakes[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype)
                if isinstance(tensor, nn.Parameter):
                    fakes[tensor] = nn.Parameter(values, requires_grad=tensor.requires_grad)
            held[name] = None if tensor is None else fakes[tensor]

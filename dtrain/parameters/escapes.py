"""Tensors that leave the forward of a unit of sharding: in what it returns, or in attributes of its modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

_OWN = frozenset(vars(nn.Module())) - {"_parameters", "_buffers"}  # such as hooks
_NO_VALUES = (nn.Module, type, FunctionType, ModuleType)


def tensors_in(value: Any, depth: int = 5) -> Iterator[Tensor]:
    """Yields the tensors in containers, dataclasses and other objects, ``depth`` of them deep, but none of modules."""
    if isinstance(value, Tensor):
        yield value
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = value
    elif not isinstance(value, _NO_VALUES) and hasattr(value, "__dict__"):
        items = vars(value).values()
    for item in items if depth else ():
        yield from tensors_in(item, depth - 1)


def kept_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, tuple[int, str], Tensor]]:
    """Yields what ``module`` and the modules in it keep as attributes: (name below ``prefix``, place, tensor).

    The place, id of the module and attribute, stays if a module is wrapped.
    """
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key in _OWN:
                continue
            named = value.items() if key in ("_parameters", "_buffers") else ((key, value),)
            for attribute, held in list(named):
                for tensor in tensors_in(held, depth=2):
                    yield ".".join(filter(None, (prefix, name, attribute))), (id(part), attribute), tensor


def storage_key(tensor: Tensor) -> int | None:
    """Returns a number that tensors over one storage share; None if the tensor has no storage of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors, subclasses that hold others
        return None

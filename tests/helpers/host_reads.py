"""Forbids operations that make the host wait for the device, on a CPU too, where they cost nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from dtrain.engine.adapters.native import NativeEngine

_READS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose",  # a value
    "nonzero", "nonzero_numpy", "argwhere", "masked_select", "bincount", "histc",  # a size that depends on values
    "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "_linalg_check_errors",
}  # fmt: skip
_METHODS = ("item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__index__", "__repr__")
_FROM_LISTS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
_FUNCTIONS = {getattr(torch.Tensor, name) for name in (*_METHODS, "__format__", "__contains__", "__complex__")}


# functions that read only tensors on the host
_HOST_ONLY = {
    ("gloo_group.py", "GlooGroup._gather"),
    ("ring_exchange.py", "RingExchange.begin"),
    ("micro_batch_weight.py", "RankWeights._cut"),
    ("formula_rule.py", "_is_skipped"),
    ("gradient_monitor.py", "GradientMonitor.are_finite"),
    ("rule.py", "UpdateScalars._has_factor"),
    ("squares.py", "_is_any"),
    ("squares.py", "_is_exact"),
}


def _is_host_only(depth: int) -> bool:
    """Whether one of the ``depth`` innermost callers reads only tensors on the host."""
    frame = sys._getframe(2)
    for _ in range(depth):
        if (Path(frame.f_code.co_filename).name, frame.f_code.co_qualname) in _HOST_ONLY:
            return True
        frame = frame.f_back or frame
    return False


class HostRead(AssertionError):
    """The host read a value of a tensor."""


class _Operators(TorchDispatchMode):
    """Operators below autograd, whoever calls them in this thread; on CPU, backward runs in it too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        # inside backward a method is an operator only, below two frames of torch
        if name in _READS and not _is_host_only(3):
            raise HostRead(str(func))
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            raise HostRead(f"{func} without output_size")
        indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        if any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices):
            raise HostRead(f"{func} with a mask")
        result = func(*args, **kwargs)
        source = next((arg for arg in reversed(args) if isinstance(arg, Tensor)), None)
        if name in ("_to_copy", "copy_") and source is not None and source.device != result.device:
            raise HostRead(f"{func} from {source.device} to {result.device}")
        return result


class _Methods(TorchFunctionMode):
    """Methods that read a CPU tensor's memory without an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FUNCTIONS:
            if not _is_host_only(1):
                raise HostRead(str(func))
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        if func in _FROM_LISTS and (kwargs or {}).get("device") is not None and not isinstance(args[0], Tensor):
            raise HostRead(f"{func} with a device: a copy from memory that is not pinned waits")
        return func(*args, **(kwargs or {}))


@contextmanager
def forbidden() -> Iterator[None]:
    """Raises ``HostRead`` at any read of a tensor's value by this thread."""
    with _Methods(), _Operators():
        yield


def like_a_gpu(engine: NativeEngine) -> list[int]:
    """Makes decisions arrive at the host only on demand; returns the list of the steps at which they were read."""
    reads: list[int] = []
    finalizer = engine._finalizer
    finalizer.is_synchronous = False

    def post(values: Tensor, *, is_decision: bool = True) -> Callable[[], list[int]]:
        kept, step = values.clone(), engine.attempted_steps

        def read() -> list[int]:
            if is_decision:
                reads.append(step)
            with torch._C.DisableTorchFunction():
                return kept.numpy()

        return read

    finalizer._readback.post = post  # type: ignore[method-assign]
    evidence = finalizer._evidence
    assert evidence is not None
    evidence.readback.post = partial(post, is_decision=False)  # type: ignore[method-assign]
    return reads

"""The Triton kernels into which ``torch.compile`` turns a function on a GPU of compute capability 9.0, without a GPU.

``triton_code`` traces on fake CUDA tensors, forward and backward, and stops where Inductor has written the source::

    for kernel in triton_code(block, lambda: (torch.empty(4096, 2048, device=DEVICE),)):
        print(kernel.phase, kernel.name, kernel.num_bytes, kernel.only_casts)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from tests.fake.inductor import fake_inductor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CASTING = frozenset((
    "abs", "amax", "amin", "neg", "maximum", "minimum", "mul", "div", "reciprocal", "add", "sub", "where", "isnan",
    "clamp", "clamp_min", "clamp_max", "lt", "le", "gt", "ge", "eq", "ne", "logical_or", "logical_not", "bitwise_or",
    "bitwise_and", "__lshift__", "__rshift__", "bitwise_left_shift", "bitwise_right_shift", "convert_element_type",
    "full", "scalar_tensor", "view", "reshape", "_unsafe_view", "permute", "clone", "unsqueeze", "squeeze", "expand",
))  # fmt: skip
"""Operations of casts, and of the integer arithmetic on the bits of their scales."""


@dataclass(frozen=True)
class Access:
    """A buffer that a kernel reads or writes.

    Attributes:
        nbytes: what is accessed of it, each byte once.
        num_elements: likewise.
        makers: names of the ATen operations that made it in the same graph; empty: the graph was given it.
    """

    name: str
    dtype: torch.dtype
    num_elements: int
    makers: frozenset[str]

    @property
    def nbytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Kernel:
    """One launch of a generated kernel.

    Attributes:
        phase: ``forward`` or ``backward``.
        operations: names of the ATen operations that it computes.
    """

    phase: str
    name: str
    source: str
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    operations: frozenset[str]

    @property
    def num_bytes(self) -> int:
        return sum(access.nbytes for access in self.reads + self.writes)

    @property
    def only_casts(self) -> bool:
        """Whether the kernel casts or measures a matrix and does nothing else, so that no cast is fused into it.

        It reads one FP32, BF16 or FP16 matrix and otherwise statistics, it writes FP8 and statistics, and its
        operations are those of casts. A statistic has at most a 64th of the matrix's elements, and is the result of an
        amax, was made of one, or is one number that the graph was given; a measured matrix is no statistic.
        """
        largest = max((access.num_elements for access in self.reads), default=0)
        matrices = [access for access in self.reads if not _is_statistic(access, largest)]
        written = [access for access in self.writes if not _is_statistic(access, largest)]
        return (
            len(matrices) == 1
            and matrices[0].dtype in _FLOATS
            and "amax" not in matrices[0].makers
            and all(access.dtype in FLOAT8 for access in written)
            and self.operations <= _CASTING
        )


def _is_statistic(access: Access, largest: int) -> bool:
    if access.num_elements * 64 > largest or access.dtype in FLOAT8:
        return False
    if not access.makers:
        return access.num_elements == 1
    return "amax" in access.makers or access.makers <= _CASTING


def triton_code(function: Callable[..., Any], inputs: Callable[[], Sequence[Tensor]]) -> list[Kernel]:
    """Returns the kernels of ``torch.compile(function, dynamic=False)`` and of its backward, in their order.

    Args:
        function: a function or a module, compiled without graph breaks. Nothing is run.
        inputs: called on the fake device, returns the arguments; those that require a gradient get one.
    """
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: torch.fx.GraphModule, arguments: Any) -> Any:
        compile_fx(graph, arguments)
        return graph.forward

    torch._dynamo.reset()
    kernels: list[Kernel] = []
    with fake_inductor(lambda *launch: kernels.append(_kernel(*launch))):
        torch.compile(function, backend=backend, dynamic=False, fullgraph=True)(*inputs())
    torch._dynamo.reset()
    return kernels


def _kernel(graph: Any, name: str, source: str, kernel: Any) -> Kernel:
    arguments = [argument for argument in kernel.args.python_argdefs()[2] if hasattr(argument, "buffer")]
    touched, steps = kernel.features.buf_accesses(), prod(map(int, kernel.numels.values()))
    accesses = {}
    for argument in arguments:
        number = min(int(graph.get_numel(argument.buffer)), steps * len(touched.get(argument.buffer, ())) or steps)
        accesses[argument.name] = Access(
            argument.buffer, argument.dtype, number, _operations(graph.try_get_buffer(argument.buffer))
        )
    reads = tuple(access for name, access in accesses.items() if name.startswith("in_"))
    writes = tuple(access for name, access in accesses.items() if "out_ptr" in name)
    operations = frozenset().union(*(_operations(node.node) for node in kernel.features.scheduler_nodes()))
    return Kernel("backward" if graph.is_backward else "forward", name, source, reads, writes, operations)


def _operations(buffer: Any) -> frozenset[str]:
    """Returns the names of ATen operations that made ``buffer``, back to the buffers that were read."""
    origins = getattr(buffer, "origins", None) or getattr(getattr(buffer, "data", None), "origins", None) or ()
    # Inductor also names the opaque operation for which it lays a buffer out
    return frozenset(
        node.target._opname for node in origins if getattr(node.target, "namespace", "") in ("aten", "prims")
    )

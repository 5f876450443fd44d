"""Launches of Triton kernels on the fake device: recorded instead of run, and their addresses checked.

Tables of addresses are built with real values, which the device would read: each must lie in memory that is alive, and
that no collective in flight writes.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tests.fake.collectives import Collectives
from tests.fake.device import DEVICE, LOWEST_ADDRESS, FakeDevice

HAS_TRITON = find_spec("triton") is not None and find_spec("dtrain.kernels") is not None
"""Whether Triton is installed; and dtrain has kernels, for counts of a checkout that has none."""

_TYPES = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
    torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """The facts about an argument for which Triton compiles; a kernel is compiled again for other facts.

    Attributes:
        type: such as ``*fp32`` or ``i64``; ``constexpr`` if the value is compiled in.
        value: the value if it is.
        is_aligned: whether a multiple of 16 is assumed.
    """

    name: str
    type: str
    value: Any = None
    is_aligned: bool = False


@dataclass(frozen=True)
class Launch:
    """One launch."""

    kernel: str
    programs: int  # size of the grid
    arguments: tuple[Argument, ...] = ()  # what it is compiled for
    options: tuple[tuple[str, Any], ...] = ()  # of the compiler, such as ``num_warps``
    function: Any = field(default=None, compare=False)  # that is ``@triton.jit``
    values: tuple[Any, ...] = field(default=(), compare=False)  # of the arguments: numbers, and addresses of tensors

    @property
    def variant(self) -> tuple[Any, ...]:
        """Returns what Triton compiles once for."""
        return self.kernel, self.arguments, self.options


def _argument(name: str, value: Any, is_constant: bool, is_specialized: bool) -> Argument:
    is_one = type(value) is int and value == 1 and is_specialized
    if is_constant or value is None or is_one:
        return Argument(name, "constexpr", value)
    if isinstance(value, Tensor):
        return Argument(name, _TYPES[value.dtype], is_aligned=is_specialized and value.data_ptr() % 16 == 0)
    if isinstance(value, bool):
        return Argument(name, "i1")
    if isinstance(value, int):
        kind = "i32" if -(2**31) <= value < 2**31 else "i64"
        return Argument(name, kind, is_aligned=is_specialized and value % 16 == 0)
    return Argument(name, "fp32")


def _launch(kernel: Any, programs: int, args: tuple[Any, ...], meta: dict[str, Any]) -> Launch:
    parameters = inspect.signature(kernel.fn).parameters
    given = {**dict(zip(parameters, args, strict=False)), **meta}
    # Triton's interpreter, which other tests may have switched on, keeps the options in a dict
    is_interpreted = not hasattr(kernel, "params")
    plain = (kernel.kwargs.get("do_not_specialize") if is_interpreted else kernel.do_not_specialize) or ()
    constants = {name for name, parameter in parameters.items() if "constexpr" in str(parameter.annotation)}
    arguments = tuple(_argument(name, given[name], name in constants, name not in plain) for name in parameters)
    options = tuple(sorted((name, value) for name, value in meta.items() if name not in parameters))
    values = tuple(value.data_ptr() if isinstance(value, Tensor) else value for value in given.values())
    return Launch(kernel.fn.__name__, programs, arguments, options, kernel, values)


class DanglingAddress(AssertionError):
    """A kernel would read or write memory that has been freed."""


@contextlib.contextmanager
def recorded_launches(device: FakeDevice, collectives: Collectives) -> Iterator[list[Launch]]:
    """Inside, kernels are not run; yields the list of their launches."""
    launches: list[Launch] = []
    if not HAS_TRITON:
        yield launches
        return
    from triton.runtime.jit import KernelInterface

    from dtrain.kernels.tiles import TileTable

    own_init: Callable[..., None] = TileTable.__init__

    def build(table: Any, rows: Any, num_tiles: Any, _: torch.device) -> None:
        with unset_fake_temporarily():
            own_init(table, rows, num_tiles, torch.device("cpu"))
            values, table._device = (table.rows.tolist(), table.tiles[:, 0].tolist()), DEVICE
        for name in ("rows", "tiles"):
            real = getattr(table, name)
            setattr(table, name, torch.empty(tuple(real.shape), dtype=real.dtype, device=DEVICE))
        table.rows.table = values  # where a launch of the tensor finds them

    def check(name: str, args: tuple[Any, ...]) -> None:
        for position, argument in enumerate(args):
            if not isinstance(argument, Tensor):
                continue
            assert argument.device == DEVICE, f"{name} takes a tensor on {argument.device}"
            collectives.require_idle(name, argument)
            if (table := getattr(argument, "table", None)) is not None:
                rows, owners = table
                first, count = args[position + 2 : position + 4]
                for row in set(owners[first : first + count]):
                    for address in (value for value in rows[row] if value >= LOWEST_ADDRESS):
                        if not device.is_live(address):
                            raise DanglingAddress(f"{name}: row {row} of its table holds the address of freed memory")
                        collectives.require_idle(name, address)

    def at(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **meta: Any) -> None:
            sizes = grid(meta) if callable(grid) else grid
            name = kernel.fn.__name__
            check(name, (*args, *meta.values()))
            launches.append(_launch(kernel, math.prod(sizes), args, meta))

        return launch

    with mock.patch.object(TileTable, "__init__", build), mock.patch.object(KernelInterface, "__getitem__", at):
        yield launches

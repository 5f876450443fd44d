"""A CUDA device without values, for a process without a GPU: fake tensors, and what they need of a CUDA build of torch.

A fake tensor has a device, a dtype, a shape and strides, and no values: code that reads one raises. Where torch's C++
asks for the device of a CUDA tensor it is told ``xla``, for which autocast and the formulas of autograd are those of
CUDA and which needs no driver; Python sees ``cuda``.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake.autograd import Autograd

DEVICE = torch.device("cuda", 0)
_XLA = torch.device("xla", 0)


class HostWait(AssertionError):
    """A copy between host and device that makes the host wait."""


HOST_READS = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException, HostWait)
"""Errors that a read of a fake tensor's values by the host raises."""


class _Event:
    """An event that has happened."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        raise HostWait("the host waits for an event of the device")

    def query(self) -> bool:
        return True


class _Stream(SimpleNamespace):
    """A stream on which nothing runs."""

    cuda_stream = 0
    device = DEVICE

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None:
        raise HostWait("the host waits for a stream of the device")


def _synchronize(device: Any = None) -> None:
    raise HostWait("the host waits for the device")


_STREAM = _Stream()
_RNG_STATE = torch.zeros(16, dtype=torch.uint8)
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132, warp_size=32
)
_TORCH_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_lazy_init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "synchronize": _synchronize,
    "get_device_properties": lambda device=None: _PROPERTIES,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: _PROPERTIES.name,
    "is_bf16_supported": lambda including_emulation=True: True,
    "get_rng_state": lambda device="cuda": _RNG_STATE,
    "set_rng_state": lambda state, device="cuda": None,
    "default_generators": (torch.Generator(),),
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "stream": lambda stream: nullcontext(),
    "device": lambda device: nullcontext(),
    "Stream": lambda device=None, priority=0: _STREAM,
    "Event": _Event,
}

LOWEST_ADDRESS = 1 << 40
"""Lowest address of fake memory; above every size and count."""


class FakeDevice:
    """Memory of the fake device: each storage has an address, a multiple of 512 as in CUDA; none is given twice.

    Attributes:
        pinned: addresses of pinned memory of the host.
        next_address: of the next storage.
    """

    def __init__(self) -> None:
        self.pinned: set[int] = set()
        self._found: dict[int, int] = {}  # by what identifies a storage in C++
        self._starts: list[int] = []
        # with bytes and device type; they keep the identity of a dead storage from being given to a new one
        self._storages: list[tuple[StorageWeakRef, int, str]] = []
        self.next_address = LOWEST_ADDRESS

    def address_of_storage(self, storage: torch.UntypedStorage, kind: str = "cuda") -> int:
        identity, nbytes = storage._cdata, storage.nbytes()
        if identity not in self._found:
            self._found[identity] = self.next_address
            self._starts.append(self.next_address)
            self._storages.append((StorageWeakRef(storage), nbytes, kind))
            self.next_address += -(-max(nbytes, 1) // 512) * 512
        return self._found[identity]

    def address_of(self, tensor: Tensor) -> int:
        if not tensor.numel():
            return 0
        return self.address_of_storage(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.itemsize

    def is_live(self, address: int) -> bool:
        """Whether the memory at ``address`` still belongs to a tensor."""
        return not self._storages[bisect_right(self._starts, address) - 1][0].expired()

    def start_of(self, address: int) -> int:
        """Returns the first address of the storage that ``address`` lies in."""
        return self._starts[bisect_right(self._starts, address) - 1]

    def live(self, kind: str = "") -> dict[int, int]:
        """Returns the bytes of all memory that belongs to a tensor, by address: on ``cpu`` or ``cuda``, or on both."""
        own = zip(self._starts, self._storages, strict=True)
        return {start: nbytes for start, (storage, nbytes, on) in own if on.startswith(kind) and not storage.expired()}

    def live_bytes(self, kind: str = "") -> int:
        return sum(self.live(kind).values())

    def no_waits(self) -> TorchDispatchMode:
        """Returns a mode in which copies between host and device must be asynchronous."""
        return _NoWaits(self.pinned)


def _pinning(make: Callable[..., Tensor], pinned: set[int], *, has_values: bool = True) -> Callable[..., Tensor]:
    """Returns ``make``, which notes that memory is pinned instead of asking the driver for it."""

    def made(*args: Any, pin_memory: bool = False, device: Any = None, **kwargs: Any) -> Tensor:
        on_device = has_values and device is not None and torch.device(device).type == "cuda"
        tensor = make(*args, device="cpu" if on_device else device, **kwargs)
        if has_values and (pin_memory or on_device):
            tensor.constant = None  # type: ignore[attr-defined] # else torch would compute with its values on the device
        if pin_memory:
            pinned.add(tensor.untyped_storage().data_ptr())
        return tensor.to(DEVICE) if on_device else tensor

    return made


class QuickMode(TorchDispatchMode):
    """A mode that dynamo does not guard: nothing is compiled here, and the guard costs more than the mode."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _NoWaits(QuickMode):
    """Inside, copies between host and device must be asynchronous, from or to pinned memory."""

    def __init__(self, pinned: set[int]) -> None:
        super().__init__()
        self._pinned = pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[-1] if func is torch.ops.aten._to_copy.default else args[1]
            host = next((tensor for tensor in (source, result) if tensor.device.type == "cpu"), None)
            if host is not None and source.device != result.device:
                is_pinned = host.untyped_storage().data_ptr() in self._pinned
                if not (is_pinned and (kwargs.get("non_blocking") or True in args[2:])):
                    raise HostWait(f"{func} from {source.device} to {result.device} makes the host wait")
        return result


_own_new = FakeTensor.__new__
_own_dispatch = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]


def _maker(device: FakeDevice) -> Callable[..., Any]:
    def new(cls: type, mode: FakeTensorMode, values: Tensor, where: torch.device, *args: Any, **kwargs: Any) -> Any:
        # C++ makes tensors on the device that it was told
        tensor: Any = _own_new(cls, mode, values, DEVICE if where.type == "xla" else where, *args, **kwargs)
        device.address_of_storage(tensor.untyped_storage(), where.type.replace("xla", "cuda"))
        return tensor

    return new


def _told_device(tensor: Any) -> torch.device:
    """Returns the device that C++ is told."""
    if tensor.fake_mode.in_kernel_invocation:
        return torch.device("meta")
    own: torch.device = tensor.fake_device
    return _XLA if own.type == "cuda" else own


def _dispatch(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func is torch.ops.prim.device.default:
        return _told_device(args[0])
    return _own_dispatch(cls, func, types, args, kwargs)


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stands in for ``Tensor.to``, which compares devices in C++."""
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    if device is None or device.type != tensor.device.type:
        return Tensor.to(tensor, *args, **kwargs)
    return tensor if dtype is None else Tensor.to(tensor, dtype, non_blocking)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float = 0.0, is_causal: bool, enable_gqa: bool = False
) -> Tensor:
    """Stands in for the choice of a kernel in C++ where there is no mask: flash, and for FP32 memory-efficient."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    if query.dtype == torch.float32:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, None, True, dropout_p, is_causal)[0]  # type: ignore[no-any-return]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(query, key, value, dropout_p, is_causal)[0]  # type: ignore[no-any-return]


def _guards() -> Any:
    """Returns c10's table of device guards, by which C++ asks for the current stream of a device type."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    return (ctypes.c_void_p * 16).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")


_XLA_TYPE, _META_TYPE = 9, 14  # c10::DeviceType


@contextmanager
def fake_cuda() -> Iterator[FakeDevice]:
    """Inside, tensors are fake, on the CPU and on one CUDA device of compute capability 9.0."""
    guards, device, autograd = _guards(), FakeDevice(), Autograd()
    own_address = torch.UntypedStorage.data_ptr

    def storage_address(storage: torch.UntypedStorage) -> int:
        return device.address_of_storage(storage) if storage.device.type == "meta" else own_address(storage)

    replaced: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, replacement) for name, replacement in _TORCH_CUDA.items()),
        (torch, "tensor", _pinning(torch.tensor, device.pinned)),
        (torch, "empty", _pinning(torch.empty, device.pinned, has_values=False)),
        (torch, "empty_like", _pinning(torch.empty_like, device.pinned)),
        (torch.UntypedStorage, "data_ptr", storage_address),
        (torch.nn.Module, "to", lambda module, _: module),  # a model is built on its device
        (torch.nn.functional, "scaled_dot_product_attention", _attention),
        (torch.autograd, "_engine_run_backward", autograd.run_backward),
        (FakeTensor, "register_hook", lambda tensor, hook: autograd.register_hook(tensor, hook)),
        (fake_tensor, "init_gpu_context", lambda device: None),
        (FakeTensor, "__new__", _maker(device)),
        (FakeTensor, "__torch_dispatch__", classmethod(_dispatch)),
        (FakeTensor, "to", _to),
        (FakeTensor, "data_ptr", lambda tensor: device.address_of(tensor)),
    ]
    handlers = {torch.ops.prim.device.default: lambda args: _told_device(args[0])}
    with ExitStack() as stack:
        guards[_XLA_TYPE] = guards[_META_TYPE]  # which does nothing
        stack.callback(guards.__setitem__, _XLA_TYPE, None)
        for target, name, replacement in replaced:
            stack.enter_context(mock.patch.object(target, name, replacement, create=True))
        stack.enter_context(mock.patch.dict(fake_tensor._DISPATCH_META_HANDLERS, handlers))
        stack.enter_context(FakeTensorMode(allow_fallback_kernels=False))
        yield device

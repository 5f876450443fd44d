"""Inductor for the fake device: it writes the code of compute capability 9.0, forward and backward, and stops there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake.device import _PROPERTIES, _XLA, DEVICE, fake_cuda


class _OnCpu(TorchDispatchMode):
    """Inside, tensors are made on the CPU: Inductor computes constants of one element."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _onto_device(graph: torch.fx.Graph) -> None:
    """Replaces the device that C++ was told by the fake device."""
    for node in list(graph.nodes):
        node.kwargs = {key: DEVICE if value == _XLA else value for key, value in node.kwargs.items()}
        if node.target is torch.ops.prims.device_put.default and node.args[1] == _XLA:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


@contextmanager
def fake_inductor(record: Callable[[Any, str, str, Any], None]) -> Iterator[None]:
    """Inside, tensors are fake, and Inductor writes code for the fake device and compiles none of it.

    Args:
        record: called for each launch of a kernel, in order, with graph, name, source and Inductor's own object.
    """
    from torch._dynamo import device_interface
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    define, fold = TritonScheduling.define_kernel, UniformValueConstantFolder._deduce_value

    def defined(scheduling: Any, source: str, nodes: Any, kernel: Any) -> Any:
        name: str = define(scheduling, source, nodes, kernel)
        record(V.graph, name, source, kernel)
        return name

    def folded(folder: Any, node: Any) -> Any:
        with _OnCpu():
            return fold(folder, node)

    def written(graph: Any) -> Any:
        graph.codegen()
        return SimpleNamespace(call=None)

    properties = SimpleNamespace(
        **vars(_PROPERTIES), gcnArchName="", max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
        max_threads_per_block=1024, shared_memory_per_block_optin=232448, L2_cache_size=50 * 2**20,
    )  # fmt: skip
    target = GPUTarget("cuda", 90, 32)
    triton_driver = SimpleNamespace(get_current_target=lambda: target)
    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    with ExitStack() as stack:
        stack.enter_context(fake_cuda())
        for owner, name, replacement in (
            (torch.autograd, "_engine_run_backward", run_backward),  # compiled autograd traces with torch's own
            (torch.cuda, "get_device_properties", lambda device=None: properties),
            (device_interface.CudaInterface, "get_device_properties", staticmethod(lambda device=None: properties)),
            (driver, "_active", triton_driver),
            (TritonScheduling, "define_kernel", defined),
            (UniformValueConstantFolder, "_deduce_value", folded),
            (GraphLowering, "compile_to_module", written),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        settings = {"compile_threads": 1, "fx_graph_cache": False, "joint_custom_pre_pass": _onto_device}
        stack.enter_context(torch._inductor.config.patch(settings))  # type: ignore[no-untyped-call]
        joint = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
        stack.enter_context(torch._functorch.config.patch(joint))  # type: ignore[attr-defined]
        _forget_devices()
        stack.callback(_forget_devices)
        yield


def _forget_devices() -> None:
    """Clears what torch remembers of the devices and of Triton."""
    from torch._inductor import codecache, utils
    from torch._inductor.runtime import hints
    from torch.utils import _triton

    for owner in (_triton, utils, hints.DeviceProperties, codecache.CacheBase):
        for value in list(vars(owner).values()):
            if (clear := getattr(getattr(value, "__func__", value), "cache_clear", None)) is not None:
                clear()

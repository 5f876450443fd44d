"""Recomputation: backward runs the forward of a block again instead of keeping its activations.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), section 4. The selective form follows Korthikanti
et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 5, by operation: the results
that cost the most time for their memory are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dtrain.engine.parts.forward_calls import kept_buffers
from dtrain.precision.float8.linear import products_as_operators
from dtrain.precision.module_calls import in_backward

Forward = Callable[..., Any]
"""A forward that takes its module as the first argument."""

_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm_v2")
_KEPT = (
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward"),
)
"""Operations of ATen whose results the selective form keeps, besides every second matmul."""


def recomputed(forward: Forward, mode: str, *, offloads: bool = False, keeps_rng: bool = True) -> Forward:
    """Returns a forward of the same result after which backward computes the activations again.

    The random numbers and the autocast state are those of the first run, so gradients have the same bits. Without
    gradients it is ``forward`` itself.

    Args:
        forward: takes its module as the first argument.
        mode: ``full`` or ``selective``.
        offloads: whether the arguments lie in host memory until backward.
        keeps_rng: whether the forward may draw random numbers, whose state a CUDA graph could not read.
    """

    fixed: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": keeps_rng}

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            # its backward has its weights; a context that depended on the module would be compiled for each
            options: dict[str, Any] = fixed | ({"context_fn": _keeping} if mode == "selective" else {})
            return checkpoint(partial(forward, self), *args, **options, **kwargs)
        # checkpoint keeps random states and inputs of positional arguments only
        values, structure = pytree.tree_flatten((args, kwargs))
        options = fixed | ({"context_fn": partial(_keeping, self)} if mode == "selective" else {})
        call = partial(_call, forward, self, structure, mode == "selective")
        with _on_host() if offloads else nullcontext():
            return checkpoint(call, *values, **options)

    return run


def _call(forward: Forward, module: nn.Module, structure: pytree.TreeSpec, is_selective: bool, *values: Any) -> Any:
    """Runs ``forward``, for the first time or again; both runs execute the same operations on the same state."""
    args, kwargs = pytree.tree_unflatten(values, structure)
    with ExitStack() as stack:
        if in_backward() and not is_selective:  # running statistics have been updated by the first run
            stack.enter_context(kept_buffers(module))
        if is_selective:  # the results that are kept are counted, so no run may find one in a cache
            stack.enter_context(products_as_operators())
            for device_type in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device_type):
                    dtype = torch.get_autocast_dtype(device_type)
                    stack.enter_context(torch.autocast(device_type, dtype=dtype, cache_enabled=False))
        return forward(module, *args, **kwargs)


def _keeping(module: nn.Module | None = None) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Returns the contexts of a forward of ``module`` of which some results are kept, and of its repetition."""
    num_matmuls: Counter[bool] = Counter()  # torch before 2.13 calls the policy when it computes again, too

    def policy(context: SelectiveCheckpointContext, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if operation in _operations(_MATMULS) or str(operation) == _FLOAT8_PRODUCT:
            num_matmuls[context.is_recompute] += 1
            is_kept = num_matmuls[context.is_recompute] % 2 == 1
        else:
            is_kept = operation in _operations(_KEPT) or str(operation) == _VARLEN_ATTENTION
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    keeping, repeating = create_selective_checkpoint_contexts(policy)
    return keeping, repeating if module is None else _AfterUnsharding(module, repeating)


class _AfterUnsharding(TorchDispatchMode):  # torch.compile takes no other context
    """The mode ``repeating``, in which operations are errors that the first forward did not run, such as unsharding."""

    def __init__(self, module: nn.Module, repeating: TorchDispatchMode) -> None:
        super().__init__()
        self._module = module
        self._repeating = repeating
        self._kept = kept_buffers(module)

    def __enter__(self) -> TorchDispatchMode:
        for part in self._module.modules():
            for name in part._parameters:
                part._parameters[name]  # a read unshards a weight of stage 3
        self._kept.__enter__()  # running statistics have been updated by the first run
        self._repeating.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._repeating.__exit__(*error)
        self._kept.__exit__(*error)


# by name, because both are registered when they are first used
_VARLEN_ATTENTION, _FLOAT8_PRODUCT = "torch_attn._varlen_attn.default", "dtrain.float8_weight_product.default"


@cache
def _operations(names: tuple[str, ...]) -> frozenset[Any]:
    found = (getattr(torch.ops.aten, name, None) for name in names)
    return frozenset(operation.default for operation in found if operation is not None)


def _on_host() -> saved_tensors_hooks:
    """Context in which autograd saves tensors of a GPU in pinned host memory.

    Unlike ``torch.autograd.graph.save_on_cpu``, the host does not wait for the copies: both directions run on the
    stream that computes, so they are in order with what writes and what reads the tensors.
    """

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor, int]:
        kept = to_host(tensor) if is_on_gpu(tensor) else tensor
        return tensor.device, kept, kept._version

    def unpack(saved: tuple[torch.device, Tensor, int]) -> Tensor:
        device, tensor, version = saved
        if tensor._version != version:  # torch checks this only without hooks
            raise RuntimeError(
                f"an input of a recomputed block was modified in place: {tensor.dtype} {list(tensor.shape)} is at "
                f"version {tensor._version}, and was at version {version} in the forward"
            )
        return tensor.to(device, non_blocking=True)

    return saved_tensors_hooks(pack, unpack)


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def to_host(tensor: Tensor) -> Tensor:
    """Returns a copy in host memory, which a GPU writes later, in the order of its stream."""
    copied = torch.empty(tensor.size(), dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return copied.copy_(tensor, non_blocking=True)

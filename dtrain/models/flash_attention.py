"""FlashAttention 3 for reproducible trainings: its deterministic backward is faster than PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from dtrain.config.schema import RunConfig
from dtrain.device import free_memory
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.consensus import describe, on_every_rank
from dtrain.distributed.logging import logger
from dtrain.engine.deterministic import deterministic_kernels
from dtrain.errors import ConfigError
from dtrain.models.attention import AttentionShape, causal_attention
from dtrain.models.factory import attention_shape

_MODULE = "flash_attn_interface"  # which activate_flash_attention_impl("FA3") imports
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_TOLERANCE = 0.02  # of the gradients' norm, beside PyTorch's own kernel: both round in 16 bits


def choose_attention(config: RunConfig, comm: Communicator, dtype: torch.dtype) -> None:
    """Activates FlashAttention 3 for a reproducible training on GPUs, on all ranks or on none, and says what it took.

    Its deterministic backward is faster than PyTorch's. Other trainings take what PyTorch takes. Every rank calls this.

    Args:
        config: of the training.
        comm: its ranks.
        dtype: in which attention is computed.
    """
    if comm.device.type != "cuda" or not config.engine.reproducible:
        return
    shape = attention_shape(config.model)
    if shape is None and not config.data.is_language:
        return  # there may be no attention at all
    problems = on_every_rank(comm, "", lambda: _activate(config, shape, comm.device, dtype), ConfigError)
    rank, problem = next(((rank, text) for rank, text in enumerate(problems) if text), (0, ""))
    if not problem:
        logger.info("attention by FlashAttention 3, which was proven on this device: its backward is deterministic")
        return
    if current_flash_attention_impl() == "FA3":
        restore_flash_attention_impl()
    logger.info(
        f"reproducible=true without FlashAttention 3 (rank {rank}: {problem}). The deterministic backward of PyTorch's "
        f"attention is about 15 % of a step of 1B parameters at 4,096 tokens by published rates; dtrain bench engine "
        f"bench.reproducible=true measures the price here"
    )


def _activate(config: RunConfig, shape: AttentionShape | None, device: torch.device, dtype: torch.dtype) -> str:
    """Returns why FlashAttention 3 cannot be taken, or an empty string: it is active then."""
    if shape is None:
        return f"the attention of model.factory={config.model.factory}, path={config.model.path} is not known"
    if problem := flash_attention_3_problem(torch.cuda.get_device_capability(device)):
        return problem
    if (active := current_flash_attention_impl()) not in (None, "FA3"):
        return f"this process has activated {active}"
    if dtype not in _SIXTEEN_BITS:
        return f"it computes in BF16 or FP16, not in {str(dtype).removeprefix('torch.')}"
    if shape.dropout:
        return f"it has no dropout, and the model has {shape.dropout:g}"
    if shape.head_dim % 8 or shape.head_dim > 256:
        return f"its heads have a multiple of 8 up to 256 dimensions, not {shape.head_dim}"
    try:
        return _prove(lambda: _gradients(shape, device, dtype, config.model.max_seq_len))
    except Exception as error:  # of a foreign package, or of a kernel that it was built without
        return describe(error)
    finally:
        free_memory(device)


def _prove(gradients: Callable[[], list[Tensor]]) -> str:
    """Activates FlashAttention 3; returns what is wrong with its gradients, or an empty string."""
    if current_flash_attention_impl() is not None:  # by an earlier training of this process
        restore_flash_attention_impl()
    with deterministic_kernels():
        expected = gradients()
        activate_flash_attention_impl("FA3")
        first, second = gradients(), gradients()
    for name, own, again, other in zip("qkv", first, second, expected, strict=True):
        if not torch.equal(own, again):
            return f"two equal backwards gave other bits of the gradient of {name}"
        distance = float((own.float() - other.float()).norm() / other.float().norm())
        if not distance <= _TOLERANCE:
            return f"its gradient of {name} is {distance:.1%} away from PyTorch's"
    return ""


def _gradients(shape: AttentionShape, device: torch.device, dtype: torch.dtype, seq_len: int) -> list[Tensor]:
    """Returns those of queries, keys and values, the same random ones in each call: of one document and of two."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn((1, seq_len, heads, shape.head_dim), generator=generator, device=device).to(dtype)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    )
    operands = [x.requires_grad_() for x in (q, k, v)]
    borders = torch.tensor([0, seq_len // 3, seq_len], dtype=torch.int32, device=device)
    outputs = [causal_attention(q, k, v, 0.0, documents) for documents in (None, borders)]
    return [*torch.autograd.grad(outputs, operands, [grad.flatten(-2)] * 2)]


def flash_attention_3_problem(capability: tuple[int, int]) -> str:
    """Returns why FlashAttention 3 cannot be activated on a GPU of this capability, or an empty string."""
    if capability[0] != 9:
        return f"it needs a GPU of compute capability 9.0, and this one has {capability[0]}.{capability[1]}"
    if find_spec(_MODULE) is None:
        return f"no package has a module {_MODULE}: install FlashAttention 3"
    return ""

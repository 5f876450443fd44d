"""Checks of the model and settings of the process for ``reproducible=True``."""

from __future__ import annotations

import os

import torch
from torch import nn

from dtrain.errors import ConfigError


def require_reproducible(model: nn.Module) -> None:
    """Raises ``ConfigError`` for a module whose results depend on which micro-batches a rank sees."""
    for name, module in model.named_modules():
        tracks = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
        if tracks and module.training:
            raise ConfigError(
                f"reproducible=True cannot hold with '{name}' ({type(module).__name__}): its running statistics "
                f"depend on which micro-batches a rank sees; use GroupNorm or LayerNorm"
            )


def use_deterministic_kernels(device: torch.device) -> None:
    """Makes torch choose deterministic kernels in this process.

    Raises:
        ConfigError: cuBLAS has chosen others before.
    """
    # torch reads it once, in the first product on a GPU, and refuses every later product if it is not set
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # on by default with deterministic algorithms: it would write every new tensor once more
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False  # it may choose another kernel in each process
    _require_deterministic_products(device)


def _require_deterministic_products(device: torch.device) -> None:
    square = torch.zeros(2, 2, device=device)
    try:
        torch.mm(square, square)
    except RuntimeError as error:
        if "CUBLAS_WORKSPACE_CONFIG" not in str(error):
            raise
        torch.use_deterministic_algorithms(False)
        raise ConfigError(
            "reproducible=True: this process has multiplied matrices on a GPU before; CUBLAS_WORKSPACE_CONFIG, which "
            "torch reads only then, was neither :4096:8 nor :16:8. Set it in the environment of the process"
        ) from error

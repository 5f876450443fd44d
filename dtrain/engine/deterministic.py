"""Deterministic kernels: checks of the model, and settings of the process, or of a part of a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from dtrain.errors import ConfigError


def keeps_running_statistics(module: nn.Module) -> bool:
    """Whether the forward of ``module`` itself writes running statistics in training: batch norm, instance norm."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats


def require_reproducible(model: nn.Module) -> None:
    """Raises ``ConfigError`` for a module whose results depend on which micro-batches a rank sees."""
    for name, module in model.named_modules():
        if keeps_running_statistics(module) and module.training:
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
    _choose_deterministic()
    try:
        _require_deterministic_products(device, "reproducible=True")
    except ConfigError:
        torch.use_deterministic_algorithms(False)
        raise


def _choose_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    # on by default with deterministic algorithms: it would write every new tensor once more
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False  # it may choose another kernel in each process


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Inside, torch chooses deterministic kernels, or raises ``RuntimeError`` for an operation that has none."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    benchmark = torch.backends.cudnn.benchmark
    try:
        _choose_deterministic()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark


def allow_deterministic_kernels(device: torch.device) -> None:
    """Prepares the process for ``deterministic_kernels``.

    Raises:
        ConfigError: cuBLAS has chosen other kernels before.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with deterministic_kernels():
        _require_deterministic_products(device, "audit.replay_every")


def _require_deterministic_products(device: torch.device, setting: str) -> None:
    square = torch.zeros(2, 2, device=device)
    try:
        torch.mm(square, square)
    except RuntimeError as error:
        if "CUBLAS_WORKSPACE_CONFIG" not in str(error):
            raise
        raise ConfigError(
            f"{setting}: this process has multiplied matrices on a GPU before; CUBLAS_WORKSPACE_CONFIG, which torch "
            "reads only then, was neither :4096:8 nor :16:8. Set it in the environment of the process"
        ) from error

"""The output layer and the loss of the language models, as ``model.loss_chunk`` and its neighbors choose."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.model import LOSS_KEYS, ModelConfig
from dtrain.distributed.logging import logger
from dtrain.errors import ConfigError
from dtrain.models.causal_lm import ModelOutput, causal_lm_output
from dtrain.models.linear_cross_entropy import linear_cross_entropy
from dtrain.precision.contract import Contract
from dtrain.precision.forward import region_dtype
from dtrain.precision.regions import in_full_precision_region
from dtrain.precision.rules import OWN_FORWARD
from dtrain.sharding.hooks import UnitParameters

_LIBRARIES = ("dtrain.", "torch.distributed.", "deepspeed.")
"""Packages whose hooks shard, check or record a head, and do not change its output."""


@dataclass(frozen=True)
class LossHead:
    """Computes logits, or in training the loss by chunks without them.

    Attributes:
        chunk: ``model.loss_chunk``: ``none``, ``auto``, or a number of rows.
        label_smoothing: of the loss in training.
        z_loss: coefficient in training.
        vocab_size: classes; the output layer may have more rows.
        name: name of the output layer in the model.
        unsupported_reason: why the model needs its logits; empty if it does not.
    """

    chunk: str | int
    label_smoothing: float
    z_loss: float
    vocab_size: int
    name: str = "head"
    unsupported_reason: str = ""

    @staticmethod
    def of(config: ModelConfig, vocab_size: int) -> LossHead:
        return LossHead(config.loss_chunk, config.label_smoothing, config.z_loss, vocab_size)

    def __call__(self, head: nn.Linear, hidden: Tensor, targets: Tensor | None, *, training: bool) -> ModelOutput:
        """Returns the output for ``hidden`` [B, T, H] and int64 ``targets`` [B, T]; ``training``: the model's mode.

        Raises:
            ConfigError: as ``is_chunked``.
        """
        if targets is not None and training and self.is_chunked(head, targets):
            return self.chunked(head, hidden, targets)
        return self.output(head(hidden)[..., : self.vocab_size], targets, training=training)

    def is_chunked(self, head: nn.Module, targets: Tensor) -> bool:
        """Whether a forward in training computes the loss of ``targets`` by chunks.

        ``auto`` does so if there are at least as many tokens as the hidden dim, and the vocabulary is larger than that:
        PyTorch's own rule for ``F.linear_cross_entropy``.

        Raises:
            ConfigError: a number of rows is asked for, and ``head`` must be called as a module.
        """
        if self.chunk == "none":
            return False
        reason = self.unsupported_reason or unsupported_head_reason(head)
        if self.chunk != "auto":
            if reason:
                raise self._error(reason)
            return True
        if reason:
            _tell(f"model.loss_chunk=auto: the loss is computed from full logits, because '{self.name}' {reason}")
            return False
        assert isinstance(head, nn.Linear)
        return targets.numel() >= head.in_features < self.vocab_size

    def _error(self, reason: str) -> ConfigError:
        return ConfigError(
            f"model.loss_chunk={self.chunk}: the output layer '{self.name}' {reason}; use model.loss_chunk=none"
        )

    def chunked(self, head: nn.Module, hidden: Tensor, targets: Tensor) -> ModelOutput:
        """Returns the loss of training without logits."""
        loss = linear_cross_entropy(
            hidden,
            head.weight,  # type: ignore[arg-type]
            targets,
            bias=head.bias,  # type: ignore[arg-type]
            vocab_size=self.vocab_size,
            chunk_rows=self.chunk,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            dtype=_region(head, hidden.device.type),
        )
        return ModelOutput(None, loss)

    def output(self, logits: Tensor, targets: Tensor | None, *, training: bool) -> ModelOutput:
        """Returns FP32 ``logits`` and their loss, which is the plain cross entropy unless ``training``."""
        if not training:
            return causal_lm_output(logits, targets)
        return causal_lm_output(logits, targets, label_smoothing=self.label_smoothing, z_loss=self.z_loss)

    def check_supported(self, contract: Contract | None = None) -> None:
        """Checks what is known before the first step.

        Raises:
            ConfigError: a number of rows is asked for, but the model needs its logits, or the output layer is FP8 in
                ``contract``.
        """
        is_float8 = contract is not None and self.name in contract.float8_modules
        reason = self.unsupported_reason or ("is FP8, and needs its own forward" if is_float8 else "")
        if reason and isinstance(self.chunk, int):
            raise self._error(reason)


def check_loss_keys(config: ModelConfig, model: nn.Module) -> None:
    """Checks that a model uses the keys of the loss if they are set: its class says so by ``uses_loss_keys = True``.

    Raises:
        ConfigError: a key is set that the model of a user's factory would ignore.
    """
    if getattr(model, "uses_loss_keys", False):
        return
    for name in LOSS_KEYS:
        if getattr(config, name) != getattr(ModelConfig, name):
            raise ConfigError(
                f"model.{name}={getattr(config, name)} has no effect on the {type(model).__name__} of "
                f"model.factory={config.factory}; remove it, or compute the loss with dtrain.linear_cross_entropy by "
                f"the keys of the config and set {type(model).__name__}.uses_loss_keys = True"
            )


def unsupported_head_reason(head: nn.Module) -> str:
    """Returns why ``head`` must be called as a module instead of only reading its weight; empty: it need not be."""
    if type(head) is not nn.Linear:
        return f"is a {type(head).__name__}, not a plain nn.Linear"
    own = head.__dict__.get("forward")
    if own is not None and getattr(own, OWN_FORWARD, None) is not nn.Linear.forward:
        return "has a forward of its own"
    hooks: list[Any] = [*head._forward_pre_hooks.values(), *head._forward_hooks.values()]
    hooks += [*head._backward_pre_hooks.values(), *head._backward_hooks.values()]
    if any(not _module_of(hook).startswith(_LIBRARIES) for hook in hooks):
        return "has hooks, which would not be called"
    if isinstance(head._parameters, UnitParameters) and head._parameters.unit("weight"):
        return "belongs to a unit of sharding, in whose forward alone its weight is whole"
    return ""


def _module_of(hook: Any) -> str:
    function = getattr(hook, "func", hook)  # of functools.partial
    return str(getattr(function, "__module__", ""))


def _region(head: nn.Module, device_type: str) -> torch.dtype | None:
    """Returns the dtype of the products of ``head`` if a rule gives it another than the modules around it."""
    dtype = region_dtype(head)
    return None if dtype != torch.float32 and in_full_precision_region(device_type) else dtype


@cache
def _tell(message: str) -> None:
    logger.info(message)

"""Models: transformers, networks for images and numbers, user factories, and FLOPs."""

from dtrain.models.causal_lm import ModelOutput
from dtrain.models.exported import ExportedModel, load_exported
from dtrain.models.factory import attention_shape, build_model, check_model, train_flops_per_token, vocabulary

__all__ = [
    "ExportedModel",
    "ModelOutput",
    "attention_shape",
    "build_model",
    "check_model",
    "load_exported",
    "train_flops_per_token",
    "vocabulary",
]

"""Models: the default transformer, GPT-2, user factories, generation and FLOPs."""

from dtrain.models.causal_lm import ModelOutput, generate, num_targets
from dtrain.models.factory import build_model, check_model, train_flops_per_token, vocabulary

__all__ = [
    "ModelOutput",
    "build_model",
    "check_model",
    "generate",
    "num_targets",
    "train_flops_per_token",
    "vocabulary",
]

"""Models: the default transformer, factories of the user's own, and what goes with them."""

from dtrain.models.causal_lm import ModelOutput
from dtrain.models.factory import build_model, vocabulary
from dtrain.models.flops import train_flops_per_token
from dtrain.models.generation import generate

__all__ = ["ModelOutput", "build_model", "generate", "train_flops_per_token", "vocabulary"]

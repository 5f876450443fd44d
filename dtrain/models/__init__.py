"""Models: the default transformer, factories of the user's own, and what goes with them."""

from dtrain.models.factory import build_model
from dtrain.models.flops import train_flops_per_token
from dtrain.models.generation import generate
from dtrain.models.transformer import ModelOutput

__all__ = ["ModelOutput", "build_model", "generate", "train_flops_per_token"]

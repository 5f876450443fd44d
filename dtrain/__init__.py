"""Mixed-precision training you can trust: FP32 masters sharded over the ranks, every dtype and skipped step proven."""

from dtrain import checkpoint, errors
from dtrain.engine.base import Culprit, Engine, StepOutcome
from dtrain.engine.initialize import initialize
from dtrain.optim.adamw import AdamW
from dtrain.optim.schedule import WSD, Constant, Cosine, Linear, Schedule
from dtrain.precision.loss_scale import LossScale
from dtrain.precision.policy import PrecisionPolicy

__version__ = "0.1.0"

__all__ = [
    "WSD",
    "AdamW",
    "Constant",
    "Cosine",
    "Culprit",
    "Engine",
    "Linear",
    "LossScale",
    "PrecisionPolicy",
    "Schedule",
    "StepOutcome",
    "checkpoint",
    "errors",
    "initialize",
]

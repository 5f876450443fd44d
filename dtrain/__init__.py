"""Mixed-precision training you can trust: FP32 masters sharded over the ranks, every dtype and skipped step checked."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain import checkpoint, errors
    from dtrain.checkpoint.frozen_source import FrozenSource
    from dtrain.config.audit import Audit
    from dtrain.config.blocks import Blocks
    from dtrain.config.engines import DDP, FSDP2, DeepSpeed, Native
    from dtrain.config.optim import SGD, Adam, AdamW, AdamWBF16, Lion, Muon, TorchOptimizer
    from dtrain.config.precision import Float8, LossScale
    from dtrain.config.schedule import WSD, Constant, Cosine, Linear, Schedule
    from dtrain.data.arrays import standardize
    from dtrain.data.images.read import read_image
    from dtrain.engine.initialize import initialize
    from dtrain.engine.interface import Engine
    from dtrain.engine.outcome import Culprit, StepOutcome
    from dtrain.models.exported import load_exported
    from dtrain.models.linear_cross_entropy import linear_cross_entropy
    from dtrain.optim.torch_schedule import TorchSchedule
    from dtrain.precision.policy import PrecisionPolicy
    from dtrain.precision.regions import full_precision
    from dtrain.train.session import Session

    __version__: str

__all__ = [
    "DDP",
    "FSDP2",
    "SGD",
    "WSD",
    "Adam",
    "AdamW",
    "AdamWBF16",
    "Audit",
    "Blocks",
    "Constant",
    "Cosine",
    "Culprit",
    "DeepSpeed",
    "Engine",
    "Float8",
    "FrozenSource",
    "Linear",
    "Lion",
    "LossScale",
    "Muon",
    "Native",
    "PrecisionPolicy",
    "Schedule",
    "Session",
    "StepOutcome",
    "TorchOptimizer",
    "TorchSchedule",
    "checkpoint",
    "errors",
    "full_precision",
    "initialize",
    "linear_cross_entropy",
    "load_exported",
    "read_image",
    "standardize",
]

# resolved on first use (PEP 562): importing torch takes seconds, and the command line must report mistakes at once
_HOMES = {
    "dtrain.checkpoint.frozen_source": ("FrozenSource",),
    "dtrain.config.audit": ("Audit",),
    "dtrain.config.blocks": ("Blocks",),
    "dtrain.config.engines": ("DDP", "FSDP2", "DeepSpeed", "Native"),
    "dtrain.config.optim": ("SGD", "Adam", "AdamW", "AdamWBF16", "Lion", "Muon", "TorchOptimizer"),
    "dtrain.config.precision": ("Float8", "LossScale"),
    "dtrain.config.schedule": ("WSD", "Constant", "Cosine", "Linear", "Schedule"),
    "dtrain.data.arrays": ("standardize",),
    "dtrain.data.images.read": ("read_image",),
    "dtrain.engine.interface": ("Engine",),
    "dtrain.engine.outcome": ("Culprit", "StepOutcome"),
    "dtrain.engine.initialize": ("initialize",),
    "dtrain.optim.torch_schedule": ("TorchSchedule",),
    "dtrain.models.exported": ("load_exported",),
    "dtrain.models.linear_cross_entropy": ("linear_cross_entropy",),
    "dtrain.precision.policy": ("PrecisionPolicy",),
    "dtrain.precision.regions": ("full_precision",),
    "dtrain.train.session": ("Session",),
}


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "errors"):
        return import_module(f"dtrain.{name}")
    if name == "__version__":
        from dtrain.version import version

        return version()
    for home, names in _HOMES.items():
        if name in names:
            return globals().setdefault(name, getattr(import_module(home), name))
    raise AttributeError(f"module 'dtrain' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})

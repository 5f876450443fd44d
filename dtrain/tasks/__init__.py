"""Tasks: how a batch becomes a loss, what validation measures, and what a run shows at its end."""

from dtrain.tasks.classification import Classification
from dtrain.tasks.denoising import Denoising
from dtrain.tasks.language import Codec, Language, generate
from dtrain.tasks.regression import Regression
from dtrain.tasks.task import IGNORE_INDEX, Sample, SampleOptions, Task, TaskOutput, num_targets

__all__ = [
    "IGNORE_INDEX",
    "Classification",
    "Codec",
    "Denoising",
    "Language",
    "Regression",
    "Sample",
    "SampleOptions",
    "Task",
    "TaskOutput",
    "generate",
    "num_targets",
]

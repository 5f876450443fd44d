"""The targets on one GPU of 80 GB. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AT_LEAST, AT_MOST, WITHIN = "at least", "at most", "within"
_SIZES = {"1.2B": 1.24e9, "3B": 3.2e9}
_SAME_SIZE = 0.15


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        key: of the goal.
        suite: of ``dtrain bench`` that measures it.
        case: name of its case; empty: every one.
        figure: what is measured.
        comparison: of the figure with ``bound``; ``within``: of its absolute value.
        model: size of the model for which it holds; empty: any.
        digits: of the texts; a share is shown in percent.
    """

    key: str
    suite: str
    case: str
    figure: str
    comparison: str
    bound: float
    model: str = ""
    digits: str = ".2f"

    def is_met(self, value: float) -> bool:
        if self.comparison == AT_LEAST:
            return value >= self.bound
        return (abs(value) if self.comparison == WITHIN else value) <= self.bound

    @property
    def text(self) -> str:
        return f"{self.comparison} {self.bound:{self.digits}}"

    def judgment(self, value: float) -> str:
        return f"{self.figure} {self.text}: {'met' if self.is_met(value) else 'NOT MET'}"


TARGETS = (
    Target("G1", "step", "dtrain", "MFU", AT_LEAST, 0.50, "1.2B", ".0%"),
    Target("G1", "step", "chunked", "MFU", AT_LEAST, 0.50, "1.2B", ".0%"),
    Target("G1", "step", "dtrain", "MFU", AT_LEAST, 0.54, "3B", ".0%"),
    Target("G1", "step", "chunked", "MFU", AT_LEAST, 0.54, "3B", ".0%"),
    Target("G1", "step", "dtrain", "speed over fsdp2", AT_LEAST, 1.10),
    Target("G1", "step", "dtrain", "speed over deepspeed", AT_LEAST, 1.30),
    Target("G1", "step", "dtrain", "speed over plain", AT_LEAST, 0.99),  # it shards nothing: a lower bound of the step
    Target("G2", "step", "tensorwise", "speed over dtrain", AT_LEAST, 1.18, "1.2B"),
    Target("G2", "step", "tensorwise", "speed over dtrain", AT_LEAST, 1.28, "3B"),
    Target("G2", "step", "tensorwise", "loss from dtrain's", WITHIN, 0.0025, "", ".2%"),
    Target("G2", "step", "blockwise", "loss from dtrain's", WITHIN, 0.0010, "", ".2%"),  # the accurate recipe
    Target("G3", "profile", "", "optimizer phase, of the copy's bandwidth", AT_LEAST, 0.90, "", ".0%"),
    Target("G4", "profile", "", "launches of the optimizer phase", AT_MOST, 5, "", ".0f"),
    Target("G4", "profile", "", "waits of the host in it", AT_MOST, 0, "", ".0f"),
    Target("G5", "step", "", "states over the formula", AT_MOST, 1.02),
    Target("G5", "memory", "", "states over the formula", AT_MOST, 1.02),
    Target("G6", "loss-head", "", "memory beside the gradients, of full FP32 logits", AT_MOST, 0.05, "", ".0%"),
    Target("G6", "loss-head", "", "speed over compiled full logits", AT_LEAST, 1.0, "", "g"),
    Target("G7", "step", "reproducible", "slower than dtrain", AT_MOST, 0.03, "1.2B", ".0%"),
)
"""For G1 the faster of the two cases counts."""


def targets_of(suite: str, case: str, num_parameters: int | None = None) -> list[Target]:
    """Returns the targets of a case of a suite; of a model of another size only those that hold for any."""
    sizes = {"", *(name for name, size in _SIZES.items() if abs((num_parameters or 0) / size - 1) < _SAME_SIZE)}
    return [one for one in TARGETS if one.suite == suite and one.case in ("", case) and one.model in sizes]


def is_judged(gpus: Sequence[str]) -> bool:
    """Whether a machine with ``gpus`` is one of those that the targets are for."""
    return any("80GB" in name or name == "NVIDIA H100 PCIe" for name in gpus)


def judge(suite: str, case: str, figures: Mapping[str, float], num_parameters: int | None = None) -> str:
    """Returns the cell of a case in the column of targets; ``figures`` are its own, by name."""
    found = targets_of(suite, case, num_parameters)
    return "; ".join(one.judgment(figures[one.figure]) for one in found if one.figure in figures)

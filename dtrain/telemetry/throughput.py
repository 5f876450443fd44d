"""Tokens a second, and model FLOPs utilisation where the peak of the device is known."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dtrain.precision.tensor_cores import rate


def device_name(device: torch.device) -> str:
    """The name that torch reports for a GPU, else the type of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # what a scheduler gave us; macOS has no such call
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def mfu(device: str, precision: str, flops_per_s: float) -> float | None:
    """Model FLOPs utilisation (Chowdhery et al., 2022, PaLM, appendix B): achieved over peak, in [0, 1].

    Args:
        device: the name of one rank's device, as :func:`device_name` gives it.
        precision: ``fp32``, ``tf32``, ``bf16`` or ``fp16``; under ``fp8`` products have formats of several rates.
        flops_per_s: the model's own FLOPs a second on one rank (no recomputation).

    Returns:
        None where there is no one peak: of an unknown device, or under ``fp8``.
    """
    teraflops = None if precision == "fp8" else rate(device, precision)
    return flops_per_s / (teraflops * 1e12) if teraflops is not None else None


@dataclass(frozen=True)
class Pace:
    """Steps and the seconds they took."""

    steps: int = 0
    seconds: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds a step; 0.0 before the first."""
        return self.seconds / self.steps if self.steps else 0.0

    def plus(self, seconds: float) -> Pace:
        """With one more step that took ``seconds``."""
        return Pace(self.steps + 1, self.seconds + seconds)


class StepTimer:
    """Times training steps on a clock that stands still during evaluation and saving.

    The clock runs on between steps, so that work which a GPU still does when a step returns is not lost.
    """

    def __init__(self) -> None:
        self._mark = time.perf_counter()
        self._window = Pace()
        self._first = Pace()
        self._later = Pace()

    def step_done(self) -> None:
        """Ends one step and begins the next."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        self._window = self._window.plus(seconds)
        if self._first.steps:
            self._later = self._later.plus(seconds)
        else:
            self._first = self._first.plus(seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens inside."""
        start = time.perf_counter()
        yield
        self._mark += time.perf_counter() - start

    def window(self) -> Pace:
        """The steps since the last call."""
        pace, self._window = self._window, Pace()
        return pace

    def total(self) -> Pace:
        """All steps but the first, which compiles and warms up; that one where there is no other."""
        return self._later if self._later.steps else self._first

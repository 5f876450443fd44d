"""Step times, and model FLOPs utilization (MFU) if the peak rate of the device is known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass

import torch

from dtrain.distributed.communicator import Communicator
from dtrain.distributed.progress import Phase
from dtrain.precision.hardware import rate
from dtrain.telemetry.gpu import GPUState, describe_state


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def mfu(device: str, precision: str, flops_per_s: float | None) -> float | None:
    """Returns the model FLOPs utilization (PaLM, Chowdhery et al., 2022, appendix B): achieved over peak, in [0, 1].

    Args:
        device: name of one rank's device, from ``device_name``.
        precision: name of the policy.
        flops_per_s: model FLOPs per second on one rank, without recomputation; None: unknown.

    Returns:
        None if there is no single peak: for an unknown device, and for ``fp8``, which mixes formats of several rates.
    """
    teraflops = None if precision == "fp8" else rate(device, precision)
    return None if teraflops is None or flops_per_s is None else flops_per_s / (teraflops * 1e12)


def mfu_text(causal: float | None, full: float | None = None, gpu: GPUState | None = None) -> str:
    """Formats an MFU with the power limit, clock and temperature of its GPU, without which it says little.

    Args:
        causal: attention counted by its causal half; None: the MFU is unknown.
        full: the same with all of attention; None: unknown.
        gpu: None: the state of this process's GPU now.
    """
    if causal is None:
        return "unknown"
    if gpu is None:
        gpu = describe_state(torch.cuda.current_device() if torch.cuda.is_available() else 0)
    in_full = "" if full is None else f" with causal attention, {100 * full:.1f} % with full"
    return f"{100 * causal:.1f} %{in_full} ({gpu.brief})"


@dataclass(frozen=True)
class StepTiming:
    """Sums over some steps.

    Attributes:
        steps: number of steps.
        seconds: time they took.
        tokens: targets that count in their loss, over all ranks.
        waited_s: time they waited for their batch.
    """

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    waited_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds per step; 0.0 before the first step."""
        return self.seconds / self.steps if self.steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def data_wait_ms(self) -> float:
        """Milliseconds that a step waited for its batch."""
        return 1000 * self.waited_s / self.steps if self.steps else 0.0

    def __add__(self, other: StepTiming) -> StepTiming:
        return StepTiming(*(own + more for own, more in zip(astuple(self), astuple(other), strict=True)))


class StepTimer:
    """Times training steps, excluding evaluation and saving.

    The clock runs between steps too, so that GPU work that is still queued when a step returns is counted.
    """

    def __init__(self) -> None:
        self._mark = time.perf_counter()
        self._window = StepTiming()
        self._first = StepTiming()
        self._later = StepTiming()

    def step_done(self, tokens: int, waited_s: float) -> None:
        """Counts the step that ends now; the arguments are those of ``StepTiming``."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        step = StepTiming(1, seconds, tokens, waited_s)
        self._window += step
        if self._first.steps:
            self._later += step
        else:
            self._first = step

    @contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._mark += time.perf_counter() - start

    def window(self) -> StepTiming:
        timing, self._window = self._window, StepTiming()
        return timing

    def total(self) -> StepTiming:
        """Returns the timing of all steps except the first, which compiles, unless it is the only one."""
        return self._later if self._later.steps else self._first


class PhaseTimes:
    """Times of rank 0's phases between two logged steps.

    Args:
        comm: whose schedule records the phases.
    """

    def __init__(self, comm: Communicator) -> None:
        self._progress = comm.schedule.progress
        self._is_known = comm.device.type == "cpu"  # on a GPU the host runs ahead of the device
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        busy, waited = self._progress.busy_s, self._progress.waited_s
        return {
            "forward_ms": busy[Phase.FORWARD],
            "backward_ms": busy[Phase.BACKWARD],
            "update_ms": busy[Phase.UPDATE],
            "rank_wait_ms": sum(waited[phase] for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)),
        }

    def window(self, steps: int) -> dict[str, float]:
        """Returns milliseconds a step since the last call, in the fields of ``StepMetrics``; empty on a GPU."""
        before, self._before = self._before, self._now()
        if not self._is_known or not steps:
            return {}
        return {name: 1000 * (seconds - before[name]) / steps for name, seconds in self._before.items()}

"""Evidence for a calibrated loss scale: what FP16 would flush of the measured gradients at one scale or another."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator
from dtrain.distributed.logging import logger
from dtrain.engine.vote.readback import Readback
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.precision.formats import FP16
from dtrain.precision.histogram import NUM_BINS, Histogram, share


class CalibrationEvidence:
    """The magnitudes of the gradients that a calibration measures, of all parameters together.

    A resumed run counts the steps since then only.

    Args:
        comm: the ranks.
        monitor: counts the magnitudes of each step.
    """

    def __init__(self, comm: Communicator, monitor: GradientMonitor) -> None:
        self._comm = comm
        self._monitor = monitor
        self.readback = Readback(comm.device, num_slots=1)
        self._counts: dict[float, Tensor] = {}  # int64 [512] by the loss scale of the steps
        self._pending: Callable[[], None] | None = None

    def add_step(self, scale: float) -> None:
        """Adds the gradients of the last step, which were multiplied by ``scale``."""
        if self._monitor.magnitudes is not None:
            counts = self._monitor.magnitudes.counts.sum(0)
            self._counts[scale] = self._counts[scale] + counts if scale in self._counts else counts

    def report(self, message: str, chosen: float) -> None:
        """Prepares ``message`` with the shares flushed at scale 1 and at ``chosen``, for ``log_pending``.

        All ranks call. The host does not wait for the counts.
        """
        scales, self._counts = self._counts, {}
        if not scales:  # every micro-batch since a resume was a dummy
            logger.info(message)
            return
        # all ranks have taken the steps at the same scales
        row = torch.stack(list(scales.values())).flatten()
        summed = self._comm.gather_rows(row, label="calibration").sum(0)
        read = self.readback.post(summed)

        def log() -> None:
            counts = read().tolist()
            histogram = Histogram((0,) * NUM_BINS)
            for number, scale in enumerate(scales):
                own = Histogram(tuple(counts[number * NUM_BINS : (number + 1) * NUM_BINS]))
                histogram += own.scaled(2.0 ** -round(math.log2(scale)))
            logger.info("%s; %s", message, _describe(histogram, chosen))

        self._pending = log

    def log_pending(self) -> None:
        """Logs the message of the last ``report``, once."""
        if self._pending is not None:
            log, self._pending = self._pending, None
            log()


def _describe(unscaled: Histogram, chosen: float) -> str:
    flushed = [f"{share(unscaled.flushed(FP16, scale), unscaled.num_nonzero):.2%}" for scale in (1.0, chosen)]
    return f"of the measured gradients FP16 flushes {flushed[0]} to zero at scale 1, {flushed[1]} at {chosen:g}"

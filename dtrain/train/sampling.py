"""Measures every N-th step of a run, and reports what precision costs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dtrain.config.schema import TelemetryConfig
from dtrain.engine.interface import Engine
from dtrain.telemetry.envelope import Envelope
from dtrain.telemetry.metrics import Sink
from dtrain.telemetry.precision import PrecisionFindings


class PrecisionSampling:
    """Measures the steps whose number divides by ``config.precision_every``.

    Args:
        sinks: receivers of what is found; empty on ranks other than 0.
    """

    def __init__(self, engine: Engine, config: TelemetryConfig, sinks: Sequence[Sink]) -> None:
        self._engine = engine
        self._config = config
        self._sinks = sinks
        self._envelope = None if config.advice is None else Envelope.read(Path(config.advice))

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Context around the next step; all ranks enter it."""
        every = self._config.precision_every
        if not every or (self._engine.attempted_steps + 1) % every:
            yield
            return
        with self._engine.measure_precision(self._config.activations) as measurement:
            yield
        report = measurement.report()
        if report is None or not self._sinks:
            return
        # a skipped step's gradients are not finite, so they are in no range
        departures = self._envelope.departures(report.unscaled()) if self._envelope and report.applied else []
        for sink in self._sinks:
            sink.precision(PrecisionFindings(report, tuple(departures)))

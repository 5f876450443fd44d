"""``precision/step-N.json``: all that is known of each sampled step of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dtrain.errors import ConfigError
from dtrain.telemetry.metrics import StepMetrics, write_json
from dtrain.telemetry.precision import PrecisionFindings

FOLDER = "precision"


class PrecisionFiles:
    """Writes ``precision/step-N.json``; files after ``start_step``, which the run resumes from, are removed first."""

    def __init__(self, run_dir: Path, start_step: int) -> None:
        self._folder = run_dir / FOLDER
        for step, path in sample_files(run_dir).items():
            if step > start_step:
                path.unlink()

    def step(self, metrics: StepMetrics) -> None: ...

    def validation(self, step: int, losses: Mapping[str, float]) -> None: ...

    def close(self, exit_code: int) -> None: ...

    def precision(self, findings: PrecisionFindings) -> None:
        self._folder.mkdir(exist_ok=True)
        write_json(self._folder / f"step-{findings.step}.json", findings.to_dict())


def sample_files(run_dir: Path) -> dict[int, Path]:
    """Returns the files of the sampled steps of a run, in the order of the steps."""
    found = {}
    for path in (run_dir / FOLDER).glob("step-*.json"):
        number = path.stem.removeprefix("step-")
        if number.isdecimal():
            found[int(number)] = path
    return dict(sorted(found.items()))


def read_sample(path: Path) -> PrecisionFindings:
    """Returns the content of a file of ``PrecisionFiles``.

    Raises:
        ConfigError: it is something else.
    """
    try:
        return PrecisionFindings.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path}: expected a sampled step of a run of dtrain; got {type(error).__name__}: {error}"
        ) from None

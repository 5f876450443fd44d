from __future__ import annotations

import pytest

LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "DTRAIN_PRECISION",
)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher and no precision in the environment, whatever started the tests."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)

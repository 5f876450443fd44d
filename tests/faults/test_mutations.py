"""Without one rename, removal or check of the product, a named test of the suite fails.

``test_power_cut`` drops the fsyncs one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import storage
from dtrain.checkpoint.directory import step_name
from tests.faults import test_checkpoint_damage as damage
from tests.faults import test_lease as leases
from tests.faults import test_power_cut as power_cut
from tests.unit.checkpoint import test_roundtrip as roundtrip

Test = Callable[[Path], None]


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


class StorageWithoutRename:
    """The ``storage`` module, whose ``rename`` does nothing."""

    def __getattr__(self, name: str) -> Any:
        return nothing if name == "rename" else getattr(storage, name)


def final_path(directory: Path, step: int) -> Path:
    return directory / step_name(step)


def cut_power_in(scenario: str) -> Test:
    def test(folder: Path) -> None:
        recording = power_cut.record(power_cut.SCENARIOS[scenario], folder / "work")
        power_cut.check_sample({scenario: recording}, 300)

    return test


def damaged_by(case: str) -> Test:
    def test(folder: Path) -> None:
        damage.make_good(folder / "template")
        damage.try_case(folder / "template", folder / "damaged", case)

    return test


WITHOUT_RENAME = StorageWithoutRename()
CASES: dict[str, tuple[dict[str, Any], Test]] = {  # replaced names of dtrain.checkpoint, and the test that must fail
    "the commit's rename": ({"commit.storage": WITHOUT_RENAME}, cut_power_in("first save of a run")),
    "the temporary name": (
        {"commit.storage": WITHOUT_RENAME, "commit.temporary_path": final_path}, cut_power_in("first save of a run")
    ),
    "the rename before a deletion": ({"directory.storage": WITHOUT_RENAME}, cut_power_in("deletes")),
    "the clean-up": ({"commit.clean_up": nothing, "lease.lease.clean_up": nothing}, cut_power_in("cleans up")),
    "the set of files": ({"reader.check_files": nothing}, damaged_by("extra shard")),
    "fingerprints of files": ({"reader.check_fingerprints": nothing}, damaged_by("data: flipped")),
    "fingerprints in place": (
        {"reader.CheckpointReader.check_fingerprints": nothing},
        roundtrip.test_fingerprints_detect_wrongly_loaded_values,
    ),
    "tiling at a save": ({"commit.check_tiling": nothing}, roundtrip.test_shards_that_do_not_tile_are_refused),
    "tiling at a load": ({"format.manifest.check_tiling": nothing}, damaged_by("manifest: gap")),
    "the lease at the commit": (
        {"lease.lease.Lease.check": nothing}, leases.test_a_save_that_has_lost_the_lease_is_not_committed
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_mutation_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    replaced, test = CASES[name]
    for target, value in replaced.items():
        monkeypatch.setattr(f"dtrain.checkpoint.{target}", value)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(tmp_path)

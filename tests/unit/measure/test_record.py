"""Records of measurements as files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from dtrain.config.tool_schema import ParityConfig
from dtrain.errors import ConfigError
from dtrain.measure.record import RecordHead, head, read_record, write_record


@dataclass(frozen=True, kw_only=True)
class Record(RecordHead):
    losses: list[float | None]


def test_a_record_is_read_without_what_was_written_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "record.json"
    record = Record(**head("dtrain parity", ParityConfig()), losses=[1.0, math.nan])
    write_record(path, record, agrees=True)
    read = read_record(path, Record, "parity")
    assert (read.command, read.host, read.config) == (record.command, record.host, record.config)
    assert read.losses == [1.0, None]
    assert '"agrees": true' in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"command": 1}'])
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{path} is no results file of this version of dtrain parity"):
        read_record(path, Record, "parity")

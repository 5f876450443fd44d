"""Runs the parts one after the other, each in its own process, and keeps one file for each that is finished."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtrain.config.dump import from_plain
from dtrain.config.tool_schema import AcceptConfig
from dtrain.distributed.launch_env import num_cores
from dtrain.distributed.logging import logger
from dtrain.errors import AcceptError, ConfigError, directory_error
from dtrain.redaction.redact import redact_text
from dtrain.telemetry.metrics import write_atomically, write_json
from dtrain.tools.accept.page import render
from dtrain.tools.accept.part import PARTIAL, Part, PartRequest
from dtrain.tools.accept.processes import run_process
from dtrain.tools.accept.records import DONE, FAILED, LATE, Acceptance, PartRecord

LONGEST_S = 540.0
"""Time limit of a part, whatever its share."""

RESULTS_FILE, PAGE_FILE = "accept.json", "accept.md"
_WORKER, _MACHINE = "dtrain.tools.accept.worker", "dtrain.tools.accept.machine"
_MACHINE_LIMIT_S = 180.0  # the first import of torch on a fresh machine takes long
_LEAST_S, _LONGEST_SHARE_S = 5.0, 480.0  # the longest leaves time for start-up and for the case under way
_GRACE_FACTOR, _GRACE_S = 1.5, 30.0  # start-up, and the case under way when the share is used up
_JOB_FILE = "job.json"


def choose_parts(names: Sequence[str] | None, parts: Sequence[Part]) -> list[Part]:
    """Returns the parts by letter, in order of value; None: all.

    Raises:
        ConfigError: a letter that is no part, or none at all.
    """
    known = {part.key: part for part in parts}
    unknown = [name for name in names or () if name not in known]
    if unknown or names == []:
        wrong = f"'{unknown[0]}' is no part" if unknown else "names no part"
        listed = ", ".join(f"{part.key} ({part.title})" for part in parts)
        raise ConfigError(f"parts=[{','.join(names or ())}]: {wrong}; the parts are {listed}")
    return [part for part in parts if names is None or part.key in names]


def share_s(parts_left: Sequence[Part], seconds_left: float) -> float:
    """Returns the seconds of the first of ``parts_left``: its share of what is left, so that saved time is used."""
    share = seconds_left * parts_left[0].minutes / sum(part.minutes for part in parts_left)
    return min(_LONGEST_SHARE_S, max(_LEAST_S, share))


def limit_s(share: float) -> float:
    """Returns the seconds after which a part with this share is killed."""
    return min(LONGEST_S, _GRACE_FACTOR * share + _GRACE_S)


def accept(config: AcceptConfig, command: str, folder: Path, parts: Sequence[Part]) -> Acceptance:
    """Runs the parts that are not finished in ``folder``; writes the results file and the page after each.

    Raises:
        AcceptError: the facts about the machine could not be read.
        ConfigError: a value that cannot be honored.
    """
    chosen = choose_parts(config.parts, parts)
    _make_folder(folder)
    machine = _describe_machine(config, folder)
    fingerprint = {key: value for key, value in machine.items() if key not in ("host_summary", "peak_tflops")}
    records = _read_records(folder, parts, fingerprint)
    finished = {key for key, record in records.items() if record.status == DONE}
    left = [part for part in chosen if part.key not in finished]
    for part in chosen:
        if part not in left:
            logger.info("%s %s: finished before", part.key, part.title)
    seconds = 60 * config.minutes * sum(part.minutes for part in left) / sum(part.minutes for part in chosen)
    deadline = time.monotonic() + seconds

    def write() -> Acceptance:
        known = [records[part.key] for part in parts if part.key in records]
        reasons = {
            part.key: "not started yet" if part in chosen else "not chosen" for part in parts if part.key not in records
        }
        date = time.strftime("%Y-%m-%dT%H:%M:%S")
        acceptance = Acceptance(command, date, config.minutes, machine, known, reasons)
        write_json(folder / RESULTS_FILE, asdict(acceptance), indent=1)
        write_atomically(folder / PAGE_FILE, redact_text(render(acceptance, parts)))
        return acceptance

    acceptance = write()
    for index, part in enumerate(left):
        share = share_s(left[index:], deadline - time.monotonic())
        logger.info("%s %s: up to %.0f s", part.key, part.title, share)
        records[part.key] = record = _run_part(part, config, machine, folder, share, fingerprint)
        outcome = record.status if record.status == DONE else f"{record.status}: {record.error}"
        logger.info("%s %s: %s, %.0f s", part.key, part.title, outcome, record.seconds)
        acceptance = write()
    return acceptance


def _run_part(
    part: Part,
    config: AcceptConfig,
    machine: Mapping[str, Any],
    folder: Path,
    share: float,
    fingerprint: dict[str, Any],
) -> PartRecord:
    own = (folder / part.key).absolute()
    request = PartRequest(machine["device"], share, machine["small"], str(own), config.keep_trace)
    job = {"module": part.module, "request": asdict(request)}
    before = _read_json(own / _JOB_FILE)
    if before is None or before.get("fingerprint") != fingerprint:  # cases of another machine must not be reused
        shutil.rmtree(own, ignore_errors=True)
    own.mkdir(exist_ok=True)
    write_json(own / _JOB_FILE, {**job, "fingerprint": fingerprint})
    log = own / "log"
    log.unlink(missing_ok=True)
    ended = run_process(_WORKER, json.dumps(job), limit_s=limit_s(share), threads=num_cores(), log=log)
    if ended.error:
        status, results = LATE if ended.is_late else FAILED, _read_json(own / PARTIAL) or {}
    else:
        status, results = DONE, json.loads(ended.result)
    date = time.strftime("%Y-%m-%dT%H:%M:%S")
    record = PartRecord(
        part.key,
        part.title,
        status,
        ended.seconds,
        share,
        date,
        fingerprint,
        results,
        ended.error,
        ended.tail,
    )
    write_json(_record_file(folder, part), asdict(record), indent=1)
    return record


def _make_folder(folder: Path) -> None:
    """Makes the folder of the results, and caches for compilers if the home directory cannot hold them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise directory_error("out", folder, error) from error
    if not os.access(Path.home(), os.W_OK):
        for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "TORCH_EXTENSIONS_DIR"):
            os.environ.setdefault(name, str(Path(tempfile.gettempdir(), f"dtrain-{os.getuid()}-{name.lower()}")))


def _describe_machine(config: AcceptConfig, folder: Path) -> dict[str, Any]:
    job = {"module": _MACHINE, "request": asdict(PartRequest(config.device, 0.0, False, str(folder)))}
    log = folder / "machine.log"
    log.unlink(missing_ok=True)
    ended = run_process(_WORKER, json.dumps(job), limit_s=_MACHINE_LIMIT_S, threads=num_cores(), log=log)
    if ended.error:
        raise AcceptError(f"the machine cannot be described: the process {ended.error}; its log is {log}")
    facts: dict[str, Any] = json.loads(ended.result)
    return facts


def _read_records(folder: Path, parts: Sequence[Part], fingerprint: Mapping[str, Any]) -> dict[str, PartRecord]:
    """Returns the records in ``folder`` of this machine with these versions."""
    records = {}
    for part in parts:
        content = _read_json(_record_file(folder, part))
        if content is not None and content.get("fingerprint") == fingerprint:
            records[part.key] = from_plain(PartRecord, content)
        elif content is not None:
            logger.warning("%s %s: measured on another machine or with other versions", part.key, part.title)
    return records


def _record_file(folder: Path, part: Part) -> Path:
    return folder / f"{part.key}.json"


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None

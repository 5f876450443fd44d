"""Damages to a checkpoint: of bytes alone, or with the hashes that cover them updated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtrain.checkpoint.format import hashing
from dtrain.checkpoint.format.manifest import canonical_json

R0, R1, MANIFEST = "r0000.safetensors", "r0001.safetensors", "manifest.json"
Damage = Callable[[Path], None]


def change(file: str, edit: Callable[[bytearray], Any]) -> Damage:
    """Edits the bytes of one file and no hash."""

    def apply(path: Path) -> None:
        data = bytearray((path / file).read_bytes())
        replaced = edit(data)
        (path / file).write_bytes(data if replaced is None else replaced)

    return apply


def flip(file: str, where: float) -> Damage:
    def edit(data: bytearray) -> None:
        data[min(int(where * len(data)), len(data) - 1)] ^= 0x10

    return change(file, edit)


def sealed(edit: Callable[[dict[str, Any]], Any]) -> Damage:
    """Edits the manifest and updates its hash."""

    def apply(path: Path) -> None:
        manifest = json.loads((path / MANIFEST).read_bytes().partition(b"\n")[2])
        replaced = edit(manifest)
        body = replaced if isinstance(replaced, bytes) else canonical_json(manifest)
        (path / MANIFEST).write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)

    return apply


def vouched(file: str, edit: Callable[[bytes], bytes]) -> Damage:
    """Edits a data file and updates its size and hash in the manifest."""

    def apply(path: Path) -> None:
        data = edit((path / file).read_bytes())
        (path / file).write_bytes(data)

        def reseal(manifest: dict[str, Any]) -> None:
            entry = next(entry for entry in manifest["files"] if entry["name"] == file)
            entry["bytes"] = len(data)
            for name in hashing.NAMES & entry.keys():
                entry[name] = hashing.new_digest(name, data).hexdigest()

        sealed(reseal)(path)

    return apply


def header(edit: Callable[[dict[str, Any]], Any], file: str = R0) -> Damage:
    """Edits the JSON header of a data file and updates all hashes."""

    def rewrite(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        fields = json.loads(data[8 : 8 + length])
        replaced = edit(fields)
        text = replaced if isinstance(replaced, bytes) else json.dumps(fields).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return vouched(file, rewrite)


def tensor(manifest: dict[str, Any], kind: str = "master", name: str = "weight") -> dict[str, Any]:
    return next(entry for entry in manifest["tensors"] if (entry["kind"], entry["name"]) == (kind, name))


def put(fields: dict[str, Any], **values: Any) -> None:
    fields.update(values)

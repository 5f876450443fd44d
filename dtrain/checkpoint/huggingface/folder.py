"""Reader of a Hugging Face model folder: strict JSON and safetensors with checked headers; runs no code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint.format.checked_file import DamageError, open_regular, parse_json, read_bytes, read_into
from dtrain.checkpoint.format.fingerprint import byte_view
from dtrain.checkpoint.format.safetensors_file import StoredTensor, read_header
from dtrain.distributed.consensus import describe
from dtrain.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
TOKENIZER_FOLDER = "tokenizer"
"""Folder of a run directory with the tokenizer of its data, in the form of transformers."""

_FILE_NAME = re.compile(r"[\w-][\w.-]*\.safetensors", re.ASCII)
_JSON_LIMIT = 64 << 20  # bytes
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")


class HFFolder:
    """A folder with ``config.json`` and weights in one safetensors file, or in several with an index.

    All methods raise a ``CheckpointError`` that names the file if one is missing, damaged or unexpected.

    Attributes:
        config: what ``config.json`` holds.
        shapes: of all tensors.
        others: the dtypes of those that are not floating point, such as the masks in older files.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.config = read_config(path)
        self._files: dict[str, str] = {}
        self._stored: dict[str, StoredTensor] = {}
        index = self._index()
        for file in sorted(set(index.values())) if index else [WEIGHTS]:
            with _open(self._path / file) as (descriptor, size):
                stored = read_header(descriptor, file, size)
            for name in stored.keys() & self._stored.keys():
                raise CheckpointError(f"{path}: both {self._files[name]} and {file} hold '{name}'")
            self._stored |= stored
            self._files |= dict.fromkeys(stored, file)
        if index and index != self._files:
            name = min(index.items() ^ self._files.items())[0]
            raise CheckpointError(f"{path / INDEX} and the files do not agree on the location of '{name}'")
        self.shapes = {name: stored.shape for name, stored in self._stored.items()}
        self.others = {name: s.dtype for name, s in self._stored.items() if not s.dtype.is_floating_point}

    def read(self, name: str, *, accept_others: bool = False) -> Tensor:
        """Reads a whole tensor, flat, on the CPU, in its stored dtype: FP32, BF16 or FP16.

        Args:
            name: the tensor.
            accept_others: read one of ``others`` too: integers and booleans.
        """
        stored, file = self._stored[name], self._files[name]
        is_other = accept_others and name in self.others
        if not is_other and stored.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(f"{self._path / file}: '{name}' is {stored.dtype}; supported are FP32, BF16 and FP16")
        with _open(self._path / file) as (descriptor, size):
            if stored.end > size:  # before the allocation, whose size the header decides
                raise CheckpointError(f"{self._path / file} changed while it was read")
            values = torch.empty((stored.end - stored.begin) // stored.dtype.itemsize, dtype=stored.dtype)
            read_into(descriptor, file, stored.begin, byte_view(values))
        return values

    def _index(self) -> dict[str, str]:
        """Returns tensor -> file from the index; empty if there is one file and no index."""
        if os.path.lexists(self._path / WEIGHTS):
            return {}
        if not os.path.lexists(self._path / INDEX):
            raise CheckpointError(f"{self._path} has neither {WEIGHTS} nor {INDEX}{self._other_weights()}")
        weight_map = _read_json(self._path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self._path / INDEX}: weight_map is {weight_map!r:.80}, expected tensors and files")
        for name, file in weight_map.items():
            if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
                raise CheckpointError(
                    f"{self._path / INDEX}: '{name}' is in {file!r:.120}, not a safetensors file of this folder"
                )
        return weight_map

    def _other_weights(self) -> str:
        names = sorted(name for name in os.listdir(self._path) if name.endswith(_OTHER_FORMATS))
        if not names:
            return ""
        return (
            f"; {names[0]} is not read because such files can run code: if you trust it, load it with transformers, "
            "and save_pretrained(FOLDER) writes safetensors"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the ``config.json`` of a folder; raises ``CheckpointError`` if there is none or it is no JSON object."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a directory; give the folder that holds a model's {CONFIG}")
    return _read_json(folder / CONFIG)


def _read_json(path: Path) -> dict[str, Any]:
    with _open(path) as (descriptor, size):
        if size > _JSON_LIMIT:
            raise CheckpointError(f"{path}: {size} bytes, more than {_JSON_LIMIT}")
        return parse_json(read_bytes(descriptor, path.name, 0, size), path.name)


@contextmanager
def _open(path: Path) -> Iterator[tuple[int, int]]:
    # links are followed, unlike in a checkpoint: the cache of `huggingface_hub` consists of links
    try:
        with open_regular(Path(os.path.realpath(path))) as opened:
            yield opened
    except DamageError as damage:
        raise CheckpointError(f"{path}: {damage.reason}") from damage
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {describe(error)}") from error

"""Text data in memory, from the running Python's standard library or from any files by glob.

Without a tokenizer, a token is a byte (0..255) or ``END_OF_DOCUMENT`` (256), which follows every file. A hash of
its relative path assigns each file to training or validation, so that adding a file never moves another one.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtrain.config.data import StdlibDataConfig, TextDataConfig
from dtrain.data.dataset import Dataset, SampleSource
from dtrain.data.sampling import Indices
from dtrain.data.shards.format import dtype_name
from dtrain.data.tokenizer import TokenizerFile
from dtrain.errors import ConfigError
from dtrain.tasks import Language

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

Tokens = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Document:
    """A file: its POSIX path relative to the root of the data, and its bytes."""

    name: str
    content: bytes


@dataclass(frozen=True)
class TokenWindows(SampleSource):
    """Windows of ``seq_len + 1`` tokens with stride ``seq_len``: each token except the first is a target once."""

    tokens: Tokens
    seq_len: int

    @property
    def num_samples(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        """Returns ``{"tokens": int64 [B, T], "targets": int64 [B, T]}``, with targets one token ahead."""
        positions = np.asarray(sample_ids)[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        window = torch.from_numpy(self.tokens[positions].astype(np.int64))
        return {"tokens": window[:, :-1].contiguous(), "targets": window[:, 1:].contiguous()}


class ByteCodec:
    """Text of byte tokens; an end of document becomes ``<|end|>``, and bytes that are not UTF-8 become U+FFFD."""

    end_id: int | None = END_OF_DOCUMENT

    def decode(self, tokens: Iterable[int] | Tensor) -> str:
        values = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        byte_strings = {END_OF_DOCUMENT: b"<|end|>"} | {value: bytes((value,)) for value in range(END_OF_DOCUMENT)}
        return b"".join(byte_strings.get(value, b"\xff") for value in values).decode(errors="replace")


def load_text(config: StdlibDataConfig | TextDataConfig, seq_len: int) -> Dataset:
    """Reads the files that ``config`` names and cuts them into windows of ``seq_len`` tokens.

    If the split by file gives training or validation no whole window (as with a single file), the last
    ``validation_percent`` of the text, at least one window, is held out instead.

    Raises:
        ConfigError: no file matches, a file cannot be read, or the text is too short for two windows.
    """
    tokenizer = None
    if isinstance(config, TextDataConfig):
        documents, label = glob_documents(config.files), f"data.files={config.files}"
        if config.tokenizer is not None:
            tokenizer = TokenizerFile(Path(os.path.expandvars(config.tokenizer)).expanduser())
    else:
        documents, label = stdlib_documents(), "data=stdlib"
    tokenize = _to_bytes if tokenizer is None else partial(_encode, tokenizer)
    held_out = [is_held_out(document.name, config.validation_percent) for document in documents]
    train = TokenWindows(tokenize([d for d, out in zip(documents, held_out, strict=True) if not out]), seq_len)
    validation = TokenWindows(tokenize([d for d, out in zip(documents, held_out, strict=True) if out]), seq_len)
    how = f"{sum(held_out)} of them held out for validation"
    if train.num_samples == 0 or validation.num_samples == 0:
        train, validation = _hold_out_tail(tokenize(documents), config.validation_percent, seq_len, label)
        share = 100 * len(validation.tokens) / (len(train.tokens) + len(validation.tokens))
        how = f"the last {share:.1f} % of the text held out for validation"
    size = sum(len(document.content) for document in documents) / 1e6
    description = f"{label}: {len(documents)} files, {size:.1f} MB, {how}"
    settings = [config.validation_percent, tokenizer and [tokenizer.sha256, tokenizer.end_id]]
    fingerprint = fingerprint_of(documents, settings)
    if tokenizer is None:
        return Dataset(train, validation, fingerprint, description, Language(VOCAB_SIZE, ByteCodec()))
    task = Language(tokenizer.vocab_size, tokenizer)
    return Dataset(train, validation, fingerprint, description, task, tokenizer.path)


def stdlib_documents() -> list[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    documents = []
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        try:
            documents.append(Document(name, path.read_bytes()))
        except OSError:  # some distributions ship dangling links
            continue
    if not documents:
        raise ConfigError(f"data=stdlib: no readable .py file under {root}; use data=text data.files=<glob>")
    return documents


def glob_documents(pattern: str) -> list[Document]:
    expanded = os.path.expandvars(os.path.expanduser(pattern))
    paths = [Path(found) for found in glob.glob(expanded, recursive=True) if os.path.isfile(found)]
    if not paths:
        inside = "; it is a folder: add /**/*.txt" if os.path.isdir(expanded) else ""
        raise ConfigError(f"data.files={pattern} matches no file (working directory {os.getcwd()}){inside}")
    root = _fixed_prefix(expanded)
    documents = []
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in set(paths)):
        try:
            documents.append(Document(name, path.read_bytes()))
        except OSError as error:
            raise ConfigError(
                f"data.files={pattern}: cannot read {path}: {error.strerror}; make it readable or narrow the glob"
            ) from error
    return documents


def _fixed_prefix(pattern: str) -> Path:
    folder = Path(pattern).parent
    while glob.has_magic(str(folder)):
        folder = folder.parent
    return folder


def is_held_out(name: str, percent: float) -> bool:
    """Returns whether what has this name is for validation, by the hash of the name."""
    return name_hash(name) < percent / 100 * 2**64


def name_hash(name: str) -> int:
    """Returns a number below 2^64."""
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()  # names need not be UTF-8
    return int.from_bytes(digest[:8], "big")


def _encode(tokenizer: TokenizerFile, documents: list[Document]) -> Tokens:
    texts = [document_text(document) for document in documents]
    dtype = np.dtype(dtype_name(tokenizer.vocab_size))
    ends = [] if tokenizer.end_id is None else [tokenizer.end_id]
    parts = [np.array([*tokens, *ends], dtype=dtype) for tokens in tokenizer.encode_batch(texts)]
    return np.concatenate([np.empty(0, dtype), *parts])


def document_text(document: Document) -> str:
    """Returns the text of a file without a byte order mark; raises ``ConfigError`` if it is not UTF-8."""
    try:
        return document.content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{document.name} is not UTF-8 at byte {error.start}, so it cannot be tokenized; convert it or leave it out"
        ) from None


def _to_bytes(documents: list[Document]) -> Tokens:
    tokens = np.full(sum(len(document.content) + 1 for document in documents), END_OF_DOCUMENT, dtype=np.uint16)
    start = 0
    for document in documents:
        stop = start + len(document.content)
        tokens[start:stop] = np.frombuffer(document.content, dtype=np.uint8)
        start = stop + 1
    return tokens


def _hold_out_tail(tokens: Tokens, percent: float, seq_len: int, label: str) -> tuple[TokenWindows, TokenWindows]:
    needed = 2 * (seq_len + 1)
    if len(tokens) < needed:
        raise ConfigError(
            f"{label} holds {len(tokens)} tokens, but one training and one validation window of model.max_seq_len="
            f"{seq_len} need {needed}; add text or lower model.max_seq_len"
        )
    # one token more than the windows need as inputs: each target is one ahead
    num_windows = max(1, int(len(tokens) * percent / 100) // seq_len)
    tail = min(num_windows * seq_len + 1, len(tokens) - (seq_len + 1))
    return TokenWindows(tokens[:-tail], seq_len), TokenWindows(tokens[-tail:], seq_len)


def fingerprint_of(documents: list[Document], settings: Any) -> str:
    """Returns a sha256 (hex) of the names and contents of the files, and of ``settings`` as JSON."""
    digest = hashlib.sha256(json.dumps(settings).encode())
    for document in documents:
        name = document.name.encode(errors="surrogateescape")
        # the lengths come first, so that different lists of files never give the same bytes
        digest.update(len(name).to_bytes(8, "big") + name + len(document.content).to_bytes(8, "big"))
        digest.update(document.content)
    return digest.hexdigest()

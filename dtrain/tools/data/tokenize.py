"""``dtrain data tokenize``: text files to token shards."""

from __future__ import annotations

import hashlib
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.data.shards.format import MANIFEST, MAX_SHARDS, ShardManifest, dtype_name
from dtrain.data.tokenizer import TOKENIZER, TOKENIZER_CONFIG, TokenizerFile
from dtrain.errors import ConfigError, DataError, disk_fault, is_disk_fault
from dtrain.tools.data import unfinished
from dtrain.tools.data.inputs import Source, find_files, plan_units
from dtrain.tools.data.pool import run_units
from dtrain.tools.data.progress import WorkProgress
from dtrain.tools.data.worker import Finished, TokenizeJob
from dtrain.tools.data.writer import write_whole
from dtrain.tools.tables import plural
from dtrain.version import version


@dataclass(frozen=True)
class TokenizeOptions:
    """What the user gives, as the command line's keys."""

    files: str
    tokenizer: Path
    out: Path
    text_key: str
    workers: int
    append_end: bool
    end_token: str | None


def run(values: Mapping[str, Any]) -> int:
    """Tokenizes, and prints what was written."""
    options = TokenizeOptions(**values)
    try:
        manifest, num_empty = tokenize(options)
    except OSError as error:
        if is_disk_fault(error):
            raise disk_fault(error, options.out) from error
        raise
    except KeyboardInterrupt:
        print("interrupted; the same command resumes", file=sys.stderr)
        return 128 + signal.SIGINT
    tokens, documents = (sum(getattr(shard, kind) for shard in manifest.shards) for kind in ("tokens", "documents"))
    skipped = f"; {plural(num_empty, 'empty document')} skipped" if num_empty else ""
    print(
        f"wrote {options.out}: {tokens:,} tokens of {documents:,} documents in "
        f"{plural(len(manifest.shards), 'shard')} ({manifest.dtype}){skipped}"
    )
    return 0


def tokenize(options: TokenizeOptions) -> tuple[ShardManifest, int]:
    """Writes the shards of ``options`` and their manifest; returns it and the number of empty documents left out.

    Raises:
        ConfigError: a mistake in the options, or ``out`` belongs to another job.
        DataError: a document is not readable text.
        StorageError: the disk is full or faulty.
    """
    tokenizer = TokenizerFile(options.tokenizer, options.end_token)
    if options.append_end and tokenizer.end_id is None:
        raise ConfigError(
            f"{tokenizer.path} has no token with a common name for the end of a document; name one with end_token=..., "
            "or set append_end=false"
        )
    files = find_files(options.files)
    units = plan_units(files, options.text_key)
    if len(units) > MAX_SHARDS:
        raise ConfigError(f"files={options.files} gives {len(units)} shards; at most {MAX_SHARDS}: split the input")
    out, inputs = options.out, unfinished.describe_files(files)
    versions = {"dtrain": version(), "tokenizers": _library_version()}
    with unfinished.open_out(out):
        unfinished.resume_or_start(
            out,
            {
                "tokenizer": tokenizer.sha256,
                "text_key": options.text_key,
                "append_end": options.append_end,
                "end_id": tokenizer.end_id,
                **versions,
                "files": inputs,
            },
        )
        _copy_tokenizer(tokenizer, out)
        shards = _write_shards(options, tokenizer, units)
        if unfinished.describe_files(files) != inputs:
            raise DataError(f"a file of files={options.files} has changed while it was read; remove {out}, start again")
        manifest = ShardManifest(
            dtype=dtype_name(tokenizer.vocab_size),
            vocab_size=tokenizer.vocab_size,
            end_id=tokenizer.end_id,
            append_end=options.append_end,
            tokenizer_sha256=tokenizer.sha256,
            versions=versions,
            shards=tuple(shards[number].entry for number in range(len(units))),
        )
        if not any(shard.tokens for shard in manifest.shards):
            raise DataError(f"files={options.files} holds no text: all documents are empty")
        write_whole(out / MANIFEST, manifest.to_bytes())
        unfinished.end_job(out)
    unfinished.remove(out)
    return manifest, sum(shard.num_empty for shard in shards.values())


def _write_shards(options: TokenizeOptions, tokenizer: TokenizerFile, units: list[list[Source]]) -> dict[int, Finished]:
    """Returns every shard: those that an interrupted command has finished, and those that the workers now write."""
    out = options.out
    job = TokenizeJob(
        out=str(out),
        scratch=str(unfinished.scratch_folder(out)),
        tokenizer=str(out / TOKENIZER),
        text_key=options.text_key,
        end_id=tokenizer.end_id if options.append_end else None,
    )
    shards = unfinished.finished_shards(out, units, np.dtype(dtype_name(tokenizer.vocab_size)).itemsize)
    sizes = [sum(source.size for source in unit) for unit in units]
    remaining = {number: unit for number, unit in enumerate(units) if number not in shards}
    with WorkProgress("tokenize", sum(sizes), sum(sizes[number] for number in shards)) as progress:
        if shards:
            progress.print(f"resuming: {len(shards)} of {plural(len(units), 'shard')} are finished")
        for number, finished in run_units(job, remaining, options.workers, progress.in_work):
            unfinished.record_shard(out, number, finished)
            shards[number] = finished
            progress.finished(sizes[number], finished.entry.tokens)
    return shards


def _copy_tokenizer(tokenizer: TokenizerFile, out: Path) -> None:
    content = tokenizer.path.read_bytes()
    if hashlib.sha256(content).hexdigest() != tokenizer.sha256:
        raise DataError(f"{tokenizer.path} has changed while it was read; start again")
    write_whole(out / TOKENIZER, content)
    config = tokenizer.path.parent / TOKENIZER_CONFIG
    if config.is_file():
        write_whole(out / TOKENIZER_CONFIG, config.read_bytes())


def _library_version() -> str:
    import tokenizers

    return str(tokenizers.__version__)

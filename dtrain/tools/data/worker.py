"""A process that tokenizes work units: ``python -m dtrain.tools.data.worker``. One core; no torch.

Standard input brings a line for the job, then one for each work unit; standard output takes a line for each message.
The process ends as soon as the one that started it has ended, because its standard input is then at its end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from dtrain.data.shards.format import ShardEntry
from dtrain.data.tokenizer import TokenizerFile
from dtrain.errors import DataError, DtrainError, disk_fault, is_disk_fault
from dtrain.tools.data.documents import documents, place
from dtrain.tools.data.inputs import Source
from dtrain.tools.data.writer import ShardWriter
from dtrain.tools.processes import open_result

_BATCH_CHARACTERS = 1 << 19  # tokenized at a time: enough for the library, and its result stays small
_BATCH_DOCUMENTS = 2048
_REPORT_S = 0.25


@dataclass(frozen=True)
class TokenizeJob:
    """What all work units share.

    Attributes:
        out: folder of the shards.
        scratch: folder of unfinished files.
        tokenizer: path of the ``tokenizer.json``.
        text_key: key or column of the text.
        end_id: token that follows every document, or None.
    """

    out: str
    scratch: str
    tokenizer: str
    text_key: str
    end_id: int | None


@dataclass(frozen=True)
class Finished:
    """A finished shard, and the number of empty documents that were left out of it."""

    entry: ShardEntry
    num_empty: int


def tokenize_unit(
    job: TokenizeJob,
    tokenizer: TokenizerFile,
    number: int,
    sources: Sequence[Source],
    report: Callable[[int, int], None] = lambda tokens, characters: None,
) -> Finished:
    """Writes shard ``number`` from ``sources``.

    Args:
        report: called now and then with the number of tokens and characters so far.

    Raises:
        DataError: a document cannot be read or tokenized; the message names it.
        StorageError: the disk is full or faulty.
    """
    try:
        writer = ShardWriter(Path(job.out), number, tokenizer.vocab_size, job.end_id, Path(job.scratch))
        try:
            characters, num_empty, reported = 0, 0, time.monotonic()
            for source in sources:
                for batch in _batches(source, job.text_key):
                    tokens = [ids for ids in _encode(tokenizer, source, batch) if ids]
                    num_empty += len(batch) - len(tokens)
                    writer.add(tokens)
                    characters += sum(len(text) for text, _ in batch)
                    if time.monotonic() - reported > _REPORT_S:
                        report(writer.tokens, characters)
                        reported = time.monotonic()
            return Finished(writer.finish(_names(sources)), num_empty)
        finally:
            writer.close()
    except OSError as error:
        if is_disk_fault(error):
            raise disk_fault(error, job.out) from error
        raise DataError(f"{error.filename or job.out} cannot be written: {error.strerror}") from error


def _batches(source: Source, text_key: str) -> Iterator[list[tuple[str, int]]]:
    batch: list[tuple[str, int]] = []
    room = _BATCH_CHARACTERS
    for text, position in documents(source, text_key):
        batch.append((text, position))
        room -= len(text)
        if room <= 0 or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, room = [], _BATCH_CHARACTERS
    if batch:
        yield batch


def _encode(tokenizer: TokenizerFile, source: Source, batch: Sequence[tuple[str, int]]) -> list[list[int]]:
    try:
        return tokenizer.encode_batch([text for text, _ in batch])
    except Exception as error:  # the library raises plain exceptions, also for text that has no UTF-8
        for text, position in batch:
            try:
                tokenizer.encode_batch([text])
            except Exception:
                halves = any("\ud800" <= character <= "\udfff" for character in text)
                reason = "the text holds half of a surrogate pair, which has no UTF-8" if halves else str(error)
                raise DataError(f"{place(source, position)} cannot be tokenized: {reason}") from None
        raise


def _names(sources: Sequence[Source]) -> list[str]:
    """Returns the sources for the manifest; of more than 64, the first and the last."""
    if len(sources) <= 64:
        return [str(source) for source in sources]
    return [str(sources[0]), f"and {len(sources) - 2} others to", str(sources[-1])]


def _read_lines() -> SimpleQueue[str]:
    lines: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(1)  # the process that started this one has ended

    threading.Thread(target=read, daemon=True).start()
    return lines


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read by the library: one worker is one core
    lines, result = _read_lines(), open_result()

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=result, flush=True)

    def report(tokens: int, characters: int) -> None:
        send({"tokens": tokens, "characters": characters})

    try:
        job = TokenizeJob(**json.loads(lines.get()))
        tokenizer = TokenizerFile(Path(job.tokenizer))
        while True:
            unit = json.loads(lines.get())
            sources = [Source(**source) for source in unit["sources"]]
            send({"finished": asdict(tokenize_unit(job, tokenizer, unit["number"], sources, report))})
    except DtrainError as error:
        send({"error": str(error), "kind": type(error).__name__})
        os._exit(1)  # the thread that waits for a line would disturb an ordinary end


if __name__ == "__main__":
    main()

"""``dtrain data train-tokenizer``: a byte-level BPE tokenizer from text files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from dtrain.data.tokenizer import NEEDS_TOKENIZERS
from dtrain.errors import ConfigError, DataError, directory_error, disk_fault, is_disk_fault
from dtrain.telemetry.live_view import can_redraw
from dtrain.tools.data.documents import documents
from dtrain.tools.data.inputs import find_files, plan_units
from dtrain.tools.data.writer import write_whole

END_OF_TEXT = "<|endoftext|>"
_LEAST_TOKENS = 257  # all bytes, and the end of a document


def run(values: Mapping[str, Any]) -> int:
    """Trains a tokenizer, writes it, and prints what it is."""
    out: Path = values["out"]
    if out.exists():
        raise ConfigError(f"out={out} exists; choose another file, or remove it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise directory_error("out", out.parent, error) from error
    text, vocab_size = train(values["files"], values["vocab_size"], values["text_key"])
    try:
        write_whole(out, text.encode())
    except OSError as error:
        if is_disk_fault(error):
            raise disk_fault(error, out) from error
        raise directory_error("out", out, error) from error
    print(f"wrote {out}: byte-level BPE, {vocab_size} tokens, {END_OF_TEXT} ends a document")
    return 0


def train(pattern: str, vocab_size: int, text_key: str = "text") -> tuple[str, int]:
    """Returns the text of a ``tokenizer.json`` and its number of tokens, a function of the text alone.

    Raises:
        ConfigError: a mistake in the options, or the text is too short for so large a vocabulary.
        DataError: a document is not readable text.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ConfigError(f"dtrain data train-tokenizer {NEEDS_TOKENIZERS}") from None
    if vocab_size < _LEAST_TOKENS:
        raise ConfigError(f"vocab_size={vocab_size}; expected at least {_LEAST_TOKENS}: 256 bytes and {END_OF_TEXT}")
    units = plan_units(find_files(pattern), text_key)

    def texts() -> Iterator[str]:
        for unit in units:
            for source in unit:
                for text, _ in documents(source, text_key):
                    yield text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=can_redraw(Console(stderr=True)),
    )
    tokenizer.train_from_iterator(texts(), trainer)
    found = tokenizer.get_vocab_size()
    if found < vocab_size:
        raise DataError(f"files={pattern} gives {found} tokens; add text, or set vocab_size={found}")
    return tokenizer.to_str(pretty=True), found

"""Conversations as training data: the tokenizer's chat template, and loss on what the assistant says.

A line of a file is ``{"messages": [{"role": ..., "content": ...}, ...]}`` or ``{"prompt": ..., "completion": ...}``.
Each conversation is a document; they are packed side by side and do not see each other.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtrain.config.data import ChatDataConfig
from dtrain.data.dataset import Dataset, SampleSource
from dtrain.data.packing import pack_documents
from dtrain.data.sampling import Indices
from dtrain.data.shards.format import sha256_of
from dtrain.data.text import Document, document_text, fingerprint_of, glob_documents, is_held_out
from dtrain.data.token_samples import PackedDocuments, mean_context
from dtrain.data.tokenizer import TOKENIZER_FILES, TokenizerFile
from dtrain.distributed.logging import logger
from dtrain.errors import ConfigError
from dtrain.tasks import IGNORE_INDEX, Language

_REPORT_S = 10.0
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")  # marks what the assistant says

Int64 = NDArray[np.int64]
Messages = list[dict[str, Any]]


def load_chat(config: ChatDataConfig, seq_len: int, on_progress: Callable[[], None]) -> Dataset:
    """Reads conversations and packs them into samples of ``seq_len`` pairs of input and target.

    A conversation is held out for validation by the hash of its line. One longer than a sample is cut; one without
    anything of the assistant in the rest is left out.

    Raises:
        ConfigError: a file or the tokenizer's folder is missing, a line is no conversation, the template rejects it or
            does not show what the assistant says, or too few conversations are left.
    """
    assert config.tokenizer is not None
    folder = Path(os.path.expandvars(config.tokenizer)).expanduser()
    if not folder.is_dir():  # a name would be looked up on a hub
        raise ConfigError(f"data.tokenizer={folder} is not a folder; expected one with tokenizer.json")
    tokenizer, template = TokenizerFile(folder), ChatTemplate(folder)
    documents = glob_documents(config.files)
    sides: tuple[list[Int64], list[Int64]] = ([], [])  # training, validation
    num_cut = num_empty = 0
    reported = time.monotonic()
    for number, (where, line) in enumerate(_lines(documents)):
        on_progress()
        if time.monotonic() - reported > _REPORT_S:
            logger.info("data=chat: %s conversations tokenized so far", f"{number:,}")
            reported = time.monotonic()
        tokens = template.encode(_messages(line, where), where)
        template.check_vocabulary(tokens, tokenizer.vocab_size, where)
        num_cut += len(tokens) > seq_len + 1
        tokens = tokens[: seq_len + 1]
        if (tokens[1:] < 0).all():
            num_empty += 1
        else:
            sides[is_held_out(line, config.validation_percent)].append(tokens)
    train, held_out = sides
    if not held_out and len(train) > 1:
        held_out.append(train.pop())
    if not train and len(held_out) > 1:
        train.append(held_out.pop())
    if not train or not held_out:
        raise ConfigError(
            f"data.files={config.files} gives {len(train) + len(held_out)} conversations with an answer in the first "
            f"{seq_len} tokens ({num_empty} without one); training and validation need one each"
        )
    notes = [f"{len(held_out)} of them held out for validation"]
    notes += [f"{num_cut} cut at {seq_len} tokens"] if num_cut else []
    notes += [f"{num_empty} without an answer left out"] if num_empty else []
    files = {name: sha256_of(folder / name) for name in TOKENIZER_FILES if (folder / name).is_file()}
    source = _pack(train, seq_len)
    return Dataset(
        source,
        _pack(held_out, seq_len),
        fingerprint_of(documents, [config.validation_percent, files]),
        f"data=chat: {len(train) + len(held_out):,} conversations in {len(documents)} files, {', '.join(notes)}",
        Language(tokenizer.vocab_size, tokenizer),
        tokenizer.path,
        mean_context(source),
    )


@dataclass(frozen=True, eq=False)
class AnswerSamples(SampleSource):
    """Packed conversations whose tokens that do not count as targets are stored inverted, ``~token``."""

    packed: PackedDocuments

    @property
    def num_samples(self) -> int:
        return self.packed.num_samples

    def batch(self, sample_ids: Indices) -> dict[str, Tensor]:
        batch = self.packed.batch(sample_ids)
        tokens, targets = batch["tokens"], batch["targets"]
        return {
            **batch,
            "tokens": torch.where(tokens < 0, ~tokens, tokens),
            "targets": targets.masked_fill(targets < 0, IGNORE_INDEX),
        }


@dataclass(frozen=True, eq=False)
class MemoryTokens:
    """A stream of tokens in memory."""

    tokens: Int64

    def read_ranges(self, starts: Int64, lengths: Int64) -> Int64:
        """Returns the tokens of ranges of different lengths, one after another."""
        ranges = zip(starts.tolist(), lengths.tolist(), strict=True)
        return np.concatenate([self.tokens[start : start + length] for start, length in ranges])


def _pack(conversations: Sequence[Int64], seq_len: int) -> AnswerSamples:
    ends = np.cumsum([len(tokens) for tokens in conversations], dtype=np.int64)
    stream = MemoryTokens(np.concatenate(conversations))
    return AnswerSamples(PackedDocuments(stream, pack_documents(ends, seq_len), seq_len))


class ChatTemplate:
    """The tokenizer of a folder, with its chat template."""

    def __init__(self, folder: Path) -> None:
        """Reads the folder; raises ``ConfigError`` if it is none of a tokenizer with a chat template."""
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise ConfigError("data=chat needs transformers, for the chat template; pip install 'dtrain[hf]'") from None
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the library raises many kinds
            raise ConfigError(f"data.tokenizer={folder} cannot be read: {_line(error)}") from None
        source = self._tokenizer.chat_template
        if isinstance(source, dict):
            raise ConfigError(
                f"data.tokenizer={folder} has several chat templates ({', '.join(source)}); keep one, as "
                "chat_template.jinja"
            )
        if not isinstance(source, str):
            raise ConfigError(
                f"data.tokenizer={folder} has no chat template; save one with the tokenizer, or as chat_template.jinja"
            )
        self._folder = folder
        self._source = source

    def encode(self, messages: Messages, where: str) -> Int64:
        """Returns the tokens of a conversation; those that are not the assistant's are inverted, ``~token``."""
        marked = _GENERATION.search(self._source)
        text, spans = (self._marked_spans if marked else self._spans)(messages, where)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{where} has {text[error.start]!r}, half of a character; repair the text") from None
        # transformers' own mask misses tokens: the last of a character of several, and all if a space begins the part
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts, ends = np.array(found["offset_mapping"]).reshape(-1, 2).T
        counts = np.zeros(len(starts), dtype=bool)
        for begin, end in spans:  # a token with the space before the part belongs to it
            counts |= (ends > begin) & (starts < end)
        ids = np.array(found["input_ids"], dtype=np.int64)
        return np.where(counts, ids, ~ids)

    def check_vocabulary(self, tokens: Int64, vocab_size: int, where: str) -> None:
        """Raises ``ConfigError`` if one of these, from ``encode``, is none of the ``vocab_size`` of the file."""
        ids = np.where(tokens < 0, ~tokens, tokens)
        if len(ids) and (largest := int(ids.max())) >= vocab_size:
            raise ConfigError(
                f"{where} needs the token {self._tokenizer.convert_ids_to_tokens(largest)!r}, which only "
                f"tokenizer_config.json of {self._folder} adds; add it to tokenizer.json, which has {vocab_size} tokens"
            )

    def _marked_spans(self, messages: Messages, where: str) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation, and where the parts that the template marks begin and end in it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {**self._tokenizer.special_tokens_map, "chat_template": self._source}
        with self._rejections(where):
            found: Any = render_jinja_template([messages], return_assistant_tokens_mask=True, **options)
        (text,), (spans,) = found  # the library's annotation, one str, is wrong
        return text, spans

    def _spans(self, messages: Messages, where: str) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a conversation, and where the assistant's parts begin and end in it.

        A part is what the text of the conversation up to it has more than that before it.
        """
        text = self._apply(messages, where)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if not number:
                raise ConfigError(
                    f"{where} begins with the assistant, and what the chat template of {self._folder} writes before is "
                    "not known; begin with another role, or mark the assistant's part in the template with "
                    "{% generation %} and {% endgeneration %}"
                )
            before = self._apply(messages[:number], where, add_generation_prompt=True)
            after = self._apply(messages[: number + 1], where)
            if not (text.startswith(after) and after.startswith(before)):
                raise ConfigError(
                    f"{where}: the chat template of {self._folder} writes message {number + 1} of this conversation in "
                    "another way where more messages follow, so the assistant's part is not known; mark it in the "
                    "template with {% generation %} and {% endgeneration %}"
                )
            spans.append((len(before), len(after)))
        return text, spans

    def _apply(self, messages: Messages, where: str, add_generation_prompt: bool = False) -> str:
        with self._rejections(where):
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        return text

    @contextmanager
    def _rejections(self, where: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of the template's own code
            raise ConfigError(
                f"{where}: the chat template of {self._folder} rejects the conversation: {_line(error)}"
            ) from None


def _lines(documents: Sequence[Document]) -> Iterator[tuple[str, str]]:
    """Yields file and line number, and the line, of each line that is not blank."""
    for document in documents:
        for number, line in enumerate(document_text(document).split("\n"), 1):
            if line.strip():
                yield f"{document.name}:{number}", line


def _messages(line: str, where: str) -> Messages:
    """Returns the messages of a line of JSON."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if isinstance(value, dict) and {"prompt", "completion"} <= value.keys():
        pairs = (("user", value["prompt"]), ("assistant", value["completion"]))
        value = {"messages": [{"role": role, "content": content} for role, content in pairs]}
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        keys = f"the keys {', '.join(map(str, value))}" if isinstance(value, dict) else f"a {type(value).__name__}"
        raise ConfigError(
            f'{where} has {keys}; expected {{"messages": [{{"role": ..., "content": ...}}, ...]}}, or prompt and '
            "completion"
        )
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ConfigError(f"{where}: message {number} is {message!r:.80}; expected role and content as texts")
    return messages


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())

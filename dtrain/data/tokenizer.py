"""A tokenizer from a local ``tokenizer.json``, by the library `tokenizers`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.errors import ConfigError, nearest

if TYPE_CHECKING:
    from torch import Tensor

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIG, "chat_template.jinja", "special_tokens_map.json")
NEEDS_TOKENIZERS = "needs the library tokenizers; install it with pip install 'dtrain[data]'"

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|im_end|>")


class TokenizerFile:
    """A tokenizer, with the token that ends a document.

    Attributes:
        path: its ``tokenizer.json``.
        sha256: of that file, hex.
        vocabulary: its tokens by text.
        vocab_size: largest token + 1, added tokens included.
        end_id: token that ends a document: the one asked for, else ``eos_token`` of the ``tokenizer_config.json``
            beside the file, else a token with a common name for it, such as ``<|endoftext|>``; None if there is none.
    """

    def __init__(self, path: Path, end_token: str | None = None) -> None:
        """Reads ``path``, a ``tokenizer.json`` or the folder that holds one.

        Raises:
            ConfigError: it is missing, is no tokenizer, or has no ``end_token``; or the library is not installed.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError(f"{path} {NEEDS_TOKENIZERS}") from None
        self.path = path / TOKENIZER if path.is_dir() else path
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise ConfigError(f"the tokenizer {self.path} cannot be read: {error.strerror}") from None
        try:
            self._tokenizer: Any = Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain exceptions
            raise ConfigError(f"{self.path} is no tokenizer.json of the library tokenizers: {error}") from None
        self._tokenizer.no_padding()  # a file may ask for both, which would change the text
        self._tokenizer.no_truncation()
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        vocabulary = self.vocabulary
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not self.vocab_size:
            raise ConfigError(f"{self.path} has an empty vocabulary")
        if end_token is not None and end_token not in vocabulary:
            special = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
            raise ConfigError(f"{self.path} has no token {end_token!r}{nearest(end_token, special)}")
        names = (end_token,) if end_token is not None else (self._configured_end(), *_END_TOKENS)
        self.end_id: int | None = next((vocabulary[name] for name in names if name in vocabulary), None)

    def _configured_end(self) -> str | None:
        try:
            config = json.loads((self.path.parent / TOKENIZER_CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        token = config.get("eos_token") if isinstance(config, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each text, without the special tokens that a template would add."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, tokens: Iterable[int] | Tensor) -> str:
        """Returns the text of 1-D ``tokens``, special tokens included; those outside the vocabulary become U+FFFD."""
        values = [int(token) for token in tokens]
        runs = groupby(values, key=lambda token: 0 <= token < self.vocab_size)
        texts = (
            self._tokenizer.decode(list(run), skip_special_tokens=False) if known else "\ufffd" * len(list(run))
            for known, run in runs
        )
        return "".join(texts)


def copy_tokenizer(file: Path, end_id: int | None, folder: Path) -> None:
    """Copies a ``tokenizer.json``, and the files of transformers beside it, to a folder that transformers loads.

    Args:
        end_id: token that ends a document, or None; named in ``tokenizer_config.json`` if there is none beside the
            file.
    """
    folder.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        source = file if name == TOKENIZER else file.parent / name
        if source.is_file():
            (folder / name).write_bytes(source.read_bytes())
    if not (folder / TOKENIZER_CONFIG).is_file():
        added = json.loads((folder / TOKENIZER).read_text(encoding="utf-8")).get("added_tokens", [])
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        names = [token["content"] for token in added if token["id"] == end_id]
        config |= {"eos_token": names[0]} if names else {}
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

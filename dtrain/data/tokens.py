"""Opens folders of token shards as a data set."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from dtrain.config.data import TokensDataConfig
from dtrain.data.dataset import Dataset, SampleSource
from dtrain.data.mixture import BLOCK, Concatenation, HeldOut, Mixture, NotHeldOut
from dtrain.data.packing import read_plan
from dtrain.data.shards.reader import TokenShards
from dtrain.data.token_samples import PackedDocuments, ShardWindows, mean_context
from dtrain.data.tokenizer import TokenizerFile
from dtrain.errors import ConfigError
from dtrain.tasks import Language


def load_tokens(config: TokensDataConfig, seq_len: int) -> Dataset:
    """Opens the folders that ``config`` names as samples of ``seq_len`` tokens.

    Raises:
        ConfigError: a folder holds no shards, too few tokens or another vocabulary than the first; a plan of packing
            is missing.
    """
    weights = config.mixture or {config.path: 1.0}
    folders = [_Folder.open(name, config, seq_len) for name in weights]
    apart = None if config.validation_path is None else _Folder.open(config.validation_path, config, seq_len)
    _check_same_vocabulary([*folders, apart] if apart else folders)
    total = sum(weights.values())
    if apart is None:
        train, validation = _hold_out(folders, [weight / total for weight in weights.values()], config)
        how = f"{config.validation_percent:g} % of the samples held out for validation"
    else:
        train, validation = [folder.source for folder in folders], apart.source
        how = f"validation on {apart.describe()}"
    shards = folders[0].shards
    source = train[0] if len(train) == 1 else _mix(train, weights)
    parts = [
        folder.describe() if len(folders) == 1 else f"{100 * weight / total:g} % from {folder.describe()}"
        for folder, weight in zip(folders, weights.values(), strict=True)
    ]
    return Dataset(
        source,
        validation,
        _fingerprint(config, folders, apart),
        f"data=tokens: {', '.join(parts)}; {how}",
        Language(shards.vocab_size, ShardCodec(shards)),
        shards.tokenizer_file,
        mean_context(source) if config.documents == "mask" else None,
    )


@dataclass(frozen=True, eq=False)
class _Folder:
    """A folder of shards as samples.

    Attributes:
        name: the folder as the user names it.
        plan: sha256 of its plan of packing; empty for windows.
        counted: share of the targets that count.
    """

    name: str
    shards: TokenShards
    source: SampleSource
    plan: str
    counted: float

    @classmethod
    def open(cls, name: str, config: TokensDataConfig, seq_len: int) -> _Folder:
        path = Path(os.path.expandvars(name)).expanduser()
        shards = TokenShards.open(path, config.vocab_size)
        plan, counted = "", 1.0
        if config.pack == "best_fit":
            packing, plan = read_plan(path, seq_len, shards.fingerprint)
            source: SampleSource = PackedDocuments(shards, packing, seq_len)
            counted = packing.num_targets / max(1, packing.num_samples * seq_len)
        else:
            masks = config.documents == "mask"
            source = ShardWindows(shards, seq_len, masks)
            num_pairs = source.num_samples * seq_len
            if masks and num_pairs:
                counted = 1 - int(shards.document_ends.search(np.array([num_pairs]))[0]) / num_pairs
        if not source.num_samples:
            raise ConfigError(
                f"{name} holds {shards.num_tokens:,} tokens, which give no sample of model.max_seq_len={seq_len}; add "
                "text or lower model.max_seq_len"
            )
        return cls(name, shards, source, plan, counted)

    def describe(self) -> str:
        return (
            f"{self.name} ({self.shards.num_tokens:,} tokens, {self.shards.num_documents:,} documents, "
            f"{self.source.num_samples:,} samples, {100 * self.counted:.2f} % of the targets count)"
        )


def _hold_out(
    folders: Sequence[_Folder], weights: Sequence[float], config: TokensDataConfig
) -> tuple[list[SampleSource], SampleSource]:
    """Returns the training samples of each folder, and those held out, in the proportion of ``weights``."""
    train: list[SampleSource] = []
    counts = []
    for folder in folders:
        num_samples = folder.source.num_samples
        if num_samples < 2:
            raise ConfigError(
                f"{folder.name} gives one sample, but training and validation need one each; add text, lower "
                "model.max_seq_len or set data.validation_path"
            )
        counts.append(max(1, int(num_samples * config.validation_percent / 100)))
        train.append(NotHeldOut(folder.source, counts[-1]))
    # as many as the scarcest folder allows: the loss of validation is then that of the mixture
    scale = min(count / weight for count, weight in zip(counts, weights, strict=True))
    held_out = [
        HeldOut(folder.source, count, max(1, round(scale * weight)))
        for folder, count, weight in zip(folders, counts, weights, strict=True)
    ]
    return train, held_out[0] if len(held_out) == 1 else Concatenation(held_out)


def _mix(sources: Sequence[SampleSource], weights: Mapping[str, float]) -> Mixture:
    mixture = Mixture(sources, list(weights.values()))
    for (name, weight), share in zip(weights.items(), mixture.shares, strict=True):
        if not share:
            raise ConfigError(
                f"data.mixture gives {name} the weight {weight:g} of {sum(weights.values()):g}, less than one sample "
                f"in {BLOCK:,}; raise it or leave the folder out"
            )
    return mixture


def _check_same_vocabulary(folders: Iterable[_Folder]) -> None:
    first, *others = folders
    for other in others:
        for what, own, expected in (
            ("a vocabulary of", other.shards.vocab_size, first.shards.vocab_size),
            ("a tokenizer of sha256", other.shards.tokenizer_sha256, first.shards.tokenizer_sha256),
        ):
            if own != expected:
                raise ConfigError(
                    f"{other.name} has {what} {own!s:.12}, but {first.name} {expected!s:.12}; their tokens mean other "
                    "text: tokenize both with the same tokenizer"
                )


def _fingerprint(config: TokensDataConfig, folders: Sequence[_Folder], apart: _Folder | None) -> str:
    weights = list(config.mixture.values()) or [1.0]
    values = {
        "documents": config.documents,
        "pack": config.pack,
        "folders": [[f.shards.fingerprint, f.plan, w] for f, w in zip(folders, weights, strict=True)],
        "validation": [apart.shards.fingerprint, apart.plan] if apart else config.validation_percent,
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class ShardCodec:
    """Text of the shards' tokens, through the tokenizer beside them; it is opened for the first text."""

    def __init__(self, shards: TokenShards) -> None:
        self._shards = shards

    @property
    def end_id(self) -> int | None:
        return self._shards.end_id

    def decode(self, tokens: Iterable[int] | Tensor) -> str:
        file = self._shards.tokenizer_file
        if file is None:
            values = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
            return " ".join(map(str, values))
        return TokenizerFile(file).decode(tokens)

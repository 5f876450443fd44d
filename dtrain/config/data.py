"""The keys of the sources of data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dtrain.config.fields import CheckedRecord, at_least, between, one_of, option, setting
from dtrain.errors import ConfigError


@dataclass(frozen=True)
class DataConfig(CheckedRecord):
    """Text, images or numbers to train on. See docs/run/data.md.

    Attributes:
        is_language: whether samples are sequences of tokens.
    """

    is_language: ClassVar[bool] = True

    name: str = option("stdlib")
    validation_percent: float = between(
        5.0,
        0.0,
        50.0,
        "Percentage of files or samples that are held out for validation; of glyphs, of an epoch, in other fonts.",
    )
    prefetch: int = at_least(1, 0, "Steps whose batches are prepared in a thread ahead of the step; 0: none.")


@dataclass(frozen=True)
class StdlibDataConfig(DataConfig):
    """Source text of the running Python's standard library: real text, no download."""

    name: str = option("stdlib")


@dataclass(frozen=True)
class TextDataConfig(DataConfig):
    """Any text files."""

    name: str = option("text")
    files: str = setting(
        "", "Glob of the files, such as '/data/**/*.txt' or, for chat, '*.jsonl'; required.", is_path=True
    )
    tokenizer: str | None = setting(
        None,
        "tokenizer.json, or for chat the folder of a tokenizer with a chat template; text with null: bytes.",
        is_path=True,
    )

    def _check(self) -> None:
        if not self.files:
            raise ConfigError(f"data=text needs {self._key('files')}, a glob such as data.files='/data/**/*.txt'")


@dataclass(frozen=True)
class TokensDataConfig(DataConfig):
    """Token shards that `dtrain data tokenize` has written, or those of llm.c or Megatron."""

    name: str = option("tokens")
    path: str = setting("", "Folder of token shards; required, unless mixture is given.", is_path=True)
    mixture: dict[str, float] = setting(
        {}, "Folders of token shards and their weights, such as {web: 0.7, code: 0.3}.", is_path=True
    )
    vocab_size: int | None = at_least(
        None, 1, "Vocabulary of shards of llm.c or Megatron, whose headers lack it; null for those of dtrain."
    )
    validation_path: str | None = setting(
        None, "Folder of token shards to validate on; null: validation_percent.", is_path=True
    )
    documents: str = one_of(
        "mask", "cross", doc="mask: tokens do not see other documents, and loss stops at the border; cross: one stream."
    )
    pack: str = one_of(
        "windows",
        "best_fit",
        doc="windows: the stream in equal parts; best_fit: whole documents (dtrain data pack).",
    )

    def _check(self) -> None:
        if bool(self.path) == bool(self.mixture):
            raise ConfigError(
                f"data=tokens needs {self._key('path')}, a folder of token shards, or {self._key('mixture')}, such as "
                "data.mixture={tokens/web: 0.7, tokens/code: 0.3}; and not both"
            )
        for folder, weight in self.mixture.items():
            if not 0 < weight < float("inf"):
                raise ConfigError(f"{self._key('mixture')} gives {folder} the weight {weight:g}; expected above 0")
        if self.validation_path in (self.path, *self.mixture):
            raise ConfigError(f"{self._entry('validation_path')} is trained on; name another folder, or null")
        if self.pack == "best_fit" and self.documents == "cross":
            raise ConfigError(
                f"{self._entry('pack')} puts unrelated documents beside each other, which needs "
                f"{self._key('documents')}=mask"
            )


@dataclass(frozen=True)
class ChatDataConfig(DataConfig):
    """Conversations in JSON lines; loss on what the assistant says."""

    name: str = option("chat")
    files: str = setting(
        "", "Glob of the files, such as '/data/**/*.txt' or, for chat, '*.jsonl'; required.", is_path=True
    )
    tokenizer: str | None = setting(
        None,
        "tokenizer.json, or for chat the folder of a tokenizer with a chat template; text with null: bytes.",
        is_path=True,
    )

    def _check(self) -> None:
        for name, example in (("files", "data.files='chat/*.jsonl'"), ("tokenizer", "data.tokenizer=/models/qwen3")):
            if not getattr(self, name):
                raise ConfigError(f"data=chat needs {self._key(name)}, such as {example}")


_TASKS = (
    "classification: learn the class; denoising: learn to remove noise from images of a class, which makes images "
    "(a diffusion model)."
)


@dataclass(frozen=True)
class ImagesDataConfig(DataConfig):
    """Images in a folder for each class."""

    is_language: ClassVar[bool] = False

    name: str = option("images")
    path: str = setting("", "Folder with a folder of images for each class; required.", is_path=True)
    validation_path: str | None = setting(
        None,
        "Such a folder of images to validate on, with the same classes; null: validation_percent of path.",
        is_path=True,
    )
    task: str = one_of("classification", "denoising", doc=_TASKS)
    size: int = at_least(64, 4, "Height and width of the images that the model sees.")
    channels: str = one_of("rgb", "gray", doc="Color or gray values.")
    augment: str = one_of(
        "none",
        "crop",
        "crop_flip",
        doc="Random part of each training image, other ones in each epoch; crop_flip: half of them mirrored.",
    )
    workers: int = at_least(1, 0, "Processes of a rank that decode images; 0: the thread that prepares batches.")

    def _check(self) -> None:
        if not self.path:
            raise ConfigError(
                f"data=images needs {self._key('path')}, a folder with a folder of images for each class, such as "
                "data.path=photos with photos/cat/1.jpg and photos/dog/1.jpg"
            )
        if self.validation_path == self.path:
            raise ConfigError(f"{self._entry('validation_path')} is trained on; name another folder, or null")


@dataclass(frozen=True)
class GlyphsDataConfig(DataConfig):
    """Digits and letters in the fonts of matplotlib, moved, turned and scaled at random: images, no download."""

    is_language: ClassVar[bool] = False

    name: str = option("glyphs")
    task: str = one_of("classification", "denoising", doc=_TASKS)
    size: int = at_least(32, 8, "Height and width of the images that the model sees.")
    characters: str = one_of("all", "digits", doc="62 classes, or ten.")


@dataclass(frozen=True)
class ArraysDataConfig(DataConfig):
    """Tensors x and y of safetensors files: regression, or classification if y has whole numbers."""

    is_language: ClassVar[bool] = False

    name: str = option("arrays")
    path: str = setting("", "File of safetensors with x [N, ...] and y [N] or [N, D]; required.", is_path=True)
    validation_path: str | None = setting(
        None, "Such a file to validate on; null: validation_percent of path.", is_path=True
    )
    standardize: bool = setting(
        True, "Subtract the mean of the training data from x, and from y in a regression, and divide by its deviation."
    )

    def _check(self) -> None:
        if not self.path:
            raise ConfigError(
                f"data=arrays needs {self._key('path')}, a file such as data.path=train.safetensors with x and y"
            )
        if self.validation_path == self.path:
            raise ConfigError(f"{self._entry('validation_path')} is trained on; name another file, or null")


@dataclass(frozen=True)
class FriedmanDataConfig(DataConfig):
    """Numbers of a known function of ten variables with noise (Friedman, 1991): regression, no download."""

    is_language: ClassVar[bool] = False

    name: str = option("friedman")
    samples: int = at_least(20000, 40, "Number of samples.")
    noise: float = at_least(1.0, 0.0, "Standard deviation of the noise in the target, whose own is about 5.")

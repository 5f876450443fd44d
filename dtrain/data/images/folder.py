"""Image files in a folder for each class."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dtrain.config.data import ImagesDataConfig
from dtrain.data.draws import CONTENT, generator
from dtrain.data.images.decode import FORMATS, ImageError, View, decode
from dtrain.data.images.pictures import Pictures, PictureSet, Pixels
from dtrain.data.images.workers import Decoder, undecodable
from dtrain.data.paths import expanded, require_other
from dtrain.data.sampling import Indices
from dtrain.data.text import is_held_out, name_hash
from dtrain.errors import ConfigError

SUFFIXES = tuple(FORMATS)

_SHARES = (0.25, 1.0)  # of an image's area, as part of it
_ASPECT = 4 / 3
_CENTER, _DEVIATION = 0.5, 0.5  # so that values are in [-1, 1]
_LOOKED_AT = 32  # files that are read when a folder is opened
_MARKED = 1000  # files between two calls of ``on_progress``


@dataclass(frozen=True, eq=False)
class ImageFiles(Pictures):
    """Image files, decoded when they are read.

    Attributes:
        root: folder of the classes.
        names: of the files, relative to the root.
        classes: int64 [N].
        augment: see ``dtrain.config.data.ImagesDataConfig``; ``none`` shows the largest square in the middle.
    """

    root: str
    names: Sequence[str]
    classes: Indices
    augment: str
    decoder: Decoder

    @property
    def num_samples(self) -> int:
        return len(self.names)

    def file(self, sample_id: int) -> str:
        return self.names[sample_id % len(self.names)]

    def read(self, ids: Indices) -> tuple[Pixels, Indices]:
        samples = ids % len(self.names)
        files = [f"{self.root}/{self.names[sample]}" for sample in samples.tolist()]
        views = [() if self.augment == "none" else self._view(sample) for sample in ids.tolist()]
        # transposed as bytes, a fourth of the size
        pixels = np.ascontiguousarray(self.decoder.decode(files, views).transpose(0, 3, 1, 2))
        return pixels * np.float32(1 / 255), self.classes[samples]

    def _view(self, sample: int) -> View:
        share, aspect, right, down, mirror = generator(sample, CONTENT).random(5).tolist()
        low, high = _SHARES
        is_mirrored = self.augment == "crop_flip" and mirror < 0.5
        return low + (high - low) * share, _ASPECT ** (2 * aspect - 1), right, down, is_mirrored


def open_folder(config: ImagesDataConfig, on_progress: Callable[[], None] = lambda: None) -> PictureSet:
    """Lists the images that ``config`` names, and decodes some of them.

    An image is held out for validation by the hash of its name, the path below ``data.path``.

    Args:
        on_progress: called now and then.

    Raises:
        ConfigError: a folder is missing or does not hold a folder of images for each of at least two classes, the
            classes of validation are others, or one of the decoded images is damaged.
    """
    found = _list_classes("data.path", config.path, on_progress)
    labels = tuple(found)
    root = expanded(config.path)
    if config.validation_path is None:
        train, validation = _split(found, config)
        roots = (root, root)
    else:
        train, validation = found, _list_classes("data.validation_path", config.validation_path, on_progress)
        roots = (root, expanded(config.validation_path))
        require_other(config, "folder")
        if labels != tuple(validation):
            raise ConfigError(_difference(config, set(labels), set(validation)))
    # one decoder, so that a rank has no more processes than it was given
    decoder = Decoder(config.workers, config.size, config.channels)
    images = ImageFiles(roots[0], *_flatten(train), config.augment, decoder)
    held_out = ImageFiles(roots[1], *_flatten(validation), "none", decoder)
    settings = [labels, config.task, config.size, config.channels, config.augment, config.validation_percent]
    settings += [_look_at(images, config, on_progress), _look_at(held_out, config, on_progress)]
    if config.validation_path is None:
        total, where = len(images.names) + len(held_out.names), "of them held out for validation"
    else:
        total, where = len(images.names), f"in {config.validation_path} to validate on"
    return PictureSet(
        images,
        held_out,
        labels,
        (3 if config.channels == "rgb" else 1, config.size, config.size),
        _CENTER,
        _DEVIATION,
        hashlib.sha256(json.dumps(settings).encode()).hexdigest(),
        f"data=images: {total:,} images of {len(labels)} classes in {config.path}, {len(held_out.names):,} {where}",
    )


def _list_classes(key: str, path: str, on_progress: Callable[[], None]) -> dict[str, list[str]]:
    """Returns the names of the images of each class, relative to ``path``, all in sorted order."""
    root = Path(expanded(path))
    if not root.is_dir():
        kind = "is no folder" if root.exists() else "is not found"
        raise ConfigError(
            f"{key}={path} {kind} (working directory {os.getcwd()}); expected a folder with a folder of images for "
            "each class"
        )
    try:
        entries = sorted(entry.name for entry in root.iterdir() if not entry.name.startswith("."))
        labels = [name for name in entries if (root / name).is_dir()]
        found = {label: sorted(_images(root, label, on_progress)) for label in labels}
    except OSError as error:
        raise ConfigError(
            f"{key}={path} cannot be read: {error.filename}: {error.strerror}; make it readable"
        ) from None
    if not labels:
        images = sum(name.lower().endswith(SUFFIXES) for name in entries)
        inside = f"{images} images of no class" if images else "no folder"
        raise ConfigError(f"{key}={path} holds {inside}; expected a folder for each class: {path}/CLASS/1.jpg")
    if empty := [label for label in labels if not found[label]]:
        raise ConfigError(
            f"{key}={path}: {', '.join(map(repr, empty[:5]))}{' and more' if len(empty) > 5 else ''} without an image; "
            f"expected files {', '.join(SUFFIXES)} in the folder of each class"
        )
    if len(labels) < 2:
        raise ConfigError(f"{key}={path} holds the class {labels[0]!r} alone; expected at least two")
    return found


def _images(root: Path, label: str, on_progress: Callable[[], None]) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(root / label, onerror=fail, followlinks=True):
        on_progress()
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = Path(folder).relative_to(root).as_posix()
        # a name that begins with a dot is a system's, such as ._1.jpg
        yield from (f"{below}/{name}" for name in files if name.lower().endswith(SUFFIXES) and name[0] != ".")


def _split(found: dict[str, list[str]], config: ImagesDataConfig) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Returns the images of each class to train on and those to validate on; every class has one to train on."""
    held_out: dict[str, list[str]] = {}
    for label, names in found.items():
        held_out[label] = [name for name in names if is_held_out(name, config.validation_percent)]
        if len(held_out[label]) == len(names):
            held_out[label].remove(max(names, key=name_hash))
    if not any(held_out.values()):
        held_out = {label: [min(names, key=name_hash)] if len(names) > 1 else [] for label, names in found.items()}
    if not any(held_out.values()):
        raise ConfigError(
            f"data.path={config.path} holds one image of each class; training and validation need different ones: "
            "add images, or name data.validation_path"
        )
    return {label: sorted(set(names) - set(held_out[label])) for label, names in found.items()}, held_out


def _difference(config: ImagesDataConfig, classes: set[str], others: set[str]) -> str:
    lacking, added = (", ".join(map(repr, sorted(names)[:5])) for names in (classes - others, others - classes))
    found = " and ".join([f"it lacks {lacking}"] * bool(lacking) + [f"it has {added}"] * bool(added))
    return (
        f"data.validation_path={config.validation_path} has other classes than data.path={config.path}: {found}; "
        "expected the same folders in both"
    )


def _flatten(side: dict[str, list[str]]) -> tuple[list[str], Indices]:
    counts = [len(names) for names in side.values()]
    return [name for names in side.values() for name in names], np.repeat(np.arange(len(side)), counts)


def _look_at(images: ImageFiles, config: ImagesDataConfig, on_progress: Callable[[], None]) -> str:
    """Returns a hash of all names and sizes, and of the content of some files, which are decoded.

    To read all may take longer than a start can wait.
    """
    digest = hashlib.sha256(images.classes.tobytes())
    looked_at = set(np.linspace(0, len(images.names) - 1, min(_LOOKED_AT, len(images.names))).astype(int).tolist())
    for place, name in enumerate(images.names):
        file = f"{images.root}/{name}"
        if place in looked_at or place % _MARKED == 0:
            on_progress()
        try:
            digest.update(f"{name}/{os.path.getsize(file)}/".encode(errors="surrogateescape"))
            if place in looked_at:
                digest.update(Path(file).read_bytes())
                decode(file, (), config.size, config.channels)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}; make it readable, or take it away") from None
        except ImageError as error:
            raise ConfigError(undecodable(str(error))) from None
    return digest.hexdigest()

"""Digits and letters in fonts that matplotlib brings: images of many classes without a download.

Each character of each font is drawn once, larger than needed. A sample is that bitmap turned, scaled, slanted and
moved at random. The fonts of validation are never trained on, so its accuracy is that of reading a new font.
"""

from __future__ import annotations

import hashlib
import json
import string
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from dtrain.config.data import GlyphsDataConfig
from dtrain.data.draws import CONTENT, generator
from dtrain.data.images.pictures import Pictures, PictureSet, Pixels
from dtrain.data.sampling import Indices
from dtrain.errors import ConfigError

_DEJAVU = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-BoldItalic")),
)
TRAINING_FONTS = (*_DEJAVU, "STIXGeneral", "STIXGeneralBolIta", "STIXGeneralItalic", "cmb10", "cmr10", "cmti10")
VALIDATION_FONTS = ("DejaVuSansMono-Bold", "DejaVuSerif-Italic", "STIXGeneralBol", "cmss10", "cmtt10")

_DRAWS = 20  # samples of a character of a font in an epoch
_LARGEST_BITMAP = 128
_EM = 0.75  # size of a font, of the bitmap's side
_TURN = 15.0  # degrees
_SCALE = 0.15
_SLANT = 0.15
_SHIFT = 0.08  # of the image's side
_NOISE = 0.2


def characters(which: str) -> str:
    """Returns the characters of ``data.characters``, one a class."""
    return string.digits if which == "digits" else string.digits + string.ascii_letters


@dataclass(frozen=True, eq=False)
class Glyphs(Pictures):
    """Characters of fonts, changed at random; also those of validation, whose changes are always the same.

    Attributes:
        corners: of the bitmaps, uint32 [fonts, characters, R, R]; see ``_corners``.
        size: height and width of the images.
        noise: largest of the uniform noise that is added to a pixel.
        count: number of samples.
    """

    corners: NDArray[np.uint32]
    size: int
    noise: float
    count: int

    @property
    def num_samples(self) -> int:
        return self.count

    def read(self, ids: Indices) -> tuple[Pixels, Indices]:
        num_fonts, num_classes = self.corners.shape[:2]
        glyphs = ids % self.count % (num_fonts * num_classes)
        draws = np.empty((len(ids), 7))
        images = np.empty((len(ids), self.size * self.size), np.float32)
        for row, sample in enumerate(ids):
            rng = generator(sample, CONTENT)
            rng.random(out=draws[row])
            if self.noise:
                rng.random(dtype=np.float32, out=images[row])
        transforms, levels = self._transforms(2 * draws[:, :6] - 1), self.noise * draws[:, 6:].astype(np.float32)
        glyph = _interpolate(self.corners.reshape(-1, *self.corners.shape[2:]), glyphs, transforms, self.size)
        if self.noise:
            images *= levels
            images += glyph * (1 - levels)
        else:
            images = glyph
        return images.reshape(-1, 1, self.size, self.size), glyphs % num_classes

    def _transforms(self, draws: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the maps [B, 2, 3] from a pixel of the image to the bitmap, both in [-1, 1], for draws in [-1, 1]."""
        turn, scale, stretch, slant, right, down = draws.T
        angle = np.deg2rad(_TURN) * turn
        # the two axes differ by less than they are scaled together
        width, height = np.exp(_SCALE * (scale + 0.3 * stretch)), np.exp(_SCALE * (scale - 0.3 * stretch))
        cosine, sine = np.cos(angle), np.sin(angle)
        maps = np.empty((len(draws), 2, 3))
        maps[:, 0, 0], maps[:, 0, 1] = cosine / width, (sine + _SLANT * slant) / width
        maps[:, 1, 0], maps[:, 1, 1] = -sine / height, cosine / height
        maps[:, 0, 2], maps[:, 1, 2] = 2 * _SHIFT * right, 2 * _SHIFT * down
        return maps


def _corners(bitmaps: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Returns each pixel [..., R, R] with its neighbors to the right, below, and both, in one number: one is read."""
    padded = np.pad(bitmaps, [*[(0, 0)] * (bitmaps.ndim - 2), (0, 1), (0, 1)])
    neighbors = (padded[..., :-1, :-1], padded[..., :-1, 1:], padded[..., 1:, :-1], padded[..., 1:, 1:])
    return np.stack(neighbors, axis=-1).view(np.uint32)[..., 0]


def _interpolate(
    corners: NDArray[np.uint32], glyphs: Indices, maps: NDArray[np.float64], size: int
) -> NDArray[np.float32]:
    """Returns images [B, size * size] in [0, 1]: bitmaps, between pixels bilinear, at the mapped places of the pixels.

    Outside of a bitmap is its border, which is 0.

    Args:
        corners: [glyphs, R, R].
        glyphs: which of them, [B].
        maps: [B, 2, 3] from a pixel of the image to the bitmap, both in [-1, 1].
    """
    side = corners.shape[-1]
    axis = (2 * np.arange(size) + 1) / size - 1
    grid = np.stack((np.tile(axis, size), np.repeat(axis, size), np.ones(size * size)))
    places = ((maps @ grid + 1) * (side / 2) - 0.5).astype(np.float32)
    np.clip(places, 0, side - 1, out=places)
    first = places.astype(np.int32)
    places -= first
    x, y = places[:, 0], places[:, 1]
    found = corners.reshape(-1)[first[:, 1] * side + first[:, 0] + (glyphs * side * side)[:, None]]
    values = found.view(np.uint8).reshape(*x.shape, 4).astype(np.float32)
    top = values[..., 0] + (values[..., 1] - values[..., 0]) * x
    bottom = values[..., 2] + (values[..., 3] - values[..., 2]) * x
    images: NDArray[np.float32] = (top + (bottom - top) * y) * np.float32(1 / 255)
    return images


def open_glyphs(config: GlyphsDataConfig) -> PictureSet:
    """Draws the glyphs that ``config`` names.

    Raises:
        ConfigError: the installed matplotlib lacks a font.
    """
    train = draw_glyphs(config.characters, config.size, TRAINING_FONTS)
    validation = draw_glyphs(config.characters, config.size, VALIDATION_FONTS)
    labels = tuple(characters(config.characters))
    count = _DRAWS * len(labels) * len(TRAINING_FONTS)
    held_out = max(len(labels), round(count * config.validation_percent / 100))
    noise = _NOISE if config.task == "classification" else 0.0
    # the bitmaps, because another version of pillow may draw them differently
    digest = hashlib.sha256(json.dumps([config.task, config.size, count, held_out]).encode())
    digest.update(train.tobytes() + validation.tobytes())
    return PictureSet(
        Glyphs(_corners(train), config.size, noise, count),
        Glyphs(_corners(validation), config.size, noise, held_out),
        labels,
        (1, config.size, config.size),
        float(train.mean() / 255),
        float(train.std() / 255),
        digest.hexdigest(),
        f"data=glyphs: {len(labels)} characters, {count:,} images of them in {len(TRAINING_FONTS)} fonts an epoch; "
        f"{held_out:,} in {len(VALIDATION_FONTS)} other fonts held out for validation",
    )


def draw_glyphs(which: str, size: int, fonts: tuple[str, ...]) -> NDArray[np.uint8]:
    """Returns the bitmaps of all characters in ``fonts``, uint8 [fonts, characters, R, R], R about twice ``size``.

    Raises:
        ConfigError: the installed matplotlib lacks a font.
    """
    side = min(2 * size, _LARGEST_BITMAP)
    opened = [_open_font(font, round(_EM * side)) for font in fonts]
    blur = ImageFilter.BoxBlur(max(side / size - 1, 0) / 2)  # else thin strokes would fall between the sampled places
    drawn = np.zeros((len(fonts), len(characters(which)), side, side), np.uint8)
    for bitmaps, font in zip(drawn, opened, strict=True):
        for bitmap, character in zip(bitmaps, characters(which), strict=True):
            image = Image.new("L", (side, side))
            # all on one line, so that a small letter differs from its capital
            ImageDraw.Draw(image).text((side / 2, (1 + _EM / 2) * side / 2), character, 255, font, anchor="ms")
            bitmap[1:-1, 1:-1] = np.asarray(image.filter(blur))[1:-1, 1:-1]
    return drawn


def _open_font(name: str, size: int) -> ImageFont.FreeTypeFont:
    package = find_spec("matplotlib")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "mpl-data" / "fonts" / "ttf" / f"{name}.ttf"
    try:
        return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)
    except OSError as error:
        raise ConfigError(f"data=glyphs cannot read the font {path}: {error}; install matplotlib again") from None

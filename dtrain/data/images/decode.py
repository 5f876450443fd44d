"""Decodes image files; as ``python -m dtrain.data.images.decode`` a process that does so. No torch and no numpy.

Standard input brings a line of JSON for each request, standard output takes ``HEADER`` and the answer: the pixels,
or why there are none. The process ends when the one that started it has ended, since its standard input is at its end.
"""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

HEADER = struct.Struct("<?q")
"""Whether the answer is pixels, and its bytes."""

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".bmp": "BMP", ".webp": "WEBP", ".gif": "GIF"}
"""Suffixes of files, and the formats that are read, whatever the suffix: others may start programs, as EPS does."""

_READ = sorted(set(FORMATS.values()))
_MODES = {"rgb": "RGB", "gray": "L"}
_ORIENTATION = 0x0112  # tag of Exif
_SIDEWAYS = (5, 6, 7, 8)  # its values with width and height swapped

View = Sequence[float]
"""Part of an image: its share of the area, its aspect (width by height), its place from left to right and from top to
bottom, both from 0 to 1, and whether it is mirrored. An empty one is the largest square, in the middle."""


class ImageError(Exception):
    """A file is no image that can be decoded; the message names it."""


def decode_all(files: Sequence[str], views: Sequence[View], size: int, channels: str) -> bytes:
    """Returns the pixels of views of files, [files, size, size, channels].

    Raises:
        ImageError: a file is missing, damaged or of an unknown format.
    """
    return b"".join(decode(file, view, size, channels) for file, view in zip(files, views, strict=True))


def decode(file: str, view: View, size: int, channels: str) -> bytes:
    """Returns the pixels of a view of a file, [size, size, channels], turned as its Exif orientation states.

    Of an animation it is the first image; what is transparent is white.

    Raises:
        ImageError: it is missing, damaged or of an unknown format.
    """
    flat = _read(file, view, size, _MODES[channels])
    part = flat.resize((size, size), Image.Resampling.BILINEAR, box=box(view, *flat.size), reducing_gap=3.0)
    if view and view[4]:
        part = ImageOps.mirror(part)
    return part.tobytes()


def _read(file: str, view: View, size: int, mode: str) -> Image.Image:
    try:
        # libraries warn of what can still be decoded; a size that is a danger to memory is an error of Pillow's
        with warnings.catch_warnings(action="ignore"), Image.open(file, formats=_READ) as image:
            sideways = image.getexif().get(_ORIENTATION) in _SIDEWAYS
            left, top, right, bottom = box(view, *(image.size[::-1] if sideways else image.size))
            # JPEG can be decoded at 1/2, 1/4 or 1/8 of its size, if that leaves enough pixels
            shrink = max(1.0, min(right - left, bottom - top) / size)
            image.draft(mode, (math.ceil(image.size[0] / shrink), math.ceil(image.size[1] / shrink)))
            return _flatten(ImageOps.exif_transpose(image), mode)
    except Exception as error:  # a damaged file makes Pillow raise almost anything
        reason = (
            f"its format is not {', '.join(_READ[:-1])} or {_READ[-1]}"
            if isinstance(error, UnidentifiedImageError)
            else error
        )
        raise ImageError(f"{file} cannot be decoded: {reason}") from error


def box(view: View, width: int, height: int) -> tuple[float, float, float, float]:
    """Returns left, top, right and bottom of a view of an image of this size."""
    if not view:
        side = min(width, height)
        left, top = (width - side) / 2, (height - side) / 2
        return left, top, left + side, top + side
    share, aspect, across, down, _ = view
    area = share * width * height
    wide, high = math.sqrt(area * aspect), math.sqrt(area / aspect)
    fit = min(1.0, width / wide, height / high)
    wide, high = min(max(1.0, wide * fit), width), min(max(1.0, high * fit), height)
    left, top = across * (width - wide), down * (height - high)
    return left, top, min(left + wide, width), min(top + high, height)


def _flatten(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert(mode)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def main() -> None:
    """Answers requests until there are no more."""
    # the process that started this one decides when both end, also when all processes of a job are told to stop
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin.buffer:
        request: dict[str, Any] = json.loads(line)
        try:
            answer = decode_all(**request)
            is_pixels = True
        except ImageError as error:
            answer, is_pixels = str(error).encode(errors="surrogateescape"), False
        answers.write(HEADER.pack(is_pixels, len(answer)))
        answers.write(answer)
        answers.flush()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        os._exit(1)  # the process that started this one has ended

"""Texts for people: counts, times, and what files hold, made safe for a terminal. Imports no torch."""

from __future__ import annotations

from dtrain.redaction.printable import printable
from dtrain.redaction.redact import redact_text

_TEXT_LIMIT = 300  # characters
_UNITS_OF_TIME = (("d", 86400), ("h", 3600), ("min", 60))


def compact(number: float | None) -> str:
    """Formats a count with three digits: ``950``, ``45.2k``, ``124M``; None is empty."""
    if number is None:
        return ""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def rate(number: float, unit: str) -> str:
    """Formats how many ``tokens`` or ``samples`` a second: ``45.2k tok/s``, ``312 samples/s``."""
    return f"{compact(number)} {'tok' if unit == 'tokens' else unit}/s"


def duration(seconds: float) -> str:
    """Formats a time: ``0:42``, ``1:02:03``, ``5 d 3 h``."""
    whole = int(min(max(seconds, 0.0), 1e9))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def span(seconds: float) -> str:
    """Formats a time in its largest unit: ``42 s``, ``3 min``, ``2 h``, ``5 d``."""
    for unit, size in _UNITS_OF_TIME:
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


def bytes_text(nbytes: float) -> str:
    """Formats bytes: ``1.50 GiB``, ``12.25 MiB``."""
    return f"{nbytes / 2**30:.2f} GiB" if abs(nbytes) >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def bytes_range(low: int, high: int) -> str:
    """Formats bounds of bytes; equal ones are one number."""
    return bytes_text(low) if low == high else f"{bytes_text(low)} to {bytes_text(high)}"


def clean(value: object) -> str:
    """Returns a text that a file holds without secrets and control characters, on one line and not too long."""
    text = " ".join(printable(redact_text(value)).split()) if isinstance(value, str) else ""
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}..."

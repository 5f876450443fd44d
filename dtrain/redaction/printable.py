"""Texts that cannot control a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Replaces control characters except newlines and tabs, so that ``text`` cannot control a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)

"""``dtrain formats``, ``dtrain formats NUMBER ...``, ``dtrain formats failures`` and ``dtrain formats picture``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dtrain.errors import ConfigError, nearest
from dtrain.tools.formats.tables import NUMBER_NOTE, Number, format_tables, notes, number_table, parse_number
from dtrain.tools.tables import show

_USAGE = """usage: dtrain formats
       dtrain formats NUMBER ...
       dtrain formats failures
       dtrain formats picture [FILE.png]

  (nothing)  what each format is: bits, range, precision, whether it needs scaling; and how fast GPUs are in it
  NUMBER     what each format makes of a number: dtrain formats 0.1 1e-8 70000
  failures   how low precision goes wrong, each failure made to happen, detected, and cured by what dtrain does
  picture    the error of every format across magnitudes, by default in formats.png

On a terminal the tables are drawn; elsewhere they are Markdown."""
_WORDS = ("failures", "picture")


def main(argv: Sequence[str]) -> int:
    """Prints or draws what was asked for; returns the exit code.

    Raises:
        ConfigError: a word that is neither a number nor known here.
    """
    words = list(argv)
    if words in (["-h"], ["--help"]):
        print(_USAGE)
    elif not words:
        show(format_tables())
        print("\n".join(notes()))
    elif words == ["failures"]:
        from dtrain.tools.formats.failures import show_failures  # brings torch; the other answers wait for nothing

        show_failures()
    elif words[0] == "picture":
        return _picture(words[1:])
    else:
        numbers = [(word, _number(word)) for word in words]
        show([number_table(word, number) for word, number in numbers])
        print(NUMBER_NOTE)
    return 0


def _number(word: str) -> Number:
    number = parse_number(word)
    if number is None:
        hint = nearest(word, _WORDS) if word.isalpha() else ""
        raise ConfigError(
            f"dtrain formats takes numbers from 1e-300 to 1e300, or 'failures' or 'picture'; got '{word}'{hint}"
        )
    return number


def _picture(words: Sequence[str]) -> int:
    path = Path(words[0] if words else "formats.png")
    if len(words) > 1 or path.suffix != ".png":
        raise ConfigError(f"dtrain formats picture takes one file that ends in .png; got '{' '.join(words)}'")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"dtrain formats picture: there is no folder '{path.parent}'")
    from dtrain.tools.formats.picture import draw  # brings matplotlib

    draw(path)
    print(path)
    return 0

"""``dtrain formats``, and ``dtrain formats`` with numbers, ``picture`` or ``histogram``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dtrain.errors import ConfigError, nearest
from dtrain.tools.formats.tables import NUMBER_NOTE, Number, format_tables, notes, number_table, parse_number
from dtrain.tools.tables import show

_COMMANDS = """commands:
  (none)               what each format is: bits, range, precision, whether it needs scaling, speed of GPUs
  NUMBER ...           what each format makes of a number: dtrain formats 0.1 1e-8 70000
  picture [FILE.png]   draw the error of every format across magnitudes, by default in formats.png
  histogram RUN [FILE.png] [PATTERN]
                       what the formats would lose of the gradients of a run: a table of the newest sampled step, and
                       in FILE.png the exponents against the formats' ranges; PATTERN chooses parameters, '*' is all

On a terminal the tables are drawn; elsewhere they are Markdown."""
_NAMES = ("picture", "histogram")


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    if words and words[0] not in (*_NAMES, "-h", "--help"):
        words = ["numbers", *words]  # the command that has no name
    try:
        arguments, rest = _parser().parse_known_args(words)
    except SystemExit as stop:  # after --help, or argparse has printed the reason
        return 2 if stop.code else 0
    if rest:
        raise ConfigError(f"dtrain formats cannot read '{rest[0]}' after '{' '.join(argv[: -len(rest)])}'")
    if arguments.command == "numbers":
        show([number_table(word, number) for word, number in arguments.numbers])
        print(NUMBER_NOTE)
    elif arguments.command == "picture":
        from dtrain.tools.formats.picture import draw  # imports matplotlib

        draw(arguments.file)
        print(arguments.file)
    elif arguments.command == "histogram":
        if arguments.run is None:
            raise ConfigError("dtrain formats histogram takes a run directory: dtrain formats histogram runs/mine")
        _histogram(arguments.run, arguments.words)
    else:
        show(format_tables())
        print("\n".join(notes()))
    return 0


def _histogram(run: Path, words: Sequence[str]) -> None:
    from dtrain.tools.formats import histogram  # imports torch

    pictures = [_picture_file(word, "histogram") for word in words if word.endswith(".png")]
    patterns = [word for word in words if not word.endswith(".png")]
    if len(pictures) > 1 or len(patterns) > 1:
        raise ConfigError(f"dtrain formats histogram takes one .png and one pattern; got {' '.join(words)}")
    pattern = patterns[0] if patterns else "*"
    reports = histogram.read_run(run)
    show([histogram.worst_table(reports[-1], pattern)])
    print(histogram.HISTOGRAM_NOTE)
    for path in pictures:
        from dtrain.tools.formats.histogram_picture import draw  # imports matplotlib

        draw(reports, pattern, path)
        print(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "dtrain formats",
        usage="dtrain formats [NUMBER ... | picture [FILE.png] | histogram RUN [FILE.png] [PATTERN]]",
        epilog=_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", help=argparse.SUPPRESS)
    commands.add_parser("numbers").add_argument("numbers", nargs="+", type=_number)
    commands.add_parser("picture").add_argument("file", nargs="?", type=_picture_file, default=Path("formats.png"))
    histogram = commands.add_parser("histogram")
    histogram.add_argument("run", nargs="?", type=Path)
    histogram.add_argument("words", nargs="*")
    return parser


def _number(word: str) -> tuple[str, Number]:
    if word == "failures":
        raise ConfigError(
            "each failure is a script: python docs/experiments/failures/NAME.py; docs/experiments/README.md"
        )
    number = parse_number(word)
    if number is None:
        hint = nearest(word, _NAMES) if word.isalpha() else ""
        raise ConfigError(
            f"dtrain formats takes numbers from 1e-300 to 1e300, or 'picture' or 'histogram'; got '{word}'{hint}"
        )
    return word, number


def _picture_file(word: str, command: str = "picture") -> Path:
    path = Path(word)
    if path.suffix != ".png":
        raise ConfigError(f"dtrain formats {command} takes one file that ends in .png; got '{word}'")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"dtrain formats {command}: there is no folder '{path.parent}'")
    return path

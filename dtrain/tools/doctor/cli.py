"""``dtrain doctor``, ``dtrain doctor engines``, ``dtrain doctor keys`` and ``dtrain doctor folder PATH``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dtrain.errors import ConfigError, nearest
from dtrain.tools.tables import show

_TOPICS = """topics:
  (none)   what this machine can do: software, devices, the dtypes that run and how fast, launchers, trackers
  engines  what each engine can do, what it refuses and why, and which of them can be used here
  keys     every key of dtrain train: its default, its meaning and its values
  folder   folder PATH: whether checkpoints can be saved in that folder (exit code 1: no); by ranks of two
           hosts: folder PATH --other-host on the first, then folder PATH --answer on the second

Nothing is sent, and nothing written but by folder: PATH/dtrain-doctor, which it removes.
On a terminal the tables are drawn; elsewhere they are Markdown."""
_NAMES = ("engines", "keys", "folder")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "dtrain doctor", epilog=_TOPICS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("topic", nargs="?", type=_topic, help=f"{' | '.join(_NAMES)}, see below")
    parser.add_argument("path", nargs="?", metavar="PATH", help="folder to test")
    parser.add_argument("--other-host", action="store_true", help="folder: wait for the answers of another host")
    parser.add_argument("--answer", action="store_true", help="folder: be the other host")
    try:
        arguments, rest = parser.parse_known_args(argv)
    except SystemExit:  # after --help
        return 0
    topic = arguments.topic
    rest = [word for word in (arguments.path,) if word and topic != "folder"] + rest
    if rest:
        raise ConfigError(f"dtrain doctor takes one topic; got '{rest[0]}' too")
    if topic == "folder":
        return _test_folder(arguments)
    if arguments.other_host or arguments.answer:
        raise ConfigError("--other-host and --answer belong to dtrain doctor folder PATH")
    if topic is None:
        from dtrain.tools.doctor.machine import machine_tables  # imports torch, which the other topics do not need

        show(machine_tables())
    else:
        from dtrain.tools.doctor.reference import engine_tables, key_table

        show(engine_tables() if topic == "engines" else [key_table()])
    return 0


def _test_folder(arguments: argparse.Namespace) -> int:
    from dtrain.tools.doctor.folder import answer, check_folder

    path = Path(arguments.path or "").absolute()
    if not arguments.path or not path.is_dir():
        raise ConfigError(f"dtrain doctor folder needs an existing folder, got {arguments.path or 'none'}")
    if arguments.answer:
        answer(path)
        return 0
    table, is_good = check_folder(path, other_host=arguments.other_host)
    show([table])
    return 0 if is_good else 1


def _topic(name: str) -> str:
    if name not in _NAMES:
        raise ConfigError(f"dtrain doctor has no topic '{name}'{nearest(name, _NAMES)}")
    return name

"""``dtrain doctor``, ``dtrain doctor engines`` and ``dtrain doctor keys``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dtrain.errors import ConfigError, nearest
from dtrain.tools.tables import show

_TOPICS = """topics:
  (none)   what this machine can do: software, devices, the dtypes that run and how fast, launchers, trackers
  engines  what each engine can do, what it refuses and why, and which of them can be used here
  keys     every key of dtrain train: its default, its meaning and its values

Nothing is written or sent. On a terminal the tables are drawn; elsewhere they are Markdown."""
_NAMES = ("engines", "keys")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "dtrain doctor", epilog=_TOPICS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("topic", nargs="?", type=_topic, help=f"{' | '.join(_NAMES)}, see below")
    try:
        arguments, rest = parser.parse_known_args(argv)
    except SystemExit:  # after --help
        return 0
    if rest:
        raise ConfigError(f"dtrain doctor takes one topic; got '{rest[0]}' too")
    topic = arguments.topic
    if topic is None:
        from dtrain.tools.doctor.machine import machine_tables  # imports torch, which the other topics do not need

        show(machine_tables())
    else:
        from dtrain.tools.doctor.reference import engine_tables, key_table

        show(engine_tables() if topic == "engines" else [key_table()])
    return 0


def _topic(name: str) -> str:
    if name not in _NAMES:
        raise ConfigError(f"dtrain doctor has no topic '{name}'{nearest(name, _NAMES)}")
    return name

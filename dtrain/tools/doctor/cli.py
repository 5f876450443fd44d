"""``dtrain doctor`` and ``dtrain doctor engines``."""

from __future__ import annotations

from collections.abc import Sequence

from dtrain.errors import ConfigError, nearest
from dtrain.tools.tables import show

_USAGE = """usage: dtrain doctor
       dtrain doctor engines

  (nothing)  what this machine can do: software, devices, the dtypes that run and how fast, launchers, trackers
  engines    what each engine can do, what it refuses and why, and which of them can be used here

Nothing is written, and nothing leaves this machine. On a terminal the tables are drawn; elsewhere they are Markdown."""


def main(argv: Sequence[str]) -> int:
    """Prints what was asked for; returns the exit code.

    Raises:
        ConfigError: a word that means nothing here.
    """
    words = list(argv)
    if words in (["-h"], ["--help"]):
        print(_USAGE)
    elif not words:
        from dtrain.tools.doctor.machine import machine_tables  # brings torch; the other answers wait for nothing

        show(machine_tables())
    elif words == ["engines"]:
        from dtrain.tools.doctor.engines import engine_tables

        show(engine_tables())
    else:
        odd = next((word for word in words if word != "engines"), words[-1])
        raise ConfigError(f"dtrain doctor takes nothing or 'engines'; got '{odd}'{nearest(odd, ['engines'])}")
    return 0

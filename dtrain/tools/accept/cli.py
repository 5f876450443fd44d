"""``dtrain accept [minutes=25] [parts=a,c] [out=DIR]``: checks, measures and profiles a new machine."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import ACCEPT
from dtrain.distributed.launch_env import LaunchEnv
from dtrain.distributed.logging import configure_logging, logger
from dtrain.errors import ConfigError
from dtrain.tools.accept.part import PARTS
from dtrain.tools.accept.run import PAGE_FILE, accept, choose_parts
from dtrain.tools.command import command_text


def main(argv: Sequence[str]) -> int:
    """Runs the parts; returns 0 if all were finished and nothing failed, else 1."""
    config = read_suite([_as_list(word) for word in argv], ACCEPT)
    if config is None:
        return 0
    choose_parts(config.parts, PARTS)
    if config.out == "":
        raise ConfigError("out is empty; name a directory, or leave it null")
    if LaunchEnv.read().launched:
        raise ConfigError("dtrain accept starts its own processes; start it once, without a launcher")
    configure_logging(0)
    folder = Path(config.out or time.strftime("runs/accept-%Y-%m-%d_%H-%M-%S"))
    logger.info("results in %s; if this command is interrupted, continue with out=%s", folder, folder)
    acceptance = accept(config, command_text("accept", argv), folder, PARTS)
    page = folder / PAGE_FILE
    print("\n## ".join(page.read_text(encoding="utf-8").split("\n## ", 2)[:2]))  # to the end of the result
    logger.info("the page is %s", page)
    return 1 if any(record.failures for record in acceptance.parts) else 0


def _as_list(word: str) -> str:
    """Returns ``parts=[a,c]`` for ``parts=a,c``, which Hydra would read as two runs."""
    return re.sub(r"^parts=(?!null$)([a-z]+(?:,[a-z]+)*)$", r"parts=[\1]", word)

"""``dtrain accept [goal=facts|figures|all] [limit_s=...] [archive=FILE] [caches=FILE] [out=DIR]``: a new machine."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from dtrain.cli.resolve import read_suite
from dtrain.config.commands import ACCEPT
from dtrain.distributed.logging import configure_logging, logger
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.errors import ConfigError
from dtrain.measure.accept.page import summary
from dtrain.measure.accept.run import PAGE_FILE, accept, check_parts
from dtrain.measure.accept.table import LIMITS_S
from dtrain.tools.command import command_text

_NOT_ENDED = 124  # as timeout(1)


def main(argv: Sequence[str]) -> int:
    """Runs the jobs; returns 0 if nothing failed, else 1."""
    config = read_suite([_as_list(word) for word in argv], ACCEPT)
    if config is None:
        return 0
    check_parts(config.parts)
    for name in ("out", "archive", "caches"):
        if getattr(config, name) == "":
            raise ConfigError(f"{name} is empty; name a path, or leave it null")
    if LaunchEnv.read().launched:
        raise ConfigError("dtrain accept starts its own processes; start it once, without a launcher")
    configure_logging(0)
    limit_s = config.limit_s or LIMITS_S[config.goal]
    folder = Path(config.out or time.strftime("runs/accept-%Y-%m-%d_%H-%M-%S"))
    logger.info(
        "goal=%s, %.0f s; results in %s; the same command with out=%s resumes", config.goal, limit_s, folder, folder
    )
    is_command = sys.argv[2:] == list(argv)  # False in a program that calls this function: it must not be ended
    age_s = process_age_s() if is_command else 0.0
    with _ended_after(limit_s - age_s) if is_command else nullcontext():
        acceptance = accept(config, command_text("accept", argv), folder, age_s)
    print(summary(acceptance, folder))
    logger.info("the page is %s", folder / PAGE_FILE)
    return 1 if acceptance.failures(folder) else 0


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Ends the process ``seconds`` later, whatever it waits for, such as a disk; its jobs end with it."""
    watchdog = threading.Timer(max(0.0, seconds), os._exit, (_NOT_ENDED,))
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def process_age_s() -> float:
    """Returns the seconds since this process was started, imports included; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        begin = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - begin)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


def _as_list(word: str) -> str:
    """Returns ``parts=[a,c]`` for ``parts=a,c``, which Hydra would read as two runs."""
    return re.sub(r"^parts=(?!null$)([a-z]+(?:,[a-z]+)*)$", r"parts=[\1]", word)

"""The logger of dtrain: rank 0 logs from INFO on, the others from WARNING on. Lines are safe to show."""

from __future__ import annotations

import logging
import sys

from dtrain.redaction.printable import printable
from dtrain.redaction.redact import redact_text

logger = logging.getLogger("dtrain")


class _Safe(logging.Formatter):
    """Blanks secrets, and replaces control characters, which names in files of others may hold."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(redact_text(super().format(record)))


def configure_logging(rank: int) -> None:
    """Sends log lines of this rank to standard error; ranks other than 0 log only warnings, with their number."""
    logger.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Safe("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False

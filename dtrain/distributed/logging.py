"""The logger of dtrain: rank 0 logs from INFO on, the others from WARNING on."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("dtrain")


def configure_logging(rank: int) -> None:
    """Sends log lines of this rank to standard error; ranks other than 0 log only warnings, with their number."""
    logger.handlers.clear()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False

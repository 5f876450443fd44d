"""Fixtures of the unit tests."""

from __future__ import annotations

from tests.helpers.hf_models import no_network
from tests.helpers.warm_ranks import warm_ranks

__all__ = ["no_network", "warm_ranks"]

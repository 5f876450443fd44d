"""Fixtures of the unit tests."""

from __future__ import annotations

from tests.helpers.warm_ranks import warm_ranks

__all__ = ["warm_ranks"]

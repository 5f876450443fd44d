"""The limit on open files is raised for many ranks, or the run is refused with what to do."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from unittest import mock

import pytest

from dtrain.distributed.descriptors import reserve_descriptors
from dtrain.errors import ConfigError


@pytest.fixture(autouse=True)
def _limits_restored() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _with_soft_limit(soft: int) -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 8192:
        pytest.skip(f"the hard limit here is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return hard


def test_the_soft_limit_is_raised_for_1024_ranks() -> None:
    hard = _with_soft_limit(1024)
    reserve_descriptors(1024)
    soft, kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft >= 2 * 1024 + 256
    assert kept == hard
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(2 * 1024)]
    for descriptor in opened:
        os.close(descriptor)


def test_a_limit_that_suffices_stays() -> None:
    _with_soft_limit(1024)
    reserve_descriptors(64)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024


def test_more_ranks_than_the_system_allows_are_refused() -> None:
    with (
        mock.patch.object(resource, "getrlimit", return_value=(1024, 4096)),
        pytest.raises(ConfigError, match=r"connections to 4096 ranks need \d+ open files .* allows 4096; .* ulimit -n"),
    ):
        reserve_descriptors(4096)

"""Collections of Python's garbage: when they run, what they free, and the collector after them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from dtrain.train.garbage import GarbageCollection


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    """The tests' own ``gc.freeze``, which makes them cheaper, is undone meanwhile."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()
    gc.collect()
    gc.freeze()


def collector() -> tuple[bool, bool]:
    """Returns whether the collector is enabled, and whether objects are frozen."""
    return gc.isenabled(), gc.get_freeze_count() > 0


def test_a_cycle_of_each_step_is_freed_by_the_next_collection() -> None:
    made: list[weakref.ref[Cycle]] = []
    alive = []
    with GarbageCollection(4) as garbage:
        for step in range(1, 14):
            made.append(weakref.ref(Cycle()))
            garbage.after_step(step, at_pause=step == 10)
            alive.append(sum(ref() is not None for ref in made))
    # after the second step, then at each fourth of the run, and at the pause; what is left waits for Python's collector
    assert alive[1:] == [0, 1, 0, 1, 2, 3, 0, 1, 0, 1, 0, 1]


def test_the_second_step_of_the_context_freezes_what_exists_whatever_its_number() -> None:
    with GarbageCollection(1000) as garbage:
        garbage.after_step(998)
        assert collector() == (True, False)
        garbage.after_step(999)
        assert collector() == (False, True)
    assert collector() == (True, False)


def fail_inside(error: Exception, then: Callable[[], None] = lambda: None) -> None:
    with GarbageCollection(2) as garbage:
        for step in (1, 2, 3):
            garbage.after_step(step)
        then()
        assert collector() == (False, True)
        raise error


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_as_before_after_an_error_and_a_context_inside(was_enabled: bool) -> None:
    def nested() -> None:
        with pytest.raises(KeyError):
            fail_inside(KeyError())

    if not was_enabled:
        gc.disable()
    with pytest.raises(ZeroDivisionError):
        fail_inside(ZeroDivisionError(), nested)
    assert collector() == (was_enabled, False)


def test_objects_that_others_have_frozen_stay_so() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with GarbageCollection(1) as garbage:
        for step in (1, 2, 3):
            garbage.after_step(step)
        assert collector() == (False, True)
    assert gc.isenabled()
    # objects that die are no longer counted
    assert 0.9 * count < gc.get_freeze_count() <= count


def test_zero_leaves_the_collector_alone() -> None:
    collections = sum(generation["collections"] for generation in gc.get_stats()[1:])
    with GarbageCollection(0) as garbage:
        for step in (1, 2, 3):
            garbage.after_step(step, at_pause=True)
            assert collector() == (True, False)
    assert sum(generation["collections"] for generation in gc.get_stats()[1:]) == collections

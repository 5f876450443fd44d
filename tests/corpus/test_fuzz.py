"""Random models and loops train as in plain torch, and planted faults are found; see ``tests/corpus/fuzz``."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings

from tests.corpus.fuzz.cases import FuzzCase, Place, cases
from tests.corpus.fuzz.models import Model
from tests.corpus.fuzz.plants import PLANTS
from tests.corpus.fuzz.run import difference, diverges

pytestmark = pytest.mark.processes
CHUNKS, PLANTED = 8, 300
_DRAWN = settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))


DIFFERED = {
    "a BF16 model in FP32 with deepspeed": FuzzCase(Model(dtype="bfloat16"), places=(Place("deepspeed", 2),)),
}
"""Cases that the fuzz has found, made small."""


class Found(AssertionError):
    """The planted fault was found."""


@settings(_DRAWN, max_examples=8, derandomize=True)
@given(cases())
def test_some_cases_train_as_in_plain_torch(case: FuzzCase) -> None:
    assume(not diverges(case))
    assert not difference(case)


@pytest.mark.parametrize("name", DIFFERED)
def test_cases_that_differed_no_longer_do(name: str) -> None:
    assert not difference(DIFFERED[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_many_cases_train_as_in_plain_torch(chunk: int, pytestconfig: pytest.Config) -> None:
    @seed(CHUNKS * pytestconfig.getoption("fuzz_seed") + chunk)
    @settings(_DRAWN, max_examples=pytestconfig.getoption("fuzz_cases") // CHUNKS)
    @given(cases())
    def train(case: FuzzCase) -> None:
        assume(not diverges(case))
        assert not difference(case)

    train()


@pytest.mark.exhaustive
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_fault_is_found(plant: str, pytestconfig: pytest.Config) -> None:
    @seed(pytestconfig.getoption("fuzz_seed"))
    @settings(_DRAWN, max_examples=PLANTED, phases=[Phase.generate])
    @given(cases())
    def train(case: FuzzCase) -> None:
        assume(not diverges(case))
        if found := difference(case, plant):
            raise Found(found)

    with pytest.raises(Found):
        train()

"""The engine of Llama 8B among 1,024 ranks, on fake tensors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

_PLAN = """
import json, resource, time
from tests.helpers.many_ranks import planned_run

taken = {}
for ranks in (64, 1024):
    start = time.process_time()
    with planned_run(ranks).engine() as (engine, batch):
        built = time.process_time()
        for _ in range(2):
            begin = time.process_time()
            for micro in engine.accumulate([batch]):
                engine.backward(engine(**micro))
            engine.step()
        taken[ranks] = built - start, time.process_time() - begin
print(json.dumps([*taken[64], *taken[1024], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


def test_an_engine_of_1024_ranks_is_built_and_steps() -> None:
    done = subprocess.run([sys.executable, "-c", _PLAN], capture_output=True, text=True, check=True, timeout=300)
    _, few_step_s, build_s, step_s, resident_kib = json.loads(done.stdout.splitlines()[-1])
    assert build_s < 60.0
    assert resident_kib < 4 * 2**20
    assert step_s < 2.5 * few_step_s, "the work of a step hardly depends on the number of ranks"

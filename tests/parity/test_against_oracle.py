"""Each engine follows the FP32 oracle at every stage, precision, world size and accumulation, clipped and weighted."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, assert_follows_the_oracle, train_all

pytestmark = pytest.mark.processes


def run(precision: str, *, steps: int, accumulation: int = 2, **options: object) -> Run:
    """A run of the transformer; in FP16 with a static scale, because the dynamic one skips its first steps."""
    options |= {"precision": precision, "loss_scale": 256.0 if precision == "fp16" else "auto"}
    return Run("transformer", steps=steps, accumulation=accumulation, unequal_weights=True, options=options)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_native_follows_the_oracle(world: int) -> None:
    """Each stage and accumulation in FP32, whose bounds are the tightest, and in one of the formats of 16 bits.

    That one alternates over the cases and over the numbers of ranks, so each case meets both.
    """
    stages_and_accumulations = [(stage, n) for stage in range(4) for n in ((1, 2, 3) if stage < 3 else (2,))]
    runs = [
        run(precision, zero_stage=stage, steps=20, accumulation=n)
        for number, (stage, n) in enumerate(stages_and_accumulations)
        for precision in ("fp32", ("bf16", "fp16")[(number + world // 2) % 2])
    ]
    assert_follows_the_oracle(run_ranks(world, train_all, runs), runs)


@pytest.mark.parametrize("world", [1, 2])
def test_ddp_follows_the_oracle(world: int) -> None:
    runs = [run(precision, engine="ddp", steps=10) for precision in ("fp32", "bf16", "fp16")]
    runs.append(run("bf16", engine="ddp", steps=10, accumulation=1))
    assert_follows_the_oracle(run_ranks(world, train_all, runs), runs)


@pytest.mark.parametrize("world", [1, 2])
def test_fsdp2_follows_the_oracle(world: int) -> None:
    precisions = ("fp32", "bf16", "fp16")
    runs = [run(precision, engine="fsdp2", zero_stage=stage, steps=10) for precision in precisions for stage in (2, 3)]
    assert_follows_the_oracle(run_ranks(world, train_all, runs), runs)

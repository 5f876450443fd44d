"""What fits: the largest micro-batch, and the changes that are proposed."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.cli.resolve import compose
from dtrain.errors import OutOfMemoryError
from dtrain.planning.devices import Device
from dtrain.planning.memory.changes import Candidate, candidates, cheapest_changes, estimate
from dtrain.planning.memory.plan import MemoryPlan, largest_micro_batch, plan_memory
from dtrain.planning.memory.show import receipt_of
from dtrain.planning.planned_run import PlannedRun
from dtrain.planning.plans import RunPlanner
from dtrain.precision.float8.cast import decode
from dtrain.train.receipt import PEAK, Receipt, is_out_of_memory
from dtrain.train.run import run_training
from tests.helpers.hf_models import build_hf, save_hf
from tests.helpers.net import Net
from tests.helpers.token_shards import write_packed_shards
from tests.unit.planning.planned_runs import planned_run

_KEYS = ("experiment=smoke", "model.num_layers=1", "train.micro_batch_size=4", "train.global_batch_size=8",
         "precision=fp32")  # fmt: skip
_BF16 = (*_KEYS, "model.num_layers=2", "model.hidden_dim=128", "precision=bf16", "engine.zero_stage=3")


@functools.cache
def planned(mebibytes: float, *keys: str, ranks: int = 2) -> tuple[PlannedRun, MemoryPlan]:
    """Returns a run on a CPU with this memory, and its plan."""
    device = Device("small", "cpu", int(mebibytes * 2**20), "cpu")
    run = PlannedRun.of(compose([*_KEYS, *keys]), device, ranks)
    return run, plan_memory(run)


def with_memory(run: PlannedRun, plan: MemoryPlan, nbytes: int) -> tuple[PlannedRun, MemoryPlan]:
    device = replace(run.device, memory=nbytes)
    return replace(run, device=device), replace(plan, device=device)


def test_the_largest_micro_batch_fits_and_a_larger_one_does_not() -> None:
    run, plan = planned(600, "model.hidden_dim=128", "model.num_layers=2")
    assert plan.largest == 4 * 12 * 128**2, "the FP32 gradients of a block"
    size = largest_micro_batch(run, plan)
    assert size > 4
    assert plan_memory(run.with_micro_batch_size(size)).fit == "fits"
    # memory is not quite linear in the micro-batch
    assert plan_memory(run.with_micro_batch_size(size + max(1, size // 20))).fit != "fits"
    small, no_plan = with_memory(run, plan, 8 * 2**20)
    assert (no_plan.fit, largest_micro_batch(small, no_plan)) == ("does not fit", 0), "beside states that do not"


@pytest.mark.exhaustive
def test_planned_fp8_tensors_never_meet_real_ones() -> None:
    """And a plan leaves the settings of torch as they were."""
    values = torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)
    assert decode(values).tolist() == [1.0, -2.0]
    planned(600, "precision=fp8", "engine.reproducible=true", ranks=1)
    assert decode(values).tolist() == [1.0, -2.0]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.exhaustive
def test_a_model_of_transformers_on_packed_documents(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shards = write_packed_shards(tmp_path / "tokens", [20, 33, 7, 12] * 30, seq_len=16)
    keys = ("model=hf", f"model.path={save_hf(tmp_path / 'hf', 'llama')}", "model.max_seq_len=16", "precision=bf16")
    plan = plan_memory(planned_run(*keys, "data=tokens", f"data.path={shards}"))
    num_parameters = sum(parameter.numel() for parameter in build_hf(tmp_path / "hf").parameters())
    assert 4 * num_parameters <= plan.states["main_grad"] < 4.2 * num_parameters  # rows are padded
    assert plan.peak["activations"] > 0


def test_each_proposed_change_makes_the_run_fit() -> None:
    run, plan = planned(0, "engine.zero_stage=1", "engine.reproducible=true", "checkpoint.asynchronous=true")
    run, plan = with_memory(run, plan, plan.high - 2**15)
    assert plan.fit == "may fit"
    changes = cheapest_changes(run, plan)
    assert 1 <= len(changes) <= 3
    assert all(change.plan.fit == "fits" for change in changes)


_MORE_CHANGES = (("precision=bf16", 2), ("optim=adamw-bf16", 2), ("engine.zero_stage=3", 2), ("engine.zero_stage=1", 0))


_CHANGES = [("train.micro_batch_size=2", 2), ("ranks=4", 2)]


@pytest.mark.parametrize(
    ("change", "stage"), [*_CHANGES, *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in _MORE_CHANGES)]
)
def test_the_estimate_of_a_change_is_near_its_plan(change: str, stage: int) -> None:
    run, plan = planned(600, f"engine.zero_stage={stage}", "train.global_batch_size=16")
    effects = {f"{one.key}={one.value}": one for one in candidates(run, plan)}
    effects["train.micro_batch_size=2"] = Candidate("train.micro_batch_size", 2, "")
    changed = effects[change].apply(run)
    assert estimate(run, plan, changed).tensors == pytest.approx(plan_memory(changed).tensors, rel=0.06)


@pytest.mark.exhaustive
def test_recomputed_blocks_keep_fewer_activations_and_nothing_is_compiled() -> None:
    keys = (*_BF16, "model.compile=blocks", "audit.replay_every=1")
    runs = [planned_run(*keys, f"model.recompute={mode}", device="h100-80gb") for mode in ("full", "selective", "none")]
    with runs[0].engine() as (engine, _):
        assert engine.compiled_graphs is None
    full, selective, none = map(plan_memory, runs)
    assert full.peak["activations"] < 0.9 * selective.peak["activations"]
    assert selective.peak["activations"] < 0.7 * none.peak["activations"]
    assert full.tensors < selective.tensors < none.tensors
    assert "uncompiled" in none.notes[-1]


def test_offloaded_states_are_planned_on_the_host() -> None:
    run = planned_run(*_BF16, device="h100-80gb", ranks=2)
    base = plan_memory(run)
    (offload,) = (one for one in candidates(run, base) if one.key == "engine.offload")
    plan = plan_memory(offload.apply(run))
    offloaded = {"master", "moments", "main_grad"}
    assert plan.host.keys() == {*offloaded, "staging"}
    assert not plan.states.keys() & plan.host.keys()
    shard = base.states["master"]
    # the norms have replicas of their own beside their masters; the rest of a step is the same
    assert plan.host["main_grad"] == plan.host["master"] >= shard
    assert plan.tensors < base.tensors - 3 * shard
    estimated = estimate(run, base, offload.apply(run)).states
    assert {kind: estimated[kind] for kind in ("compute", "transfer")} == {
        kind: plan.peak[kind] for kind in ("compute", "transfer")
    }
    receipt = receipt_of(plan, {**plan.states, **plan.host}, None)
    assert not {row.kind for row in receipt.rows} & offloaded
    assert "in the memory of the host, for each rank: " in receipt.notes[1]


@pytest.mark.parametrize(("precision", "kept"), [("bf16", "compute"), ("fp32", "master")])
def test_weights_that_stay_are_no_full_weights_of_stage_3(precision: str, kept: str) -> None:
    plan = plan_memory(planned_run(*_KEYS, f"precision={precision}", "engine.zero_stage=2", ranks=2))
    assert plan.peak[kept] > 0.9 * plan.states[kept]
    assert "unsharded" not in plan.peak


@pytest.mark.parametrize("sharded_again", [False, True])
def test_to_shard_weights_again_is_proposed_only_where_they_stay(sharded_again: bool) -> None:
    run, plan = planned(600, "engine.zero_stage=2", "train.global_batch_size=16")
    engine = replace(run.config.engine, zero_stage=3, reshard_after_forward=sharded_again)
    run = replace(run, config=replace(run.config, engine=engine))
    assert ("engine.reshard_after_forward" in {one.key for one in candidates(run, plan)}) != sharded_again


def test_changes_are_added_up_if_none_is_enough() -> None:
    planned_apart = ("precision=bf16", "model.recompute=full", "model.loss_chunk=auto")  # changes that take a plan each
    run, plan = planned(0, "engine.zero_stage=0", "train.global_batch_size=16", *planned_apart, ranks=4)
    run, plan = with_memory(run, plan, plan.tensors // 2)
    last = cheapest_changes(run, plan)[-1]
    assert last.plan.high < plan.high
    names = [key.partition("=")[0] for key in last.keys.split()]
    assert len(set(names)) == len(names) > 2, "one value of each key"


def build(config: object, vocab_size: int) -> nn.Module:
    """A model that asks for more memory than any machine has, in a real forward."""

    def run(net: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        scores: Tensor = net.weight.sum() * tokens.float().mean()
        return scores + torch.empty(2**60, dtype=torch.uint8)[0].float() * 0

    return Net(run, weight=nn.Parameter(torch.zeros(8)))


def test_a_failed_allocation_shows_the_plan(tmp_path: object) -> None:
    config = compose([*_KEYS, f"run_dir={tmp_path}/run", f"model.factory={__name__}:build", "supervise.enabled=false"])
    with pytest.raises(OutOfMemoryError) as caught:
        run_training(config, planner=RunPlanner())
    first, *plan = str(caught.value).splitlines()
    assert "rank 0" in first
    assert "can't allocate memory" in first
    assert "memory activations" in "".join(plan)
    assert "does not fit on cpu" in "".join(plan)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_run_writes_what_training_took_beside_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.train.run._write_sample", lambda *_: torch.ones(2**28))
    keys = ("supervise.enabled=false", "train.steps=2", "train.eval_batches=1")
    run_training(compose([*_KEYS, f"run_dir={tmp_path}/run", *keys]), planner=RunPlanner())
    receipt = Receipt.read(tmp_path / "run")
    for row in receipt.rows[:-2]:
        assert row.planned_low == row.planned_high == row.measured, row
    peak = receipt.rows[-1]
    assert peak.kind == PEAK
    assert peak.measured is not None
    assert 0 < peak.measured < 2**30, "a sample, such as one of 1 GiB, is no part of training"

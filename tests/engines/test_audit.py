"""Audits of every engine: no alarm for what is legal, the right ranks without a record, and repeated micro-batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.engine.model_state import MASTER
from dtrain.engine.step import StepEngine
from dtrain.errors import CheckpointError, ConfigError, CorruptionError, UsageError
from tests.engines import float8_model
from tests.engines.helpers import batch, held, same, start, state_digests, train_step
from tests.helpers.bit_flips import flip_bit
from tests.helpers.ranks import run_ranks

processes = pytest.mark.processes
SGD = dtrain.TorchOptimizer(torch.optim.SGD, lr=1e-2, momentum=0.9)
LEGAL: list[tuple[str, int, str, dict[str, Any]]] = [
    ("native", 0, "fp32", {"optimizer": dtrain.AdamWBF16(lr=3e-3)}),
    ("native", 1, "fp32", {"ema_decay": 0.9}),
    ("native", 2, "bf16", {"optimizer": dtrain.Muon(lr=3e-3), "ema_decay": 0.9}),
    ("native", 3, "bf16", {}),
    ("ddp", 0, "bf16", {"optimizer": SGD, "ema_decay": 0.9}),
    ("fsdp2", 2, "bf16", {"optimizer": dtrain.Muon(lr=3e-3)}),
]


def flip_master(engine: StepEngine, rank: int) -> str:
    """Flips a mantissa bit that an update does not round off; returns the parameter."""
    engine.comm.barrier()  # the other ranks may still gather from this one
    if engine.rank != rank:
        return ""
    shard = next(shard for shard in engine.local_shards(MASTER) if shard.data.numel())
    flip_bit(shard.data, 0, 20)
    return shard.name


def corruptions(action: Any) -> list[tuple[tuple[int, ...], str, str]]:
    with pytest.raises(CorruptionError) as caught:
        action()
    return [(item.ranks, item.tensor, item.kind) for item in caught.value.corruptions]


@torch.no_grad()
def write_in_place(engine: StepEngine) -> None:
    if engine.name == "ddp" or (engine.name == "native" and engine.options.zero_stage < 3):
        engine.comm.barrier()  # as in flip_master
        engine.module.get_parameter("mix.weight").mul_(0.5)


def skip(engine: StepEngine) -> None:
    for index in engine.accumulate(range(2)):
        engine.backward(engine(tokens=batch(index)) * math.inf)
    assert not engine.step().applied


def legal_acts(engine: StepEngine, folder: Path, micro_batches: int) -> None:
    """Everything that changes states between steps, each followed by an audited step, and by a save."""
    train_step(engine, micro_batches)
    engine.save(folder)
    write_in_place(engine)
    train_step(engine, micro_batches)
    skip(engine)
    train_step(engine, micro_batches)
    write_in_place(engine)
    engine.save(folder, asynchronous=True)
    train_step(engine, micro_batches)
    with engine.modify_weights("mix.*"):
        engine.module.get_parameter("mix.bias").fill_(0.25)
    engine.expect_save()
    train_step(engine, micro_batches)
    engine.save(folder)
    if engine.ema_decay is not None:
        with engine.ema(), engine.eval():
            engine(tokens=batch(0))
    engine.master_state()
    train_step(engine, micro_batches)
    # on all ranks: writes that no counter shows, as of a teacher's weights or a codebook
    engine.module.get_buffer("table").data.mul_(0.5)
    if engine.options.zero_stage < 3:
        engine.module.get_parameter("frozen.bias").data.mul_(0.5)
    train_step(engine, micro_batches)
    engine.module.get_buffer("table").add_(engine.rank)  # of each rank its own, as batch norm's
    train_step(engine, micro_batches)
    engine.load(folder)
    train_step(engine, micro_batches)
    write_in_place(engine)
    engine.save(folder / "last")


def audit_legal_acts(engine: StepEngine, folder: Path, micro_batches: int) -> None:
    engine.module.register_buffer("table", torch.arange(5.0))
    legal_acts(engine, folder, micro_batches)
    train_step(engine, micro_batches)
    name = flip_master(engine, engine.world_size - 1)  # the audit was on
    found = corruptions(lambda: train_step(engine, micro_batches))
    assert [item[0::2] for item in found] == [((engine.world_size - 1,), MASTER)]
    assert engine.rank != engine.world_size - 1 or found[0][1] == name


def flaky(engine: StepEngine, rank: int, *, in_backward: bool) -> Any:
    """A kernel's output that is wrong by one bit in its last call of a replayed step."""
    calls = 0

    def on_forward(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls != 3 or engine.rank != rank:  # the forward of the one micro-batch, then two that are compared
            return output
        if in_backward:
            output.register_hook(flipped)
            return output
        return output + (flipped(output.detach()) - output.detach())

    return engine.module.get_submodule("blocks.0.down").register_forward_hook(on_forward)


def flipped(values: Tensor) -> Tensor:
    copy = values.clone(memory_format=torch.contiguous_format)
    flip_bit(copy, copy.numel() // 2, 8 * copy.element_size() - 3)  # of the exponent
    return copy


REPLAYED = [("native", 3, "bf16"), ("ddp", 0, "fp32"), ("fsdp2", 3, "bf16")]


def replay(case: tuple[str, int, str], world: int) -> None:
    def started(**audit: int) -> StepEngine:
        return start(*case[:2], precision=case[2], dropout=0.1, audit=dtrain.Audit(every=0, **audit))

    once, twice = started(), started(replay_every=2)
    for _ in range(4):
        assert train_step(once, world) == train_step(twice, world)
    assert state_digests(once) == state_digests(twice), f"{case}: a replay left a trace"
    for in_backward in (False, True):
        train_step(twice, world)
        handle = flaky(twice, world - 1, in_backward=in_backward)
        before = held(twice)
        found = corruptions(lambda: train_step(twice, world))
        handle.remove()
        first = ("gradient", True) if in_backward else ("loss", False)
        assert (found[0][2], found[0][1].startswith("blocks.0.down")) == first, (case, found)
        assert {item[0] for item in found} == {(world - 1,)}
        assert same(held(twice), before), f"{case}: updated"
        train_step(twice, world)


def all_engines(rank: int, world: int, folder: Path) -> None:
    for name, stage, precision, options in LEGAL:
        engine = start(name, stage, precision=precision, audit=dtrain.Audit(every=1), **options)
        audit_legal_acts(engine, folder / f"{name}{stage}", world)
    for case in REPLAYED:
        replay(case, world)


@processes
def test_no_alarm_for_what_is_legal_and_replays_find_wrong_arithmetic(tmp_path: Path) -> None:
    run_ranks(2, all_engines, tmp_path)


def without_a_record(rank: int, world: int, folder: Path) -> list[Any]:
    """A flip after a step that is not audited; the save compares the copies of the ranks."""
    found = []
    for name, stage, precision in (("native", 0, "fp32"), ("native", 1, "fp32"), ("ddp", 0, "bf16")):
        engine = start(name, stage, precision=precision, audit=dtrain.Audit(every=1000))
        train_step(engine, world)
        flip_master(engine, 0)
        found.append(corruptions(lambda: engine.save(folder)))  # noqa: B023
        with pytest.raises(CorruptionError):
            engine.backward(torch.zeros((), requires_grad=True))
    return found


@processes
@pytest.mark.parametrize("world", [2, 3])
def test_without_a_record_the_majority_judges_or_the_pair_is_named(tmp_path: Path, world: int) -> None:
    results = run_ranks(world, without_a_record, tmp_path)
    assert all(result == results[0] for result in results)
    of_master, of_shared, of_ddp = results[0]
    ranks = (0, 1) if world == 2 else (0,)
    assert [item[0::2] for item in (*of_master, *of_ddp)] == [(ranks, MASTER)] * 2
    kind = MASTER if world == 3 else f"compute replica or {MASTER}"
    assert [item[0::2] for item in of_shared] == [(ranks, kind)]
    assert not list(tmp_path.glob("step-*"))


# -- one rank ---------------------------------------------------------------------------------------------------------


def test_one_rank_audits_masters_and_casts(tmp_path: Path) -> None:
    engine = start("native", 2, precision="bf16", audit=dtrain.Audit(every=1), ema_decay=0.9)
    audit_legal_acts(engine, tmp_path, 1)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_quantized_copies_and_scales_follow_from_the_masters(recipe: str, tmp_path: Path) -> None:
    policy = dtrain.PrecisionPolicy.named("fp8", float8=dtrain.Float8(recipe=recipe))
    engine = float8_model.start("native", 3, policy, audit=1)

    def step() -> None:
        engine.backward(engine(tokens=float8_model.batch(engine.attempted_steps)))
        engine.step()

    step()
    engine.save(tmp_path)
    step()
    shards = [shard for shard in engine.compute_shards() if shard.data.dtype == torch.float8_e4m3fn]
    kinds = {shard.kind for shard in engine.compute_shards()}
    assert kinds == {"compute replica", "FP8 scale"} | ({"compute replica (columns)"} if recipe == "rowwise" else set())
    scales = [shard for shard in engine.compute_shards() if shard.kind == "FP8 scale"]
    for shard, bit in ((shards[0], 0), (shards[-1], 7), (scales[-1], 23)):
        flip_bit(shard.data, shard.data.numel() - 1, bit)
        # with another scale the copies are not the casts any more
        assert ((0,), shard.name, shard.kind) in corruptions(step)
        engine.load(tmp_path)
        step()


def test_off_costs_no_collective(tmp_path: Path) -> None:
    engine = start("native", 2, audit=0)
    issued = []
    for _ in range(3):
        before = engine.comm.schedule.num_issued
        engine.expect_save()
        train_step(engine, 1)
        issued.append(engine.comm.schedule.num_issued - before)
    assert issued[0] == issued[1] == issued[2]
    flip_master(engine, 0)
    engine.save(tmp_path)
    train_step(engine, 1)


def test_steps_between_audits_do_no_work_of_an_audit() -> None:
    engine = start("native", 2, audit=3)
    labels = []
    for _ in range(7):
        engine.comm.schedule.on_reduction = None
        before = engine.comm.schedule.num_issued
        train_step(engine, 1)
        labels.append(engine.comm.schedule.num_issued - before)
    # the record of step 3 is checked in step 4, with one collective
    assert [count - labels[1] for count in labels[1:]] == [0, 0, 1, 0, 0, 1]


def test_a_replay_of_what_depends_on_more_than_its_inputs_is_named() -> None:
    engine = start("native", 2, audit=dtrain.Audit(replay_every=1))
    handle = flaky(engine, 0, in_backward=False)
    assert corruptions(lambda: train_step(engine, 1))[0] == ((0,), "forward", "loss")
    handle.remove()
    train_step(engine, 1)


def test_a_replay_that_fails_is_an_error_of_the_step() -> None:
    engine = start("native", 2, audit=dtrain.Audit(replay_every=1))
    calls = 0

    def on_forward(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("scatter has no deterministic implementation")

    handle = engine.module.register_forward_hook(on_forward)
    with pytest.raises(UsageError, match=r"replay_every.*rank 0: RuntimeError: scatter has no"):
        train_step(engine, 1)
    handle.remove()
    train_step(engine, 1)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_replay_of_a_random_forward_in_eval_mode_leaves_no_trace() -> None:
    engine = start("native", 2, audit=dtrain.Audit(replay_every=1))
    engine.module.eval()

    def on_forward(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output * torch.rand(())

    engine.module.register_forward_hook(on_forward)
    torch.manual_seed(1)
    train_step(engine, 1)
    after = torch.rand(())
    torch.manual_seed(1)
    torch.rand(())  # of the one forward
    assert after == torch.rand(())


def test_a_save_after_a_replay_that_failed_is_still_compared(tmp_path: Path) -> None:
    engine = start("native", 2, audit=dtrain.Audit(every=1, replay_every=2))
    train_step(engine, 1)
    handle = flaky(engine, 0, in_backward=False)
    assert corruptions(lambda: train_step(engine, 1))[0][2] == "loss"
    handle.remove()
    name = flip_master(engine, 0)
    assert corruptions(lambda: engine.save(tmp_path)) == [((0,), name, MASTER)]
    assert not list(tmp_path.glob("step-*"))


def test_a_load_replaces_what_a_save_under_way_found_corrupt(tmp_path: Path) -> None:
    engine = start("native", 2, audit=1)
    train_step(engine, 1)
    engine.save(tmp_path)
    before = state_digests(engine)
    for path in (tmp_path, tmp_path / "none"):
        train_step(engine, 1)
        moment = next(shard for shard in engine.local_shards("exp_avg") if shard.data.numel())
        flip_bit(moment.data, 0, 20)  # it has no second copy, so only the thread that writes it can tell
        engine.save(tmp_path, asynchronous=True)
        if path.exists():
            engine.load(path)
            assert state_digests(engine) == before
            continue
        with pytest.raises(CheckpointError):
            engine.load(path)
        corruptions(lambda: train_step(engine, 1))  # nothing was loaded


def batch_norm(rank: int, world: int) -> None:
    """A rank without a forward does not move the statistics, which torch writes without counting."""
    engine = dtrain.initialize(
        nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), precision="fp32", engine="native", zero_stage=0, audit=1
    )
    for step in range(3):
        has_data = rank == 0 or step == 0
        loss = engine(torch.randn(4, 2)).square().mean() if has_data else torch.zeros((), requires_grad=True)
        engine.backward(loss, weight=float(has_data))
        engine.step()


@processes
def test_running_statistics_are_not_audited() -> None:
    run_ranks(2, batch_norm)


@pytest.mark.parametrize(
    ("audit", "reason"),
    [
        (-1, "audit=-1 is too small"),
        ("often", "audit='often' is not a whole number"),
        (dtrain.Audit(replay_every=3), "engine=deepspeed cannot do audit.replay_every=above 0: DeepSpeed would reduce"),
    ],
)
def test_refused(audit: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        dtrain.initialize(nn.Linear(2, 2), engine="deepspeed", audit=audit)

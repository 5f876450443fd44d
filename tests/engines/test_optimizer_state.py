"""States of optimizers on one rank: torch's groups, checkpoints of other optimizers, and the traffic of matrices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dtrain
from dtrain.checkpoint import Snapshot, open_newest, save
from dtrain.errors import CheckpointError
from tests.engines.checks.optimizers import MUON
from tests.engines.helpers import build as odd_model
from tests.engines.helpers import digest, train_step
from tests.engines.helpers import start as start_odd
from tests.helpers.checkpoints import ALONE
from tests.helpers.momentum import Momentum, trained_by
from tests.helpers.one_rank import build, loss_of, start, unchanged
from tests.helpers.one_rank import train_step as train_small
from tests.helpers.ranks import run_ranks

BF16_STATE = Momentum(lr=0.05, weight_decay=0.1, reduced=True, init=0.25)


def start_with(record: Any) -> Any:
    with trained_by():
        return start(optimizer=record)


def test_a_state_has_the_dtype_and_first_value_of_its_optimizer_if_it_has_one(tmp_path: Path) -> None:
    engine = start_with(BF16_STATE)
    assert all((state == 0.25).all() for _, state in engine.states.full_state("momentum"))
    assert train_small(engine).applied
    memory, formula = engine.memory(), engine.memory_formula()
    held = sum(shard.data.nbytes for shard in engine.states.local_shards("momentum"))
    assert held <= memory["moments"] <= memory["master"] // 2
    assert abs(formula["moments"] - formula["master"] / 2) <= 2  # each is rounded up to whole bytes
    engine.save(tmp_path)
    dtypes = {tensor.kind: tensor.dtype for tensor in open_newest(tmp_path, ALONE).tensors}
    assert dtypes == {"master": torch.float32, "momentum": torch.bfloat16}
    stateless = start(optimizer=dtrain.SGD(momentum=0.0))
    assert train_small(stateless).applied
    assert stateless.memory()["moments"] == 0


def assert_refused(engine: Any, path: Path, message: str) -> None:
    """``engine`` refuses the checkpoint, keeps its bits and trains on."""
    before = engine.master_state()
    with pytest.raises(CheckpointError, match=message):
        engine.load(path)
    assert unchanged(engine, before)
    assert train_small(engine).applied


def test_states_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    engines = {
        "adamw": start(),
        "momentum": start_with(Momentum()),
        "reduced": start_with(Momentum(reduced=True)),
        "nadam": start(optimizer=dtrain.TorchOptimizer(torch.optim.NAdam, lr=0.01)),
        "grouped": start(optimizer=dtrain.TorchOptimizer(torch.optim.NAdam, lr=0.01, groups={"2": {"eps": 1e-6}})),
        "muon": start(optimizer=dtrain.Muon(lr=0.01)),
        "muon but one": start(optimizer=dtrain.Muon(lr=0.01, adamw=["0"])),
    }
    for name, engine in engines.items():
        assert train_small(engine).applied
        engine.save(tmp_path / name)
    unknown = r"holds {}:\S+, of a kind that this run does not know \(known: buffer, {}\); load it with the optimizer"
    for name, saved, message in (
        ("adamw", "momentum", unknown.format("momentum", "exp_avg, exp_avg_sq, frozen, master")),
        ("momentum", "adamw", unknown.format("exp_avg", "frozen, master, momentum")),
        ("reduced", "momentum", r"momentum '\S+' was saved as torch.float32, the optimizer keeps it in torch.bfloat16"),
        ("grouped", "nadam", "holds the numbers of 1 optimizer groups, this run has 2"),
        ("muon but one", "muon", r"no exp_avg(_sq)? of '0\.weight', which the optimizer keeps; .* groups"),
    ):
        assert_refused(engines[name], tmp_path / saved, message)


def save_only(engine: Any, folder: Path, *kinds: str) -> None:
    whole: Snapshot = engine._between.parts.checkpointer._snapshot({}, {}, {}, {})
    save(folder, replace(whole, shards=tuple(shard for shard in whole.shards if shard.kind in kinds)), ALONE)


def test_a_checkpoint_without_a_state_is_refused(tmp_path: Path) -> None:
    engine = start()
    for kinds, missing in (
        (("master", "exp_avg"), "'exp_avg_sq', the state that AdamW keeps; resume with the optimizer that it was"),
        (("master",), "'exp_avg' and no 'exp_avg_sq', the state that AdamW keeps"),
    ):
        assert train_small(engine).applied
        save_only(engine, tmp_path / kinds[-1], *kinds)
        assert_refused(engine, tmp_path / kinds[-1], f"holds no {missing}")


def test_masters_alone_are_loaded_before_the_first_update(tmp_path: Path) -> None:
    """As of an imported model: the states have their initial values, whatever they were."""
    engine = start_with(BF16_STATE)
    save_only(engine, tmp_path, "master")
    before = [digest(tensor) for kind in ("master", "momentum") for _, tensor in engine.states.full_state(kind)]
    assert train_small(engine).applied
    engine.load(tmp_path)
    assert [digest(tensor) for kind in ("master", "momentum") for _, tensor in engine.states.full_state(kind)] == before
    assert engine.applied_steps == 0


def test_groups_keep_states_of_their_own() -> None:
    """Sorted by name, the parameters with ``grad_avg`` would not be adjacent in the flat buffer."""
    groups: dict[str, Any] = {"0.0.weight": {"momentum": 0.9}, "0.1": {"centered": True}}
    groups["0.2.weight"] = {"momentum": 0.9, "centered": True}
    record = dtrain.TorchOptimizer(torch.optim.RMSprop, lr=0.05, groups=groups)
    trained = start(nn.Sequential(build()), optimizer=record, max_grad_norm=None)
    model = build()
    parameters = dict(model.named_parameters(prefix="0"))
    changes = {name: groups.get(name, groups.get(name[:3], {})) for name in parameters}
    reference = torch.optim.RMSprop([{"params": [p], **changes[name]} for name, p in parameters.items()], lr=0.05)
    for _ in range(3):
        assert train_small(trained).applied
        reference.zero_grad()
        loss_of(model).backward()
        reference.step()
    for name, got in trained.master_state().items():
        torch.testing.assert_close(got, parameters[name].detach(), rtol=1e-6, atol=1e-6)


def test_checkpoints_of_adamw_are_exchanged(tmp_path: Path) -> None:
    options: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    engine = start(optimizer=dtrain.AdamW(lr=0.01, **options))
    for _ in range(3):
        train_small(engine)
    engine.save(tmp_path / "adamw")
    adopted = start(optimizer=dtrain.TorchOptimizer(torch.optim.AdamW, lr=0.01, **options))
    adopted.load(tmp_path / "adamw")
    for trained in (engine, adopted):
        assert train_small(trained).applied
    expected, got = engine.master_state(), adopted.master_state()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-6, atol=1e-7)
    adopted.save(tmp_path / "torch")
    engine.load(tmp_path / "torch")
    assert all(map(torch.equal, engine.master_state().values(), got.values()))


def traffic(rank: int, world: int) -> list[list[str]]:
    """The collectives that move matrices, at each stage."""
    found = []
    for stage in range(4):
        engine = start_odd("native", stage, wide=True, precision="bf16", optimizer=MUON)
        train_step(engine, world)
        found.append([entry for entry in engine.comm.schedule.log if "owners" in entry])
    return found


@pytest.mark.processes
def test_matrices_are_sent_to_their_owners_once() -> None:
    matrices = sum(p.numel() for n, p in odd_model(wide=True).named_parameters() if p.dim() == 2 and p.requires_grad)
    matrices -= odd_model(wide=True).embedding.weight.numel()
    whole, *sharded = run_ranks(2, traffic)[0]
    assert [entry.partition("(")[0] for entry in whole] == ["all_gather"], "every rank holds the gradients"
    assert matrices <= int(whole[0].split(", ")[1].split(" x ")[0]) < 1.3 * matrices, "sections of one size"
    for moved in sharded:  # there and back; no more than every element, and less by what the owners hold
        assert [entry.partition("(")[0] for entry in moved] == ["all_to_all"] * 2
        assert moved[0].endswith(" x bfloat16) in step")
        (size,) = {int(entry.split(", ")[1].split(" x ")[0]) for entry in moved}
        assert 0.3 * matrices < size <= matrices

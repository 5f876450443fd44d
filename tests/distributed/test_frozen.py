"""Frozen parameters at stage 3: sharded with their units, at the bits of stage 2."""

from __future__ import annotations

import gc
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import dtrain
from dtrain.checkpoint import CheckpointReader
from dtrain.config.engines import Native
from dtrain.engine.native import NativeEngine
from dtrain.errors import CheckpointError, ContractError, ModelError, UsageError
from tests.distributed.test_memory import live_storages
from tests.helpers.adapted_models import Adapted, AdaptedBlock, batch
from tests.helpers.damage import vouched
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

DIM = 32
UNITS = [f"blocks.{number}" for number in range(5)]


def start(
    model: Adapted, stage: int = 3, precision: str = "bf16", reproducible: bool = False, **options: Any
) -> NativeEngine:
    native = Native(zero_stage=stage, reproducible=reproducible, **options)
    engine = dtrain.initialize(
        model, engine=native, precision=precision, seed=5, max_grad_norm=0.5, optimizer=dtrain.AdamW(lr=0.01)
    )
    assert isinstance(engine, NativeEngine)
    return engine


def train(engine: NativeEngine, steps: int = 3) -> list[float]:
    """Two micro-batches a step on each rank, and an evaluation between the steps."""
    losses = []
    for step in range(steps):
        for index in engine.accumulate([engine.rank, engine.world_size + engine.rank]):
            engine.backward(engine(batch(step, index)), weight=1.0 + index)
        losses.append(engine.step().loss)
        with engine.eval():
            losses.append(float(engine(batch(step, 9))))
    return losses


def held(engine: NativeEngine) -> dict[str, list[tuple[int, Tensor]]]:
    """Returns what this rank holds of the frozen parameters, by name: (first element, values)."""
    found = {shard.name: [(shard.start, shard.data.clone())] for shard in engine.frozen_shards()}
    whole = {name: [(0, tensor.clone().view(-1))] for name, tensor in engine.replicated_frozen().items()}
    assert not found.keys() & whole.keys()
    return found | whole


def joined(ranks: list[dict[str, list[tuple[int, Tensor]]]]) -> dict[str, Tensor]:
    """Returns the frozen parameters in full, 1-D, from what the ranks hold; a rank may hold all of one."""
    found: dict[str, dict[int, Tensor]] = {}
    for name, shards in itertools.chain.from_iterable(rank.items() for rank in ranks):
        found.setdefault(name, {}).update(shards)
    return {name: torch.cat([shards[start] for start in sorted(shards)]) for name, shards in found.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


# -- bits --------------------------------------------------------------------------------------------------------------

VARIANTS = [
    (recomputes, {"prefetch": prefetch, "reshard_after_forward": reshard})
    for recomputes, prefetch, reshard in itertools.product((False, True), (0, 1, 2), (True, False))
]


def compare_stages(rank: int, world: int, precision: str, reproducible: bool, variants: list[Any]) -> None:
    for recomputes, variant in variants:
        reference = start(Adapted(DIM, recomputes=recomputes), 2, precision, reproducible)
        before, losses, masters = reference.master_state(), train(reference, 2), reference.master_state()
        assert not any(torch.equal(before[name], tensor) for name, tensor in masters.items()), "all are trained"
        engine = start(Adapted(DIM, recomputes=recomputes), 3, precision, reproducible, **variant)
        frozen = joined([held(engine)])
        assert train(engine, 2) == losses, variant
        assert same(engine.master_state(), masters), variant
        assert same(joined([held(engine)]), frozen), variant
        assert engine.memory()["unsharded"] == 0
        assert engine.sharded.scheduler is not None
        if variant["reshard_after_forward"]:
            assert engine.sharded.scheduler.peak <= 1 + variant["prefetch"], "groups unsharded at a time"


@pytest.mark.parametrize(
    ("precision", "reproducible", "variants"),
    [
        ("fp32", False, [VARIANTS[0], VARIANTS[5], VARIANTS[8], VARIANTS[10]]),
        ("bf16", True, [VARIANTS[2], VARIANTS[9]]),
        *(
            pytest.param(precision, reproducible, VARIANTS, marks=pytest.mark.exhaustive)
            for precision in ("bf16", "fp32")
            for reproducible in (False, True)
        ),
    ],
)
def test_stage_3_has_the_bits_of_stage_2(precision: str, reproducible: bool, variants: list[Any]) -> None:
    run_ranks(2, compare_stages, precision, reproducible, variants)


# -- memory ------------------------------------------------------------------------------------------------------------

WIDE = 192


def frozen_bytes(rank: int, world: int, precision: str) -> dict[int, tuple[int, int, int, set[str]]]:
    """Returns, by stage: bytes of the frozen parameters, by the formula, bytes not accounted for, whole parameters."""
    found = {}
    for stage in (0, 2, 3):
        gc.collect()
        gc.freeze()  # objects that exist already are neither searched nor counted
        engine = start(Adapted(WIDE), stage, precision)
        train(engine, 1)
        gc.collect()
        memory = engine.memory()
        unknown = sum(live_storages(engine.comm).values()) - sum(memory.values())
        found[stage] = memory["frozen"], engine.memory_formula()["frozen"], unknown, set(engine.replicated_frozen())
    return found


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.exhaustive)])
def test_frozen_bytes_follow_the_formula(precision: str) -> None:
    model = Adapted(WIDE)
    every = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    codes = every["blocks.3.codes"].nbytes
    for found in run_ranks(2, frozen_bytes, precision):
        for stage in (0, 2):
            got, formula, unknown, whole = found[stage]
            assert (got, whole) == (formula, set(every))
            assert abs(unknown) < 16 * 1024, f"stage {stage}"
        total = found[0][0]
        got, formula, unknown, whole = found[3]
        assert whole == {"blocks.3.codes"}
        assert formula == -(-total // 2)
        # the codes stay whole, which the formula does not know
        assert formula <= got - codes / 2 <= 1.03 * formula
        assert abs(unknown) < 16 * 1024
    assert precision != "fp32" or total == sum(p.nbytes for p in every.values())


# -- all-gathers and groups --------------------------------------------------------------------------------------------


def gathers(rank: int, world: int, prefetch: int, recomputes: bool, reshard: bool) -> Counter[str]:
    """Returns the number of all-gathers of each flat buffer in the second step, which has one micro-batch."""
    model = Adapted(DIM, recomputes=recomputes)
    engine = start(model, prefetch=prefetch, reshard_after_forward=reshard)
    schedule, labels = engine.comm.schedule, []
    record = schedule.record

    def recorded(op: str, label: str, tensor: Tensor) -> str:
        labels.append((op, label))
        return record(op, label, tensor)

    schedule.record = recorded  # type: ignore[method-assign]
    for step in range(2):
        labels.clear()
        engine.backward(engine(batch(step, rank)))
        engine.step()
    return Counter(label for op, label in labels if op == "all_gather")


@pytest.mark.parametrize(("prefetch", "recomputes"), [(0, False), (1, True), (2, False)])
def test_a_unit_is_gathered_once_a_pass(prefetch: int, recomputes: bool) -> None:
    trained = {f"blocks.{number}/bfloat16" for number in (0, 1, 3, 4)} | {"root/bfloat16"}
    frozen = {f"{unit}/bfloat16/frozen" for unit in UNITS}
    root = {"root/bfloat16/frozen", "root/float32/frozen"}
    # the last 1 + prefetch units stay unsharded from forward to backward
    once = ("root/", *(f"blocks.{number}/" for number in (4, 3, 2)[: 1 + prefetch]))
    want = {label: 1 if label.startswith(once) else 2 for label in trained | frozen | root}
    assert run_ranks(2, gathers, prefetch, recomputes, True) == [want] * 2
    assert run_ranks(2, gathers, prefetch, recomputes, False) == [dict.fromkeys(want, 1)] * 2


class FrozenNorms(Adapted):
    """Trains all but the norms."""

    def __init__(self) -> None:
        super().__init__(DIM)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("norm." not in name and parameter.is_floating_point())


def groups(rank: int, world: int) -> tuple[list[dict[str, set[str]]], set[str]]:
    engines = [start(Adapted(DIM), precision=precision) for precision in ("bf16", "fp32")]
    found = [{group.name: set(group.parameters) for group in engine.sharded.groups} for engine in engines]
    return found, {replica.layout.name for replica in start(FrozenNorms()).sharded.frozen}


def test_only_norms_join_the_root() -> None:
    """Not the weights of a unit that has a parameter of integers too.

    A flat buffer of frozen norms in every unit would be mostly padding, and double the all-gathers.
    """
    names = {name for name, p in Adapted(DIM).named_parameters() if p.is_floating_point()}
    want = []
    for precision in ("bf16", "fp32"):
        in_units = {n for n in names if n.startswith("blocks.") and (precision == "fp32" or ".norm." not in n)}
        of_units = {unit: {name for name in in_units if name.startswith(f"{unit}.")} for unit in UNITS}
        want.append({"": names - in_units, **of_units})
    assert run_ranks(2, groups) == [(want, {"root/float32/frozen"})] * 2


# -- misuse ------------------------------------------------------------------------------------------------------------


class Peeks(Adapted):
    """The root reads a frozen weight of a block."""

    def __init__(self) -> None:
        super().__init__(DIM)
        self.peek: Callable[[], Tensor] = lambda: torch.zeros(())

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.peek().float()


def message(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def misuse(rank: int, world: int) -> dict[str, Any]:
    x = batch(0, 0)
    model = Peeks()
    block = model.blocks[1]
    assert isinstance(block, AdaptedBlock)
    engine = start(model)
    said: dict[str, Any] = {}
    model.peek = lambda: block.up.weight.sum()
    said["read"] = message(ModelError, lambda: engine(x))
    raw = dict(model.named_parameters())["blocks.1.up.weight"]
    model.peek = raw.sum
    said["raw"] = bool(engine(x).isnan())
    model.peek = lambda: torch.zeros(())
    with engine.eval():
        engine(x)
    said["between"] = message(UsageError, lambda: model.embedding.weight)
    said["state_dict"] = message(UsageError, model.blocks[2].state_dict)
    said["whole"] = bool(model.blocks[3].codes.any())  # type: ignore[operator]
    fixed = Peeks()
    inner = fixed.blocks[1]
    assert isinstance(inner, AdaptedBlock)
    fixed.peek = lambda: inner.up.weight.sum()
    kept = start(fixed, keep_gathered=["blocks.1.up"])
    train(kept, 1)
    said["fixed"] = "blocks.1.up.weight" in kept.sharded.groups[0].parameters
    engine.backward(engine(x))
    raw.data = torch.zeros_like(raw)
    said["replaced"] = message(ContractError, engine.step)
    return said


def test_a_sharded_frozen_weight_read_elsewhere_is_an_error_with_the_fix() -> None:
    for said in run_ranks(2, misuse):
        assert "'blocks.1.up.weight' is read outside the forward of 'blocks.1'" in said["read"]
        assert "keep_gathered=['blocks.1.up.weight']" in said["read"]
        assert said["raw"], "NaN: no number that could be taken for one"
        assert "'embedding.weight' is read outside a forward of the engine" in said["between"]
        assert "is sharded (zero_stage=3) would hold no values; engine.master_state()" in said["state_dict"]
        assert said["whole"], "the codes are not sharded"
        assert said["fixed"]
        assert "parameter 'blocks.1.up.weight' no longer lies in its flat buffer" in said["replaced"]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save(rank: int, world: int, folder: str, stage: int, loaded: str | None) -> tuple[Any, ...]:
    """Trains two steps, or loads instead, and saves; returns masters, frozen parameters and the loss after it."""
    # other weights, frozen ones too, if it loads: what was saved must come back
    engine = start(Adapted(DIM, seed=1 if loaded else 0), stage, reproducible=True)
    if loaded is None:
        train(engine, 2)
    else:
        engine.load(loaded)
    engine.save(folder)
    with engine.eval():
        return engine.master_state(), held(engine), float(engine(batch(7, 7)))


def test_a_checkpoint_goes_from_stage_3_to_stage_2_and_back(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("first", "second", "third")]
    sharded = run_ranks(2, save, folders[0], 3, None)
    whole = run_ranks(1, save, folders[1], 2, folders[0])
    back = run_ranks(2, save, folders[2], 3, folders[1])
    frozen = joined([rank[1] for rank in sharded])
    model = Adapted(DIM)
    assert frozen.keys() == {name for name, p in model.named_parameters() if not p.requires_grad}
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad or torch.equal(frozen[name], parameter.to(frozen[name].dtype).view(-1)), name
    for ranks in (whole, back):
        assert same(ranks[0][0], sharded[0][0])
        assert same(joined([rank[1] for rank in ranks]), frozen)
        assert [rank[2] for rank in ranks] == [sharded[0][2]] * len(ranks)


def corrupt(path: Path, name: str) -> None:
    """Changes the last byte of the frozen tensor's first part, and the hash of its file."""

    def edit(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        key = next(key for key in header if key.startswith("frozen") and name in key)
        last = 8 + length + header[key]["data_offsets"][1] - 1
        return data[:last] + bytes([data[last] ^ 0x01]) + data[last + 1 :]

    vouched("r0000.safetensors", edit)(path)


def refusals(rank: int, world: int, damaged: list[str], path: str, name: str) -> list[str]:
    """Loads damaged checkpoints, and a good one of which rank 1 reads the last element of a frozen shard wrongly."""
    said = []
    for number, folder in enumerate(damaged):
        engine = start(Adapted(DIM, seed=1), (3, 2)[number % 2], reproducible=True)
        said.append(message(CheckpointError, lambda engine=engine, folder=folder: engine.load(folder)))  # type: ignore[misc]
    real = CheckpointReader.read_into
    for precision in ("bf16", "fp32"):
        engine = start(Adapted(DIM, seed=1), 3, precision)

        def read_into(reader: CheckpointReader, targets: Iterable[Any], engine: NativeEngine = engine) -> None:
            real(reader, targets)
            shard = next(shard for shard in engine.frozen_shards() if shard.name == name)
            if engine.rank == 1:
                shard.data[-1] += 1

        with mock.patch.object(CheckpointReader, "read_into", read_into):
            said.append(message(CheckpointError, lambda engine=engine: engine.load(path)))  # type: ignore[misc]
    return said


def test_a_load_refuses_frozen_weights_that_have_changed(tmp_path: Path) -> None:
    """BF16 weights are proven by their fingerprint, the casts to FP32 against the file."""
    run_ranks(2, save, str(tmp_path), 3, None)
    (path,) = tmp_path.glob("step*")
    names = ["blocks.1.up.weight", "embedding.weight", "blocks.3.codes"]
    folders = [Path(shutil.copytree(path, tmp_path / name / path.name)) for name in names]
    for folder, name in zip(folders, names, strict=True):
        corrupt(folder, name)
    other = "blocks.1.down.weight"
    for *damaged, bf16, fp32 in run_ranks(2, refusals, [str(folder) for folder in folders], str(path), other):
        for said, name in zip(damaged, names, strict=True):
            assert f"frozen:{name} has the fingerprint" in said, said
        for said in (bf16, fp32):
            assert f"after loading {tmp_path}" in said, said
            assert other in said, said

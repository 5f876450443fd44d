"""Frozen weights in each format: the same bits at every stage and world size, their bytes, and their checkpoints."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dtrain.checkpoint import CheckpointReader, verify
from dtrain.checkpoint.format.integrity import verify_checkpoint
from dtrain.engine.adapters.native import NativeEngine
from dtrain.errors import CheckpointError
from dtrain.precision.float8.cast import E4M3, Scaling, dequantize, quantize
from tests.distributed.test_memory import live_storages
from tests.helpers.adapted_models import DIM, LINEARS, Adapted, float8_weights, held, joined, same, start, train
from tests.helpers.damage import vouched
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

FORMATS = ("fp32", "bf16", "fp8", "fp8-rowwise")


def formats(default: str) -> pytest.MarkDecorator:
    """Parametrizes a test with all formats, the others in the exhaustive tier."""
    marks = {name: [] if name == default else [pytest.mark.exhaustive] for name in FORMATS}
    return pytest.mark.parametrize("precision", [pytest.param(name, marks=own) for name, own in marks.items()])


def cast(weight: Tensor, precision: str) -> Tensor:
    """Returns what products in FP8 compute with."""
    return dequantize(quantize(weight.detach(), E4M3, Scaling.ROWS if precision == "fp8-rowwise" else Scaling.TENSOR))


Setting = tuple[int, bool, bool, dict[str, Any]]
"""Stage, whether sums are reproducible, whether activations are recomputed, and options of the engine."""
SETTINGS: list[Setting] = [
    (2, True, False, {}),
    (3, True, True, {"prefetch": 0}),
    (3, True, False, {"prefetch": 2, "reshard_after_forward": False}),
]
PLAIN: list[Setting] = [(2, False, False, {}), (3, False, True, {"prefetch": 1})]


def bits(
    rank: int, world: int, precision: str, settings: list[Setting]
) -> list[tuple[list[float], dict[str, Tensor], dict[str, list[tuple[int, Tensor]]]]]:
    """Losses, masters and what the rank holds of the frozen weights."""
    found = []
    for stage, reproducible, recomputes, options in settings:
        engine: Any = start(stage, precision, recomputes=recomputes, reproducible=reproducible, **options)
        assert set(engine.contract.float8_modules) == (set(LINEARS) if precision.startswith("fp8") else set())
        before, frozen = engine.master_state(), held(engine)
        losses, masters = train(engine, range(2)), engine.master_state()
        assert not any(torch.equal(before[name], tensor) for name, tensor in masters.items()), "all are trained"
        assert same(joined([held(engine)]), joined([frozen]))
        assert engine.memory()["unsharded"] == 0
        if stage == 3 and options.get("reshard_after_forward", True):
            assert engine.sharded.scheduler.peak <= 1 + options.get("prefetch", 1), "groups unsharded at a time"
        found.append((losses, masters, frozen))
    return found


@pytest.mark.parametrize(
    ("precision", "settings", "plain"),
    [
        ("fp32", SETTINGS[::2], PLAIN),
        ("bf16", SETTINGS[1:2], []),
        ("fp8", SETTINGS[2:], []),
        ("fp8-rowwise", SETTINGS[1:2], []),
        *(pytest.param(one, SETTINGS, PLAIN, marks=pytest.mark.exhaustive) for one in FORMATS),
    ],
)
def test_stages_and_ranks_change_no_bit(precision: str, settings: list[Setting], plain: list[Setting]) -> None:
    """The plain order depends on the number of ranks, but not on the stage."""
    ((losses, masters, frozen),) = run_ranks(1, bits, precision, [(0, True, False, {})])[0]
    for name, weight in Adapted(DIM).named_parameters():
        if name.removesuffix(".weight") in LINEARS and precision.startswith("fp8"):
            assert torch.equal(frozen[name][0][1], cast(weight, precision).view(-1)), "of the unrounded weight, once"
            assert not torch.equal(frozen[name][0][1], weight.view(-1))
        elif not weight.requires_grad:
            assert torch.equal(frozen[name][0][1], weight.to(frozen[name][0][1].dtype).view(-1))
    first, second = run_ranks(2, bits, precision, settings + plain)
    reference = first[len(settings)][:2] if plain else ()
    for setting, own, other in zip(settings + plain, first, second, strict=True):
        want_losses, want_masters = (losses, masters) if setting[1] else reference
        assert own[0] == other[0] == want_losses, setting
        assert same(own[1], want_masters), setting
        assert same(joined([own[2], other[2]]), joined([frozen])), setting


WIDE = 192


def frozen_bytes(rank: int, world: int, precision: str) -> dict[int, tuple[int, int, int, set[str]]]:
    """Returns, by stage: bytes of the frozen parameters, by the formula, bytes not accounted for, whole parameters."""
    found = {}
    for stage in (0, 3):
        gc.collect()
        gc.freeze()  # objects that exist already are neither searched nor counted
        engine = start(stage, precision, dim=WIDE)
        train(engine, range(1))
        gc.collect()
        memory = engine.memory()
        unknown = sum(live_storages(engine).values()) - sum(memory.values())
        replicated = set(engine.states.replicated_frozen())
        found[stage] = memory["frozen"], engine.memory_formula()["frozen"], unknown, replicated
    return found


@formats("fp8")
def test_frozen_bytes_follow_the_formula(precision: str) -> None:
    every = {name: p for name, p in Adapted(WIDE).named_parameters() if not p.requires_grad}
    float8 = {n: p for n, p in every.items() if n.removesuffix(".weight") in LINEARS and precision.startswith("fp8")}
    codes = every["blocks.3.codes"].numel()  # int8 is no floating point, so it is never sharded
    total = codes
    for name, p in every.items():
        if p.is_floating_point():
            total += p.numel() * (1 if name in float8 else 4 if "norm" in name or precision == "fp32" else 2)
    scales = 4 * sum(p.shape[0] if precision == "fp8-rowwise" else 1 for p in float8.values())  # on every rank
    for found in run_ranks(2, frozen_bytes, precision):
        for stage, (got, formula, unknown, whole) in found.items():
            assert formula == (total if stage < 3 else -(-total // 2))
            share = got if stage < 3 else got - codes / 2  # which the formula does not know
            padding = 0.0 if stage < 3 and not float8 else (0.02 if float8 else 0.03) * formula
            assert formula <= share <= formula + padding + scales, stage
            assert whole == ({"blocks.3.codes"} if stage == 3 else set(every) - set(float8)), stage
            assert abs(unknown) < (32 if float8 else 16) * 1024, stage


def save(
    rank: int, world: int, folder: str, precision: str, stage: int = 3, loaded: str | None = None
) -> tuple[dict[str, Tensor], dict[str, list[tuple[int, Tensor]]], list[float]]:
    """Trains a step, or loads instead, and saves; returns masters, frozen weights and the losses of the steps after."""
    # other weights, frozen ones too, if it loads: what was saved must come back
    engine = start(stage, precision, seed=1 if loaded else 0, reproducible=True)
    if loaded is None:
        train(engine, range(1))
    else:
        engine.load(loaded)
    engine.save(folder)
    return engine.master_state(), held(engine), train(engine, range(1, 2))


@formats("fp8-rowwise")
def test_a_checkpoint_goes_from_stage_3_to_others_and_back(precision: str, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("first", "second", "third")]
    ranks = run_ranks(2, save, folders[0], precision)
    (path,) = Path(folders[0]).glob("step*")
    saved = {entry.name: entry.dtype for entry in verify_checkpoint(path).tensors if entry.kind == "frozen"}
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    assert {saved[f"{name}.weight"] for name in LINEARS} == {dtype}, "which has the values of E4M3 exactly"
    whole = run_ranks(1, save, folders[1], precision, 2, folders[0])
    back = run_ranks(2, save, folders[2], precision, 3, folders[1])
    for again in (whole, back):
        assert same(again[0][0], ranks[0][0])
        assert same(joined([rank[1] for rank in again]), joined([rank[1] for rank in ranks]))
        assert all(rank[2] == ranks[0][2] for rank in again)
    assert verify(Path(folders[2])).checkpoints


def test_checkpoints_go_between_precisions(tmp_path: Path) -> None:
    """BF16 weights are cast; those that were FP8 stay what they are, because BF16 has them exactly."""
    name = "blocks.1.up.weight"
    start(2, "bf16").save(tmp_path / "bf16")
    float8 = start(3)
    float8.load(tmp_path / "bf16")
    values = float8_weights(float8)[name]
    assert torch.equal(values, cast(Adapted(DIM).get_parameter(name).bfloat16(), "fp8"))
    float8.save(tmp_path / "fp8")
    bf16 = start(2, "bf16", seed=1)
    bf16.load(tmp_path / "fp8")
    assert torch.equal(bf16.module.get_parameter(name).float(), values)


def corrupt(path: Path, name: str) -> None:
    """Changes the last byte of the frozen tensor's first part, and the hash of its file."""

    def edit(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        key = next(key for key in header if key.startswith("frozen") and name in key)
        changed = bytearray(data)
        changed[8 + length + header[key]["data_offsets"][1] - 1] ^= 1
        return bytes(changed)

    vouched("r0000.safetensors", edit)(path)


def message(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


MISREAD = "blocks.1.down.weight"


def refusals(rank: int, world: int, damaged: list[str], path: str) -> list[str]:
    """Loads damaged checkpoints, and a good one of which the last element of a frozen weight is read wrongly."""
    said = [
        message(CheckpointError, partial(start(stage, precision, seed=1).load, folder))
        for folder in damaged
        for stage, precision in ((3, "bf16"), (2, "bf16"), (3, "fp8"))
    ]
    real = CheckpointReader.read_into
    for stage, precision in ((3, "bf16"), (3, "fp32"), (3, "fp8"), (0, "fp8")):
        engine = start(stage, precision, seed=1)

        def read_into(reader: CheckpointReader, targets: Iterable[Any], engine: NativeEngine = engine) -> None:
            targets = list(targets)
            real(reader, targets)
            to_cast = [target for target in targets if target.data.dtype == torch.float32]  # to FP8, if to that
            for shard in [*engine.states.frozen_shards(), *(to_cast if engine.states.frozen_float8 else ())]:
                if shard.name == MISREAD and rank == 1:
                    shard.data.view(-1)[-1] += 1

        with mock.patch.object(CheckpointReader, "read_into", read_into):
            said.append(message(CheckpointError, partial(engine.load, path)))
    return said


def test_a_load_refuses_frozen_weights_that_have_changed(tmp_path: Path) -> None:
    """BF16 weights are proven by their fingerprint, the casts to FP32 and FP8 against the file."""
    run_ranks(2, save, str(tmp_path), "bf16")
    (path,) = tmp_path.glob("step*")
    names = ["blocks.1.up.weight", "embedding.weight", "blocks.3.codes"]
    folders = [Path(shutil.copytree(path, tmp_path / name / path.name)) for name in names]
    for folder, name in zip(folders, names, strict=True):
        corrupt(folder, name)
    for found in run_ranks(2, refusals, [str(folder) for folder in folders], str(path)):
        for number, said in enumerate(found[:9]):
            assert f"frozen:{names[number // 3]} has the fingerprint" in said, said
        for said in found[9:11]:
            assert f"after loading {tmp_path}" in said, said
            assert MISREAD in said, said
        for said in found[11:]:
            assert "the frozen FP8 weights of 'blocks.1/float8_e4m3fn/frozen'" in said
            assert "are not the cast of what was saved" in said

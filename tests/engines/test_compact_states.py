"""Masters of a BF16 weight and a remainder, and BF16 gradients: writes, flips, checkpoints, memory, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.checkpoint import open_newest
from dtrain.errors import ConfigError, CorruptionError
from dtrain.parameters.model_states import MAIN_GRAD, MASTER
from dtrain.precision.remainder import RemainderPair
from tests.engines.checks.optimizers import cast_as_pairs_round
from tests.engines.helpers import digest, start, state_digests, train_step
from tests.helpers.bit_flips import flip_bit
from tests.helpers.checkpoints import ALONE
from tests.helpers.one_rank import start as start_small
from tests.helpers.one_rank import train_step as train_small


def new_engine(stage: int, **options: Any) -> Any:
    return start("native", stage, **{"precision": "bf16", "master": "remainder", **options})


def test_a_checkpoint_has_the_bytes_of_full_masters_and_loads_under_either(tmp_path: Path) -> None:
    files, states = [], []
    with cast_as_pairs_round():
        for master, other in (("full", "remainder"), ("remainder", "full")):
            engine = new_engine(2, master=master)
            train_step(engine, 2)
            engine.save(tmp_path / master)
            reader = open_newest(tmp_path / master, ALONE)
            files.append({(t.kind, t.name): digest(reader.read(t.kind, t.name)) for t in reader.tensors})
            loaded = new_engine(3, master=other, seed=6)
            loaded.load(tmp_path / master)
            train_step(loaded, 2)
            states.append(state_digests(loaded))
    assert files[0] == files[1]
    assert {kind for kind, _ in files[0]} >= {MASTER, "exp_avg"}
    assert states[0] == states[1]


def test_a_write_in_place_becomes_the_whole_master_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine = new_engine(2)
    train_step(engine, 2)
    before = engine.master_state()
    weight = engine.module.get_parameter("mix.weight")
    with torch.no_grad():
        weight[0] = 0.375
    after = engine.master_state()
    assert torch.equal(after["mix.weight"], weight.float())
    assert all(torch.equal(after[name], before[name]) for name in after if name != "mix.weight")
    assert "'mix.weight' was written to" in caplog.text
    assert train_step(engine, 2).applied


@pytest.mark.parametrize("half", ["weight", "remainder"])
def test_the_audit_finds_a_flipped_bit_in_either_half(half: str) -> None:
    engine = new_engine(2, audit=1)
    train_step(engine, 2)
    shard = next(shard for shard in engine.states.local_shards(MASTER) if isinstance(shard.values, RemainderPair))
    flip_bit(getattr(shard.values, half), 1, 3)
    with pytest.raises(CorruptionError) as caught:
        train_step(engine, 2)
    assert [(item.tensor, item.kind) for item in caught.value.corruptions] == [(shard.name, MASTER)]


ADAMW_BF16: dict[str, Any] = {"optimizer": dtrain.AdamWBF16()}


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.LayerNorm(256))


@pytest.mark.parametrize(
    ("options", "main_grad", "moments"),
    [({}, 4, 8), (ADAMW_BF16, 4, 4), ({**ADAMW_BF16, "grad_dtype": "bf16"}, 2, 4)],
    ids=["remainder", "remainder and BF16 moments", "all"],
)
def test_bytes_of_a_parameter(options: dict[str, Any], main_grad: int, moments: int) -> None:
    engine = start_small(stack(), precision="bf16", master="remainder", **options)
    assert train_small(engine, torch.ones(2, 256)).applied
    memory, formula = engine.memory(), engine.memory_formula()
    assert sum(formula.values()) <= sum(memory.values()) <= 1.02 * sum(formula.values())
    assert memory[MAIN_GRAD] >= main_grad * engine.num_parameters
    nbytes = {"compute": 2, "master": 2, "main_grad": main_grad, "moments": moments}
    for kind, number in nbytes.items():  # the norm's states are whole
        assert formula[kind] == pytest.approx(number * engine.num_parameters, rel=0.01), kind
    if len(options) == 2:
        assert engine.contract.describe()[-1] == (
            "states: masters fp32 as bf16 weight and 16-bit remainder, main grads bf16, moments bf16"
        )


def test_fp8_weights_keep_full_masters() -> None:
    policy = dtrain.PrecisionPolicy.named("fp8", rules={"0": "bf16"})
    engine = start_small(stack(), precision=policy, master="remainder")
    found = {buffer.layout.dtype: type(buffer.master) for buffer in engine.sharded.buffers}
    assert found == {torch.float8_e4m3fn: Tensor, torch.bfloat16: RemainderPair, torch.float32: Tensor}


RULED = dtrain.PrecisionPolicy.named("bf16", rules={"*": "fp32"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp32"}, "no trained parameter has a BF16 weight"),
        ({"precision": "fp16"}, "use precision=bf16, or master=full"),
        ({"precision": "bf16", "optimizer": dtrain.TorchOptimizer(torch.optim.RAdam)}, "optimizer=torch"),
        ({"precision": "bf16", "engine": "fsdp2"}, "a setting of engine=native"),
        ({"precision": RULED}, "no trained parameter has a BF16"),
        ({"precision": RULED, "master": "full", "grad_dtype": "bf16"}, "no trained parameter has BF16 gradients"),
        ({"precision": "fp32", "master": "full", "grad_dtype": "bf16"}, "grad_dtype=bf16 with precision="),
        ({"precision": "fp16", "master": "full", "grad_dtype": "bf16"}, "grad_dtype=bf16 with precision="),
    ],
)
def test_what_cannot_be_compact_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start_small(**{"master": "remainder", **options})

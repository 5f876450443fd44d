"""Weights that the user writes between steps: what single engines refuse, patterns, races and checkpoints."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.distributed.transport.host_memory import _CopyRead
from dtrain.engine.adapters.deepspeed import config as deepspeed_config
from dtrain.errors import DivergenceError, UsageError
from tests.engines.checks.weights import NOWHERE, clamp, load_state_dict, weights_of, zero
from tests.engines.helpers import batch, build, computed, start, state_digests, train_step
from tests.helpers.net import Net
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes


def halves() -> nn.Module:
    """Two units share a parameter, which ``fully_shard`` therefore replicates, here in BF16."""
    blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    blocks[1].weight = blocks[0].weight
    return Net(lambda net, x: net.blocks[1](torch.tanh(net.blocks[0](x))), blocks=blocks)


def test_fsdp2_takes_over_low_precision_parameters_that_it_replicates() -> None:
    engine = dtrain.initialize(halves(), engine="fsdp2", precision="bf16", seed=0)
    weight = engine.module.get_parameter("blocks.0.weight")
    assert type(weight) is nn.Parameter
    assert weight.dtype == torch.bfloat16
    engine.backward(engine(torch.ones(2, 4)).float().square().mean())
    assert engine.step().applied
    before = engine.master_state()["blocks.0.weight"]
    with torch.no_grad():
        weight[:1] = 2.0  # no master rounds to it, so each takes it
    after = engine.master_state()["blocks.0.weight"]
    assert torch.equal(after[0], torch.full((4,), 2.0))
    assert torch.equal(after[1:], before[1:])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fsdp2_refuses_writes_to_weights_that_are_unsharded(precision: str) -> None:
    """FP32 weights of BF16 units are replicated, in the memory of their masters."""
    engine = start("fsdp2", 2, precision=precision)
    computed(engine)  # stage 2 leaves the weights unsharded
    masters = state_digests(engine, buffers=False)
    clamp(engine.module)
    kept = rf"; other writes are kept \({6 if precision == 'bf16' else 2}, such as 'frozen.weight'\)"
    with pytest.raises(UsageError, match=rf"'\S+' was written to .* is lost \(written so: \d+\){kept}; write"):
        computed(engine)
    computed(engine)
    clamp(engine.module)
    engine.backward(engine(tokens=batch(0)))
    with pytest.raises(UsageError, match=r"'\S+' was written to .* engine.modify_weights"):
        engine.step()
    after = state_digests(engine, buffers=False)
    changed = [name for name in after if after[name] != masters[name]]  # the biases were small enough
    norms = [f"master:blocks.{number}.norm.weight" for number in range(2)]
    assert changed == (norms if precision == "bf16" else [])
    assert engine.step().applied


def test_a_lost_write_does_not_lose_the_others() -> None:
    """The tied weight is replicated in BF16 beside its FP32 master; the biases are unsharded, so theirs are lost."""
    engine = dtrain.initialize(halves(), engine="fsdp2", zero_stage=2, precision="bf16", seed=0)
    x = torch.ones(2, 4)
    with engine.eval():
        engine(x)  # stage 2 leaves the weights unsharded
    with torch.no_grad():
        engine.module.get_parameter("blocks.0.weight").fill_(2.0)
        engine.module.get_submodule("blocks.0").bias.fill_(2.0)
    message = r"\.bias' was written to .* \(written so: 1\); other writes are kept \(1, such as 'blocks.0.weight'\)"
    with pytest.raises(UsageError, match=message), engine.eval():
        pass
    engine.backward(engine(x).float().square().mean())
    assert engine.step(lr=0.0).applied
    assert torch.equal(engine.master_state()["blocks.0.weight"], torch.full((4, 4), 2.0))


def deepspeed_forgets_unsharded(rank: int, world: int) -> None:
    deepspeed_config.PERSISTENT = 0  # else the small weights would stay gathered
    engine = start("deepspeed", 3, precision="bf16")
    for _ in range(3):
        train_step(engine, 2)
    computed(engine)  # leaves weights unsharded
    with engine.modify_weights():
        zero(engine.module)
    zero(reference := build())
    torch.testing.assert_close(computed(engine), reference(batch(0)).detach())


@pytest.mark.parametrize("name", ["native", "ddp"])  # fully_shard refuses it itself
def test_a_replaced_parameter_is_refused(name: str) -> None:
    engine = start(name, 0 if name == "ddp" else 2)
    engine.module.load_state_dict(build(seed=6).state_dict(), assign=True)
    with pytest.raises(UsageError, match=r"'\S+' was replaced after dtrain.initialize"):
        engine.save(NOWHERE)


def test_modify_weights_is_refused_outside_of_its_place() -> None:
    engine = start("native", 2)
    for pattern in ("decoder.*", ""):
        message = f"modify_weights pattern '{re.escape(pattern)}' matches no parameter"
        with pytest.raises(UsageError, match=message), engine.modify_weights(pattern):
            pass
    with engine.eval(), pytest.raises(UsageError, match=r"inside engine.eval"), engine.modify_weights():
        pass
    for _ in engine.accumulate([0]):
        with pytest.raises(UsageError, match="a micro-batch; call it between steps"), engine.modify_weights():
            pass
    engine.backward(engine(tokens=batch(0)))
    with pytest.raises(UsageError, match="between backward and step"), engine.modify_weights():
        pass
    assert engine.step().applied


def test_a_pattern_selects_what_is_taken() -> None:
    engine = start("native", 2, precision="bf16")
    with torch.no_grad():
        before = engine.master_state()
        with engine.modify_weights("head", "scale"):  # the head's weight is tied
            assert engine.module.get_parameter("mix.weight").dtype == torch.bfloat16
            assert engine.module.get_parameter("embedding.weight").dtype == torch.float32
            zero(engine.module.get_submodule("head"))
            engine.module.get_parameter("scale").mul_(1.001)
        after = engine.master_state()
        changed = {name for name, old in before.items() if not torch.equal(after[name], old)}
        assert changed == {"embedding.weight", "head.bias", "scale"}
        assert torch.equal(after["scale"], before["scale"] * 1.001)
        message = r"'scale' was written to inside .* do not match it"
        with pytest.raises(UsageError, match=message), engine.modify_weights("head"):
            zero(engine.module)
    # the write itself was one in place, which is noticed
    assert not engine.master_state()["mix.weight"].any()


def takes_frozen_weights(rank: int, world: int) -> None:
    engine = start("native", 3, precision="bf16")
    frozen = build().frozen.weight.detach()
    with engine.modify_weights("frozen", "scale"):
        assert torch.equal(engine.module.get_parameter("frozen.weight"), frozen)
        engine.module.get_submodule("frozen").weight.mul_(2.0)
    with engine.modify_weights():
        assert torch.equal(engine.module.get_parameter("frozen.weight"), frozen * 2)


def refuses_different_values(rank: int, world: int) -> None:
    engine = start("native", 1, precision="bf16")
    with torch.no_grad():
        engine.module.get_parameter("mix.weight")[0] = rank
    engine.backward(engine(tokens=batch(0)))
    with pytest.raises(DivergenceError, match=r"values written to parameter 'mix.weight' differ on rank 0 and rank 1"):
        engine.step()


@pytest.mark.parametrize("check", [deepspeed_forgets_unsharded, takes_frozen_weights, refuses_different_values])
def test_on_two_ranks(check: Any) -> None:
    run_ranks(2, check)


def write_at_once(rank: int, world: int, delay: float) -> dict[str, str]:
    """Writes after each step; rank 1 may still read its parameters to refresh its own."""
    read = _CopyRead._use

    def read_late(self: Any, tensors: list[Tensor], output: Tensor) -> None:
        time.sleep(delay * rank)
        read(self, tensors, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_CopyRead, "_use", read_late)
        engine = start("native", 1)
        for _ in range(3):
            with torch.no_grad():
                torch._foreach_mul_([p for p in engine.module.parameters() if p.requires_grad], 1.5)
            train_step(engine, 2)
        return state_digests(engine)


def test_a_write_waits_for_ranks_that_still_read() -> None:
    assert run_ranks(2, write_at_once, 0.05) == run_ranks(2, write_at_once, 0.0)


def test_a_checkpoint_holds_what_was_written(tmp_path: Path) -> None:
    engine, again = (start("native", 2, precision="bf16") for _ in range(2))
    train_step(engine, 1)
    zero(engine.module)
    engine.save(tmp_path)
    load_state_dict(again.module)  # a load overwrites what was written before it
    again.load(tmp_path)
    assert all(not values.any() for values in again.master_state().values())
    assert set(weights_of(again)) == set(weights_of(engine))
    train_step(again, 1)

"""Megatron-LM: tied and frozen weights, overrides by name, and what a checkpoint brings back or must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dtrain
from dtrain.errors import CheckpointError, ConfigError
from tests.corpus.assertions.megatron_steps import constant, total, two_layers
from tests.corpus.rows import assertion
from tests.corpus.training import follows_oracle, seeded, start, step_of
from tests.engines.checks.checkpoints import loads_what_any_other_saved
from tests.engines.helpers import state_digests
from tests.engines.matrix import Trial

FULLY_SHARD = "NVIDIA/Megatron-LM tests/unit_tests/distributed/mfsdp_v2/test_fully_shard.py"
ROUND_TRIP = "NVIDIA/Megatron-LM tests/unit_tests/distributed/mfsdp_v2/test_checkpoint.py"
SERIALIZATION = "NVIDIA/Megatron-LM tests/unit_tests/dist_checkpointing/test_serialization.py"
SAVED_STATES = "NVIDIA/Megatron-LM tests/unit_tests/dist_checkpointing/test_optimizer.py"
OPTIMIZER = "NVIDIA/Megatron-LM tests/unit_tests/test_optimizer.py"

assertion(
    f"{ROUND_TRIP}::test_checkpoint_roundtrip_flat_dp",
    "A load restores every bit of weights and optimizer states that the ranks share unevenly.",
)(loads_what_any_other_saved)


class Tied(nn.Module):
    """An embedding that is the head's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.embedding(tokens))).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@assertion(
    f"{FULLY_SHARD}::test_tied_child_parameters_allocate_one_physical_weight",
    "An embedding tied to the output layer is one weight for sharding and for the optimizer.",
    precisions=("fp32", "bf16"),
)
def a_tied_weight_is_stored_and_updated_once(trial: Trial) -> None:
    draw = torch.Generator().manual_seed(3)
    steps = [[({"tokens": torch.randint(7, (2, 4), generator=draw)}, 1.0) for _ in range(6)] for _ in range(2)]
    engine = follows_oracle(trial, lambda: seeded(Tied), steps)
    assert engine.num_parameters == 35
    assert sorted(engine.master_state()) == ([] if trial.rank else ["embedding.weight"])
    assert engine.module.head.weight is engine.module.embedding.weight


class HalfFrozen(nn.Module):
    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.body = nn.Linear(7, 5)
        self.more = nn.Linear(5, 11).requires_grad_(False) if frozen else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.more(torch.tanh(self.body(x)))


@assertion(
    f"{FULLY_SHARD}::test_frozen_parameter_group_does_not_allocate_main_grad",
    "Weights that are not trained take no memory for gradients.",
)
def frozen_weights_take_no_gradients_and_no_states(trial: Trial) -> None:
    """Beside them, the trained ones take what they take alone; between backward and step, when gradients exist."""
    memories = []
    for frozen in (True, False):
        engine = start(trial, seeded(lambda frozen=frozen: HalfFrozen(frozen=frozen)))
        engine.backward(total(engine, {"x": torch.ones(2, 7)}))
        memories.append({kind: engine.memory()[kind] for kind in ("main_grad", "master", "moments")})
        assert engine.step().applied
        assert engine.num_parameters == 40
    assert memories[0] == memories[1]
    assert memories[0]["main_grad"] > 0 or trial.case.engine == "deepspeed"


@assertion(
    f"{OPTIMIZER}::test_get_param_groups_with_overrides",
    "An override of weight decay acts on the parameters whose names match, and each parameter is in exactly one group.",
)
def an_override_of_decay_by_name_acts_on_what_matches_only(trial: Trial) -> None:
    """Gradients of zero leave the decay alone: a factor of ``1 - lr * decay`` on each weight, once."""
    groups = {"0.bias": {"weight_decay": 0.25}, "2.weight": {"weight_decay": 0.5, "lr_factor": 2.0}}
    optimizer = dtrain.AdamW(lr=0.5, weight_decay=0.75, groups=groups)
    engine = start(trial, two_layers(), optimizer=optimizer)
    before = two_layers().state_dict()
    step_of(engine, [({"x": torch.ones(1, 7)}, 1.0)] * trial.ranks, lambda model, given: 0.0 * total(model, given))
    factors = {"0.weight": 1 - 0.5 * 0.75, "0.bias": 1 - 0.5 * 0.25, "2.weight": 1 - 1.0 * 0.5, "2.bias": 1.0}
    masters = engine.master_state()
    assert sorted(masters) == ([] if trial.rank else sorted(factors))
    for name, weight in masters.items():
        torch.testing.assert_close(weight, before[name] * factors[name], rtol=1e-6, atol=0)


@assertion(
    f"{SERIALIZATION}::TestSerialization::test_tensor_shape_mismatch",
    "Loading a weight that is smaller or larger than the saved one is an error, without cutting or padding it.",
)
def a_weight_of_another_size_is_not_loaded(trial: Trial) -> None:
    saved, smaller, larger = (start(trial, constant(out_features)) for out_features in (5, 4, 7))
    saved.save(trial.folder)
    for engine in (smaller, larger):
        before = state_digests(engine)
        with pytest.raises(CheckpointError, match="weight"):
            engine.load(trial.folder)
        assert state_digests(engine) == before


@assertion(
    f"{SAVED_STATES}::TestDistributedOptimizer::test_finetune_doesnt_load_optimizer",
    "Loading only the weights leaves the optimizer's states unchanged.",
    precisions=("fp32", "bf16"),
)
def loading_only_the_weights_keeps_the_optimizer_states(trial: Trial) -> None:
    given = [({"x": torch.ones(2, 7)}, 1.0)] * trial.ranks
    engine, other = (start(trial, seeded(lambda: HalfFrozen(frozen=False), seed)) for seed in (0, 1))
    for each in (engine, other):
        step_of(each, given, total)
    other.save(trial.folder)
    masters = _everywhere(trial.folder / "masters.pt", trial, other)
    before = state_digests(engine)
    with engine.modify_weights():
        engine.module.load_state_dict(masters)
    after, theirs = state_digests(engine), state_digests(other)
    for key in before:
        assert after[key] == (theirs if key.startswith("master:") else before)[key], key
        assert not key.startswith("master:") or after[key] != before[key], key


def _everywhere(path: Path, trial: Trial, engine: Any) -> dict[str, Tensor]:
    """The masters, which only rank 0 has, on all ranks."""
    if masters := engine.master_state():
        torch.save(masters, path)
    engine.comm.barrier()
    found: dict[str, Tensor] = torch.load(path)
    return found


class Counting(torch.optim.Optimizer):
    """Mean gradients; it remembers their sum, a number of updates and, if it ``flags``, a Boolean."""

    def __init__(self, params: Any, lr: float = 0.5, flags: bool = False) -> None:
        super().__init__(params, {"lr": lr, "flags": flags})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(sum=torch.zeros_like(p), updates=0)
                if group["flags"]:
                    state["found_inf"] = False
                state["sum"].add_(p.grad)
                state["updates"] += 1
                p.sub_(state["sum"], alpha=group["lr"] / state["updates"] ** 2)


@assertion(
    f"{OPTIMIZER}::test_distrib_optimizer_save_load_with_non_tensor_state",
    "States of an optimizer that are not tensors, such as a count of updates, do not disturb a save and a load.",
)
def a_number_that_an_optimizer_keeps_comes_through_a_checkpoint(trial: Trial) -> None:
    """The update after a load is that of a run without it; each gradient is 1. A flag is refused by its name."""

    def started(**options: Any) -> Any:
        optimizer = dtrain.TorchOptimizer(Counting, lr=0.5, **options)
        return trial.engine(constant(5, 0.0), optimizer=optimizer, max_grad_norm=None)

    given = [({"x": torch.ones(1, 1)}, 1.0)] * trial.ranks
    engine = started()
    for _ in range(3):
        step_of(engine, given, total)
    engine.save(trial.folder)
    loaded = started()
    loaded.load(trial.folder)
    for each in (engine, loaded):
        step_of(each, given, total)
        for weight in each.master_state().values():
            want = -0.5 * (1 + 2 / 4 + 3 / 9 + 4 / 16)
            torch.testing.assert_close(weight, torch.full_like(weight, want), rtol=1e-6, atol=0)
    with pytest.raises(ConfigError, match=r"its state 'found_inf' .* has type bool"):
        started(flags=True)

"""Weights, buffers and settings of parameters that DeepSpeed has lost on the way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import dtrain
from tests.corpus.rows import fault
from tests.corpus.training import SETTINGS, compare_masters, seeded, start, step_of
from tests.engines.matrix import Trial
from tests.helpers.oracle import Oracle


class Net(nn.Module):
    """A trained layer before and after a frozen one, and tied weights that are not the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.back = nn.Linear(3, 5, bias=False)
        self.tied = nn.Linear(3, 5, bias=False)
        self.tied.weight = self.back.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(torch.tanh(self.frozen(torch.tanh(self.first(x)))))
        return (self.tied(torch.tanh(h)) + self.back(h.detach())).float().square().mean()


class Positions(nn.Module):
    """Multiplies by angles of an FP32 buffer, whose large positions BF16 cannot tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.register_buffer("angles", torch.arange(256.0, 261.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).float() * self.angles.cos()).square().mean()


def build(kind: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    return seeded(kind, seed)


def batch(seed: int) -> list[tuple[dict[str, Tensor], float]]:
    draw = torch.Generator().manual_seed(seed)
    return [({"x": torch.randn(2, 3, generator=draw)}, 1.0) for _ in range(6)]


@fault(
    "deepspeedai/DeepSpeed#3090",
    "ZeRO-3 saves no frozen weights, so that they stay random in the run that resumes from the checkpoint.",
    peers="DeepSpeed",
)
def a_resumed_run_has_the_frozen_weights_of_the_one_that_saved(trial: Trial) -> None:
    """The engine that loads begins with other weights, and goes on with the bits of the one that saved."""
    saving, loading = start(trial, build()), start(trial, build(seed=1))
    step_of(saving, batch(0))
    loading.load(saving.save(trial.folder))
    frozen = dict(loading.states.full_frozen())
    assert all(torch.equal(value, build().get_parameter(name)) for name, value in frozen.items())
    assert len(frozen) == 2
    assert step_of(loading, batch(1)).loss == step_of(saving, batch(1)).loss
    masters, want = loading.master_state(), saving.master_state()
    assert all(torch.equal(masters[name], value) for name, value in want.items())


@fault(
    "deepspeedai/DeepSpeed#3033",
    "Tied weights that are restored from a ZeRO-3 checkpoint are tied to the first parameter, whichever it is.",
    peers="DeepSpeed",
)
def tied_weights_are_those_of_their_partner_after_save_and_load(trial: Trial) -> None:
    """By the checkpoint, and by the masters in a plain model."""
    saving, loading = start(trial, build()), start(trial, build(seed=1))
    step_of(saving, batch(0))
    loading.load(saving.save(trial.folder))
    saved, masters, plain = saving.master_state(), loading.master_state(), build()
    if masters:
        assert "tied.weight" not in masters
        assert torch.equal(masters["back.weight"], saved["back.weight"])
        plain.load_state_dict(masters, strict=False)
        assert torch.equal(plain.get_submodule("tied").weight, masters["back.weight"])
    with loading.full_model() as whole:
        assert whole.tied.weight is whole.back.weight
        for micro_batch, _ in batch(1) if masters else ():
            assert torch.equal(whole(**micro_batch), plain(**micro_batch))


@fault(
    "deepspeedai/DeepSpeed#762",
    "After weights are loaded without optimizer states, the FP32 masters stay random, and the next step "
    "overwrites the weights with them.",
    peers="DeepSpeed",
    precisions=("bf16", "fp32"),
)
def training_goes_on_from_weights_that_are_loaded_into_the_engine(trial: Trial) -> None:
    engine, loaded = start(trial, build()), build(seed=1)
    with engine.modify_weights():
        engine.module.load_state_dict(loaded.state_dict())
    oracle = Oracle(loaded, optimizer=SETTINGS)
    if masters := engine.master_state():
        assert all(torch.equal(value, loaded.get_parameter(name)) for name, value in masters.items())
    before = oracle.masters()
    assert oracle.step(batch(0)).applied == step_of(engine, batch(0)).applied
    if masters := engine.master_state():
        trained = {name: value for name, value in masters.items() if not name.startswith("frozen")}
        tolerance = 1e-5 if trial.case.precision == "fp32" else 0.06
        compare_masters(trained, oracle.masters(), before, tolerance, trial.case.precision)


@fault(
    "deepspeedai/DeepSpeed#5812",
    "Under BF16 or FP16 with ZeRO, buffers that a model keeps in FP32 are cast to the lower precision.",
    peers="DeepSpeed",
    precisions=("bf16", "fp32"),
)
def a_buffer_keeps_its_dtype_and_its_large_values(trial: Trial) -> None:
    engine = start(trial, build(Positions))
    want = Oracle(build(Positions), optimizer=SETTINGS).step(batch(0))
    outcome = step_of(engine, batch(0))
    assert abs(outcome.loss - want.loss) <= (1e-5 if trial.case.precision == "fp32" else 0.02) * want.loss
    angles = engine.module.get_buffer("angles")
    assert angles.dtype == torch.float32
    assert angles.tolist() == [256.0, 257.0, 258.0, 259.0, 260.0]


@fault(
    "deepspeedai/DeepSpeed#6873",
    "Under ZeRO-3, parameters of groups with learning rates of their own all train with the same rate.",
    peers="DeepSpeed",
)
def every_group_of_parameters_has_its_own_learning_rate(trial: Trial) -> None:
    """The reference is torch's AdamW with the same groups."""
    groups = {"first": {"lr_factor": 10.0}, "last.bias": {"lr_factor": 0.0}}
    record = dtrain.AdamW(lr=0.01, eps=SETTINGS.eps, betas=SETTINGS.betas, weight_decay=0.0, groups=groups)
    engine, plain = start(trial, build(), optimizer=record), build()
    rates = {"first.weight": 0.1, "first.bias": 0.1, "last.bias": 0.0}
    optimizer = torch.optim.AdamW(
        [{"params": [p], "lr": rates.get(n, 0.01)} for n, p in plain.named_parameters() if p.requires_grad],
        eps=SETTINGS.eps, betas=SETTINGS.betas, weight_decay=0.0,
    )  # fmt: skip
    for seed in range(2):
        optimizer.zero_grad()
        sum(plain(**micro_batch) / 6 for micro_batch, _ in batch(seed)).backward()  # type: ignore[union-attr]
        optimizer.step()
        assert step_of(engine, batch(seed)).applied
    want = {name: p.detach() for name, p in plain.named_parameters()}
    if masters := engine.master_state():
        compare_masters(masters, want, {}, 1e-5)

"""FP32 masters against none: the same training with each update applied to FP16 or BF16 weights directly.

Without masters, the weights are rounded to their compute dtype at the start and after every update. Gradients, moments
and the formula of the update are the same, so that only the missing master differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from torch import Tensor

from dtrain.engine.interface import Engine
from dtrain.measure.experiment.networks import SmallNetwork, language_model, regression
from dtrain.measure.experiment.train import BLOCK, LossCurve, train
from dtrain.precision.histogram import share
from dtrain.tools.format_styles import PRECISION_COLORS
from dtrain.tools.tables import Table

PAPER = (
    "updates to FP16 weights cost a Mandarin speech model 80 % relative accuracy, FP32 masters nothing (section 3.1)"
)
_PRECISIONS = ("fp16", "bf16")
_MASTERS: dict[str, Any] = {"color": "#c0c0c0", "linewidth": 6, "label": "FP32 masters"}


@dataclass(frozen=True)
class MasterComparison:
    """A network trained at one learning rate with and without masters.

    Attributes:
        untrained: held-out loss before the first step.
        lost_updates: share of the nonzero updates that changed no weight, without masters.
    """

    network: str
    precision: str
    lr: float
    seed: int
    untrained: float
    with_masters: LossCurve
    without: LossCurve
    lost_updates: float

    @property
    def lost_progress(self) -> float:
        """Share of the progress, from the untrained loss, that the missing masters cost."""
        return (self.without.final - self.with_masters.final) / (self.untrained - self.with_masters.final)


@dataclass(frozen=True)
class MasterWeightsResult:
    steps: int
    trainings: list[MasterComparison]

    def of(self, network: str, precision: str, lr: float) -> list[MasterComparison]:
        """Returns the trainings of all seeds."""
        key = (network, precision, lr)
        return [item for item in self.trainings if (item.network, item.precision, item.lr) == key]

    @property
    def cases(self) -> list[tuple[str, str, float]]:
        """Network, precision and learning rate of each case."""
        return list(dict.fromkeys((item.network, item.precision, item.lr) for item in self.trainings))

    def rates(self, network: str) -> list[float]:
        return sorted({item.lr for item in self.trainings if item.network == network})


class WithoutMasters:
    """Rounds the masters of all weights in reduced precision to their compute dtype, and counts lost updates."""

    def __init__(self) -> None:
        self.updates = 0
        self.lost = 0
        self._before: dict[str, Tensor] = {}

    def round(self, engine: Engine) -> None:
        """Rounds the masters: before the first step and after each."""
        dtypes = {name: dtype for name, dtype in engine.contract.replica_dtypes.items() if dtype != torch.float32}
        with engine.modify_weights(*dtypes):
            for name, dtype in dtypes.items():
                weight = engine.module.get_parameter(name)
                after = weight.to(dtype).float()
                before = self._before.get(name)
                if before is not None:
                    is_update = weight != before
                    self.updates += int(is_update.sum())
                    self.lost += int((is_update & (after == before)).sum())
                weight.copy_(after)
                self._before[name] = after


def run(
    rates: Sequence[tuple[SmallNetwork, Sequence[float], Sequence[int]]] | None = None, steps: int = 300
) -> MasterWeightsResult:
    """Trains each network of ``rates`` at each of its learning rates with each of its seeds."""
    rates = rates or (
        (regression(), (1e-6, 1e-5, 1e-4, 1e-3), (0, 1, 2)),
        (language_model(), (1e-6, 1e-5, 1e-4, 1e-3), (0,)),
    )
    trainings = [
        _compare(replace(network, optimizer=replace(network.optimizer, lr=lr)), precision, steps, seed)
        for network, values, seeds in rates
        for lr in values
        for precision in _PRECISIONS
        for seed in seeds
    ]
    return MasterWeightsResult(steps, trainings)


def _compare(network: SmallNetwork, precision: str, steps: int, seed: int) -> MasterComparison:
    observer = WithoutMasters()
    untrained = train(network, "fp32", 0, seed=seed).final
    with_masters = train(network, precision, steps, seed=seed)
    without = train(network, precision, steps, seed=seed, on_start=observer.round, on_step=observer.round)
    lost = share(observer.lost, observer.updates)
    return MasterComparison(network.name, precision, network.optimizer.lr, seed, untrained, with_masters, without, lost)


def finding(result: MasterWeightsResult) -> str:
    network = result.trainings[0].network
    lr = sorted(result.rates(network))[1]
    shares = [f"{_mean(result.of(network, name, lr), 'lost_progress'):.0%} in {name.upper()}" for name in _PRECISIONS]
    return (
        f"Without FP32 masters, small updates change no weight; at a learning rate of {lr:g} the {network} loses "
        f"{' and '.join(shares)} of its progress"
    )


def tables(result: MasterWeightsResult) -> list[Table]:
    compared = ("final loss with masters", "without", "more")
    columns = ("network", "weights", "lr", "updates lost", *compared, "progress lost")
    rows = []
    for network, precision, lr in result.cases:
        found = result.of(network, precision, lr)
        finals = (fmean(item.with_masters.final for item in found), fmean(item.without.final for item in found))
        losses = (*(f"{value:.4f}" for value in finals), f"{finals[1] / finals[0] - 1:+.1%}")
        shares = [f"{_mean(found, name):.1%}" for name in ("lost_updates", "lost_progress")]
        rows.append((network, precision, f"{lr:g}", shares[0], *losses, shares[1]))
    return [Table(f"Updates applied to the weights, {result.steps} steps of AdamW", columns, rows)]


def _mean(trainings: Sequence[MasterComparison], name: str) -> float:
    return fmean(getattr(item, name) for item in trainings)


def draw(figure: Figure, result: MasterWeightsResult) -> None:
    """Draws loss curves of three cases, and the final loss, progress and updates over the learning rate."""
    figure.set_size_inches(11, 7)
    upper, lower = figure.subplots(2, 3)
    networks = list(dict.fromkeys(item.network for item in result.trainings))
    first = [(networks[0], lr) for lr in result.rates(networks[0])[-2:]]
    for axes, (network, lr) in zip(upper, [*first, (networks[-1], first[0][1])], strict=True):
        _draw_curves(axes, result, network, lr)
    upper[0].set_ylabel(f"loss, means of {BLOCK} steps")
    _draw_finals(lower[0], result, networks[0])
    for axes, name, label in (
        (lower[1], "lost_progress", "no masters: share of the\nprogress that is lost"),
        (lower[2], "lost_updates", "no masters: share of the\nupdates that change no weight"),
    ):
        for network, style in zip(networks, ("-o", ":s"), strict=False):
            for precision in _PRECISIONS:
                rates = result.rates(network)
                values = [_mean(result.of(network, precision, lr), name) for lr in rates]
                color = PRECISION_COLORS[precision]
                axes.plot(rates, values, style, color=color, label=f"{precision.upper()} weights, {network}")
        axes.set(ylabel=label, ylim=(-0.05, 1.05))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.0%}"))
    legend = lower[1].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    for axes in lower:
        axes.set(xscale="log", xlabel="learning rate")
    for axes in (*upper, *lower):
        axes.grid(alpha=0.3, which="both")


def _draw_curves(axes: Axes, result: MasterWeightsResult, network: str, lr: float) -> None:
    fp16, bf16 = (result.of(network, precision, lr)[0] for precision in _PRECISIONS)
    axes.plot(*fp16.with_masters.points(), **_MASTERS)
    for item in (fp16, bf16):
        label = f"updates to {item.precision.upper()} weights"
        axes.plot(*item.without.points(), color=PRECISION_COLORS[item.precision], label=label)
    axes.set_title(f"{network}, learning rate {lr:g}", fontsize=10)
    axes.set_xlabel("step")
    if fp16.with_masters.final < 0.1 * fp16.untrained:
        axes.set_yscale("log")
    axes.legend(fontsize=8, loc="lower left")


def _draw_finals(axes: Axes, result: MasterWeightsResult, network: str) -> None:
    rates = result.rates(network)
    with_masters = [fmean(item.with_masters.final for item in result.of(network, "fp16", lr)) for lr in rates]
    axes.plot(rates, with_masters, **_MASTERS)
    for precision in _PRECISIONS:
        finals = [fmean(item.without.final for item in result.of(network, precision, lr)) for lr in rates]
        axes.plot(
            rates, finals, "-o", color=PRECISION_COLORS[precision], label=f"updates to {precision.upper()} weights"
        )
    axes.set(yscale="log", ylabel=f"{network}: final loss")
    axes.legend(fontsize=8)

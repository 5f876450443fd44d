"""What does training lose if updates go to FP16 or BF16 weights, without FP32 masters?

Without masters, the weights are rounded to their compute dtype at the start and after every update. Gradients, moments
and the formula of the update are the same, so that only the missing master differs.
"""

import sys
from statistics import fmean

import torch
from common import BLOCK, COLORS, main, points, train
from matplotlib.ticker import StrMethodFormatter
from networks import LanguageModel, Regression

PAPER = (
    "updates to FP16 weights cost a Mandarin speech model 80 % relative accuracy, FP32 masters nothing (section 3.1)"
)
PRECISIONS = ("fp16", "bf16")
RATES = (1e-6, 1e-5, 1e-4, 1e-3)
CASES = ((Regression, RATES, (0, 1, 2)), (LanguageModel, RATES, (0,)))  # networks, learning rates, seeds
SMALL = {"cases": ((Regression, (1e-5, 1e-3), (0,)),), "steps": 10}
MASTERS = {"color": "#c0c0c0", "linewidth": 6, "label": "FP32 masters"}


class WithoutMasters:
    """Rounds the masters of all weights in reduced precision to their compute dtype, and counts lost updates."""

    def __init__(self):
        self.updates = self.lost = 0
        self.before = {}

    def round(self, engine):
        """Rounds the masters: before the first step and after each."""
        dtypes = {name: dtype for name, dtype in engine.contract.replica_dtypes.items() if dtype != torch.float32}
        with engine.modify_weights(*dtypes):
            for name, dtype in dtypes.items():
                weight = engine.module.get_parameter(name)
                after = weight.to(dtype).float()
                if name in self.before:
                    is_update = weight != self.before[name]
                    self.updates += int(is_update.sum())
                    self.lost += int((is_update & (after == self.before[name])).sum())
                weight.copy_(after)
                self.before[name] = after


def run(cases=CASES, steps=300):
    trainings = [
        compare(network(), precision, lr, steps, seed)
        for network, rates, seeds in cases
        for lr in rates
        for precision in PRECISIONS
        for seed in seeds
    ]
    return {"steps": steps, "trainings": trainings}


def compare(network, precision, lr, steps, seed):
    """Trains with and without masters.

    ``untrained`` is the held-out loss before the first step, ``lost_updates`` the share of the nonzero updates that
    change no weight without masters.
    """
    observer = WithoutMasters()
    untrained = train(network, "fp32", 0, seed=seed)["final"]
    with_masters = train(network, precision, steps, seed=seed, lr=lr)
    without = train(network, precision, steps, seed=seed, lr=lr, on_start=observer.round, on_step=observer.round)
    found = {"network": network.name, "precision": precision, "lr": lr, "seed": seed, "untrained": untrained}
    lost = observer.lost / observer.updates
    return {**found, "with_masters": with_masters, "without": without, "lost_updates": lost}


def lost_progress(item):
    """Share of the progress, from the untrained loss, that the missing masters cost."""
    with_masters = item["with_masters"]["final"]
    return (item["without"]["final"] - with_masters) / (item["untrained"] - with_masters)


def lost_updates(item):
    return item["lost_updates"]


def of(result, network, precision, lr):
    """Returns the trainings of all seeds."""
    key = (network, precision, lr)
    return [item for item in result["trainings"] if (item["network"], item["precision"], item["lr"]) == key]


def final(trainings, name):
    """Mean over the seeds."""
    return fmean(item[name]["final"] for item in trainings)


def learning_rates(result, network):
    return sorted({item["lr"] for item in result["trainings"] if item["network"] == network})


def finding(result):
    network = result["trainings"][0]["network"]
    lr = learning_rates(result, network)[1]
    shares = [(name, fmean(map(lost_progress, of(result, network, name, lr)))) for name in PRECISIONS]
    lost = " and ".join(f"{share:.0%} in {name.upper()}" for name, share in shares)
    return (
        f"Without FP32 masters, small updates change no weight; at a learning rate of {lr:g} the {network} loses "
        f"{lost} of its progress"
    )


def table(result):
    compared = ("final loss with masters", "without", "more")
    columns = ["network", "weights", "lr", "updates lost", *compared, "progress lost"]
    rows = []
    for key in dict.fromkeys((item["network"], item["precision"], item["lr"]) for item in result["trainings"]):
        found = of(result, *key)
        finals = [final(found, name) for name in ("with_masters", "without")]
        losses = (*(f"{value:.4f}" for value in finals), f"{finals[1] / finals[0] - 1:+.1%}")
        updates, progress = (f"{fmean(map(share, found)):.1%}" for share in (lost_updates, lost_progress))
        rows.append([*key[:2], f"{key[2]:g}", updates, *losses, progress])
    return f"Updates applied to the weights, {result['steps']} steps of AdamW", columns, rows


def draw(figure, result):
    """Draws loss curves of three cases, and the final loss, progress and updates over the learning rate."""
    figure.set_size_inches(11, 7)
    upper, lower = figure.subplots(2, 3)
    networks = list(dict.fromkeys(item["network"] for item in result["trainings"]))
    first = [(networks[0], lr) for lr in learning_rates(result, networks[0])[-2:]]
    for axes, (network, lr) in zip(upper, [*first, (networks[-1], first[0][1])], strict=True):
        draw_curves(axes, result, network, lr)
    upper[0].set_ylabel(f"loss, means of {BLOCK} steps")
    draw_finals(lower[0], result, networks[0])
    for axes, share, label in (
        (lower[1], lost_progress, "no masters: share of the\nprogress that is lost"),
        (lower[2], lost_updates, "no masters: share of the\nupdates that change no weight"),
    ):
        for network, style in zip(networks, ("-o", ":s"), strict=False):
            for name in PRECISIONS:
                rates = learning_rates(result, network)
                values = [fmean(map(share, of(result, network, name, lr))) for lr in rates]
                axes.plot(rates, values, style, color=COLORS[name], label=f"{name.upper()} weights, {network}")
        axes.set(ylabel=label, ylim=(-0.05, 1.05))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.0%}"))
    legend = lower[1].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    for axes in lower:
        axes.set(xscale="log", xlabel="learning rate")
    for axes in (*upper, *lower):
        axes.grid(alpha=0.3, which="both")


def draw_curves(axes, result, network, lr):
    fp16, bf16 = (of(result, network, name, lr)[0] for name in PRECISIONS)
    axes.plot(*points(fp16["with_masters"]), **MASTERS)
    for item, name in ((fp16, "fp16"), (bf16, "bf16")):
        axes.plot(*points(item["without"]), color=COLORS[name], label=f"updates to {name.upper()} weights")
    axes.set_title(f"{network}, learning rate {lr:g}", fontsize=10)
    axes.set_xlabel("step")
    if fp16["with_masters"]["final"] < 0.1 * fp16["untrained"]:
        axes.set_yscale("log")
    axes.legend(fontsize=8, loc="lower left")


def draw_finals(axes, result, network):
    rates = learning_rates(result, network)
    axes.plot(rates, [final(of(result, network, "fp16", lr), "with_masters") for lr in rates], **MASTERS)
    for name in PRECISIONS:
        finals = [final(of(result, network, name, lr), "without") for lr in rates]
        axes.plot(rates, finals, "-o", color=COLORS[name], label=f"updates to {name.upper()} weights")
    axes.set(yscale="log", ylabel=f"{network}: final loss")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    main(sys.modules[__name__])

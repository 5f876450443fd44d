"""Can BF16, FP16 and FP8 be told from FP32's own noise on each kind of task?

Runs of ``dtrain train``, smaller and shorter. FP32's noise at a step has two parts, each a standard deviation over
trainings: of other seeds, and of weights that start an ulp away.
"""

import math
import shlex
import sys
from statistics import fmean, stdev

import torch
from common import COLORS, GREY, main, report
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import dtrain
from dtrain.precision.fp16_products import fp16_products

PAPER = (
    "mixed precision in FP16 matches FP32 on all networks, such as ResNet-50 with 76.04 % against 75.92 % top-1 "
    "(section 4.1); BF16 and FP8 came later"
)
PRECISIONS = ("bf16", "fp16", "fp8")
LIMIT = 2.0  # a smaller gap, in units of noise, cannot be told from noise

COMMON = "optim.compile=false launch.threads_per_rank=1"  # to compile the update takes longer than such a training
GLYPHS = "data.characters=digits data.validation_percent=20 train.global_batch_size=32"
VIT = "{hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 128}"
STEPS = "train.steps=240 train.eval_every=30"
REGRESSION = (
    "experiment=regression data.validation_percent=10 model.hidden_dim=64 "
    "train.global_batch_size=64 train.steps=600 train.eval_every=75"
)
# task: its metric, and the command line. With exact targets the loss of the regression falls until the rounding of
# products is a large part of what is left.
TASKS = {
    "language model": (
        "",
        "model.num_layers=2 model.hidden_dim=32 model.num_heads=2 model.max_seq_len=32 train.global_batch_size=8 "
        f"optim.lr=3e-3 {STEPS} train.eval_batches=16",
    ),
    "convnet": ("accuracy", f"experiment=glyphs {GLYPHS} data.size=16 model.hidden_dim=8 {STEPS}"),
    "vision transformer": (
        "accuracy",
        f"experiment=vit {GLYPHS} data.size=16 'model.args={VIT}' train.steps=320 train.eval_every=40",
    ),
    "regression": ("rmse", REGRESSION),
    "regression, exact targets": ("rmse", f"{REGRESSION} data.noise=0"),
    "diffusion": ("", f"experiment=diffusion {GLYPHS} data.size=12 model.hidden_dim=8 ema.decay=null {STEPS}"),
}
SHORT = "train.steps=2 train.eval_every=1 train.eval_batches=2 train.global_batch_size=8 train.micro_batch_size=8"
SMALL = {"tasks": ("regression",), "seeds": (0, 1), "more": SHORT}


def run(tasks=tuple(TASKS), seeds=(0, 1, 2, 3), more=""):
    """Trains every task in every format with every seed; ``more`` are further words of the command line."""
    shares = {name: product_shares(name, more) for name in tasks}  # builds all models before the first is trained
    return {"seeds": list(seeds), "tasks": [compare(name, shares[name], seeds, more) for name in tasks]}


def compare(name, shares, seeds, more):
    fp32, *formats = (
        {"precision": precision, "curves": [train(name, precision, seed, more) for seed in seeds]}
        for precision in ("fp32", *PRECISIONS)
    )
    perturbed = [train(name, "fp32", seeds[0], more, perturbation=number) for number in range(1, len(seeds))]
    settings = open_session(name, "fp32", 0, more).config.train
    steps = list(range(settings.eval_every, settings.steps + 1, settings.eval_every))
    found = {"task": name, "metric": TASKS[name][0], "steps": steps, "shares": shares}
    return {**found, "fp32": fp32, "perturbed": perturbed, "formats": formats}


def open_session(name, precision, seed, more):
    words = shlex.split(f"{TASKS[name][1]} {COMMON} {more} precision={precision} seed={seed}")
    if precision == "fp8":
        words.append("precision.float8.choice=all")  # the Linears in FP8 are not chosen by their speed on this device
    return dtrain.Session.open(overrides=words)


def train(name, precision, seed, more="", perturbation=0):
    """Trains from the weights and on the batches of ``seed``; ``losses`` are those of the validation data.

    If ``perturbation`` is not 0, the weights start an ulp away, up or down as this number draws.
    """
    session = open_session(name, precision, seed, more)
    if perturbation:
        perturb_by_an_ulp(session.engine, perturbation)
    settings, losses, skipped = session.config.train, [], 0
    with fp16_products(session.engine.device, [precision]):  # a CPU computes them as GPUs do, and not for hours
        for step in range(1, settings.steps + 1):
            skipped += not session.step().applied
            if step % settings.eval_every == 0:
                found = session.validate()
                losses.append(found["loss"])
    report(f"{name}, {precision}, seed {seed}: loss {losses[-1]:.4g}")
    return {"losses": losses, "metric": found.get(TASKS[name][0]), "skipped": skipped}


def perturb_by_an_ulp(engine, seed):
    """Moves every weight to a neighboring number, up or down at random."""
    generator = torch.Generator().manual_seed(seed)
    with engine.modify_weights():
        for weight in engine.module.parameters():
            up = torch.randint(2, weight.shape, generator=generator, dtype=torch.int8).bool()
            weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf).to(weight)))


def product_shares(name, more=""):
    """Returns the shares of the FLOPs of matrix products, forward and backward, that ``precision=fp8`` computes in FP8,
    and that convolutions take, which it computes in BF16.
    """
    aten = torch.ops.aten
    for words in ("", "_backward"):  # the counter does not know the attention of a CPU
        known, on_cpu = (f"_scaled_dot_product_flash_attention{device}{words}" for device in ("", "_for_cpu"))
        flop_registry[getattr(aten, on_cpu)] = flop_registry[getattr(aten, known)]
    in_float8 = open_session(name, "fp8", 0, more).engine.contract.float8_modules
    session, flops = open_session(name, "fp32", 0, more), 0

    def count(linear, inputs, output):
        nonlocal flops  # of the forward, and of the gradients of the weight and of the input
        flops += 2 * output.numel() * linear.in_features * (2 + inputs[0].requires_grad)

    for module in in_float8:
        session.engine.module.get_submodule(module).register_forward_hook(count)
    with FlopCounterMode(display=False) as counter:
        session.step()
    total = counter.get_total_flops()
    convolutions = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "convolution" in str(op))
    num_linears = sum(isinstance(module, nn.Linear) for module in session.engine.module.modules())
    shares = {"float8": flops / total, "convolutions": convolutions / total}
    return {**shares, "num_float8": len(in_float8), "num_linears": num_linears}


def losses(curves, index=-1):
    """Returns the loss of each seed at the validation ``index``."""
    return [curve["losses"][index] for curve in curves]


def noise(item, index=-1):
    """Returns FP32's noise of seeds and of rounding, and the root of the sum of their squares: the unit of gaps."""
    reference, *others = losses(item["fp32"]["curves"], index)
    seeds, rounding = stdev([reference, *others]), stdev([reference, *losses(item["perturbed"], index)])
    return seeds, rounding, math.hypot(rounding, seeds)


def gaps(item, found, index=-1):
    """Returns each seed's loss minus FP32's with the same seed, in units of noise, at the validation ``index``."""
    pairs = zip(losses(found["curves"], index), losses(item["fp32"]["curves"], index), strict=True)
    return [(loss - fp32) / noise(item, index)[-1] for loss, fp32 in pairs]


def mean_gaps(item, found):
    """Returns the mean gap of the seeds at each validation."""
    return [fmean(gaps(item, found, index)) for index in range(len(item["steps"]))]


def finding(result):
    pairs = [(item, found, mean_gaps(item, found)) for item in result["tasks"] for found in item["formats"]]
    outside = [pair for pair in pairs if abs(pair[2][-1]) >= LIMIT]
    inside = [means for *_, means in pairs if abs(means[-1]) < LIMIT]
    if not inside:
        return "At the end every format can be told from FP32's own noise"
    largest = f"{max(abs(means[-1]) for means in inside):.1f} units"
    at_any_step = f"{max(abs(gap) for means in inside for gap in means):.1f} at any step"
    if not outside:
        return f"No format can be told from FP32's own noise; mean gaps are at most {largest} at the end, {at_any_step}"
    named = [
        f"{found['precision'].upper()} on {item['task']} ({means[-1]:+.1f} units)" for item, found, means in outside
    ]
    return (
        f"Outside FP32's own noise: {', '.join(named)}; other mean gaps are at most {largest} at the end, {at_any_step}"
    )


def table(result):
    columns = ["task", "format", "products", "loss", "metric", "gap at 1/4 of the steps", "1/2", "3/4", "end"]
    rows = []
    for item in result["tasks"]:
        steps = len(item["steps"])
        quarters = [max(0, steps * quarter // 4 - 1) for quarter in (1, 2, 3, 4)]
        units = [f"unit {noise(item, index)[-1]:.2g}" for index in quarters]
        seeds, rounding, _ = noise(item)
        note = f"noise of seeds {seeds:.2g}, of rounding {rounding:.2g}"
        rows.append(
            [item["task"], "fp32", f"{item['steps'][-1]} steps", *at_the_end(item, item["fp32"]), *units, note, ""]
        )
        for found in item["formats"]:
            name, means = found["precision"], mean_gaps(item, found)
            each = " ".join(f"{gap:+.2f}" for gap in gaps(item, found))
            skipped = f"{sum(curve['skipped'] for curve in found['curves'])}"
            quarter_gaps = [f"{means[index]:+.2f}" for index in quarters]
            rows.append(
                ["", name, products(item["shares"], name), *at_the_end(item, found), *quarter_gaps, each, skipped]
            )
    title = f"Validation loss, and its gap to FP32 in units of FP32's noise, mean of {len(result['seeds'])} seeds"
    return title, [*columns, "each seed at the end", "skipped"], rows


def at_the_end(item, found):
    """Returns the mean loss and the mean metric of the seeds."""
    loss = f"{fmean(losses(found['curves'])):.4g}"
    if not item["metric"]:
        return loss, ""
    return loss, f"{item['metric']} {fmean(curve['metric'] for curve in found['curves']):.3f}"


def products(shares, precision):
    if precision != "fp8":
        return f"all {precision}"
    linears = f"Linears: {shares['num_float8']} of {shares['num_linears']}"
    convolutions = f"; convolutions, {shares['convolutions']:.0%}, bf16" if shares["convolutions"] else ""
    return f"{shares['float8']:.0%} fp8 ({linears}){convolutions}"


def draw(figure, result):
    """Draws the mean gap, and that of each seed, over the steps: a panel for each task."""
    columns = min(3, len(result["tasks"]))
    rows = -(-len(result["tasks"]) // columns)
    figure.set_size_inches(4.1 * columns, 2.9 * rows + 1.3)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, item in zip(panels, result["tasks"], strict=False):
        draw_task(axes, item)
    for axes in panels[len(result["tasks"]) :]:
        axes.axis("off")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=10, frameon=False)
    figure.supylabel(
        "validation loss minus FP32's with the same seed,\nin units of FP32's noise at that step", fontsize=10
    )


def draw_task(axes, item):
    axes.axhspan(-LIMIT, LIMIT, color=GREY, alpha=0.2, label="cannot be told from noise")
    axes.axhline(0, color=COLORS["fp32"], linewidth=1.0, label="fp32")
    # BF16 stays visible behind FP8, which equals it in a model without FP8 Linears
    for found, (dash, width) in zip(item["formats"], (("-", 3.6), ("--", 1.8), ("-", 1.4)), strict=True):
        name, color = found["precision"], COLORS[found["precision"]]
        seeds = [gaps(item, found, index) for index in range(len(item["steps"]))]
        axes.plot(item["steps"], seeds, dash, color=color, alpha=0.35, linewidth=0.8)
        style = {"color": color, "markersize": 2.2 * width, "linewidth": width, "label": f"{name}, mean"}
        axes.plot(item["steps"], mean_gaps(item, found), f"o{dash}", **style)
    axes.plot([], [], color="black", alpha=0.4, linewidth=0.8, label="one seed")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -1.5 * LIMIT), max(high, 1.5 * LIMIT))
    axes.set_title(f"{item['task']}: {item['shares']['float8']:.0%} of products in fp8", fontsize=11)
    axes.set_xlabel("steps")
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    main(sys.modules[__name__])

"""What does each FP8 recipe cost in loss, and what do its casts lose?

Runs of ``dtrain train`` with equal weights and batches. BF16 trains three times with each seed, from weights an ulp
apart. The noise of a gap is what the gaps of one recipe differ by from seed to seed.
"""

import math
import shlex
import sys
from collections import defaultdict
from statistics import fmean, variance
from tempfile import TemporaryDirectory

from common import BLOCK, GREY, main, points, report
from formats import perturb_by_an_ulp

import dtrain

PAPER = "has no FP8, which came later; DeepSeek-V3 reports a loss within 0.25 % of BF16's, with blocks of 128"
COMMON = "optim.compile=false launch.threads_per_rank=1"
TASKS = {  # the head has weights of its own, so that it can be FP8
    "language model": "model.num_layers=3 model.hidden_dim=256 model.max_seq_len=64 model.tie_embeddings=false "
    "train.global_batch_size=8 train.steps=600",
    "regression, exact targets": "experiment=regression data.noise=0 model.hidden_dim=256 train.steps=1000",
}
FP8 = "precision=fp8 precision.float8.choice=all precision.float8.recipe"
FORMATS = {
    "bf16": "precision=bf16",
    "tensorwise": f"{FP8}=tensorwise",
    "tensorwise, E4M3 gradients": f"{FP8}=tensorwise precision.float8.grad_format=e4m3",
    "rowwise": f"{FP8}=rowwise",
    "rowwise_bf16_wgrad": f"{FP8}=rowwise_bf16_wgrad",
    "blockwise": f"{FP8}=blockwise",
    "tensorwise, last third in BF16": f"{FP8}=tensorwise",  # as precision.float8.finish_in=bf16 does it
    "tensorwise, head too": f"{FP8}=tensorwise 'precision.rules={{head: fp8}}'",
    "tensorwise, BF16 end blocks": f"{FP8}=tensorwise 'precision.rules={{blocks.0.*: bf16, blocks.2.*: bf16}}'",
}
*_, FINISH, HEAD, MIDDLE = FORMATS
ENDS = (HEAD, MIDDLE)  # only for the language model
COLORS = ("#009E73", "#CC79A7", "#E69F00", "#0072B2", "#56B4E9", "#D55E00", "#000000", "#8C564B", "#6A3D9A")
NUM_ULPS = 3  # BF16 trainings of a seed
STUDENT = 2.18  # of 95 % by 12 degrees of freedom: 2 of each of 6 formats
SMALL = {"tasks": ("regression, exact targets",), "seeds": (0, 1), "more": "train.steps=12"}


def run(tasks=tuple(TASKS), seeds=(0, 1, 2), more=""):
    """Trains every task in every format with every seed; ``more`` are further words of the command line."""
    found = []
    for task in tasks:
        formats = [name for name in FORMATS if name not in ENDS or task == "language model"]
        curves = {
            name: [[train(task, name, seed, ulps, more) for ulps in copies(name)] for seed in seeds] for name in formats
        }
        found.append({"task": task, "formats": curves})
    return {"seeds": list(seeds), "tasks": found}


def copies(name):
    return range(NUM_ULPS if name == "bf16" else 1)


def train(task, name, seed, ulps, more):
    """Trains from the weights and on the batches of ``seed``, and measures the casts of the last step.

    If ``ulps`` is not 0, the weights start an ulp away, up or down as this number draws.
    """
    words = shlex.split(f"{COMMON} {TASKS[task]} {more} seed={seed}")
    session = dtrain.Session.open(overrides=[*words, *shlex.split(FORMATS[name])])
    if ulps:
        perturb_by_an_ulp(session.engine, ulps)
    steps = session.config.train.steps
    losses = [session.step().loss for _ in range(steps - steps // 3)]
    if name == FINISH:
        with TemporaryDirectory() as folder:
            session.engine.save(folder)
            session = dtrain.Session.open(overrides=[*words, "precision=bf16"])
            session.engine.load(folder)
    losses += [session.step().loss for _ in range(steps // 3 - 1)]
    with session.engine.measure_precision() as measurement:
        losses.append(session.step().loss)
    casts = defaultdict(list)
    for product in measurement.report().float8:
        kind = ".".join(part for part in product.module.split(".") if not part.isdigit())
        casts[kind, product.product].append((product.sqnr_db, max(own.underflow for own in product.operands)))
    report(f"{task}, {name}, seed {seed}: loss {fmean(losses[-BLOCK:]):.4g}")
    return {
        "losses": [fmean(losses[start : start + BLOCK]) for start in range(0, steps, BLOCK)],
        "casts": [
            {
                "module": kind,
                "product": product,
                "sqnr_db": min(own[0] for own in found),
                "underflow": max(own[1] for own in found),
            }
            for (kind, product), found in casts.items()
        ],
    }


def level(curve):
    """Returns the mean loss of the last quarter of the steps."""
    losses = curve["losses"]
    return fmean(losses[-max(1, len(losses) // 4) :])


def gaps(item, name, of=level):
    """Returns how much each seed's loss is above the mean of BF16's trainings of that seed, as a fraction."""
    pairs = zip(item["formats"][name], item["formats"]["bf16"], strict=True)
    return [fmean(map(of, own)) / fmean(map(of, bf16)) - 1 for own, bf16 in pairs]


def limit(item):
    """Returns up to which mean gap, as a fraction, 95 % of formats stay that have no gap."""
    variances = [variance(gaps(item, name)) for name in item["formats"] if name != "bf16"]
    return STUDENT * math.sqrt(fmean(variances) / len(item["formats"]["bf16"]))


def casts(item, name):
    """Returns SQNR in dB and share of underflows by module and product, the worst of the seeds."""
    found = {}
    for (curve,) in item["formats"][name]:
        for own in curve["casts"]:
            sqnr_db, underflow = found.get((own["module"], own["product"]), (math.inf, 0.0))
            worst = min(sqnr_db, own["sqnr_db"]), max(underflow, own["underflow"])
            found[own["module"], own["product"]] = worst
    return found


def finding(result):
    sentences = []
    for item in result["tasks"]:
        means = [fmean(gaps(item, name)) for name in item["formats"] if name not in ("bf16", FINISH)]
        ends = f"{min(means):+.1%} to {max(means):+.1%}"
        sentences.append(f"{item['task']}: FP8 ends {ends} from BF16 (noise: {limit(item):.1%})")
    return "; ".join(sentences)


def table(result):
    columns = ["task", "format", "loss", "gap", "each seed", "SQNR of fprop, dgrad, wgrad in dB", "largest underflow"]
    rows = []
    for item in result["tasks"]:
        for name, seeds in item["formats"].items():
            loss = f"{fmean(level(curve) for copied in seeds for curve in copied):.4g}"
            if name == "bf16":
                rows.append([item["task"], name, loss, f"noise {limit(item):.2%}", "", "", ""])
                continue
            each = " ".join(map(percent, gaps(item, name)))
            rows.append(["", name, loss, percent(fmean(gaps(item, name))), each, *lost(casts(item, name))])
    title = f"Training loss of the last quarter of the steps, and its gap to BF16, mean of {len(result['seeds'])} seeds"
    return title, columns, rows


def percent(gap):
    return f"{round(gap, 4) + 0.0:+.2%}"  # never -0.00%


def lost(found):
    """Returns the lowest SQNR of each product and the largest underflow of ``casts``, for the table."""
    products = ("fprop", "dgrad", "wgrad")
    of_product = {kind: [sqnr for (_, product), (sqnr, _) in found.items() if product == kind] for kind in products}
    lowest = ", ".join(f"{min(own):.1f}" if own else "bf16" for own in of_product.values())
    if not found:
        return lowest, ""
    (module, product), (_, underflow) = max(found.items(), key=lambda own: own[1][1])
    return lowest, f"{underflow:.2%} ({module}, {product})"


def draw(figure, result):
    """Draws the loss and the gap over the steps for each task, and what casts lose in the first task."""
    figure.set_size_inches(5.4 * max(2, len(result["tasks"])), 11.5)
    above, below = figure.subfigures(2, 1, height_ratios=(6, 4.6))
    panels = above.subplots(2, len(result["tasks"]), squeeze=False, sharex="col")
    for (losses, gap), item in zip(panels.T, result["tasks"], strict=True):
        draw_task(losses, gap, item)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    above.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    draw_casts(below, result["tasks"][0])


def draw_task(losses, gap, item):
    count = len(item["formats"]["bf16"][0][0]["losses"])
    size = max(1, count // 10)
    starts = range(0, count - size + 1, size)
    middles = [BLOCK * (start + size / 2) for start in starts]
    for (name, seeds), color in zip(item["formats"].items(), COLORS, strict=False):
        xs, _ = points(seeds[0][0])
        means = [fmean(values) for values in zip(*(copied[0]["losses"] for copied in seeds), strict=True)]
        losses.plot(xs, means, color=color, linewidth=1.2, label=name)
        if name != "bf16":
            means = [100 * fmean(gaps(item, name, of=mean_from(start, size))) for start in starts]
            gap.plot(middles, means, ":" if name == FINISH else "-o", color=color, markersize=3, linewidth=1.6)
    for number in range(NUM_ULPS):
        own = {
            "formats": {
                "bf16": item["formats"]["bf16"],
                "one": [[copied[number]] for copied in item["formats"]["bf16"]],
            }
        }
        means = [100 * fmean(gaps(own, "one", of=mean_from(start, size))) for start in starts]
        gap.plot(middles, means, "--", color=COLORS[0], linewidth=1.0)
    noise, last, end = 100 * limit(item), count - max(1, count // 4), BLOCK * count
    gap.fill_between([BLOCK * last, end], -noise, noise, color=GREY, alpha=0.25)
    gap.axvline(end - end // 3, color=GREY, linewidth=0.8)
    losses.set(title=item["task"], ylabel="training loss")
    losses.set_yscale("log")
    if losses.get_ylim()[0] > 1:
        losses.yaxis.set_minor_formatter("{x:g}")
    lines = "dashed: BF16, an ulp apart; vertical line: the switch to BF16"
    gap.set(xlabel=f"steps ({lines};\ngray: noise of a mean over the last quarter)", ylabel="gap to BF16, %")
    for axes in (losses, gap):
        axes.grid(alpha=0.3)


def mean_from(start, size):
    return lambda curve: fmean(curve["losses"][start : start + size])


def draw_casts(figure, item):
    """Draws SQNR and underflow by module and product, a column for each recipe."""
    names = [name for name in item["formats"] if name not in ("bf16", FINISH, MIDDLE)]
    found = {name: casts(item, name) for name in names}
    kinds = sorted({kind for own in found.values() for kind in own})
    measures = (("SQNR of both operands, dB", "RdYlGn", 20, 30), ("nonzero values that become 0", "RdYlGn_r", -5, -1))
    for index, (axes, measure) in enumerate(zip(figure.subplots(1, 2, sharey=True), measures, strict=True)):
        title, colors, least, most = measure
        values = [[found[name].get(kind, (math.nan, math.nan))[index] for name in names] for kind in kinds]
        shown = values if index == 0 else [[math.log10(max(value, 1e-6)) for value in row] for row in values]
        axes.imshow(shown, aspect="auto", cmap=colors, alpha=0.6, vmin=least, vmax=most)
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                text = f"{value:.1f}" if index == 0 else small(value)
                axes.text(x, y, "bf16" if math.isnan(value) else text, ha="center", va="center", fontsize=8)
        axes.set_xticks(
            range(len(names)), [name.replace(", ", ",\n").replace("_bf16", "\n_bf16") for name in names], fontsize=8
        )
        axes.set_yticks(range(len(kinds)), [" ".join(kind).removeprefix("blocks.") for kind in kinds], fontsize=8)
        axes.set_title(f"{item['task']}: {title}", fontsize=10)


def small(share):
    return f"{share:.2%}" if share >= 5e-5 else "<0.01%" if share else "0"


if __name__ == "__main__":
    main(sys.modules[__name__])

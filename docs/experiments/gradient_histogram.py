"""How many activation gradients does FP16 flush to zero, and which loss scale recovers them?

The gradients of the outputs of all convolutions and Linears are counted by their power of two, over a training in FP32.
"""

import math
import sys
from collections import Counter
from functools import partial

import torch
from common import COLORS, GREY, main, train
from matplotlib.ticker import StrMethodFormatter
from networks import Convnet, Detector, LanguageModel
from torch import nn

PAPER = (
    "of Multibox SSD's activation gradients 66.8 % were 0 and FP16 flushed another 31 %; a scale of 8 sufficed, 32K "
    "recovered all but 0.1 % (section 3.2; NVIDIA, Train With Mixed Precision)"
)
SMALL = {"networks": (Detector,), "steps": 2}
SCALES = [2.0**power for power in range(16)]  # from 1 to 32,768
TABLE_SCALES = (1.0, 8.0, 128.0, 1024.0, 32768.0)
FP16 = torch.finfo(torch.float16)
NORMAL = round(math.log2(FP16.smallest_normal))
FLUSHED = round(math.log2(FP16.smallest_normal * FP16.eps / 2))  # numbers up to two to this power become zero


def run(networks=(Detector, LanguageModel, Convnet), steps=300, seed=0):
    found = [{"network": network.name, "histogram": measure(network(), steps, seed)} for network in networks]
    return {"steps": steps, "seed": seed, "networks": found}


def measure(network, steps, seed):
    counts = {"zeros": Counter(), "powers_of_two": Counter(), "between": Counter()}

    def watch(module, inputs, output):
        if output.requires_grad:
            output.register_hook(partial(count, counts))

    def hook(engine):
        for module in engine.module.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                module.register_forward_hook(watch)

    train(network, "fp32", steps, seed=seed, on_start=hook)
    return as_histogram(counts)


def count(counts, gradient):
    mantissas, exponents = torch.frexp(gradient.abs())  # mantissa x 2^exponent, and 1/2 <= mantissa < 1
    for kind, chosen in (("zeros", mantissas == 0), ("powers_of_two", mantissas == 0.5), ("between", mantissas > 0.5)):
        found = zip(*torch.unique(exponents[chosen] - 1, return_counts=True), strict=True)
        counts[kind].update({int(exponent): int(number) for exponent, number in found})


def as_histogram(counts):
    """Returns the number of zeros, of powers of two by exponent, and of numbers between these, as plain JSON."""
    zeros = counts["zeros"].total()
    kinds = ("powers_of_two", "between")
    return {"zeros": zeros} | {kind: {str(e): counts[kind][e] for e in sorted(counts[kind])} for kind in kinds}


def exponents(network):
    """Returns the number of gradients from 2^e to below 2^(e + 1), by e."""
    counts = Counter()
    for name in ("powers_of_two", "between"):
        counts.update({int(exponent): number for exponent, number in network["histogram"][name].items()})
    return dict(sorted(counts.items()))


def zeros(network):
    """Share of the gradients that are zero in FP32."""
    number = network["histogram"]["zeros"]
    return number / (number + sum(exponents(network).values()))


def flushed(network, scale=1.0):
    """Share of the nonzero gradients, times ``scale``, that FP16 flushes to zero."""
    limit = FLUSHED - math.log2(scale)  # a gradient of two to this power is a tie, which rounds to zero
    between = sum(number for e, number in network["histogram"]["between"].items() if int(e) < limit)
    powers = sum(number for e, number in network["histogram"]["powers_of_two"].items() if int(e) <= limit)
    return (between + powers) / sum(exponents(network).values())


def finding(result):
    first, largest = result["networks"][0], SCALES[-1]
    return (
        f"{first['network']}: FP16 flushes {flushed(first):.1%} of the nonzero activation gradients; "
        f"a loss scale of {largest:,.0f} leaves {flushed(first, largest):.1%}"
    )


def table(result):
    columns = ["network", "zero in FP32", *(f"flushed, scale {scale:,.0f}" for scale in TABLE_SCALES)]
    rows = []
    for network in result["networks"]:
        shares = [f"{flushed(network, scale):.2%}" for scale in TABLE_SCALES]
        rows.append([network["network"], f"{zeros(network):.1%}", *shares])
    title = f"Activation gradients over {result['steps']} steps in FP32; flushed: share of the nonzero ones in FP16"
    return title, columns, rows


def draw(figure, result):
    """Draws the first network's histogram over the formats' ranges, and the recovery of all networks."""
    figure.set_size_inches(9, 8.8)
    histogram, ranges, recovery = figure.subplots(3, 1, height_ratios=(4, 1.5, 3.4))
    draw_histogram(histogram, result["networks"][0])
    draw_ranges(ranges)
    ranges.set_xlim(histogram.get_xlim())
    styles = (("-o", COLORS["fp16"]), (":s", "black"), ("--^", GREY))
    for network, (style, color) in zip(result["networks"], styles, strict=False):
        values = [flushed(network, scale) for scale in SCALES]
        recovery.plot(SCALES, values, style, color=color, markersize=4, label=network["network"])
    recovery.set_xscale("log", base=2)
    recovery.axvspan(8, 32768, color=GREY, alpha=0.12, label="scales used in practice: 8 to 32K")
    recovery.set(xlabel="loss scale", ylabel="nonzero gradients that\nFP16 flushes to zero", xticks=SCALES[::3])
    recovery.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    recovery.yaxis.set_major_formatter(StrMethodFormatter("{x:.0%}"))
    recovery.grid(alpha=0.3)
    recovery.legend(fontsize=9)


def draw_histogram(axes, network):
    color, scale, share_of_zeros = COLORS["fp16"], SCALES[-1], zeros(network)
    counts = exponents(network)
    shares = [(1 - share_of_zeros) * number / sum(counts.values()) for number in counts.values()]
    low, high, top = -52, 17, 1.45 * max(shares)
    axes.axvspan(low, FLUSHED, color=GREY, alpha=0.25)
    axes.axvspan(FLUSHED, NORMAL, color=color, alpha=0.12)
    axes.axvspan(NORMAL, math.ceil(math.log2(FP16.max)), color=color, alpha=0.25)
    for start, text in ((FLUSHED - 13, "FP16: zero"), (FLUSHED + 1, "subnormal"), (NORMAL + 1, "normal")):
        axes.text(start, 0.93 * top, text, fontsize=10)
    places = [exponent + 0.5 for exponent in counts]
    axes.bar(places, shares, 0.9, color="black", label="as they are")
    shifted = [place + math.log2(scale) for place in places]
    axes.bar(shifted, shares, 0.9, color=color, label=f"times {scale:,.0f}")
    axes.text(low + 0.5, 0.78 * top, f"not shown: {share_of_zeros:.0%} are zero in FP32 too", fontsize=9)
    axes.set(ylabel="share of all activation gradients", xlim=(low, high), ylim=(0, top))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.0%}"))
    axes.legend(fontsize=9, loc="center right")


def draw_ranges(axes):
    formats = {
        "fp8 e4m3": (torch.float8_e4m3fn, COLORS["fp8"]),
        "fp8 e5m2": (torch.float8_e5m2, COLORS["fp8 e5m2"]),
        "fp16": (torch.float16, COLORS["fp16"]),
        "bf16": (torch.bfloat16, COLORS["bf16"]),
    }
    for row, (dtype, color) in enumerate(formats.values()):
        info = torch.finfo(dtype)
        smallest, normal = (math.log2(number) for number in (info.smallest_normal * info.eps, info.smallest_normal))
        axes.barh(row, normal - smallest, left=smallest, height=0.7, color=color, alpha=0.4)
        axes.barh(row, math.ceil(math.log2(info.max)) - normal, left=normal, height=0.7, color=color)
    axes.set_yticks(range(len(formats)), formats)
    axes.set(xlabel="magnitude of the gradient, as a power of two", ylabel="range\n(pale: subnormal)")


if __name__ == "__main__":
    main(sys.modules[__name__])

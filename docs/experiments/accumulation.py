"""How far is a dot product of length n off if it is summed one by one in FP16, BF16 or FP32?

Each error is compared with its bound. The operands are BF16 for sums in BF16, else FP16.
"""

import sys

import torch
from common import COLORS, GREY, main

PAPER = "some networks need products of FP16 numbers accumulated in FP32 and converted to FP16 afterwards (section 3.3)"
SUMS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MATMUL = "fp16 matmul"  # of FP16 matrices as a Linear computes it: FP32 sums, and a result rounded to FP16
SMALL = {"longest": 64, "trials": 4}


def random_signs(shape, dtype, generator):
    x, y = positive(shape, dtype, generator)
    return x * (2 * torch.randint(2, shape, generator=generator) - 1), y


def positive(shape, dtype, generator):
    x, y = torch.rand(2, *shape, generator=generator) / 2 + 0.5
    return x, y


def worst_case(shape, dtype, generator):
    """Returns vectors whose first product is 1 and the others half a unit in its last place: each of them is lost."""
    exponent = round(torch.tensor(unit_roundoff(dtype)).log2().item())
    x, y = torch.full(shape, 2.0 ** (exponent // 2)), torch.full(shape, 2.0 ** (exponent - exponent // 2))
    x[:, 0] = y[:, 0] = 1.0
    return x, y


VECTORS = {
    "random signs": (random_signs, "errors cancel"),
    "positive": (positive, "errors add up"),
    "worst case": (worst_case, "1, then terms too small to count"),
}


def unit_roundoff(dtype):
    return torch.finfo(dtype).eps / 2


def gamma(length, dtype):
    """Returns the bound n u / (1 - n u) of the error of n roundings; None from n u = 1 on, where none exists.

    Higham, "Accuracy and Stability of Numerical Algorithms" (2nd edition), lemma 3.1.
    """
    product = length * unit_roundoff(dtype)
    return product / (1 - product) if product < 1 else None


def run(longest=2**15, trials=64, seed=0):
    """Measures lengths from 2 to ``longest``, a power of two."""
    lengths = [2**power for power in range(1, longest.bit_length())]
    cases = []
    for name, (make, _) in VECTORS.items():
        for sums, dtype in SUMS.items():
            x, y = make((trials, longest), dtype, torch.Generator().manual_seed(seed))
            x, y = (v.to(torch.bfloat16 if sums == "bf16" else torch.float16) for v in (x, y))
            found = errors(x, y, running_sums(x.to(dtype), y.to(dtype), lengths), lengths)
            bounds = [gamma(n, dtype) for n in lengths]
            cases.append({"vectors": name, "sums": sums, "errors": found, "bounds": bounds})
        # the last sums were FP32; one more rounding, of the result to FP16
        bounds = [(1 + bound) * (1 + unit_roundoff(torch.float16)) - 1 for bound in bounds]
        found = errors(x, y, [torch.bmm(x[:, None, :n], y[:, :n, None]).flatten() for n in lengths], lengths)
        cases.append({"vectors": name, "sums": MATMUL, "errors": found, "bounds": bounds})
    return {"seed": seed, "trials": trials, "lengths": lengths, "cases": cases}


def running_sums(x, y, lengths):
    """Returns the sums [trials] of the first n products for each n; each product and each sum is rounded."""
    total, found = torch.zeros_like(x[:, 0]), []
    for index, (a, b) in enumerate(zip(x.T.contiguous(), y.T.contiguous(), strict=True), start=1):
        total = total + a * b
        if index in lengths:
            found.append(total)
    return found


def errors(x, y, sums, lengths):
    """Returns the largest error of the trials, relative to the sum of the products' magnitudes, by length."""
    products = x.double() * y.double()
    exact, magnitude = products.cumsum(dim=1), products.abs().cumsum(dim=1)
    both = zip(sums, lengths, strict=True)
    return [((total.double() - exact[:, n - 1]).abs() / magnitude[:, n - 1]).max().item() for total, n in both]


def of(result, vectors, sums):
    return next(case for case in result["cases"] if (case["vectors"], case["sums"]) == (vectors, sums))


def error(result, vectors, sums, length):
    return of(result, vectors, sums)["errors"][result["lengths"].index(length)]


def finding(result):
    length = 4096 if 4096 in result["lengths"] else result["lengths"][-1]
    fp16, fp32 = (error(result, "positive", sums, length) for sums in ("fp16", "fp32"))
    return (
        f"Summed in FP16, a dot product of {length:,} positive terms is off by {fp16:.0%}; "
        f"summed in FP32 by {fp32:.0e}, and every error is within its bound"
    )


def table(result):
    places = [place for place, length in enumerate(result["lengths"]) if length in (64, 1024, 4096, 32768)]
    columns = ["vectors", "sums in", *(f"n = {result['lengths'][place]:,}: error (bound)" for place in places)]
    rows = []
    for case in result["cases"]:
        bounds = ["none" if bound is None else f"{bound:.1e}" for bound in case["bounds"]]
        cells = [f"{case['errors'][place]:.1e} ({bounds[place]})" for place in places]
        rows.append([case["vectors"], case["sums"], *cells])
    title = f"Dot products of length n: largest error of {result['trials']}, relative to the sum of the magnitudes"
    return title, columns, rows


def draw(figure, result):
    figure.set_size_inches(11, 4.9)
    panels = figure.subplots(1, len(VECTORS), sharey=True)
    for axes, (vectors, (_, meaning)) in zip(panels, VECTORS.items(), strict=True):
        draw_case(axes, result, vectors)
        axes.set_title(f"{vectors}: {meaning}", fontsize=10.5)
    panels[0].set_ylabel("error / sum of the magnitudes,\nlargest of the trials")
    legend = panels[0].get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=5, fontsize=9, frameon=False)


def draw_case(axes, result, vectors):
    for sums in SUMS:
        case, color = of(result, vectors, sums), COLORS[sums]
        axes.plot(result["lengths"], visible(case), "-o", markersize=3, color=color, label=f"sums in {sums}")
        bounds = [(n, bound) for n, bound in zip(result["lengths"], case["bounds"], strict=True) if bound is not None]
        axes.plot(*zip(*bounds, strict=True), "--", linewidth=1, color=color)
    matmul = visible(of(result, vectors, MATMUL))
    axes.plot(result["lengths"], matmul, ":s", markersize=3, color=GREY, label="matmul of fp16 tensors")
    axes.plot([], [], "--", color="black", linewidth=1, label="bound n u / (1 - n u)")
    axes.set(yscale="log", xlabel="length n of the vectors", ylim=(1e-8, 3))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)


def visible(case):
    """Errors of 0 become NaN, which a logarithmic axis leaves out."""
    return [error or float("nan") for error in case["errors"]]


if __name__ == "__main__":
    main(sys.modules[__name__])

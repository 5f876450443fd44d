"""``dtrain bench products``: rates of matrix products and attention, and the bandwidth of copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from dtrain.config.model import ModelConfig
from dtrain.config.tool_schema import ModelSuite, ProductsBenchConfig
from dtrain.device import repeated_ms
from dtrain.distributed.startup.setup import choose_device
from dtrain.errors import ConfigError, nearest
from dtrain.measure.bench.records import TableResults
from dtrain.measure.record import head
from dtrain.precision.float8.cast import BLOCK
from dtrain.precision.hardware import has_float8_tensor_cores, rate
from dtrain.telemetry.throughput import device_name
from dtrain.tools.tables import Table

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BLOCKWISE = "fp8 blockwise"
_FLOAT8 = {  # kinds of both scales, fast accumulation
    "fp8": ("TensorWise", "TensorWise", False),
    "fp8 fast": ("TensorWise", "TensorWise", True),
    "fp8 rowwise": ("RowWise", "RowWise", False),
    "fp8 rowwise fast": ("RowWise", "RowWise", True),
    _BLOCKWISE: ("BlockWise1x128", "BlockWise128x128", False),
}
_WARMUP_S = 0.5
_LARGEST_EMULATED = 256  # 40 seconds for one product of 1,024 on a CPU

_DESCRIPTION = (
    "Random data on {device}; medians. A product is `[m, k] @ [n, k].T` with operands in the format, without casts. "
    "`fast` lets Tensor Cores accumulate FP8 in fewer bits. Attention: causal, forward and backward, its causal half "
    "counted. The published rates are dense; an unknown device has none."
)

Operation: TypeAlias = tuple[Callable[[], object], int, int]
"""A function to time, the bytes that it moves, and its FLOPs; one of the two is 0."""


@dataclass(frozen=True)
class _Case:
    """``make`` makes the operands; ``label`` says where the shape comes from, or is the name of a copy."""

    format: str
    label: str
    shape: str
    make: Callable[[], Operation]


def run_products_suite(config: ModelSuite[ProductsBenchConfig], command: str) -> Iterator[TableResults]:
    """Measures the cases in order of value until ``bench.limit_s``.

    Raises:
        ConfigError: an unknown format.
    """
    bench = config.bench
    deadline = time.monotonic() + (bench.limit_s or float("inf"))
    device = choose_device(bench.device, 0)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    cases = _cases(config, device, left_out)
    name, header = device_name(device), head(command, config)
    if device.type == "cuda":
        _raise_clocks(device)
    for case in cases:
        title = f"{case.format} {case.label} {case.shape}".strip()
        if rows and time.monotonic() > deadline:
            left_out[title] = "no time left"
            continue
        try:
            rows.append(_measure(case, device, bench.case_s))
        except torch.OutOfMemoryError:
            left_out[title] = "out of memory"
        except torch.AcceleratorError:  # fails every later call of this process
            raise
        except (RuntimeError, ValueError) as error:  # such as a format that this version does not support here
            left_out[title] = str(error).splitlines()[0]
        yield _results(header, name, rows, left_out)
    yield _results(header, name, rows, left_out)


def _measure(case: _Case, device: torch.device, case_s: float) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the operands of the case before, which may have had other sizes
    operation, nbytes, flops = case.make()
    peak = rate(device_name(device), case.format.split()[0]) if flops else None
    ms = repeated_ms(operation, device, budget_s=case_s)
    return {
        "format": case.format,
        "label": case.label,
        "shape": case.shape,
        "bytes": nbytes,
        "ms": ms,
        "tflops": flops / median(ms) / 1e9 if flops else None,
        "peak_tflops": peak,
        "gb_per_s": nbytes / median(ms) / 1e6 if nbytes else None,
    }


def _raise_clocks(device: torch.device) -> None:
    """Keeps the device busy: an idle one has low clocks, and the first case would be slow."""
    product, *_ = multiplication("bf16", (4096, 4096, 4096), device)
    end = time.monotonic() + _WARMUP_S
    while time.monotonic() < end:
        product()
        torch.cuda.synchronize(device)


def _cases(config: ModelSuite[ProductsBenchConfig], device: torch.device, left_out: dict[str, str]) -> list[_Case]:
    """Returns the cases in order of value: products of the first format, copies, attention, other formats."""
    formats = _formats(config.bench, device, left_out)
    products = {name: list(_products(config, name, device)) for name in formats}
    first, *others = products.values()
    attention = [_attention(config, name, device) for name in ("bf16", "fp16") if name in formats]
    return [*first, *_copies(device, config.bench.copied), *attention, *(case for found in others for case in found)]


def _formats(bench: ProductsBenchConfig, device: torch.device, left_out: dict[str, str]) -> list[str]:
    known = [*_DTYPES, *_FLOAT8]
    for name in bench.formats:
        if name not in known:
            raise ConfigError(f"bench.formats: '{name}' is not one of {', '.join(known)}{nearest(name, known)}")
    if bench.formats:
        return bench.formats
    if device.type == "cpu":
        return ["bf16", "fp8", "fp32"]  # FP16 is emulated on most CPUs
    if not has_float8_tensor_cores(device):
        left_out["fp8"] = f"{device_name(device)} has no FP8 Tensor Cores"
    capability = torch.cuda.get_device_capability(device)
    float8 = list(_FLOAT8) if has_float8_tensor_cores(device) else []
    if float8 and capability != (9, 0):
        float8.remove(_BLOCKWISE)
        left_out[_BLOCKWISE] = "needs compute capability 9.0"
    return ["fp16", "fp32"] if capability < (8, 0) else ["bf16", *float8, "fp16", "tf32", "fp32"]


def _products(config: ModelSuite[ProductsBenchConfig], name: str, device: torch.device) -> Iterator[_Case]:
    shapes = {(size, size, size): "square" for size in config.bench.squares}
    if name in ("bf16", *_FLOAT8):
        shapes |= {(config.bench.rows, n, k): label for label, (n, k) in _linears(config.model).items()}
    for shape, label in shapes.items():
        if device.type == "cuda" or name not in _FLOAT8 or max(shape) <= _LARGEST_EMULATED:
            yield _Case(name, label, " x ".join(map(str, shape)), partial(multiplication, name, shape, device))


def _linears(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns output and input features of the Linears of a Llama."""
    width = model.hidden_dim
    kv_dim = width // model.num_heads * (model.num_kv_heads or model.num_heads)
    hidden = model.ffn_dim or 4 * width
    return {
        "attention query, output": (width, width),
        "attention key, value": (kv_dim, width),
        "feed-forward up, gate": (hidden, width),
        "feed-forward down": (width, hidden),
        "head": (model.vocab_size or 512, width),
    }


def multiplication(name: str, shape: tuple[int, ...], device: torch.device) -> Operation:
    """Returns the product of random matrices in the format ``name``; it sets the precision of FP32 products."""
    m, n, k = shape
    # not zeros: a GPU draws less power with them, and clocks higher
    x, weight = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    flops = 2 * m * n * k
    if name in _DTYPES:
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        x, weight = x.to(_DTYPES[name]), weight.to(_DTYPES[name])
        return lambda: x @ weight.t(), 0, flops
    *kinds, fast = _FLOAT8[name]
    left, right = (tensor.to(torch.float8_e4m3fn) for tensor in (x, weight))
    blocks = -(-k // BLOCK)
    ones = partial(torch.ones, device=device)
    scales = {  # in the layouts of [Note: rules of scaled_mm]
        "TensorWise": (ones(()), ones(())),
        "RowWise": (ones((m, 1)), ones((1, n))),
        "BlockWise1x128": (ones((blocks, m)).t(), ones((-(-n // BLOCK), blocks + -blocks % 4)).t()),
    }[kinds[0]]
    types: Any = [getattr(F.ScalingType, kind) for kind in kinds]
    operands = (left, right.t(), scales[0], types[0], scales[1], types[1])
    scaled_mm: Any = F.scaled_mm
    return lambda: scaled_mm(*operands, output_dtype=torch.bfloat16, use_fast_accum=fast), 0, flops


def _attention(config: ModelSuite[ProductsBenchConfig], name: str, device: torch.device) -> _Case:
    model, heads, length = config.model, config.model.num_heads, config.model.max_seq_len
    size = model.hidden_dim // heads
    count = max(1, config.bench.rows // length)

    def make() -> Operation:
        options: Any = {"device": device, "dtype": _DTYPES[name], "requires_grad": True}
        q = torch.randn(count, heads, length, size, **options)
        k, v = (torch.randn(count, model.num_kv_heads or heads, length, size, **options) for _ in range(2))
        out_grad = torch.randn_like(q)

        def run() -> None:
            q.grad = k.grad = v.grad = None
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).backward(out_grad)

        # two products of n x n forward and five backward, half of each
        return run, 0, 7 * count * heads * length * length * size

    return _Case(name, "attention", f"{count} x {heads} x {length} x {size}", make)


def _copies(device: torch.device, numel: int) -> Iterator[_Case]:
    def copy() -> Operation:
        source, target = torch.randn(numel, device=device), torch.empty(numel, device=device)
        return lambda: target.copy_(source), 2 * source.nbytes, 0

    def triad() -> Operation:
        one, other = (torch.randn(numel, device=device) for _ in range(2))
        target = torch.empty(numel, device=device)
        return lambda: torch.add(one, other, alpha=0.5, out=target), 3 * one.nbytes, 0

    def host_copy(*, to_device: bool) -> Operation:
        host, remote = torch.randn(numel // 4).pin_memory(), torch.randn(numel // 4, device=device)
        target, source = (remote, host) if to_device else (host, remote)
        return lambda: target.copy_(source, non_blocking=True), host.nbytes, 0

    yield _Case("", "copy, read + write", "", copy)
    yield _Case("", "triad, 2 reads + write", "", triad)
    if device.type == "cuda":
        yield _Case("", "host to device, pinned", "", partial(host_copy, to_device=True))
        yield _Case("", "device to host, pinned", "", partial(host_copy, to_device=False))


# -- the report --------------------------------------------------------------------------------------------------------


def _results(
    header: dict[str, Any], device: str, rows: Sequence[Mapping[str, Any]], left_out: Mapping[str, str]
) -> TableResults:
    rated = [row for row in rows if row["tflops"] is not None]
    copies = [row for row in rows if row["gb_per_s"] is not None]
    formats = list(dict.fromkeys(row["format"] for row in rated))
    by_case = {(row["label"], row["shape"], row["format"]): f"{row['tflops']:.3g}" for row in rated}
    cells = [
        (*case, *(by_case.get((*case, name), "") for name in formats))
        for case in dict.fromkeys((row["label"], row["shape"]) for row in rated)
    ]
    peaks = {row["format"]: row["peak_tflops"] for row in rated}
    cells.append(("published peak", "", *(f"{peaks[name]:.3g}" if peaks[name] else "unknown" for name in formats)))
    tables = [Table("Products", ("TFLOP/s", "m x n x k", *formats), cells)]
    if copies:
        moved = [(row["label"], f"{row['bytes'] / 2**20:.0f}", f"{row['gb_per_s']:.4g}") for row in copies]
        tables.append(Table("Copies", ("copy", "MiB moved", "GB/s"), moved))
    return TableResults(
        suite="products",
        **header,
        description=_DESCRIPTION.format(device=device),
        tables=tables,
        conclusions=_conclusions(rated, copies, device),
        rows=[dict(row) for row in rows],
        left_out=dict(left_out),
    )


def _conclusions(rated: Sequence[Mapping[str, Any]], copies: Sequence[Mapping[str, Any]], device: str) -> list[str]:
    lines = []
    products = [row for row in rated if row["label"] != "attention"]
    best = {row["format"]: row for row in sorted(products, key=lambda row: float(row["tflops"]))}
    if best:
        order = [name for name in (*_DTYPES, *_FLOAT8) if name in best]
        texts = [f"{name} {best[name]['tflops']:.3g}{_share(best[name])}" for name in order]
        lines.append(f"highest matrix rates, TFLOP/s: {', '.join(texts)}")
    attention = [row for row in rated if row not in products]
    lines += [f"attention, TFLOP/s: {row['format']} {row['tflops']:.3g}{_share(row)}" for row in attention]
    if copies:
        lines.append("GB/s: " + "; ".join(f"{row['label']} {row['gb_per_s']:.4g}" for row in copies))
    float8 = next((name for name in _FLOAT8 if name in best), None)
    if float8 is not None and "bf16" in best and device != "cpu":
        lines.append(f"FP8 over BF16 in single products: {_gains(products, float8)}")
    return lines


def _share(row: Mapping[str, Any]) -> str:
    return f" ({row['tflops'] / row['peak_tflops']:.0%} of the published rate)" if row["peak_tflops"] else ""


def _gains(products: Sequence[Mapping[str, Any]], float8: str) -> str:
    bf16 = {row["shape"]: row["tflops"] for row in products if row["format"] == "bf16"}
    gains = []
    for row in products:
        if row["format"] == float8 and row["shape"] in bf16:
            what = row["shape"].split()[0] + " square" if row["label"] == "square" else row["label"]
            gains.append(f"{what} {row['tflops'] / bf16[row['shape']]:.2f}x")
    return ", ".join(gains)

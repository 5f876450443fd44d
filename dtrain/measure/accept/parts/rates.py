"""Matrix rates by format and shape, and the bandwidth of copies: by which the other figures are divided."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dtrain.device import repeated_ms
from dtrain.measure.accept.job import Request
from dtrain.measure.accept.models import MODELS
from dtrain.precision.hardware import has_float8_tensor_cores, rate
from dtrain.telemetry.throughput import device_name
from dtrain.tools.tables import Table

_ROWS = 8192  # tokens in a forward: 2 sequences of 4,096
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FLOAT8 = {  # rowwise scales, fast accumulation
    "fp8": (False, False),
    "fp8 fast": (False, True),
    "fp8 rowwise": (True, False),
    "fp8 rowwise fast": (True, True),
}
_CASE_S, _SMALL_CASE_S = 0.4, 0.05
_WARMUP_S = 0.5

Operation: TypeAlias = tuple[Callable[[], object], int]
"""A function to time, and the bytes that it moves."""


@dataclass(frozen=True)
class Product:
    """A product ``[m, k] @ [n, k].T`` in one format; ``label`` says where the shape comes from."""

    format: str
    label: str
    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.format} {self.m} x {self.n} x {self.k}"


def run(request: Request) -> Iterator[dict[str, Any]]:
    """Measures products and copies in order of value until the time is used up."""
    device = torch.device(request.device, 0) if request.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        _raise_clocks(device)
    case_s = _SMALL_CASE_S if request.small else _CASE_S
    measurement = Measurement(device, time.monotonic() + request.seconds, case_s)
    results = measurement.results
    products = plan_products(device, small=request.small)
    first = [product for product in products if product.format == products[0].format]
    for product in first:
        measurement.measure_product(product)
    yield results
    for name, make in _copies(device, small=request.small):
        measurement.measure_copy(name, make)
    for product in products[len(first) :]:
        yield results
        measurement.measure_product(product)
    if device.type == "cpu":
        results["left_out"]["copies between host and device"] = "no GPU"
    elif not has_float8_tensor_cores(device):
        results["left_out"]["fp8"] = f"{results['device']} has no FP8 Tensor Cores"
    yield results


def _raise_clocks(device: torch.device) -> None:
    """Keeps the device busy: an idle one has low clocks, and the first case would be slow."""
    product = multiplication(Product("bf16", "square", 4096, 4096, 4096), device)
    end = time.monotonic() + _WARMUP_S
    while time.monotonic() < end:
        product()
        torch.cuda.synchronize(device)


class Measurement:
    """Times cases on one device until ``deadline``; ``results`` has the figures, and what was left out."""

    def __init__(self, device: torch.device, deadline: float, case_s: float) -> None:
        self._device, self._deadline, self._case_s = device, deadline, case_s
        name = device_name(device)
        self.results: dict[str, Any] = {"device": name, "matmuls": [], "copies": [], "left_out": {}}

    def measure_product(self, product: Product) -> None:
        ms = self._time(product.name, lambda: (multiplication(product, self._device), 0))
        if ms is None:
            return
        peak = rate(self.results["device"], product.format.split()[0])
        tflops = 2 * product.m * product.n * product.k / median(ms[0]) / 1e9
        self.results["matmuls"].append(asdict(product) | {"ms": ms[0], "tflops": tflops, "peak_tflops": peak})

    def measure_copy(self, name: str, make: Callable[[], Operation]) -> None:
        timed = self._time(name, make)
        if timed is not None:
            ms, nbytes = timed
            gb_per_s = nbytes / median(ms) / 1e6
            self.results["copies"].append({"name": name, "bytes": nbytes, "ms": ms, "gb_per_s": gb_per_s})

    def _time(self, name: str, make: Callable[[], Operation]) -> tuple[list[float], int] | None:
        if time.monotonic() > self._deadline:
            self.results["left_out"][name] = "no time left"
            return None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the operands of the case before, which may have had other sizes
        try:
            operation, nbytes = make()
            return repeated_ms(operation, self._device, budget_s=self._case_s), nbytes
        except torch.OutOfMemoryError:
            self.results["left_out"][name] = "out of memory"
        except torch.AcceleratorError:  # fails every later call of this process, so it ends the part
            raise
        except (RuntimeError, ValueError) as error:  # such as a format that this version does not support here
            self.results["left_out"][name] = str(error).splitlines()[0]
        return None


def plan_products(device: torch.device, *, small: bool) -> list[Product]:
    """Returns the products in order of value: those of BF16 first, the slow formats last."""
    squares = [256, 512, 1024] if small else [4096, 8192, 16384]
    formats = ["bf16", "fp16", "tf32", "fp32"]
    if device.type == "cpu":
        formats, float8 = ["bf16", "fp32"], ["fp8"]  # FP16 is emulated on most CPUs
    else:
        if torch.cuda.get_device_capability(device) < (8, 0):
            formats = ["fp16", "fp32"]
        float8 = list(_FLOAT8) if has_float8_tensor_cores(device) else []
    order = [*formats[:1], *float8, *formats[1:]]
    model = MODELS["tiny" if small else "1.2B"]
    kv_dim = model.hidden_dim // model.num_heads * (model.num_kv_heads or model.num_heads)
    linears = {
        "attention query, output": (model.hidden_dim, model.hidden_dim),
        "attention key, value": (kv_dim, model.hidden_dim),
        "feed-forward up, gate": (model.ffn_dim or 4 * model.hidden_dim, model.hidden_dim),
        "feed-forward down": (model.hidden_dim, model.ffn_dim or 4 * model.hidden_dim),
        "head": (model.vocab_size or 512, model.hidden_dim),
    }
    products = []
    for format_name in order:
        sizes = squares[:2] if format_name == "fp32" else squares
        if device.type == "cpu" and format_name in float8:
            sizes = squares[:1]  # emulated: 40 seconds for one product of 1,024
        products += [Product(format_name, "square", size, size, size) for size in sizes]
        rows = 256 if small else _ROWS
        if format_name in ("bf16", *float8):
            products += [Product(format_name, label, rows, n, k) for label, (n, k) in linears.items()]
    return products


def multiplication(product: Product, device: torch.device) -> Callable[[], Tensor]:
    """Returns the product of random matrices as a function; it sets the precision of FP32 products."""
    # not zeros: a GPU draws less power with them, and clocks higher
    x = torch.randn(product.m, product.k, device=device)
    weight = torch.randn(product.n, product.k, device=device)
    if product.format in _DTYPES:
        torch.set_float32_matmul_precision("high" if product.format == "tf32" else "highest")
        dtype = _DTYPES[product.format]
        x, weight = x.to(dtype), weight.to(dtype)
        return lambda: x @ weight.t()
    rowwise, fast = _FLOAT8[product.format]
    left, right = (tensor.to(torch.float8_e4m3fn) for tensor in (x, weight))
    scales = [torch.ones((), device=device)] * 2
    if rowwise:
        scales = [torch.ones(product.m, 1, device=device), torch.ones(1, product.n, device=device)]
    return lambda: torch._scaled_mm(
        left, right.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _copies(device: torch.device, *, small: bool) -> Iterator[tuple[str, Callable[[], Operation]]]:
    """Yields copies by name, each with what makes its operands and gives the function and the bytes that it moves."""
    numel = (1 << 24) if small else (1 << 28)
    yield "copy, read + write", partial(_device_copy, device, numel)
    yield "triad, 2 reads + write", partial(_triad, device, numel)
    if device.type == "cuda":
        yield "host to device, pinned", partial(_host_copy, device, numel // 4, to_device=True)
        yield "device to host, pinned", partial(_host_copy, device, numel // 4, to_device=False)


def _device_copy(device: torch.device, numel: int) -> Operation:
    source, target = torch.randn(numel, device=device), torch.empty(numel, device=device)
    return lambda: target.copy_(source), 2 * source.nbytes


def _triad(device: torch.device, numel: int) -> Operation:
    one, other, target = (
        torch.randn(numel, device=device),
        torch.randn(numel, device=device),
        torch.empty(numel, device=device),
    )
    return lambda: torch.add(one, other, alpha=0.5, out=target), 3 * one.nbytes


def _host_copy(device: torch.device, numel: int, *, to_device: bool) -> Operation:
    host, remote = torch.randn(numel).pin_memory(), torch.randn(numel, device=device)
    if to_device:
        return lambda: remote.copy_(host, non_blocking=True), host.nbytes
    return lambda: host.copy_(remote, non_blocking=True), host.nbytes


def best(matmuls: Sequence[Mapping[str, Any]], format_name: str) -> Mapping[str, Any] | None:
    """Returns the fastest measured product of a format, or None."""
    return max((row for row in matmuls if row["format"] == format_name), key=lambda row: row["tflops"], default=None)


def conclusions(results: Mapping[str, Any]) -> list[str]:
    lines = []
    rates = {name: fastest for name in (*_DTYPES, *_FLOAT8) if (fastest := best(results["matmuls"], name)) is not None}
    if rates:
        texts = [f"{name} {row['tflops']:.3g}{_share(row)}" for name, row in rates.items()]
        lines.append(f"highest matrix rates, TFLOP/s: {', '.join(texts)}")
    copies = {row["name"]: row["gb_per_s"] for row in results["copies"]}
    if copies:
        lines.append(f"GB/s: {'; '.join(f'{name} {value:.4g}' for name, value in copies.items())}")
    float8 = [name for name in _FLOAT8 if name in rates]
    if float8 and "bf16" in rates and results["device"] != "cpu":
        lines.append(f"FP8 over BF16 in single products: {_gains(results['matmuls'], float8[0])}")
    return lines


def _share(row: Mapping[str, Any]) -> str:
    return f" ({row['tflops'] / row['peak_tflops']:.0%} of the published rate)" if row["peak_tflops"] else ""


def _gains(matmuls: Sequence[Mapping[str, Any]], format_name: str) -> str:
    bf16 = {(row["m"], row["n"], row["k"]): row for row in matmuls if row["format"] == "bf16"}
    gains = []
    for row in matmuls:
        other = bf16.get((row["m"], row["n"], row["k"]))
        if row["format"] == format_name and other is not None:
            what = f"{row['m']} square" if row["label"] == "square" else row["label"]
            gains.append(f"{what} {row['tflops'] / other['tflops']:.2f}x")
    return ", ".join(gains)


def section(results: Mapping[str, Any]) -> list[str]:
    lines = [
        "Random data; medians. A product is `[m, k] @ [n, k].T` with operands in the format, without casts. `fast` "
        "lets Tensor Cores accumulate FP8 in fewer bits. The published rates are dense; an unknown device has none.",
    ]
    if matmuls := results.get("matmuls"):
        shapes = list(dict.fromkeys((row["label"], row["m"], row["n"], row["k"]) for row in matmuls))
        formats = list(dict.fromkeys(row["format"] for row in matmuls))
        by_case = {(row["format"], row["m"], row["n"], row["k"]): row["tflops"] for row in matmuls}
        rows = [
            (label, f"{m} x {n} x {k}", *(_number(by_case.get((name, m, n, k))) for name in formats))
            for label, m, n, k in shapes
        ]
        peaks = {row["format"]: row["peak_tflops"] for row in matmuls}
        rows.append(("published peak", "", *(_number(peaks[name], "unknown") for name in formats)))
        lines += ["", Table("TFLOP/s", ("TFLOP/s", "m x n x k", *formats), rows).markdown()]
    if copies := results.get("copies"):
        rows = [(row["name"], f"{row['bytes'] / 2**20:.0f}", f"{row['gb_per_s']:.4g}") for row in copies]
        lines += ["", Table("GB/s", ("copy", "MiB moved", "GB/s"), rows).markdown()]
    return lines


def _number(value: float | None, none: str = "") -> str:
    return none if value is None else f"{value:.3g}"

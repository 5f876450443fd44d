"""Matrix rates: the products of a device, their rates, and the page."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtrain.tools.accept.parts import rates
from dtrain.tools.accept.parts.rates import Product, conclusions, multiplication, plan_products, section

CPU = torch.device("cpu")


def row(format_name: str, size: int, tflops: float, peak: float | None = None) -> dict[str, Any]:
    shape = {"label": "square", "m": size, "n": size, "k": size}
    return shape | {"format": format_name, "tflops": tflops, "peak_tflops": peak}


def test_a_hopper_gpu_has_all_formats_bf16_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    products = plan_products(torch.device("cuda", 0), small=False)
    formats = list(dict.fromkeys(product.format for product in products))
    assert formats == ["bf16", "fp8", "fp8 fast", "fp8 rowwise", "fp8 rowwise fast", "fp16", "tf32", "fp32"]
    shapes = {product.label: (product.m, product.n, product.k) for product in products if product.format == "fp8"}
    assert shapes["feed-forward down"] == (8192, 2048, 8192)
    assert shapes["head"] == (8192, 128256, 2048)
    assert [product.m for product in products if product.format == "fp32"] == [4096, 8192]


def test_an_older_gpu_has_no_bf16_and_no_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    products = plan_products(torch.device("cuda", 0), small=True)
    assert {product.format for product in products} == {"fp16", "fp32"}


@pytest.mark.parametrize("format_name", ["fp32", "bf16", "fp16", "fp8"])
def test_a_product_is_computed_in_its_format(format_name: str) -> None:
    torch.manual_seed(0)
    product = multiplication(Product(format_name, "square", 32, 16, 64), CPU)()
    torch.manual_seed(0)
    exact = torch.randn(32, 64).double() @ torch.randn(16, 64).double().t()
    assert product.shape == (32, 16)
    error = float((product.double() - exact).norm() / exact.norm())
    assert error < {"fp32": 1e-6, "bf16": 1e-2, "fp16": 2e-3, "fp8": 8e-2}[format_name]
    assert error > {"fp32": 0, "bf16": 1e-4, "fp16": 1e-5, "fp8": 1e-2}[format_name]


def test_a_product_without_memory_or_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr(rates, "multiplication", fail)
    measurement = rates.Measurement(CPU, float("inf"), 0.01)
    measurement.measure_product(Product("bf16", "square", 8, 8, 8))
    assert measurement.results["left_out"] == {"bf16 8 x 8 x 8": "out of memory"}
    late = rates.Measurement(CPU, 0.0, 0.01)
    late.measure_product(Product("fp8", "square", 8, 8, 8))
    assert late.results["left_out"] == {"fp8 8 x 8 x 8": "no time left"}


def test_a_rate_counts_two_flops_and_a_copy_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "time_ms", lambda operation, device, *, budget_s: [9.0, 2.0, 1.0])
    measurement = rates.Measurement(CPU, float("inf"), 0.01)
    measurement.measure_product(Product("bf16", "square", 100, 200, 300))
    measurement.measure_copy("copy", lambda: (lambda: None, 6_000_000))
    assert measurement.results["matmuls"][0]["tflops"] == pytest.approx(0.006)  # 12 million in 2 ms
    assert measurement.results["copies"][0]["gb_per_s"] == pytest.approx(3.0)


def test_what_the_page_says() -> None:
    results = {
        "device": "NVIDIA H100 80GB HBM3",
        "matmuls": [row("bf16", 4096, 600.0, 989.4), row("bf16", 8192, 742.0, 989.4), row("fp8", 8192, 1336.0, 1978.9)],
        "copies": [{"name": "copy, read + write", "bytes": 1 << 31, "ms": [0.8], "gb_per_s": 2684.4}],
    }
    assert conclusions(results) == [
        "highest matrix rates, TFLOP/s: bf16 742 (75% of the published rate), fp8 1.34e+03 (68% of the published rate)",
        "GB/s: copy, read + write 2684",
        "FP8 over BF16 in single products: 8192 square 1.80x",
    ]
    text = "\n".join(section(results))
    assert "| published peak |                    | 989  | 1.98e+03 |" in text
    assert "unknown" in "\n".join(section({"matmuls": [row("bf16", 8, 1.0)]}))
    assert section({})

"""The proof of the cast kernels finds a wrong one by name, and tensor code takes its place."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from dtrain.precision.float8 import cast, proof
from dtrain.precision.float8.cast import E4M3, E5M2, Scaling

quantize = pytest.importorskip("dtrain.kernels.quantize", reason="Triton is not installed")


@pytest.mark.parametrize("scaling", [Scaling.TENSOR, Scaling.ROWS, Scaling.LINES])
@pytest.mark.parametrize(("dtype", "turned"), [(E4M3, False), (E5M2, True)], ids=["e4m3", "e5m2"])
def test_the_kernels_hold(device: torch.device, dtype: torch.dtype, scaling: Scaling, turned: bool) -> None:
    options = {"both": True, "turned": turned}
    assert proof.check_quantize((144, 80), torch.bfloat16, dtype, device, scaling, **options) == ""


@pytest.mark.parametrize("scaling", [Scaling.TENSOR, Scaling.ROWS, Scaling.SQUARES])
def test_the_kernels_of_weights_hold(device: torch.device, scaling: Scaling) -> None:
    assert proof.check_weights(device, scaling) == ""


@pytest.mark.parametrize(("number", "name"), [(0, "values"), (1, "scale"), (2, "transpose")])
def test_one_wrong_element_is_named(monkeypatch: pytest.MonkeyPatch, number: int, name: str) -> None:
    def wrong(x: Tensor, dtype: torch.dtype, sides: tuple[int, int], *, both: bool) -> tuple[Tensor, ...]:
        found = [tensor.clone() for tensor in cast.quantized_both(x, dtype, Scaling(sides))]
        found[number].view(-1).view(torch.uint8)[3] ^= 1
        return tuple(found)

    monkeypatch.setattr(quantize, "quantize", wrong)
    found = proof.check_quantize((64, 48), torch.float32, E4M3, torch.device("cpu"), Scaling.TENSOR, both=True)
    import triton

    assert found.startswith(f"Triton {triton.__version__}: quantize(torch.float32[64, 48] to torch.float8_e4m3fn")
    assert f"differs from tensor code in 1 of {1 if name == 'scale' else 64 * 48} {name}" in found


def test_a_wrong_kernel_is_replaced_by_tensor_code_and_named_once(monkeypatch: Any, caplog: Any) -> None:
    """As on a GPU: the proof runs, fails, and the kernel is not used."""
    monkeypatch.setattr(proof, "_found", {})
    monkeypatch.setattr(cast, "uses_kernels", lambda device, *, compiled: compiled)
    kernel = mock.Mock(side_effect=AssertionError("the wrong kernel was used"))
    monkeypatch.setattr(quantize, "quantize", kernel)
    monkeypatch.setattr(proof, "check_quantize", lambda *args, **options: "Triton 0: garbage")
    monkeypatch.setattr(proof, "proves_quantize", _on_any_device(proof.proves_quantize))
    x = torch.randn(32, 48)
    with caplog.at_level(logging.WARNING):
        found = [proof.quantize(x, E4M3, Scaling.ROWS, both=True, compiled=True) for _ in range(2)][-1]
        (only,) = proof.quantize(x, E4M3, Scaling.ROWS, both=False, compiled=True)
    want = proof.quantize(x, E4M3, Scaling.ROWS, both=True, compiled=False)
    for got, expected in zip((*found, only), (*want, want[0]), strict=True):
        assert torch.equal(got.values.float(), expected.values.float())
        assert torch.equal(got.scale, expected.scale)
    assert [text for text in caplog.messages if "garbage; tensor code casts" in text] == caplog.messages
    assert len(caplog.messages) == len(proof.failed_proofs()) == 2  # with and without the transpose


def _on_any_device(proves: Any) -> Any:
    """Calls ``proves`` with the tensor on a device that looks like a GPU."""

    def call(x: Tensor, dtype: torch.dtype, scaling: Scaling, **options: bool) -> bool:
        on = mock.Mock(wraps=x, shape=x.shape, dtype=x.dtype, device=torch.device("cuda", 0), stride=x.stride)
        with mock.patch.object(proof, "is_fake", return_value=False), mock.patch.object(proof, "_waiting_allowed"):
            return bool(proves(on, dtype, scaling, **options))

    return call


def test_the_tile_has_what_casts_get_wrong() -> None:
    x = proof.adversarial((256, 192))
    assert x.isfinite().all()
    assert (x[1] == 0).all()
    scale = cast.scale_of(x.abs().amax(), E4M3)
    scaled = (x / scale).abs()
    assert ((scaled > 0) & (scaled < 2.0**-9)).any(), "lost under one scale"
    assert scaled.max() >= 224
    as_float8 = cast.cast(x, scale, E4M3).float()
    assert ((as_float8 != x / scale) & (as_float8 != 0)).any(), "rounded"
    assert proof.adversarial((4, 4), float("nan")).isnan().sum() == 1
    assert proof.proves_quantize(torch.ones(2, 2), E4M3, Scaling.TENSOR, both=True), "a CPU needs no proof"

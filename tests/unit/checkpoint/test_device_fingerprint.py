"""Fingerprints as device tensors equal those that checkpoints hold, whatever the cut into blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dtrain.checkpoint.format import device_fingerprint
from dtrain.checkpoint.format.device_fingerprint import bits_of, device_sums, fingerprint_tensor, flat, signed
from dtrain.checkpoint.format.fingerprint import fingerprint

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn)


def random_bits(dtype: torch.dtype, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    data = torch.randint(256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype)


@pytest.mark.parametrize("block", [1 << 22, 100, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_to_the_fingerprints_of_checkpoints(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_fingerprint, "_BLOCK", block)
    # parts that share their weights, one that is larger than a block, one element, a start beyond 2^30
    parts = [(random_bits(dtype, n), start) for n, start in ((50, 3), (50, 3), (301, 0), (1, 0), (99, (1 << 30) + 5))]
    expected = [signed(fingerprint(data, start)) for data, start in parts]
    assert [int(total) for total in device_sums(parts)] == expected
    assert fingerprint_tensor(parts, torch.device("cpu")).tolist() == expected


def test_nothing_to_sum() -> None:
    assert fingerprint_tensor([], torch.device("cpu")).shape == (0,)


def test_every_flip_changes_the_sum() -> None:
    data = random_bits(torch.bfloat16, 16)
    before = device_sums([(data, 5)])[0]
    for element in range(16):
        for bit in range(16):
            other = data.clone()
            bits_of(other)[element] ^= torch.tensor(1 << bit, dtype=torch.int32).to(torch.int16)
            assert device_sums([(other, 5)])[0] != before, (element, bit)


def test_complex_and_strided_tensors_are_flattened() -> None:
    assert torch.equal(flat(torch.arange(6).view(2, 3).T), torch.tensor([0, 3, 1, 4, 2, 5]))
    assert flat(torch.ones(3, dtype=torch.complex128)).tolist() == [1, 0, 1, 0, 1, 0]

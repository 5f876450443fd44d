"""Fingerprints, on the host and as device tensors, against their definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtrain.checkpoint.format import device_fingerprint
from dtrain.checkpoint.format.device_fingerprint import device_sums, fingerprint_tensor, flat, signed
from dtrain.checkpoint.format.fingerprint import MASK, fingerprint, fingerprints, host_blocks

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
DTYPES = [*FLOATS, torch.int64, torch.uint8, torch.bool]


def oracle(data: Tensor, start: int = 0) -> int:
    """The definition, element by element, in Python's own integers."""
    total = 0
    raw = data.view(torch.uint8).numpy().tobytes()
    size = data.element_size()
    for i in range(len(raw) // size):
        z = start + i
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        z = (z ^ z >> 31) | 1
        total += int.from_bytes(raw[i * size : (i + 1) * size], "little") * z
    return total & MASK


def random_bits(count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    high = 2 if dtype == torch.bool else 256
    raw = np.random.default_rng(seed).integers(0, high, count * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_the_definition_also_beyond_2_to_the_30(dtype: torch.dtype) -> None:
    for start in (0, 2**30 - 301, 2**30 - 300, 2**30 - 150, 2**30 - 1, 2**30, 2**40 + 3, 2**64 - 7):
        data = random_bits(300 if start < 2**63 else 7, dtype)
        assert fingerprint(data, start) == oracle(data, start)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from([1, 7, 40_000]), st.sampled_from([0, 5]), st.integers(0, 2)), max_size=25))
def test_tensors_that_share_weights_have_the_same_fingerprints(parts: list[tuple[int, int, int]]) -> None:
    dtypes = (torch.float32, torch.int32, torch.bfloat16)
    made = [(random_bits(n, dtypes[kind], seed), start) for seed, (n, start, kind) in enumerate(parts)]
    assert list(fingerprints(iter(made))) == [fingerprint(data, start) for data, start in made]


def test_known_value_of_the_stored_format() -> None:
    """Every later version reads today's checkpoints, so these bits never change."""
    assert f"{fingerprint(torch.arange(5, dtype=torch.float32)):016x}" == "eb9305b954400000"
    assert fingerprint(torch.empty(0)) == 0


@settings(max_examples=20)
@given(st.lists(st.integers(0, 40_000), max_size=5), st.permutations(range(6)))
def test_independent_of_splitting_and_order(cuts: list[int], order: list[int]) -> None:
    data = random_bits(40_000, torch.bfloat16)  # more than one block of weights
    bounds = [0, *sorted(cuts), 40_000]
    parts = [fingerprint(data[a:b], a) for a, b in itertools.pairwise(bounds)]
    assert sum(parts[i] for i in order if i < len(parts)) & MASK == fingerprint(data)


@settings(max_examples=100)
@given(st.sampled_from(DTYPES), st.integers(1, 64), st.integers(0, 2**45), st.data())
def test_every_single_bit_flip_is_detected(dtype: torch.dtype, count: int, start: int, draw: st.DataObject) -> None:
    data = random_bits(count, torch.uint8 if dtype == torch.bool else dtype)
    flipped = data.clone().view(torch.uint8)
    bit = draw.draw(st.integers(0, flipped.numel() * 8 - 1))
    flipped[bit // 8] ^= 1 << (bit % 8)
    assert fingerprint(data, start) != fingerprint(flipped.view(data.dtype), start)


def test_one_element_of_any_stride_and_parameters() -> None:
    data = torch.arange(10.0)
    assert fingerprint(data[::5][1:]) == fingerprint(torch.tensor([5.0]))
    assert fingerprint(torch.nn.Parameter(data)) == fingerprint(data)


def test_blocks_are_small_and_cover_the_tensor() -> None:
    data = random_bits(3_000_000, torch.float32)
    blocks = list(host_blocks(data))
    assert max(map(len, blocks)) <= 4 << 20
    assert b"".join(blocks) == data.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("block", [1 << 22, 100, 7])
@pytest.mark.parametrize("dtype", DTYPES[:-1], ids=str)
def test_device_sums_equal_the_fingerprints(dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_fingerprint, "_BLOCK", block)
    # parts that share their weights, one that is larger than a block, one element, a start beyond 2^30
    parts = [(random_bits(n, dtype), start) for n, start in ((50, 3), (50, 3), (301, 0), (1, 0), (99, (1 << 30) + 5))]
    expected = [signed(fingerprint(data, start)) for data, start in parts]
    assert [int(total) for total in device_sums(parts)] == expected
    assert fingerprint_tensor(parts, torch.device("cpu")).tolist() == expected
    assert fingerprint_tensor([], torch.device("cpu")).shape == (0,)


def test_complex_and_strided_tensors_are_flattened() -> None:
    assert torch.equal(flat(torch.arange(6).view(2, 3).T), torch.tensor([0, 3, 1, 4, 2, 5]))
    assert flat(torch.ones(3, dtype=torch.complex128)).tolist() == [1, 0, 1, 0, 1, 0]

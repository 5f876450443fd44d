"""The kernels of the vote against the tensor code that a CPU runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.engine.vote.decide import DecodedDecision
from dtrain.engine.vote.losses import LossAccumulator
from dtrain.engine.vote.record import NUM_DEVICE, NUM_HOST, DeviceRecord, upload
from dtrain.engine.vote.tensors import VoteTensors
from dtrain.parameters.gradient_monitor import GradientMonitor
from tests.helpers.vote_records import RankRecords, rank_records, table

fused = pytest.importorskip("dtrain.engine.vote.fused", reason="Triton is not installed")

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
numbers = st.one_of(st.floats(-10, 1e4, width=32), st.sampled_from([0.0, math.inf, -math.inf, math.nan]))
weights = st.one_of(st.floats(0, 64, width=32), st.sampled_from([0.0, -1.0, math.inf, math.nan]))


def known(**changes: Any) -> RankRecords:
    return rank_records(**{"loss_scale": 1024.0, "save_failed": 1, **changes})


def assert_same(got: torch.Tensor, want: torch.Tensor, words: Sequence[int]) -> None:
    """Two rows agree, sums to rounding."""
    assert torch.equal(got[:-NUM_DEVICE], want[:-NUM_DEVICE])
    assert got[:NUM_HOST].tolist() == known().host.to_row()
    assert got[NUM_HOST:-NUM_DEVICE].tolist() == list(words)
    mine, other = (vars(DeviceRecord.from_row(row[-NUM_DEVICE:].tolist())) for row in (got, want))
    assert mine == pytest.approx(other, rel=1e-12, nan_ok=True)


def sent_by_host(words: Sequence[int], losses: LossAccumulator) -> tuple[torch.Tensor, int]:
    """Returns what the host sends, followed by the numbers of an update, and the number of columns in it."""
    columns = [*known().host.to_row(), *words]
    return upload([*columns, *losses.micro_batches, 17], DEVICE), len(columns)


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 40), numbers, weights), min_size=1, max_size=10, unique_by=lambda e: e[0]),
    st.lists(st.one_of(st.floats(0, 1e30), st.sampled_from([math.inf, math.nan])), min_size=1, max_size=5),
    st.sampled_from([(), (5, -1), tuple(range(1500))]),
)
def test_the_record_is_that_of_the_tensor_code(
    entries: list[tuple[int, float, float]], squares: list[float], words: tuple[int, ...]
) -> None:
    losses, monitor = LossAccumulator(DEVICE), GradientMonitor(4)
    for micro_batch, loss, weight in entries:
        losses.add(micro_batch, torch.tensor(loss, device=DEVICE), torch.tensor(weight, device=DEVICE))
    sums = torch.tensor(squares, dtype=torch.float64, device=DEVICE)
    sent, num_known = sent_by_host(words, losses)
    want = VoteTensors().record(sent, num_known, losses, monitor, sums)
    got = fused.FusedVoteTensors(DEVICE).record(sent, num_known, losses, monitor, sums)
    assert_same(got, want, words)


def test_the_record_names_the_first_gradient_that_is_not_finite() -> None:
    vote, losses = fused.FusedVoteTensors(DEVICE), LossAccumulator(DEVICE)
    losses.add(0, torch.ones((), device=DEVICE), torch.ones((), device=DEVICE))
    monitor = GradientMonitor(3, vote.bad_gradient)
    flat = torch.zeros(3, 64, device=DEVICE, dtype=torch.bfloat16)
    found = []
    for bad in (None, 2, 1, None):
        flat.zero_()
        if bad is not None:
            flat[bad, 17] = math.nan
            flat[2, 3] = math.inf
        monitor.search(2, list(enumerate(flat)))
        row = vote.record(*sent_by_host((), losses), losses, monitor, torch.ones(1, dtype=torch.float64, device=DEVICE))
        found.append(DeviceRecord.from_row(row[-NUM_DEVICE:].tolist()).bad_gradient)
    assert found == [-1, 2 * 3 + 2, 2 * 3 + 1, -1]


records = st.builds(
    known,
    step=st.sampled_from([4, 4, 4, 4, 5]),
    sum_weights=st.one_of(st.floats(0, 64), st.sampled_from([0.0, math.nan])),
    sum_weighted_loss=st.floats(-10, 100),
    sum_squares=st.one_of(st.floats(0, 1e30), st.sampled_from([1e-80, 1e60, 1e80, math.inf, math.nan])),
    num_bad_losses=st.sampled_from([0, 0, 0, 2]),
    bad_weight=st.sampled_from([-1, -1, -1, 5]),
    max_grad_norm=st.sampled_from([math.inf, 1.0, 1e-3, 1e6]),
    grad_factor=st.sampled_from([1.0, 0.5, 3.0]),
)


@settings(max_examples=20)
@given(st.lists(records, min_size=1, max_size=5), st.booleans())
def test_the_decision_is_that_of_the_tensor_code(rows: list[RankRecords], agrees: bool) -> None:
    if agrees:  # else hardly any list is free of a veto
        rows = [one.replaced(step=4, **{key: rows[0][key] for key in ("max_grad_norm", "grad_factor")}) for one in rows]
    want, want_packed = VoteTensors().decide(table(rows, DEVICE))
    got, packed = fused.FusedVoteTensors(DEVICE).decide(table(rows, DEVICE))
    assert got.code.item() == want.code.item()
    if not want.code.item():  # else the others are not used
        for name in ("loss", "grad_norm", "grad_divisor"):
            assert getattr(got, name).item() == pytest.approx(getattr(want, name).item(), rel=1e-7)
    decoded, wanted = (DecodedDecision.unpack(one.tolist(), len(rows)) for one in (packed, want_packed))
    assert decoded.reason == wanted.reason
    assert packed[4:].tolist() == want_packed[4:].tolist()


@pytest.mark.parametrize("num_ranks", [1, 1023, 1025, 3000])
def test_any_number_of_ranks(num_ranks: int) -> None:
    rows = table([known(sum_weights=1.0, sum_weighted_loss=2.0, sum_squares=1024.0**2)] * num_ranks, DEVICE)
    decision, packed = fused.FusedVoteTensors(DEVICE).decide(rows)
    assert decision.loss.item() == 2.0
    assert decision.grad_norm.item() == pytest.approx(num_ranks**-0.5)
    assert torch.equal(packed[4:], rows.view(-1))
    rows[-1, 0] += num_ranks > 1
    assert fused.FusedVoteTensors(DEVICE).decide(rows)[0].code.item() == (5 if num_ranks > 1 else 0)


def test_canonical_sums_replace_those_of_the_records() -> None:
    rows = table([known(sum_weights=3.0, sum_weighted_loss=6.0, sum_squares=5.0)], DEVICE)
    values = {"sum_squares": 16.0, "sum_weights": 2.0}
    sums = {name: torch.tensor(value, dtype=torch.float64, device=DEVICE) for name, value in values.items()}
    decision, _ = fused.FusedVoteTensors(DEVICE).decide(rows, **sums)
    assert (decision.loss.item(), decision.grad_norm.item()) == (3.0, 4.0 / 2048.0)

"""The vote: records keep every bit, every disagreement is found, and the decision follows from all records.

``tests/faults/test_vote_trials.py`` has the reasons and culprits of random steps.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dtrain.engine.vote.decide import REASONS, Decision, DecodedDecision, decide
from dtrain.engine.vote.divergence import find_disagreement
from dtrain.engine.vote.record import (
    COLUMNS,
    MUST_AGREE,
    NEVER,
    NUM_FIELDS,
    NUM_HOST,
    DeviceRecord,
    HostRecord,
    first_index,
    upload,
)
from tests.helpers.vote_records import DEVICE_FIELDS, FLOATS, HOST_FIELDS, RankRecords, decoded, ranks_of, table
from tests.helpers.vote_records import rank_records as record

any_float = st.floats(width=64, allow_nan=True, allow_infinity=True, allow_subnormal=True)
any_int = st.integers(-1, 2**63 - 1)
FIELDS = (*HOST_FIELDS, *DEVICE_FIELDS)
any_record = st.builds(record, **{name: any_float if name in FLOATS else any_int for name in FIELDS})
ODD_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000ABCDEF))[0]


def decode(records: list[RankRecords], **options: Any) -> DecodedDecision:
    """The decision on ``records`` as the host decodes it."""
    rows = table(records)
    return DecodedDecision.unpack(decide(rows, **options).pack(rows).tolist())


def disagreement(records: list[RankRecords]) -> tuple[str, int] | None:
    return find_disagreement([one.host for one in records])


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def assert_same_bits(got: RankRecords, sent: RankRecords) -> None:
    for name in FIELDS:
        assert bits(got[name]) == bits(sent[name]) if name in FLOATS else got[name] == sent[name], name


def from_row(row: list[int]) -> RankRecords:
    return RankRecords(HostRecord.from_row(row[:NUM_HOST]), DeviceRecord.from_row(row[NUM_HOST:]))


# -- records -----------------------------------------------------------------------------------------------------------


@given(st.lists(any_record, min_size=1, max_size=5))
@example([record(), record(**dict.fromkeys(FLOATS, ODD_NAN))])
def test_records_keep_every_bit_on_their_way_to_the_host(records: list[RankRecords]) -> None:
    for sent, arrived in zip(records, ranks_of(decode(records)), strict=True):
        row = sent.to_row()
        assert len(row) == NUM_FIELDS == len(FIELDS)
        assert_same_bits(from_row(torch.tensor(row, dtype=torch.int64).tolist()), sent)
        assert_same_bits(arrived, sent)


@pytest.mark.parametrize("name", FIELDS)
def test_a_row_has_the_hosts_fields_then_the_devices(name: str) -> None:
    """Each field stands in the column of its name, an integer as it is, a float as its bits."""
    row = torch.tensor(record(**{name: 3}).to_row(), dtype=torch.int64)[COLUMNS[name]]
    assert (row.view(torch.float64) if name in FLOATS else row).item() == 3
    assert (COLUMNS[name] < NUM_HOST) is (name in HOST_FIELDS)


@given(st.sampled_from([None, *REASONS]), any_float, any_float, any_float)
def test_decoded_decision_has_the_values_of_the_device(
    reason: str | None, loss: float, norm: float, divisor: float
) -> None:
    code = 0 if reason is None else 1 + REASONS.index(reason)
    values = torch.tensor([code, loss, norm, divisor], dtype=torch.float64)
    got = DecodedDecision.unpack(Decision(*values.unbind()).pack(table([record()])).tolist())
    assert (got.reason, bits(got.loss), bits(got.grad_norm)) == (reason, bits(loss), bits(norm))
    assert ranks_of(got) == [record()]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2**40)), min_size=1, max_size=8))
def test_first_index_is_the_least_true_one(entries: list[tuple[bool, int]]) -> None:
    where, index = zip(*entries, strict=True)
    got = first_index(torch.tensor(where), torch.tensor(index))
    assert got.shape == ()
    assert got.item() == min((number for mark, number in entries if mark), default=-1)
    assert max(index) < NEVER


def test_upload_keeps_63_bits() -> None:
    cpu = torch.device("cpu")
    assert upload([2**63 - 1, -1, 0], cpu).tolist() == [2**63 - 1, -1, 0]
    assert upload([], cpu).dtype == torch.int64


# -- disagreement ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MUST_AGREE)
def test_each_field_that_differs_is_found(name: str) -> None:
    for rank in (1, 3):
        records = [record() for _ in range(4)]
        expected = records[0][name]
        got = math.nextafter(expected, 0.0) if isinstance(expected, float) else expected + 1
        records[rank] = record(**{name: got})
        assert disagreement(records) == (name, rank)
        assert decode(records).reason == "diverged"


@given(st.sampled_from(MUST_AGREE), any_record, any_record)
@example("lr", record(lr=0.0), record(lr=-0.0))
@example("lr", record(lr=math.nan), record(lr=ODD_NAN))
@example("lr", record(lr=math.nan), record(lr=math.nan))
def test_host_names_every_divergence_that_the_device_finds(name: str, one: RankRecords, other: RankRecords) -> None:
    changed = one.replaced(**{name: other[name]})
    differs = bits(one[name]) != bits(other[name]) if name in FLOATS else one[name] != other[name]
    assert disagreement([one, changed]) == ((name, 1) if differs else None)
    assert (decode([one, changed]).reason == "diverged") is differs


def test_earliest_disagreement_is_named() -> None:
    # a rank with another configuration also issues other collectives; the configuration is what explains it
    assert disagreement([record(), record(schedule_hash=1, config_hash=2)]) == ("config_hash", 1)


def test_fields_that_may_differ_are_no_disagreement() -> None:
    free = set(FIELDS) - set(MUST_AGREE)
    assert free == {
        "stop_requested", "save_failed", "busy_s", "sum_weights", "sum_weighted_loss", "sum_squares", "bad_loss",
        "max_abs_grad", "num_bad_losses", "bad_micro_batch", "bad_weight", "bad_gradient",
    }  # fmt: skip
    other = record(**{name: record()[name] + 1 for name in free})
    assert disagreement([record(), other]) is None
    assert decode([record(), other]).reason != "diverged"


# -- the decision ------------------------------------------------------------------------------------------------------

BY_HAND = [
    record(sum_weights=3.0, sum_weighted_loss=6.0, sum_squares=400.0, max_abs_grad=24.0),
    record(sum_weights=1.0, sum_weighted_loss=10.0, sum_squares=624.0, max_abs_grad=3.0),
]


def test_decision_to_apply_computed_by_hand() -> None:
    decision = decide(table(BY_HAND))
    assert {tensor.dtype for tensor in (decision.loss, decision.grad_norm, decision.grad_divisor)} == {torch.float64}
    assert decision.code.item() == 0
    assert decision.loss.item() == 4.0  # 16 / 4
    assert decision.grad_norm.item() == 1.0  # sqrt(1024) / 32
    assert decision.grad_divisor.item() == 32.0  # loss scale 8 x weights 4
    assert decode(BY_HAND) == decoded(None, 4.0, 1.0, BY_HAND)
    assert decode(BY_HAND).max_abs_grad == 3.0, "of all ranks, without the scale of 8"


@pytest.mark.parametrize(
    ("max_grad_norm", "grad_factor", "divisor"),
    [
        (2.0, 1.0, 32.0),  # below the threshold nothing is clipped
        (1.0, 1.0, 32.0 * 1.000001),  # at it: clip = 1 / (1 + 1e-6)
        (0.25, 1.0, 32.0 * 1.000001 / 0.25),
        (math.inf, 3.0, 32.0 / 3),
        (1.5, 3.0, 32.0 / 3 * 3.000001 / 1.5),  # the factor enters the norm before it is clipped
    ],
)
def test_clipping_computed_by_hand(max_grad_norm: float, grad_factor: float, divisor: float) -> None:
    options = {"max_grad_norm": max_grad_norm, "grad_factor": grad_factor}
    decision = decide(table([one.replaced(**options) for one in BY_HAND]))
    assert decision.grad_divisor.item() == pytest.approx(divisor, rel=1e-15)
    assert decision.grad_norm.item() == pytest.approx(grad_factor, rel=1e-15), "the norm before clipping"
    assert decision.loss.item() == 4.0


def test_canonical_sums_replace_those_of_the_records() -> None:
    def sums(squares: float, weights: float) -> dict[str, Any]:
        return {"sum_squares": torch.tensor(squares).double(), "sum_weights": torch.tensor(weights).double()}

    clean = [record(), record()]
    decision = decide(table(clean), **sums(1024.0, 8.0))
    assert (decision.grad_divisor.item(), decision.grad_norm.item(), decision.loss.item()) == (64.0, 0.5, 1.0)
    assert decode(clean, **sums(math.inf, 8.0)).reason == "overflow"
    assert decode(clean, **sums(1.0, 0.0)).reason == "empty"


@pytest.mark.parametrize(
    ("squares", "max_grad_norm", "code"),
    [(1e80, 1.0, 0), (1e80, 1e18, 0), (1e80, 1e19, 2), (1e80, math.inf, 2), (1e36, math.inf, 0), (1e-80, 1e-3, 0)],
)
def test_a_finite_norm_overflows_only_if_it_is_large_after_clipping(
    squares: float, max_grad_norm: float, code: int
) -> None:
    options = {"sum_squares": squares, "loss_scale": 1.0, "max_grad_norm": max_grad_norm}
    decision = decide(table([record(sum_weights=1.0, **options)]))
    assert decision.code.item() == code
    assert decision.grad_norm.item() == pytest.approx(squares**0.5)
    empty = decode([record(sum_weights=0.0, sum_weighted_loss=0.0, **options)])
    assert empty.reason == "empty"
    assert math.isnan(empty.loss)


@pytest.mark.parametrize("squares", [math.inf, math.nan])
def test_nonfinite_norm_is_reported_unchanged(squares: float) -> None:
    assert repr(decode([record(sum_squares=squares)]).grad_norm) == repr(squares)


voters = st.builds(
    record,
    sum_weights=st.sampled_from([0.0, 1.0, 3.0, 0.125, 1e6]),
    sum_weighted_loss=st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.inf, -math.inf, math.nan])),
    sum_squares=st.one_of(st.floats(0, 1e30), st.sampled_from([math.inf, math.nan])),
    max_grad_norm=st.just(0.5),
    stop_requested=st.integers(0, 1),
    save_failed=st.integers(0, 1),
    num_bad_losses=st.sampled_from([0, 0, 0, 2]),
    bad_weight=st.sampled_from([-1, -1, -1, 0]),
    bad_gradient=st.integers(-1, 3),
    loss_scale=st.sampled_from([8.0, 8.0, 8.0, 16.0]),
)


def reason_by_hand(records: list[RankRecords]) -> str | None:
    if any(r[name] != records[0][name] for r in records for name in MUST_AGREE):
        return "diverged"
    devices = [r.device for r in records]
    if any(device.bad_weight >= 0 for device in devices):
        return "bad_weight"
    if any(device.num_bad_losses for device in devices):
        return "nonfinite_loss"
    if not math.isfinite(sum(device.sum_squares for device in devices)):
        return "overflow"
    return None if sum(device.sum_weights for device in devices) > 0 else "empty"


@given(st.lists(voters, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_decision_does_not_depend_on_the_order_of_ranks(records: list[RankRecords], rng: Any) -> None:
    permuted = rng.sample(records, len(records))
    one, other = decode(records), decode(permuted)
    assert one.reason == other.reason == reason_by_hand(records)
    for name in ("stop_requested", "save_failed"):
        assert getattr(one, name) == getattr(other, name) == any(r[name] for r in records)
    if one.reason != "diverged":
        first, second = (decide(table(rows)).grad_divisor.item() for rows in (records, permuted))
        assert repr(first) == repr(second)
        assert one.grad_norm == pytest.approx(other.grad_norm, nan_ok=True)
        size = sum(abs(r["sum_weighted_loss"]) for r in records)
        if math.isfinite(size) and first > 0:
            assert abs(one.loss - other.loss) <= 1e-12 * size / (first / records[0]["loss_scale"])

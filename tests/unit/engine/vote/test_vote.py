"""The vote: records keep every bit, every disagreement is found, and the decision follows from all records."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
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

CPU = torch.device("cpu")
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


@given(any_record)
def test_record_row_round_trip_keeps_every_bit(sent: RankRecords) -> None:
    row = sent.to_row()
    assert len(row) == NUM_FIELDS == len(FIELDS)
    assert_same_bits(from_row(torch.tensor(row, dtype=torch.int64).tolist()), sent)


@pytest.mark.parametrize("name", FIELDS)
def test_a_row_has_the_hosts_fields_then_the_devices(name: str) -> None:
    """Each field stands in the column of its name, an integer as it is, a float as its bits."""
    row = torch.tensor(record(**{name: 3}).to_row(), dtype=torch.int64)[COLUMNS[name]]
    assert (row.view(torch.float64) if name in FLOATS else row).item() == 3
    assert (COLUMNS[name] < NUM_HOST) is (name in HOST_FIELDS)


@pytest.mark.parametrize("name", sorted(FLOATS))
def test_record_keeps_nan_payload(name: str) -> None:
    sent = record(**{name: ODD_NAN})
    assert bits(from_row(sent.to_row())[name]) == bits(ODD_NAN)
    assert bits(ranks_of(decode([record(), sent]))[1][name]) == bits(ODD_NAN)


def test_whole_numbers_in_float_fields_survive() -> None:
    got = from_row(record(loss_scale=1024, lr=1, sum_weights=3).to_row())
    assert (got["loss_scale"], got["lr"], got["sum_weights"]) == (1024.0, 1.0, 3.0)


@given(st.lists(any_record, min_size=1, max_size=5))
def test_decoded_decision_has_all_records(records: list[RankRecords]) -> None:
    for got, sent in zip(ranks_of(decode(records)), records, strict=True):
        assert_same_bits(got, sent)


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
    assert upload([2**63 - 1, -1, 0], CPU).tolist() == [2**63 - 1, -1, 0]
    assert upload([], CPU).dtype == torch.int64


# -- disagreement ------------------------------------------------------------------------------------------------------


@given(any_record, st.integers(1, 5))
def test_equal_records_agree(one: RankRecords, world: int) -> None:
    copies = [from_row(one.to_row()) for _ in range(world)]
    assert disagreement(copies) is None
    assert decode(copies).reason != "diverged"


@pytest.mark.parametrize("name", MUST_AGREE)
@pytest.mark.parametrize("rank", [1, 3])
def test_each_field_that_differs_is_found(name: str, rank: int) -> None:
    records = [record() for _ in range(4)]
    expected = records[0][name]
    got = math.nextafter(expected, 0.0) if isinstance(expected, float) else expected + 1
    records[rank] = record(**{name: got})
    assert disagreement(records) == (name, rank)
    assert decode(records).reason == "diverged"


@given(st.sampled_from(MUST_AGREE), any_record, any_record)
def test_host_names_every_divergence_that_the_device_finds(name: str, one: RankRecords, other: RankRecords) -> None:
    records = [one, one.replaced(**{name: other[name]})]
    found = disagreement(records)
    assert (found is not None) == (decode(records).reason == "diverged")
    assert found in (None, (name, 1))


@pytest.mark.parametrize(("first", "second"), [(1e-3, math.nan), (0.0, -0.0), (math.nan, ODD_NAN)])
def test_learning_rates_that_differ_in_a_bit_diverge(first: float, second: float) -> None:
    records = [record(lr=first), record(lr=second)]
    assert disagreement(records) == ("lr", 1)
    assert decode(records).reason == "diverged"


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


def test_max_abs_grad_is_of_all_ranks_without_the_scale() -> None:
    records = [record(max_abs_grad=3.0), record(max_abs_grad=24.0), record()]  # under a loss scale of 8
    assert decode(records).max_abs_grad == 3.0


# -- the decision ------------------------------------------------------------------------------------------------------

BY_HAND = [
    record(sum_weights=3.0, sum_weighted_loss=6.0, sum_squares=400.0),
    record(sum_weights=1.0, sum_weighted_loss=10.0, sum_squares=624.0),
]


def test_decision_to_apply_computed_by_hand() -> None:
    decision = decide(table(BY_HAND))
    assert {tensor.dtype for tensor in (decision.loss, decision.grad_norm, decision.grad_divisor)} == {torch.float64}
    assert decision.code.item() == 0
    assert decision.loss.item() == 4.0  # 16 / 4
    assert decision.grad_norm.item() == 1.0  # sqrt(1024) / 32
    assert decision.grad_divisor.item() == 32.0  # loss scale 8 x weights 4
    assert decode(BY_HAND) == decoded(None, 4.0, 1.0, BY_HAND)


@pytest.mark.parametrize(
    ("max_grad_norm", "divisor"),
    [
        (math.inf, 32.0),
        (2.0, 32.0),  # below the threshold nothing is clipped
        (1.0, 32.0 * 1.000001),  # at it: clip = 1 / (1 + 1e-6)
        (0.25, 32.0 * 1.000001 / 0.25),
    ],
)
def test_clipping_computed_by_hand(max_grad_norm: float, divisor: float) -> None:
    decision = decide(table([one.replaced(max_grad_norm=max_grad_norm) for one in BY_HAND]))
    assert decision.grad_divisor.item() == pytest.approx(divisor, rel=1e-15)
    assert decision.grad_norm.item() == 1.0, "the norm before clipping"


@pytest.mark.parametrize(("max_grad_norm", "divisor"), [(math.inf, 32.0 / 3), (1.5, 32.0 / 3 * 3.000001 / 1.5)])
def test_a_factor_enters_the_norm_before_it_is_clipped(max_grad_norm: float, divisor: float) -> None:
    rows = table([one.replaced(max_grad_norm=max_grad_norm, grad_factor=3.0) for one in BY_HAND])
    decision = decide(rows)
    assert decision.grad_norm.item() == pytest.approx(3.0, rel=1e-15)
    assert decision.grad_divisor.item() == pytest.approx(divisor, rel=1e-15)
    assert decision.loss.item() == 4.0


def test_canonical_sums_replace_those_of_the_records() -> None:
    sums = {"sum_squares": torch.tensor(1024.0).double(), "sum_weights": torch.tensor(8.0).double()}
    decision = decide(table([record(), record()]), **sums)
    assert decision.grad_divisor.item() == 64.0
    assert decision.grad_norm.item() == 0.5
    assert decision.loss.item() == 1.0
    sums["sum_squares"] = torch.tensor(math.inf).double()
    assert decode([record(), record()], **sums).reason == "overflow"
    sums["sum_weights"] = torch.tensor(0.0).double()
    sums["sum_squares"] = torch.tensor(1.0).double()
    assert decode([record(), record()], **sums).reason == "empty"


@pytest.mark.parametrize("rank", [0, 1])
def test_any_rank_can_request_stop(rank: int) -> None:
    records = [record(stop_requested=int(rank == other)) for other in range(2)]
    assert decode(records).stop_requested
    assert decode(records).reason is None
    assert not decode([record(), record()]).stop_requested


@pytest.mark.parametrize("rank", [0, 1])
def test_any_rank_can_report_a_failed_save(rank: int) -> None:
    records = [record(save_failed=int(rank == other)) for other in range(2)]
    assert decode(records).save_failed
    assert decode(records).reason is None
    assert not decode([record(), record(stop_requested=1)]).save_failed


LOSS = {"num_bad_losses": 1, "bad_micro_batch": 1, "bad_loss": math.nan, "sum_weighted_loss": math.nan}
GRADIENT = {"bad_gradient": 5, "sum_squares": math.inf}
EMPTY = {"sum_weights": 0.0, "sum_weighted_loss": 0.0}
WEIGHT = {"bad_weight": 1, "sum_weights": math.nan, "sum_squares": math.nan}
OTHER = {"step": 5}


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([{}, {}], None),
        ([EMPTY, {}], None),
        ([EMPTY, EMPTY], "empty"),
        ([{}, GRADIENT], "overflow"),
        ([{**EMPTY, **GRADIENT}, EMPTY], "overflow"),
        ([{}, LOSS], "nonfinite_loss"),
        ([GRADIENT, LOSS], "nonfinite_loss"),
        ([{**EMPTY, **LOSS}, {**EMPTY, **GRADIENT}], "nonfinite_loss"),
        ([{}, WEIGHT], "bad_weight"),
        ([LOSS, {**WEIGHT, **GRADIENT}], "bad_weight"),
        ([{}, {"bad_weight": 0, "sum_weights": -5.0}], "bad_weight"),
        ([{}, OTHER], "diverged"),
        ([{**OTHER, **LOSS}, {**WEIGHT, **GRADIENT}], "diverged"),
    ],
)
def test_reason_is_the_one_that_explains_most(ranks: list[dict[str, Any]], reason: str | None) -> None:
    for order in (ranks, ranks[::-1]):
        assert decode([record(**values) for values in order]).reason == reason


@pytest.mark.parametrize("squares", [math.inf, math.nan])
def test_nonfinite_norm_is_reported_unchanged(squares: float) -> None:
    got = decode([record(sum_squares=squares)])
    assert got.reason == "overflow"
    assert repr(got.grad_norm) == repr(squares)


@pytest.mark.parametrize(
    ("squares", "max_grad_norm", "code"),
    [(1e80, 1.0, 0), (1e80, 1e18, 0), (1e80, 1e19, 2), (1e80, math.inf, 2), (1e36, math.inf, 0), (1e-80, 1e-3, 0)],
)
def test_a_finite_norm_overflows_only_if_it_is_large_after_clipping(
    squares: float, max_grad_norm: float, code: int
) -> None:
    decision = decide(
        table([record(sum_squares=squares, sum_weights=1.0, loss_scale=1.0, max_grad_norm=max_grad_norm)])
    )
    assert decision.code.item() == code
    assert decision.grad_norm.item() == pytest.approx(squares**0.5)
    empty = table([record(**EMPTY, sum_squares=squares, max_grad_norm=max_grad_norm)])
    assert decide(empty).code.item() == 1


def test_empty_step_has_no_loss() -> None:
    decision = decode([record(**EMPTY, sum_squares=0.0)])
    assert math.isnan(decision.loss)
    assert math.isnan(decision.grad_norm)


numbers = st.floats(-1e6, 1e6)
voters = st.builds(
    record,
    sum_weights=st.sampled_from([0.0, 1.0, 3.0, 0.125, 1e6]),
    sum_weighted_loss=st.one_of(numbers, st.sampled_from([math.inf, -math.inf, math.nan])),
    sum_squares=st.one_of(st.floats(0, 1e30), st.sampled_from([math.inf, math.nan])),
    stop_requested=st.integers(0, 1),
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


@given(st.lists(voters, min_size=1, max_size=6))
def test_every_rank_derives_the_same_decision(records: list[RankRecords]) -> None:
    records = [one.replaced(max_grad_norm=0.5) for one in records]
    packed = [decide(table(records)).pack(table(records)) for _ in range(2)]
    assert packed[0].tolist() == packed[1].tolist(), "to the last bit"
    decision = DecodedDecision.unpack(packed[0].tolist())
    assert decision.reason == reason_by_hand(records)
    assert decision.stop_requested == any(r["stop_requested"] for r in records)


@given(
    st.lists(voters, min_size=1, max_size=6).flatmap(lambda r: st.tuples(st.just(r), st.permutations(range(len(r)))))
)
def test_decision_does_not_depend_on_the_order_of_ranks(case: tuple[list[RankRecords], list[int]]) -> None:
    records, order = case
    permuted = [records[rank] for rank in order]
    one, other = decode(records), decode(permuted)
    assert (one.reason, one.stop_requested) == (other.reason, other.stop_requested)
    if one.reason != "diverged":
        divisors = [decide(table(rows)).grad_divisor.item() for rows in (records, permuted)]
        assert divisors[0] == divisors[1]
        assert one.grad_norm == pytest.approx(other.grad_norm, nan_ok=True)
        size = sum(abs(r["sum_weighted_loss"]) for r in records)
        if math.isfinite(size) and divisors[0]:
            assert abs(one.loss - other.loss) <= 1e-12 * size / (divisors[0] / records[0]["loss_scale"])

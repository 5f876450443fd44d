"""The vote: nothing is lost on the way, every disagreement is found, and the verdict is one function of all records."""

from __future__ import annotations

import math
import struct
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtrain.distributed.collectives import Communicator
from dtrain.engine.vote import MUST_AGREE, Disagreement, Flags, VoteRecord, collect, decide, find_disagreement

any_float = st.floats(width=64, allow_nan=True, allow_infinity=True, allow_subnormal=True)
any_int = st.integers(-1, 2**63 - 1)
FLOATS = {f.name for f in fields(VoteRecord) if f.type == "float"}
any_record = st.builds(VoteRecord, **{f.name: any_float if f.name in FLOATS else any_int for f in fields(VoteRecord)})


def record(**values: Any) -> VoteRecord:
    """A clean record of a rank with two micro-batches of weight 1 and loss 2."""
    defaults = {
        "step": 4,
        "config_hash": 1 << 55,
        "schedule_hash": 77,
        "data_cursor": 640,
        "num_micro_batches": 2,
        "lr": 1e-3,
        "loss_scale": 8.0,
        "sum_weights": 2.0,
        "sum_weighted_loss": 4.0,
        "sum_squares": 100.0,
    }
    return VoteRecord(**{**defaults, **values})


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@given(any_record)
def test_a_row_holds_every_bit(sent: VoteRecord) -> None:
    row = sent.to_row()
    assert row.dtype == torch.int64
    assert row.shape == (len(fields(VoteRecord)),)
    got = VoteRecord.from_row(row.tolist())
    for field in fields(VoteRecord):
        a, b = getattr(sent, field.name), getattr(got, field.name)
        assert bits(a) == bits(b) if field.name in FLOATS else a == b, field.name


def test_a_nan_keeps_its_payload() -> None:
    nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000ABCDEF))[0]
    got = VoteRecord.from_row(record(sum_squares=nan).to_row().tolist())
    assert bits(got.sum_squares) == bits(nan)


def test_whole_numbers_in_float_fields_survive() -> None:
    whole = record(loss_scale=1024, lr=1, sum_weights=3)
    got = VoteRecord.from_row(whole.to_row().tolist())
    assert (got.loss_scale, got.lr, got.sum_weights) == (1024.0, 1.0, 3.0)


def test_collect_alone() -> None:
    comm = Communicator(None, torch.device("cpu"))
    assert collect(comm, record()) == [record()]


@given(any_record, st.integers(1, 5))
def test_equal_records_agree(one: VoteRecord, world: int) -> None:
    copies = [VoteRecord.from_row(one.to_row().tolist()) for _ in range(world)]
    assert find_disagreement(copies) is None


@pytest.mark.parametrize("name", MUST_AGREE)
@pytest.mark.parametrize("rank", [1, 3])
def test_each_field_that_differs_is_found_with_both_values(name: str, rank: int) -> None:
    records = [record() for _ in range(4)]
    expected = getattr(records[0], name)
    got = math.nextafter(expected, math.inf) if isinstance(expected, float) else expected + 1
    records[rank] = replace(records[rank], **{name: got})
    assert find_disagreement(records) == Disagreement(name, rank, expected, got)


def test_a_nan_on_one_rank_is_a_disagreement() -> None:
    found = find_disagreement([record(), record(lr=math.nan)])
    assert found is not None
    assert (found.field, found.rank, found.expected) == ("lr", 1, 1e-3)


def test_the_earliest_cause_is_named_first() -> None:
    # a rank with another configuration also issues other collectives; the configuration is what explains it
    found = find_disagreement([record(), record(schedule_hash=1, config_hash=2)])
    assert found is not None
    assert found.field == "config_hash"


def test_what_may_differ_is_no_disagreement() -> None:
    free = {f.name for f in fields(VoteRecord)} - set(MUST_AGREE)
    assert free == {"sum_weights", "sum_weighted_loss", "sum_squares", "flags", "bad_tensor", "bad_micro_batch"}
    other = replace(record(), **{name: getattr(record(), name) + 1 for name in free})
    assert find_disagreement([record(), other]) is None


def test_apply_by_hand() -> None:
    verdict = decide(
        [
            record(sum_weights=3.0, sum_weighted_loss=6.0, sum_squares=400.0),
            record(sum_weights=1.0, sum_weighted_loss=10.0, sum_squares=624.0),
        ]
    )
    assert verdict.reason is None
    assert verdict.loss == 4.0  # 16 / 4
    assert verdict.grad_divisor == 32.0  # loss scale 8 x weights 4
    assert verdict.grad_norm == 1.0  # sqrt(1024) / 32
    assert (verdict.bad_rank, verdict.bad_tensor, verdict.bad_micro_batch) == (-1, -1, -1)
    assert not verdict.stop_requested


def test_sums_formed_outside_the_records_replace_theirs() -> None:
    verdict = decide([record(), record()], sum_squares=1024.0, sum_weights=8.0)
    assert verdict.grad_divisor == 64.0
    assert verdict.grad_norm == 0.5
    assert verdict.loss == 1.0


def test_any_rank_can_ask_to_stop() -> None:
    assert decide([record(), record(flags=int(Flags.STOP_REQUESTED))]).stop_requested
    skipped = decide([record(flags=int(Flags.STOP_REQUESTED | Flags.NONFINITE_LOSS), bad_micro_batch=0)])
    assert (skipped.stop_requested, skipped.reason) == (True, "nonfinite_loss")


LOSS = {"flags": int(Flags.NONFINITE_LOSS), "bad_micro_batch": 1, "sum_weighted_loss": math.nan}
GRADIENT = {"flags": int(Flags.NONFINITE_GRADIENT), "bad_tensor": 5, "sum_squares": math.inf}
EMPTY = {"sum_weights": 0.0, "sum_weighted_loss": 0.0}


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([{}, LOSS], "nonfinite_loss"),
        ([{}, GRADIENT], "overflow"),
        ([EMPTY, EMPTY], "empty"),
        ([EMPTY, {}], None),
        ([GRADIENT, LOSS], "nonfinite_loss"),
        ([{**EMPTY, **GRADIENT}, EMPTY], "overflow"),
        ([{**EMPTY, **LOSS}, {**EMPTY, **GRADIENT}], "nonfinite_loss"),
    ],
)
def test_precedence(ranks: list[dict[str, Any]], reason: str | None) -> None:
    for order in (ranks, ranks[::-1]):
        assert decide([record(**values) for values in order]).reason == reason


def test_the_culprit_is_the_earliest_micro_batch_then_the_lowest_rank() -> None:
    flags = int(Flags.NONFINITE_LOSS)
    verdict = decide(
        [record(), record(flags=flags, bad_micro_batch=1), record(flags=flags, bad_micro_batch=0), record()]
    )
    assert (verdict.bad_rank, verdict.bad_micro_batch, verdict.bad_tensor) == (2, 0, -1)
    verdict = decide([record(), record(flags=flags, bad_micro_batch=1), record(flags=flags, bad_micro_batch=1)])
    assert (verdict.bad_rank, verdict.bad_micro_batch) == (1, 1)


def test_the_culprit_is_the_first_tensor_then_the_lowest_rank() -> None:
    flags = int(Flags.NONFINITE_GRADIENT)
    verdict = decide([record(flags=flags, bad_tensor=9), record(flags=flags, bad_tensor=0), record()])
    assert (verdict.bad_rank, verdict.bad_tensor, verdict.bad_micro_batch) == (1, 0, -1)


def test_a_bad_loss_is_blamed_before_the_gradient_it_spoils() -> None:
    verdict = decide([record(**GRADIENT), record(**{**LOSS, **GRADIENT, "flags": LOSS["flags"] | GRADIENT["flags"]})])
    assert (verdict.reason, verdict.bad_rank, verdict.bad_micro_batch, verdict.bad_tensor) == (
        "nonfinite_loss",
        1,
        1,
        -1,
    )


@pytest.mark.parametrize(("squares", "norm"), [(math.inf, math.inf), (math.nan, math.nan)])
def test_a_norm_that_is_not_finite_is_shown_as_it_is(squares: float, norm: float) -> None:
    got = decide([record(sum_squares=squares, flags=int(Flags.NONFINITE_GRADIENT), bad_tensor=0)]).grad_norm
    assert got == norm or (math.isnan(got) and math.isnan(norm))


def test_an_empty_step_has_no_loss() -> None:
    verdict = decide([record(**EMPTY, sum_squares=0.0)])
    assert (verdict.bad_rank, verdict.bad_tensor, verdict.bad_micro_batch) == (-1, -1, -1)
    assert math.isnan(verdict.loss)
    assert math.isnan(verdict.grad_norm)


numbers = st.floats(-1e6, 1e6)
voters = st.builds(
    record,
    sum_weights=st.sampled_from([0.0, 1.0, 3.0, 1e-3, 1e6]),
    sum_weighted_loss=st.one_of(numbers, st.sampled_from([math.inf, -math.inf, math.nan])),
    sum_squares=st.one_of(st.floats(0, 1e30), st.sampled_from([math.inf, math.nan])),
    flags=st.integers(0, 7),
    bad_tensor=st.integers(-1, 3),
    bad_micro_batch=st.integers(-1, 1),
)


@given(
    st.lists(voters, min_size=1, max_size=6).flatmap(lambda r: st.tuples(st.just(r), st.permutations(range(len(r)))))
)
def test_the_verdict_does_not_depend_on_the_order_of_ranks(case: tuple[list[VoteRecord], list[int]]) -> None:
    records, order = case
    one, other = decide(records), decide([records[rank] for rank in order])
    assert (one.reason, one.stop_requested, one.grad_divisor) == (
        other.reason,
        other.stop_requested,
        other.grad_divisor,
    )
    assert (one.bad_tensor, one.bad_micro_batch) == (other.bad_tensor, other.bad_micro_batch)
    assert one.grad_norm == pytest.approx(other.grad_norm, nan_ok=True)
    size = sum(abs(r.sum_weighted_loss) for r in records)
    if math.isfinite(size) and one.grad_divisor:
        assert abs(one.loss - other.loss) <= 1e-12 * size / (one.grad_divisor / records[0].loss_scale)
    if one.bad_rank >= 0:  # the same record is blamed, or one that says the same
        field = "bad_tensor" if one.reason == "overflow" else "bad_micro_batch"
        assert getattr(records[one.bad_rank], field) == getattr(records[order[other.bad_rank]], field)


@given(st.lists(voters, min_size=1, max_size=6))
def test_every_rank_derives_the_same_verdict(records: list[VoteRecord]) -> None:
    verdicts = [decide([VoteRecord.from_row(r.to_row().tolist()) for r in records]) for _ in range(2)]
    assert repr(verdicts[0]) == repr(verdicts[1]) == repr(decide(records))
    assert (verdicts[0].reason is None) == (
        not any(r.flags & (Flags.NONFINITE_LOSS | Flags.NONFINITE_GRADIENT) for r in records)
        and sum(r.sum_weights for r in records) > 0
    )

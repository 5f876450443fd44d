"""The vote: records keep every bit, every disagreement is found, the numbers of a decision, and the culprit.

``tests/faults/test_vote_trials.py`` has the reasons, outcomes and culprits of random steps on all ranks.
"""

from __future__ import annotations

import math
import struct
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dtrain.engine.outcome import Culprit
from dtrain.engine.parts.missed_updates import MissedUpdates
from dtrain.engine.run_state import RunState
from dtrain.engine.vote.culprit import Finding, find_nonfinite
from dtrain.engine.vote.decide import DecodedDecision, decide
from dtrain.engine.vote.divergence import find_disagreement
from dtrain.engine.vote.record import (
    COLUMNS,
    MUST_AGREE,
    NUM_DEVICE,
    NUM_FIELDS,
    NUM_HOST,
    DeviceRecord,
    HostRecord,
    upload,
)
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.sharding.layout import CHUNK, ParamSpec, flat_layouts
from tests.helpers.vote_records import DEVICE_FIELDS, FLOATS, HOST_FIELDS, RankRecords, decoded, ranks_of, table
from tests.helpers.vote_records import rank_records as record

any_float = st.floats(width=64, allow_nan=True, allow_infinity=True, allow_subnormal=True)
any_int = st.integers(-1, 2**63 - 1)
FIELDS = (*HOST_FIELDS, *DEVICE_FIELDS)
any_record = st.builds(record, **{name: any_float if name in FLOATS else any_int for name in FIELDS})
ODD_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000ABCDEF))[0]


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def assert_same_bits(got: RankRecords, sent: RankRecords) -> None:
    for name in FIELDS:
        assert bits(got[name]) == bits(sent[name]) if name in FLOATS else got[name] == sent[name], name


def decode(records: list[RankRecords], **options: Any) -> DecodedDecision:
    """The decision on ``records`` as the host decodes it."""
    rows = table(records)
    return DecodedDecision.unpack(decide(rows, **options).pack().tolist(), len(records))


def disagreement(records: list[RankRecords]) -> tuple[str, int] | None:
    return find_disagreement([one.host for one in records])


@given(st.lists(any_record, min_size=1, max_size=5))
@example([record(), record(**dict.fromkeys(FLOATS, ODD_NAN))])
def test_records_keep_every_bit_on_their_way_to_the_host(records: list[RankRecords]) -> None:
    for sent, arrived in zip(records, ranks_of(decode(records)), strict=True):
        row = sent.to_row()
        assert len(row) == NUM_FIELDS == len(FIELDS)
        host, device = HostRecord.from_row(row[:NUM_HOST]), DeviceRecord.from_row(row[-NUM_DEVICE:])
        assert_same_bits(RankRecords(host, device), sent)
        assert_same_bits(arrived, sent)


@pytest.mark.parametrize("name", FIELDS)
def test_a_row_has_the_hosts_fields_then_the_devices(name: str) -> None:
    """Each field stands in the column of its name, an integer as it is, a float as its bits."""
    row = torch.tensor(record(**{name: 3}).to_row(), dtype=torch.int64)[COLUMNS[name]]
    assert (row.view(torch.float64) if name in FLOATS else row).item() == 3
    assert (COLUMNS[name] >= 0) is (name in HOST_FIELDS)


def rows_of_bits(number: int) -> st.SearchStrategy[list[list[bool]]]:
    return st.lists(st.lists(st.booleans(), min_size=number, max_size=number), min_size=1, max_size=3)


@given(st.integers(0, 200).flatmap(rows_of_bits))
def test_what_no_rank_has_received_is_missing(received: list[list[bool]]) -> None:
    rows, number = [], len(received[0])
    for own in received:
        monitor = GradientMonitor(number)
        monitor.receive(*[n for n in range(number) if own[n]])
        words = MissedUpdates(
            ["p"] * number, monitor, RunState("", 0), mock.Mock(), mock.Mock(missing_grad="skip")
        ).words()
        rows.append([*record().host.to_row(), *words, *record().device.to_row()])
    decision = decide(torch.tensor(rows, dtype=torch.int64))
    missing = [n for n in range(number) if not any(own[n] for own in received)]
    assert decision.missing(range(number)).nonzero().flatten().tolist() == missing
    assert DecodedDecision.unpack(decision.pack().tolist(), len(rows)).missing(number) == missing
    assert decision.code == decide(table([record()] * len(rows))).code


def test_upload_keeps_63_bits() -> None:
    cpu = torch.device("cpu")
    assert upload([2**63 - 1, -1, 0], cpu).tolist() == [2**63 - 1, -1, 0]
    assert upload([], cpu).dtype == torch.int64


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


def test_fields_that_may_differ_are_no_disagreement() -> None:
    free = set(FIELDS) - set(MUST_AGREE)
    assert free == {
        "stop_requested", "save_failed", "busy_s", "sum_weights", "sum_weighted_loss", "sum_squares", "bad_loss",
        "max_abs_grad", "num_bad_losses", "bad_micro_batch", "bad_weight", "bad_gradient",
    }  # fmt: skip
    # a rank with another configuration also issues other collectives; the configuration is what explains it
    assert disagreement([record(), record(schedule_hash=1, config_hash=2)]) == ("config_hash", 1)
    other = record(**{name: record()[name] + 1 for name in free})
    assert disagreement([record(), other]) is None
    assert decode([record(), other]).reason != "diverged"


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
    for squares in (math.inf, math.nan):
        assert repr(decode([record(sum_squares=squares)]).grad_norm) == repr(squares), "reported unchanged"


@pytest.mark.parametrize(
    ("squares", "max_grad_norm", "code"),
    [(1e80, 1.0, 0), (1e80, 1e18, 0), (1e80, 1e19, 2), (1e80, math.inf, 2), (1e36, math.inf, 0), (1e-80, 1e-3, 0)],
)
def test_a_finite_norm_overflows_only_if_large_after_clipping(squares: float, max_grad_norm: float, code: int) -> None:
    options = {"sum_squares": squares, "loss_scale": 1.0, "max_grad_norm": max_grad_norm}
    decision = decide(table([record(sum_weights=1.0, **options)]))
    assert decision.code.item() == code
    assert decision.grad_norm.item() == pytest.approx(squares**0.5)
    empty = decode([record(sum_weights=0.0, sum_weighted_loss=0.0, **options)])
    assert empty.reason == "empty"
    assert math.isnan(empty.loss)


def test_a_tensor_on_two_ranks_counts_in_its_own_elements_and_padding_is_nobodys() -> None:
    specs = [ParamSpec("a", (10, 5), torch.float32, 0), ParamSpec("b", (30, 50), torch.float32, 0)]
    (layout,) = flat_layouts("x", specs, 2)
    start = layout.slots[1].start
    assert start == 64
    flat = torch.full((layout.numel,), 3e38)
    flat[50], flat[63], flat[start + 1500] = math.nan, math.inf, math.nan  # padding
    flat[0] = flat[49] = math.nan
    flat[start], flat[CHUNK - 1], flat[CHUNK], flat[start + 1499] = math.inf, math.nan, -math.inf, math.nan
    found = []
    for rank in range(2):
        begin, end = layout.shard(rank)
        for interval in layout.intervals(begin, end):
            values = flat[begin + interval.offset :][: interval.stop - interval.start]
            found += find_nonfinite(interval.spec.name, rank, interval.start, values)
    cut = CHUNK - start
    assert found == [Finding("a", 0, 0, 50, 0, 2), Finding("b", 0, 0, cut, 1, 1), Finding("b", 1, cut, 1500, 1, 1)]


def test_monitor_keeps_numbers_and_sums_together_over_dtypes() -> None:
    monitor = GradientMonitor(2)
    good, bad = torch.ones(4), torch.tensor([1.0, math.nan])
    for micro_batch, number, grad in ((0, 0, good.bfloat16()), (0, 1, bad), (1, 0, bad.bfloat16()), (1, 1, good)):
        monitor.record_finiteness(micro_batch, number, grad)
    numbers, marks = monitor.finiteness()
    assert dict(zip(numbers, marks.tolist(), strict=True)) == {0: False, 1: True, 2: True, 3: False}
    monitor.clear()
    assert monitor.finiteness() == ([], None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_monitor_finds_one_bad_element(dtype: torch.dtype, value: float) -> None:
    monitor = GradientMonitor(3)
    grad = torch.full((5000,), 100.0, dtype=dtype)  # as FP16, its sum would overflow
    bad_grad = grad.index_fill(0, torch.tensor(4999), value)
    for micro_batch, number, recorded in ((0, 2, grad), (1, 0, grad), (1, 1, bad_grad), (1, 2, grad)):
        monitor.record_finiteness(micro_batch, number, recorded)
    numbers, bad = monitor.finiteness()
    assert dict(zip(numbers, bad.tolist(), strict=True)) == {2: False, 3: False, 4: True, 5: False}


LOCAL, REDUCED = "local gradient", "reduced gradient"
TEXTS = {
    Culprit(1, 3, "forward loss", 2, num_nan=1, num_bad_losses=4): "forward loss is NaN on rank 1, micro-batch 2 "
    "(losses of this step that are not finite: 4)",
    Culprit(2, 3, LOCAL, 0, "w", 7, 9, 1, 1): "local gradient of 'w'[7:9] not finite (1 Inf, 1 NaN) on rank 2, "
    "micro-batch 0",
    Culprit(2, 3, REDUCED, None, "w", 7, 8, 1, 0): "reduced gradient of 'w'[7:8] not finite (1 Inf); owner of the "
    "shard: rank 2",
    Culprit(-1, 3, REDUCED): "reduced gradient: every element is finite, but the norm after clipping is above 9.2e+18 "
    "(under deepspeed: that of the main grads above 9.2e+18 / sqrt(ranks))",
}


def test_culprit_as_text() -> None:
    assert [str(culprit) for culprit in TEXTS] == [*TEXTS.values()]

"""Steps replayed from graphs have the bits of eager ones: on the CPU, where a graph is a list of operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dtrain
from dtrain.engine.graphs.step import WARM_UP
from dtrain.errors import ConfigError, UsageError
from tests.helpers.recorded_graph import RecordedGraph, graphs_on_cpu

NUM_STEPS = WARM_UP + 6
GRAPHS: list[RecordedGraph] = []


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    global GRAPHS
    GRAPHS = graphs_on_cpu(monkeypatch)


def make(**options: Any) -> dtrain.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), nn.Linear(16, 1)
    )
    settings: dict[str, Any] = {
        "optimizer": dtrain.AdamW(lr=1e-2, compile=False),
        "engine": dtrain.Native(graph=True),
        "schedule": dtrain.Cosine(total_steps=NUM_STEPS, warmup_steps=4),
        "precision": "bf16",
        "max_grad_norm": 0.5,
        "seed": 3,
    }
    return dtrain.initialize(model, **{**settings, **options})


def batches(num_micro_batches: int = 2) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(4, 8, generator=generator) for _ in range(num_micro_batches)] for _ in range(NUM_STEPS)]


Step = Callable[..., dtrain.StepOutcome]


def steps(engine: dtrain.Engine, forward: Callable[[Tensor], Tensor] | None = None, *, replays: bool) -> Step:
    """Returns a whole step: from graphs, or as a user writes it."""

    def loss(micro: Tensor) -> Tensor:
        return engine(micro).float().square().mean()  # type: ignore[no-any-return]

    own = forward or loss

    def eagerly(batch: list[Tensor], weights: list[float] | None = None, **arguments: Any) -> dtrain.StepOutcome:
        for place, micro in enumerate(engine.accumulate(batch)):
            engine.backward(own(micro), weight=1.0 if weights is None else weights[place])
        return engine.step(**arguments)

    return engine.graphed_step(own) if replays else eagerly


def train(engine: dtrain.Engine, data: list[list[Tensor]], *, replays: bool, weights: Any = None) -> list[Any]:
    """Returns all that a user sees of each step."""
    step = steps(engine, replays=replays)
    seen = []
    for number, batch in enumerate(data):
        outcome = step(batch, None if weights is None else weights(number))
        engine.data_cursor += 1
        seen.append((outcome, engine.applied_steps, engine.loss_scale.scale, engine.comm.schedule.hash))
    return seen


def assert_equal(own: dict[str, Any], data: list[list[Tensor]], **how: Any) -> list[Any]:
    eager, replayed = make(**own), make(**own)
    want, got = train(eager, data, replays=False, **how), train(replayed, data, replays=True, **how)
    assert repr(got) == repr(want)  # NaN too
    states = [engine.master_state() for engine in (eager, replayed)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    return got


OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32, average": {"precision": "fp32", "ema_decay": 0.9, "max_grad_norm": None},
    "fp16, growing scale": {
        "precision": "fp16",
        "loss_scale": dtrain.LossScale("dynamic", init=4.0, growth_interval=1),
    },
    "two rates": {
        "optimizer": dtrain.AdamW(
            lr=1e-2, compile=False, groups={"3.*": {"lr_factor": 0.5, "schedule": dtrain.Constant()}}
        )
    },
    "lion": {"optimizer": dtrain.Lion(lr=1e-3, compile=False)},
    "sgd": {"optimizer": dtrain.SGD(lr=1e-1, momentum=0.9, compile=False)},
    "reproducible": {"engine": dtrain.Native(graph=True, reproducible=True)},
    "recomputed": {"blocks": dtrain.Blocks(recompute="full")},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_replayed_steps_have_the_bits_of_eager_ones(name: str) -> None:
    seen = assert_equal(OPTIONS[name], batches())
    assert [graph.num_replays for graph in GRAPHS] == [NUM_STEPS - WARM_UP] * 2
    assert len({outcome.lr for outcome, *_ in seen}) > 3
    if "scale" in name:
        assert len({outcome.loss_scale for outcome, *_ in seen}) == NUM_STEPS


def test_weights_are_not_baked_in() -> None:
    assert_equal({}, batches(), weights=lambda number: [2.0 + number, 0.5])
    assert GRAPHS[0].num_replays == NUM_STEPS - WARM_UP


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e6])
def test_an_overflow_is_skipped_inside_the_graph_and_its_culprit_named(value: float, num_micro_batches: int) -> None:
    data = batches(num_micro_batches)
    for number in (WARM_UP, WARM_UP + 2):  # the captured step, and a replayed one
        data[number][-1][0, 3] = value
    seen = assert_equal({"precision": "fp16", "loss_scale": dtrain.LossScale("dynamic", init=1024.0)}, data)
    skipped = [number for number, (outcome, *_) in enumerate(seen) if not outcome.applied]
    assert skipped == [WARM_UP, WARM_UP + 2]
    assert all(seen[number][0].culprit is not None for number in skipped)
    assert GRAPHS[0].num_replays == NUM_STEPS - WARM_UP


def test_a_number_of_the_host_in_the_forward_shows() -> None:
    """The control: what is no tensor of the batch is in the graph as it was."""
    engines, losses = [make(), make()], []
    for engine, replays in zip(engines, (False, True), strict=True):
        numbers = iter(range(1, 100))

        def forward(micro: Tensor, engine: dtrain.Engine = engine, numbers: Iterator[int] = numbers) -> Tensor:
            return engine(micro).float().square().mean() * next(numbers)

        step = steps(engine, forward, replays=replays)
        losses.append([step(batch).loss for batch in batches(1)])
    assert losses[0][: WARM_UP + 1] == losses[1][: WARM_UP + 1]
    assert losses[0][WARM_UP + 1 :] != losses[1][WARM_UP + 1 :]


def test_what_changes_between_steps_does_not_end_the_replays(tmp_path: Path) -> None:
    """Saves, loads, audits, writes, evaluations, other thresholds, and a step that is measured."""
    data, found = batches() + batches(), []
    for index in range(2):
        engine = make(audit=dtrain.Audit(every=2), ema_decay=0.9)
        step, seen = steps(engine, replays=bool(index)), []
        for number, batch in enumerate(data):
            if number == 6:
                with engine.modify_weights("0.*"):
                    engine.module[0].weight.data.mul_(2.0)  # type: ignore[operator, union-attr]
            if number == 8:
                engine.save(tmp_path / str(index))
            if number == 12:
                engine.load(tmp_path / str(index))
            if number == 14:
                with engine.eval():
                    seen.append(engine(batch[0]).sum().item())
            if number == 15:
                with engine.measure_precision(["0"]):
                    seen.append(step(batch))
                continue
            if number == 10:
                engine.expect_save()
            seen.append(step(batch, max_grad_norm=0.1 if number % 3 else math.inf, lr=None if number % 4 else 0.03))
        found.append((repr(seen), {name: value.tolist() for name, value in engine.master_state().items()}))
    assert found[0] == found[1]
    assert sum(graph.num_replays for graph in GRAPHS) >= 10
    assert len(GRAPHS) == 4, "once more after the load"


def test_steps_of_other_shapes_have_graphs_of_their_own() -> None:
    data = batches()
    data = [batch if number % 2 else [micro[:3] for micro in batch] for number, batch in enumerate(data + data)]
    assert_equal({}, data)
    assert [graph.num_replays for graph in GRAPHS] == [NUM_STEPS - WARM_UP] * 4


def test_a_value_that_is_read_is_named() -> None:
    engine = make()
    reads: list[bool] = []

    def forward(micro: Tensor) -> Tensor:
        loss = engine(micro).float().square().mean()
        return loss * 2 if reads and loss > 0 else loss

    step = engine.graphed_step(forward)
    data = batches(1)
    for batch in data[:WARM_UP]:
        step(batch)
    reads.append(True)
    with pytest.raises(UsageError, match=r"cannot be captured \(aten._local_scalar_dense.*set engine.graph=false"):
        step(data[WARM_UP])
    assert torch.ones(2).sum().item() == 2, "the capture has ended"


def test_a_parameter_without_a_gradient_is_named() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    engine = dtrain.initialize(Half(), optimizer=dtrain.AdamW(compile=False), engine=dtrain.Native(graph=True))
    step = engine.graphed_step(lambda micro: engine(micro).float().square().mean())
    first, second, *_ = batches(1)
    step(first)
    with pytest.raises(UsageError, match=r"2 parameters have had no gradient in a step, such as 'unused"):
        step(second)


def test_random_numbers_that_would_be_drawn_again_are_refused_before_a_backward() -> None:
    engine = make(blocks=dtrain.Blocks(recompute="full"))
    step = engine.graphed_step(lambda micro: nn.functional.dropout(engine(micro), 0.5).float().mean())
    step(batches()[0])
    engine = dtrain.initialize(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
        engine=dtrain.Native(graph=True),
        blocks=dtrain.Blocks(recompute="full"),
    )
    step = engine.graphed_step(lambda micro: engine(micro).float().mean())
    with pytest.raises(UsageError, match=r"draws random numbers with recomputation, which would draw others"):
        step(batches()[0])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"engine": dtrain.Native()}, r"was set up without it; use dtrain.Native\(graph=True\)"),
        ({}, r"needs a GPU, and this rank trains on cpu; set engine.graph=false"),
    ],
)
def test_what_no_graph_can_hold_is_refused(
    options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=rf"engine.graph=true: .*{reason}"):
        make(**options).graphed_step(lambda micro: micro)


def test_a_step_with_a_wrong_argument_can_be_repeated(tmp_path: Path) -> None:
    engine = make()
    step, data = steps(engine, replays=True), batches()
    for batch in data[: WARM_UP + 2]:
        step(batch)
    with pytest.raises(UsageError, match=r"the learning rate of step 5 is -1\.0"):
        step(data[-1], lr=-1.0)
    engine.save(tmp_path)
    assert step(data[-1]).applied
    assert GRAPHS[0].num_replays == 3


def test_nothing_is_updated_after_a_capture_that_failed() -> None:
    engine = make()
    fails: list[bool] = []

    def forward(micro: Tensor) -> Tensor:
        if fails:
            raise ValueError("of the user")
        return engine(micro).float().square().mean()  # type: ignore[no-any-return]

    step, data = engine.graphed_step(forward), batches()
    for batch in data[:WARM_UP]:
        step(batch)
    fails.append(True)
    with pytest.raises(ValueError, match="of the user"):
        step(data[WARM_UP])
    fails.clear()
    before = engine.master_state()
    for call in (engine.step, lambda: step(data[WARM_UP])):
        with pytest.raises(UsageError, match="backward that failed half-way"):
            call()
    assert all(torch.equal(value, before[name]) for name, value in engine.master_state().items())


@pytest.mark.parametrize(
    ("batch", "weights", "message"),
    [
        ([torch.zeros(4, 8)], [torch.ones(())], r"expected 1 numbers, one a micro-batch"),
        ([torch.zeros(4, 8)], [1.0, 2.0], r"expected 1 numbers, one a micro-batch"),
        ([np.zeros((4, 8))], None, r"a micro-batch holds a ndarray; expected tensors without, and plain values"),
        ([torch.zeros(4, 8, requires_grad=True)], None, r"holds a tensor that needs a gradient"),
    ],
)
def test_a_batch_that_no_graph_can_hold_is_refused(batch: list[Any], weights: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        steps(make(), replays=True)(batch, weights)


def test_a_buffer_that_the_forward_assigns_is_named() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 1)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return super().forward(x)

    engine = dtrain.initialize(Counting(), optimizer=dtrain.AdamW(compile=False), engine=dtrain.Native(graph=True))
    with pytest.raises(UsageError, match=r"the forward assigns the buffer 'calls', .*write into it \(self.calls.copy_"):
        steps(engine, replays=True)(batches()[0])


def test_explained_skips_are_refused_also_if_they_are_switched_on_late() -> None:
    engine = make()
    step, data = steps(engine, replays=True), batches()
    step(data[0])
    engine.explain_skips = True
    with pytest.raises(UsageError, match=r"explain_skips would run forwards again .*set engine.explain_skips=False"):
        step(data[1])


def test_steps_that_other_ranks_may_run_eagerly_keep_the_order_of_collectives() -> None:
    """The check of an audit comes after the reductions in an eager step: a replay would begin with it."""
    engine = make(audit=dtrain.Audit(every=5))
    step, data = steps(engine, replays=True), batches()
    pending = []
    for batch in data:
        pending.append((engine._between.parts.audit.is_pending, GRAPHS[0].num_replays if GRAPHS else 0))  # type: ignore[attr-defined]
        step(batch)
    assert [is_pending for is_pending, _ in pending].index(True) == 5
    assert pending[5][1] == pending[6][1], "the step that checks ran eagerly"


def test_a_mode_of_a_module_is_another_kind(caplog: pytest.LogCaptureFixture) -> None:
    engine = make()
    step, data = steps(engine, replays=True), batches()
    for batch in data[: WARM_UP + 1]:
        step(batch)
    engine.module[2].eval()  # type: ignore[index, operator]
    for batch in data[: WARM_UP + 1]:
        step(batch)
    assert len(GRAPHS) == 4


def test_kinds_beyond_the_fourth_run_eagerly_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine = make()
    step = steps(engine, replays=True)
    for size in range(1, 6):
        for _ in range(WARM_UP + 2):
            step([torch.ones(size, 8)])
    assert len(GRAPHS) == 2 * 4
    assert [record.getMessage() for record in caplog.records if "kinds of steps have graphs" in record.getMessage()]


@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        ({"offload": "cpu"}, None),
        ({"grad_dtype": "bf16"}, None),
        ({}, dtrain.AdamWBF16()),
        ({}, dtrain.TorchOptimizer(torch.optim.RAdam)),
    ],
)
def test_settings_that_exclude_a_graph_are_refused(options: dict[str, Any], optimizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"graph=true with "):
        dtrain.initialize(nn.Linear(2, 2), optimizer=optimizer, engine=dtrain.Native(graph=True, **options))

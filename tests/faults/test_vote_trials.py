"""10,000 votes of simulated ranks with faults at random places: one decision on all ranks, and the right culprit.

The records are built, decided on and settled by the code of the engine; only the collectives are simulated, and the
gradients are made up. What must come out is derived here from the faults alone, in plain Python.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from dtrain.distributed.communicator import Communicator
from dtrain.engine.interface import Culprit, StepOutcome
from dtrain.engine.vote.culprit import Finding, find_nonfinite
from dtrain.engine.vote.decide import REASONS, decide
from dtrain.engine.vote.finalize import CulpritSearch, StepFinalizer
from dtrain.engine.vote.losses import LossAccumulator
from dtrain.engine.vote.record import MUST_AGREE, VoteRecord, fill
from dtrain.engine.vote.skips import SkipCounter
from dtrain.errors import DivergenceError, UsageError
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.precision.loss_scale import LossScale
from dtrain.sharding.layout import ArenaLayout, FlatLayout, ParamSpec, flat_layouts
from dtrain.sharding.replicas import slot_views
from dtrain.sharding.state import ShardedState

TRIALS = 10_000
CPU = torch.device("cpu")
FP32_MAX = torch.finfo(torch.float32).max
MAX_MICRO_BATCHES = 3
MAX_GRAD_NORM = 0.5
SCALE = 64.0
CONFIG = '{"lr": 1}'


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """What is this small gains nothing from a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """Two blocks and a root with a norm, flattened for so many ranks, and clean gradients of every micro-batch."""

    layouts: tuple[FlatLayout, ...]
    leaves: tuple[Tensor, ...]  # of each layout, [micro-batch, rank, numel]

    @property
    def backward_order(self) -> list[FlatLayout]:
        return sorted(self.layouts, key=lambda layout: (layout.group == "", -self.layouts.index(layout)))

    @property
    def places(self) -> list[tuple[int, int]]:
        """(flat, slot) of all parameters in the order of backward."""
        flats = [self.layouts.index(layout) for layout in self.backward_order]
        return [(flat, slot) for flat in flats for slot in reversed(range(len(self.layouts[flat].slots)))]

    @property
    def backward_names(self) -> list[str]:
        return [self.layouts[flat].slots[slot].spec.name for flat, slot in self.places]


@functools.cache
def model(world: int, low: torch.dtype) -> Model:
    def weights(group: str) -> list[ParamSpec]:
        return [
            ParamSpec(f"{group}.weight", (30, 50), low, True),
            ParamSpec(f"{group}.gate", (70,), low, True),
            ParamSpec(f"{group}.bias", (30,), low, False),
        ]

    root = [
        ParamSpec("embedding", (13, 100), low, True),
        ParamSpec("norm", (9,), torch.float32, False),
        ParamSpec("scale", (), torch.float32, False),
    ]
    groups = {"": root, "blocks.0": weights("blocks.0"), "blocks.1": weights("blocks.1")}
    layouts = [layout for name, specs in groups.items() for layout in flat_layouts(name, specs, world)]
    generator = torch.Generator().manual_seed(world)
    leaves = []
    for layout in layouts:
        leaf = torch.zeros(MAX_MICRO_BATCHES, world, layout.numel)
        for slot in layout.slots:
            part = leaf[..., slot.start : slot.stop]
            part.copy_(1e-2 * torch.randn(part.shape, generator=generator))
        leaves.append(leaf.to(layout.dtype))
    return Model(tuple(layouts), tuple(leaves))


# -- faults ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Poke:
    """One element of one parameter's gradient, as the backward of one micro-batch leaves it on one rank."""

    micro_batch: int
    rank: int
    flat: int
    slot: int
    element: int
    value: float


@dataclass
class Trial:
    """One step: what each rank sees of it, and whether the sums are canonical."""

    world: int
    num_micro_batches: int
    low: torch.dtype
    sharded: bool
    canonical: bool
    losses: list[list[float]]  # [rank][micro-batch]
    weights: list[list[float]]
    pokes: list[Poke] = field(default_factory=list)
    differs: dict[str, Any] = field(default_factory=dict)  # fields of the record of ``odd_rank``
    odd_rank: int = 0
    stop: int | None = None  # the rank that wants to stop
    failed_save: int | None = None  # the rank whose save has failed

    @property
    def measures(self) -> bool:
        """Whether the ranks read_lease for the largest gradient: in some trials, because it takes time."""
        return self.world == 2 and self.num_micro_batches == 1

    @staticmethod
    def clean(dice: random.Random) -> Trial:
        world, number = dice.randint(1, 4), dice.randint(1, MAX_MICRO_BATCHES)
        return Trial(
            world,
            number,
            dice.choice([torch.bfloat16, torch.float16, torch.float32]),
            dice.random() < 0.7,
            dice.random() < 0.3,
            [[dice.uniform(1, 4) for _ in range(number)] for _ in range(world)],
            [[float(dice.randint(1, 5)) for _ in range(number)] for _ in range(world)],
            stop=dice.randrange(world) if dice.random() < 0.1 else None,
            failed_save=dice.randrange(world) if dice.random() < 0.1 else None,
        )

    @property
    def model(self) -> Model:
        return model(self.world, self.low)

    @property
    def last_pokes(self) -> list[Poke]:
        """Without those that others overwrite."""
        return list({(p.micro_batch, p.rank, p.flat, p.slot, p.element): p for p in self.pokes}.values())

    def place(self, dice: random.Random) -> tuple[int, int]:
        """(micro-batch, rank)."""
        return dice.randrange(self.num_micro_batches), dice.randrange(self.world)

    def element(self, dice: random.Random) -> tuple[int, int, int]:
        """(flat, slot, element); often the first or last."""
        flat = dice.randrange(len(self.model.layouts))
        slot = dice.randrange(len(self.model.layouts[flat].slots))
        numel = self.model.layouts[flat].slots[slot].spec.numel
        return flat, slot, dice.choice([0, numel - 1, dice.randrange(numel)])


def bad_losses(trial: Trial, dice: random.Random) -> None:
    for _ in range(dice.randint(1, 3)):
        micro_batch, rank = trial.place(dice)
        trial.losses[rank][micro_batch] = dice.choice([math.inf, -math.inf, math.nan])


def bad_gradients(trial: Trial, dice: random.Random) -> None:
    for _ in range(dice.randint(1, 3)):
        value = dice.choice([math.inf, -math.inf, math.nan])
        trial.pokes.append(Poke(*trial.place(dice), *trial.element(dice), value))


def large_gradients(trial: Trial, dice: random.Random) -> None:
    """Finite elements: their sum overflows on the way, or only a norm or the sum of a leaf, or nothing does."""
    if trial.low == torch.float16:
        return
    trial.weights = [[1.0] * trial.num_micro_batches for _ in range(trial.world)]
    place, element = trial.place(dice), trial.element(dice)
    value = dice.choice([3e38, 3e38, 2e25, 1e15])
    trial.pokes.append(Poke(*place, *element, value))
    if dice.random() < 0.7:
        trial.pokes.append(Poke(*trial.place(dice), *element, value))
    elif dice.random() < 0.7:
        trial.pokes.append(Poke(*place, *trial.element(dice), value))


def bad_weights(trial: Trial, dice: random.Random) -> None:
    for _ in range(dice.randint(1, 2)):
        micro_batch, rank = trial.place(dice)
        trial.weights[rank][micro_batch] = dice.choice([math.inf, math.nan, -1.0])


def no_weights(trial: Trial, dice: random.Random) -> None:
    for rank in range(trial.world):
        trial.weights[rank] = [0.0] * trial.num_micro_batches


def idle_rank(trial: Trial, dice: random.Random) -> None:
    trial.weights[dice.randrange(trial.world)] = [0.0] * trial.num_micro_batches


def divergence(trial: Trial, dice: random.Random) -> None:
    if trial.world > 1:
        name = dice.choice(MUST_AGREE)
        trial.odd_rank = dice.randrange(1, trial.world)
        trial.differs = {name: dice.choice([13, 1 << 40]) if name not in ("lr", "loss_scale") else 0.125}


FAULTS = (bad_losses, bad_gradients, large_gradients, bad_weights, no_weights, idle_rank, divergence)


def trials(number: int, seed: int) -> Iterator[Trial]:
    """One fault most often, none or several now and then."""
    dice = random.Random(seed)
    for _ in range(number):
        trial = Trial.clean(dice)
        for fault in dice.sample(FAULTS, dice.choice([0, 1, 1, 1, 1, 2, 3])):
            fault(trial, dice)
        yield trial


# -- what must come of them --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    reason: str | None
    message: str = ""  # of the error
    culprit: Culprit | None = None


def expect(trial: Trial) -> Expected:
    places = [(m, r) for m in range(trial.num_micro_batches) for r in range(trial.world)]  # earliest first
    known = known_record(trial, 0)
    if trial.differs:
        ((name, value),) = trial.differs.items()
        if name == "config_hash":
            return Expected("diverged", f"'lr' is 1 on rank 0 and 2 on rank {trial.odd_rank}")
        if name == "schedule_hash":
            return Expected("diverged", f"number 1 of this step is reduce b on rank 0 and b2 on rank {trial.odd_rank}")
        return Expected("diverged", f"{name} is {getattr(known, name)} on rank 0 and {value} on rank {trial.odd_rank}")
    weights = {(m, r): trial.weights[r][m] for m, r in places}
    bad = [place for place in places if not 0 <= weights[place] < math.inf]
    if bad:
        return Expected("bad_weight", f"micro-batch {bad[0][0]} of step {known.step} on rank {bad[0][1]} ")
    losses = {(m, r): trial.losses[r][m] for m, r in places}
    bad = [place for place in places if not math.isfinite(losses[place])]
    if bad:
        infinite = int(math.isinf(losses[bad[0]]))
        counts = {"num_inf": infinite, "num_nan": 1 - infinite, "num_bad_losses": len(bad)}
        culprit = Culprit(bad[0][1], known.step, "forward loss", bad[0][0], **counts)
        return Expected("nonfinite_loss", culprit=culprit)
    sums = reduced(trial)
    if any(not abs(total) < 1e18 for total in sums.values()):
        return Expected("overflow", culprit=expect_gradient(trial, sums))
    return Expected(None if sum(weights.values()) > 0 else "empty")


def reduced(trial: Trial) -> dict[tuple[int, int, int], float]:
    """The poked elements of the main grads: (flat, slot, element) -> value."""
    sums: dict[tuple[int, int, int], float] = {}
    for poke in trial.last_pokes:
        key = (poke.flat, poke.slot, poke.element)
        total = sums.get(key, 0.0) + trial.weights[poke.rank][poke.micro_batch] * poke.value
        sums[key] = total if abs(total) <= FP32_MAX else total * math.inf
    return sums


def expect_gradient(trial: Trial, sums: dict[tuple[int, int, int], float]) -> Culprit:
    order = trial.model.places
    totals: dict[tuple[int, int, int], float] = {}
    for poke in trial.last_pokes:
        gradient = (poke.micro_batch, order.index((poke.flat, poke.slot)), poke.rank)
        totals[gradient] = totals.get(gradient, 0.0) + poke.value
    first = min((gradient for gradient, total in totals.items() if not abs(total) <= FP32_MAX), default=None)
    if trial.world == trial.num_micro_batches == 1:
        first = (0, -1, 0)
    bad = [key for key, total in sums.items() if not math.isfinite(total)]
    wanted = [order[first[1]], *order] if first and first[1] >= 0 else order
    flat, slot = next((place for place in wanted if any(key[:2] == place for key in bad)), (None, None))
    phase = "local gradient" if first else "reduced gradient"
    where = {"step": known_record(trial, 0).step, "phase": phase, "micro_batch": first[0] if first else None}
    if flat is None or slot is None:
        return Culprit(rank=first[2] if first else -1, **where)
    elements = [key[2] for key in bad if key[:2] == (flat, slot)]
    values = [sums[flat, slot, element] for element in elements]
    layout = trial.model.layouts[flat]
    owner = min((layout.slots[slot].start + element) // layout.shard_numel for element in elements)
    infinite = sum(map(math.isinf, values))
    return Culprit(
        rank=first[2] if first else owner,
        tensor=layout.slots[slot].spec.name,
        start=min(elements),
        stop=max(elements) + 1,
        num_inf=infinite,
        num_nan=len(values) - infinite,
        **where,
    )


# -- the ranks ---------------------------------------------------------------------------------------------------------


class Said(Exception):
    """What a rank tells the others, who are asked later."""


class Link(Communicator):
    """One rank's end of the simulated collectives."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(None, CPU)
        self.rank, self.world_size = rank, world
        self.texts: list[str] | None = None
        self.rows: Tensor | None = None

    def exchange_text(self, text: str) -> list[str]:
        if self.texts is None:
            raise Said(text)
        assert self.texts[self.rank] == text
        return self.texts

    def gather_rows(self, row: Tensor, *, label: str) -> Tensor:
        assert self.rows is not None
        return self.rows.clone()


def known_record(trial: Trial, rank: int) -> VoteRecord:
    values = {
        "step": 7, "config_hash": 1 << 54, "num_micro_batches": trial.num_micro_batches, "schedule_hash": 99,
        "data_cursor": 640, "lr": 1e-3, "loss_scale": SCALE, "stop_requested": int(trial.stop == rank),
        "save_failed": int(trial.failed_save == rank), "sum_weights": 0.0, "sum_weighted_loss": 0.0, "sum_squares": 0.0,
    }  # fmt: skip
    return VoteRecord(**{**values, **(trial.differs if rank == trial.odd_rank else {})})


class Rank:
    """What a rank holds when it votes; borrows from engine and state how records are made of it."""

    chunk_squares = ShardedState.chunk_squares
    canonical_sum = ShardedState.canonical_sum

    def __init__(self, rank: int, trial: Trial, main_grads: list[Tensor]) -> None:
        self.rank, self.trial, self.device = rank, trial, CPU
        self.layouts = trial.model.layouts
        self.link = self._comm = Link(rank, trial.world)
        self._losses, self.monitor, self.state = LossAccumulator(), GradientMonitor(len(trial.model.places)), self
        arena = ArenaLayout.of(self.layouts, rank, sharded=trial.sharded)
        self.main_grads = [
            full[segment.flat_start : segment.flat_start + segment.numel]
            for segment, full in zip(arena.segments, main_grads, strict=True)
        ]
        self.segments = arena.segments
        self.known = known_record(trial, rank)
        self.finalizer = StepFinalizer(
            self.link,
            LossScale("calibrated", init=SCALE, calibration_steps=2).start(),
            SkipCounter(limit=2),
            CulpritSearch(self.search, self.monitor.clear, trial.model.backward_names),
            CONFIG.replace("1", "2") if rank and "config_hash" in trial.differs and rank == trial.odd_rank else CONFIG,
            is_synchronous=False,
        )

    def backward(self, leaves: dict[str, Tensor]) -> None:
        """All micro-batches: losses into the tally, leaves past the watch."""
        trial = self.trial
        for micro_batch in range(trial.num_micro_batches):
            loss, weight = (table[self.rank][micro_batch] for table in (trial.losses, trial.weights))
            self._losses.add(micro_batch, torch.tensor(loss), torch.tensor(weight))
            self.monitor.is_enabled = trial.world > 1 or trial.num_micro_batches > 1
            self.monitor.records_magnitude = trial.measures
            first = 0
            for layout in trial.model.backward_order:
                grads = slot_views(leaves[layout.name][micro_batch, self.rank], layout)[::-1]
                for grad in grads:
                    self.monitor.record_magnitude(grad)
                self.monitor.record_finiteness(micro_batch, first, grads)
                first += len(grads)

    def owned_main_grads(self) -> Iterator[tuple[FlatLayout, Tensor]]:
        for segment, main_grad in zip(self.segments, self.main_grads, strict=True):
            start, stop = segment.layout.shard(self.rank)
            yield segment.layout, main_grad[start - segment.flat_start : stop - segment.flat_start]

    def search(self) -> list[Finding]:
        return [
            finding
            for layout, grad in self.owned_main_grads()
            for part in layout.intervals(*layout.shard(self.rank))
            for finding in find_nonfinite(
                part.spec.name, self.rank, part.start, grad[part.offset : part.offset + part.stop - part.start]
            )
        ]

    def decide(self, rows: Tensor, squares: Tensor) -> None:
        """From this rank's own copy of the records."""
        sums: dict[str, Tensor] = {}
        if self.trial.canonical:
            self.link.rows = squares
            weights = torch.tensor(self.trial.weights).T.flatten().double().sum()
            sums = {"sum_squares": self.canonical_sum(squares[self.rank]), "sum_weights": weights}
        self.decision = decide(rows, max_grad_norm=MAX_GRAD_NORM, **sums)
        odd = "schedule_hash" in self.trial.differs and self.rank == self.trial.odd_rank
        self.finalizer.post(self.decision, rows, self.known, ("reduce a", "b2" if odd else "reduce b"))

    def finalize_step(self) -> StepOutcome | tuple[type, str] | str:
        """The outcome, the error that ends the run, or what this rank has to tell first."""
        try:
            self.finalizer.finalize_step()
        except Said as said:
            return str(said)
        except (DivergenceError, UsageError) as error:
            return type(error), str(error)
        return self.finalizer.outcome()


@contextmanager
def poked(trial: Trial) -> Iterator[None]:
    """The leaves with the faults in them."""
    clean = []
    for poke in trial.last_pokes:
        place = trial.model.layouts[poke.flat].slots[poke.slot].start + poke.element
        element = trial.model.leaves[poke.flat][poke.micro_batch, poke.rank, place]
        clean.append((element, element.clone()))
        element.fill_(poke.value)
    yield
    for element, value in clean:
        element.copy_(value)


@dataclass(frozen=True)
class Gradients:
    """What is to come out of those of a step, still scaled: the norm of their sum, and the largest if measured."""

    norm: float
    largest: float


def take(trial: Trial, ignored: str | None = None) -> tuple[Expected, Gradients, list[Rank], list[Any]]:
    """One step on all ranks; the field ``ignored`` of the records holds rank 0's value everywhere."""
    leaves = {layout.name: leaf for layout, leaf in zip(trial.model.layouts, trial.model.leaves, strict=True)}
    factors = torch.tensor(trial.weights).T.unsqueeze(-1)
    with poked(trial):
        main_grads = [(leaf[: trial.num_micro_batches].float() * factors).sum((0, 1)) for leaf in leaves.values()]
        ranks = [Rank(rank, trial, main_grads) for rank in range(trial.world)]
        for rank in ranks:
            rank.backward(leaves)
        largest = max(leaf[0].abs().max().item() for leaf in leaves.values()) if trial.measures else 0.0
    squares = torch.stack([rank.chunk_squares() for rank in ranks])
    rows = torch.stack(
        [fill(rank.known, rank._losses.observe(rank.monitor, own)) for rank, own in zip(ranks, squares, strict=True)]
    )
    if ignored is not None:
        column = [entry.name for entry in fields(VoteRecord)].index(ignored)
        rows[:, column] = rows[0, column]
    for rank in ranks:
        rank.decide(rows.clone(), squares.clone())
    results = [rank.finalize_step() for rank in ranks]
    if isinstance(results[0], str):
        for rank in ranks:
            rank.link.texts = results
        results = [rank.finalize_step() for rank in ranks]
    norm = math.sqrt(sum(grad.double().square().sum().item() for grad in main_grads))
    return expect(trial), Gradients(norm, largest), ranks, results


def check(trial: Trial, ignored: str | None = None) -> str | None:
    """Asserts that one step ends as it must; returns the reason."""
    expected, gradients, ranks, results = take(trial, ignored)
    assert len({repr(result) for result in results}) == 1, "the ranks decided differently"
    assert len({repr((rank.finalizer.scale, rank.finalizer.applied_steps)) for rank in ranks}) == 1
    assert [rank.finalizer.save_failed for rank in ranks] == [trial.failed_save is not None] * trial.world
    first, finalizer, result = ranks[0], ranks[0].finalizer, results[0]
    code = 0 if expected.reason is None else 1 + REASONS.index(expected.reason)
    assert [rank.decision.code.item() for rank in ranks] == [code] * trial.world
    if expected.message:
        assert result[0] is (UsageError if expected.reason == "bad_weight" else DivergenceError)
        assert expected.message in result[1]
        assert finalizer.applied_steps == 0
        return expected.reason
    assert isinstance(result, StepOutcome), result
    assert (result.reason, result.applied) == (expected.reason, expected.reason is None)
    assert result.culprit == expected.culprit
    assert (result.loss_scale, result.lr) == (SCALE, first.known.lr)
    assert result.stop_requested == (trial.stop is not None)
    assert finalizer.applied_steps == int(result.applied)
    assert finalizer.scale.scale == (SCALE / 2 if expected.reason == "overflow" else SCALE)
    assert finalizer.scale.clean_steps == finalizer.scale.num_measured == int(result.applied)
    if result.applied:
        assert finalizer.scale.max_abs_grad == gradients.largest / SCALE
        pairs = [
            (w, x) for ws, xs in zip(trial.weights, trial.losses, strict=True) for w, x in zip(ws, xs, strict=True)
        ]
        total = sum(w for w, _ in pairs)
        norm = gradients.norm / (SCALE * total)
        assert result.loss == pytest.approx(sum(w * x for w, x in pairs) / total, rel=1e-6)
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        divisor = SCALE * total / min(1.0, MAX_GRAD_NORM / (norm + 1e-6))
        assert first.decision.grad_divisor.item() == pytest.approx(divisor, rel=1e-5)
    return expected.reason


def check_all(many: Iterator[Trial], ignored: str | None = None) -> Counter[str | None]:
    return Counter(check(trial, ignored) for trial in many)


@pytest.mark.parametrize("share", range(4))
def test_ranks_never_disagree_and_the_culprit_is_right(share: int) -> None:
    seen = check_all(trials(TRIALS // 4, seed=share))
    assert seen.total() == TRIALS // 4
    for reason in (None, *REASONS):
        assert seen[reason] > TRIALS // 4 / 40, f"too few trials end with {reason}"


@pytest.mark.parametrize("name", [entry.name for entry in fields(VoteRecord)])
def test_no_field_of_the_record_can_be_missed(name: str) -> None:
    """Were a field not sent, some trial would end otherwise than it must."""
    with pytest.raises(AssertionError):
        check_all(trials(1000, seed=99), ignored=name)

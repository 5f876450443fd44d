"""10,000 votes of simulated ranks with random faults: one decision on all ranks, and the right culprit (F7).

The engine's code builds, decides and finalizes the records; only the collectives and the gradients are simulated. The
expected result is derived here from the faults alone, in plain Python.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from dtrain.checkpoint.snapshot import TensorShard
from dtrain.config.precision import LossScale
from dtrain.distributed.mesh import Mesh
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.engine.outcome import Culprit, StepOutcome
from dtrain.engine.run_state import RunState
from dtrain.engine.step import StepEngine
from dtrain.engine.vote.culprit import Finding, locate_bad_gradient
from dtrain.engine.vote.decide import REASONS
from dtrain.engine.vote.finalize import StepFinalizer
from dtrain.engine.vote.losses import LossAccumulator
from dtrain.engine.vote.record import COLUMNS, MUST_AGREE, HostRecord, upload
from dtrain.engine.vote.skips import SkipCounter
from dtrain.engine.vote.tensors import VoteTensors
from dtrain.errors import DivergenceError, UsageError
from dtrain.parameters.gradient_monitor import GradientMonitor
from dtrain.precision.loss_scale import LossScaleState
from dtrain.sharding.layout import CHUNK, FlatLayout, ParamSpec, flat_layouts
from dtrain.sharding.model import ShardedModel
from dtrain.sharding.placement import Placement
from dtrain.sharding.replicas import slot_views
from tests.helpers.fault_counts import FaultCounts
from tests.helpers.vote_records import decoded, rank_records

TRIALS = 10_000
CPU = torch.device("cpu")
FP32_MAX = torch.finfo(torch.float32).max
MAX_MICRO_BATCHES = 3
MAX_GRAD_NORM = 0.5
_FLOATS = ("lr", "loss_scale", "max_grad_norm", "grad_factor")  # of the fields in which ranks must agree
SCALE = 64.0
CONFIG = '{"lr": 1}'


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """Flat layouts of two blocks and a root with a norm, and clean gradients of every micro-batch."""

    layouts: tuple[FlatLayout, ...]
    gradients: tuple[Tensor, ...]  # of each layout: [micro-batch, rank, numel]

    @functools.cached_property
    def backward_order(self) -> list[FlatLayout]:
        return sorted(self.layouts, key=lambda layout: (layout.group == "", -self.layouts.index(layout)))

    @functools.cached_property
    def backward_slots(self) -> list[tuple[int, int]]:
        """(flat, slot) of all parameters in the order of backward."""
        flats = [self.layouts.index(layout) for layout in self.backward_order]
        return [(flat, slot) for flat in flats for slot in reversed(range(len(self.layouts[flat].slots)))]

    @functools.cached_property
    def backward_names(self) -> list[str]:
        return [self.layouts[flat].slots[slot].spec.name for flat, slot in self.backward_slots]


@functools.cache
def model(world: int, dtype: torch.dtype) -> Model:
    norms = [ParamSpec("norm", (9,), torch.float32, 1), ParamSpec("scale", (), torch.float32, 1)]
    groups = {"": [ParamSpec("embedding", (13, 100), dtype, 0), *norms]}
    of_block = [("weight", (30, 50), 0), ("gate", (70,), 0), ("bias", (30,), 1)]
    for block in ("blocks.0", "blocks.1"):
        groups[block] = [ParamSpec(f"{block}.{name}", shape, dtype, number) for name, shape, number in of_block]
    layouts = [layout for name, specs in groups.items() for layout in flat_layouts(name, specs, world)]
    generator = torch.Generator().manual_seed(world)
    gradients = []
    for layout in layouts:
        gradient = torch.zeros(MAX_MICRO_BATCHES, world, layout.numel)
        for slot in layout.slots:
            part = gradient[..., slot.start : slot.stop]
            part.copy_(1e-2 * torch.randn(part.shape, generator=generator))
        gradients.append(gradient.to(layout.dtype))
    return Model(tuple(layouts), tuple(gradients))


# -- faults ------------------------------------------------------------------------------------------------------------


class BadElement(NamedTuple):
    """One element of one parameter's gradient from one micro-batch of one rank."""

    micro_batch: int
    rank: int
    flat: int
    slot: int
    element: int
    value: float


@dataclass
class Trial:
    """One step: the losses, weights and faults of each rank."""

    world: int
    num_micro_batches: int
    dtype: torch.dtype
    sharded: bool
    canonical: bool
    losses: list[list[float]]  # [rank][micro-batch]
    weights: list[list[float]]
    bad_elements: list[BadElement] = field(default_factory=list)
    differs: dict[str, Any] = field(default_factory=dict)  # fields of ``odd_rank``'s host record that differ
    odd_rank: int = 0
    stop: int | None = None  # rank that requests a stop
    failed_save: int | None = None  # rank whose save has failed

    @property
    def measures(self) -> bool:
        """Whether the ranks record the largest gradient: in some trials, because it takes time."""
        return self.world == 2 and self.num_micro_batches == 1

    @staticmethod
    def clean(rng: random.Random) -> Trial:
        world, number = rng.randint(1, 4), rng.randint(1, MAX_MICRO_BATCHES)
        kind = rng.choice([torch.bfloat16, torch.float16, torch.float32]), rng.random() < 0.7, rng.random() < 0.3
        losses = [[rng.uniform(1, 4) for _ in range(number)] for _ in range(world)]
        weights = [[float(rng.randint(1, 5)) for _ in range(number)] for _ in range(world)]
        stop, failed_save = (rng.randrange(world) if rng.random() < 0.1 else None for _ in range(2))
        return Trial(world, number, *kind, losses, weights, stop=stop, failed_save=failed_save)

    @property
    def model(self) -> Model:
        return model(self.world, self.dtype)

    @property
    def effective_bad_elements(self) -> list[BadElement]:
        """Bad elements that no later one overwrites."""
        return list({bad[:-1]: bad for bad in self.bad_elements}.values())

    def micro_batch_and_rank(self, rng: random.Random) -> tuple[int, int]:
        return rng.randrange(self.num_micro_batches), rng.randrange(self.world)

    def element(self, rng: random.Random) -> tuple[int, int, int]:
        """Returns a random (flat, slot, element), often the first or last element."""
        flat = rng.randrange(len(self.model.layouts))
        slot = rng.randrange(len(self.model.layouts[flat].slots))
        numel = self.model.layouts[flat].slots[slot].spec.numel
        return flat, slot, rng.choice([0, numel - 1, rng.randrange(numel)])


def bad_losses(trial: Trial, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 3)):
        micro_batch, rank = trial.micro_batch_and_rank(rng)
        trial.losses[rank][micro_batch] = rng.choice([math.inf, -math.inf, math.nan])


def bad_gradients(trial: Trial, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 3)):
        value = rng.choice([math.inf, -math.inf, math.nan])
        trial.bad_elements.append(BadElement(*trial.micro_batch_and_rank(rng), *trial.element(rng), value))


def large_gradients(trial: Trial, rng: random.Random) -> None:
    """Finite elements whose sum over ranks, local sum or norm may overflow."""
    if trial.dtype == torch.float16:
        return
    trial.weights = [[1.0] * trial.num_micro_batches for _ in range(trial.world)]
    source, element = trial.micro_batch_and_rank(rng), trial.element(rng)
    value = rng.choice([3e38, 3e38, 2e25, 1e15])
    trial.bad_elements.append(BadElement(*source, *element, value))
    if rng.random() < 0.7:
        trial.bad_elements.append(BadElement(*trial.micro_batch_and_rank(rng), *element, value))
    elif rng.random() < 0.7:
        trial.bad_elements.append(BadElement(*source, *trial.element(rng), value))


def bad_weights(trial: Trial, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 2)):
        micro_batch, rank = trial.micro_batch_and_rank(rng)
        trial.weights[rank][micro_batch] = rng.choice([math.inf, math.nan, -1.0])


def no_weights(trial: Trial, rng: random.Random) -> None:
    trial.weights = [[0.0] * trial.num_micro_batches for _ in range(trial.world)]


def idle_rank(trial: Trial, rng: random.Random) -> None:
    trial.weights[rng.randrange(trial.world)] = [0.0] * trial.num_micro_batches


def divergence(trial: Trial, rng: random.Random) -> None:
    if trial.world > 1:
        name = rng.choice(MUST_AGREE)
        trial.odd_rank = rng.randrange(1, trial.world)
        trial.differs = {name: 0.125 if name in _FLOATS else rng.choice([13, 1 << 40])}


FAULTS = (bad_losses, bad_gradients, large_gradients, bad_weights, no_weights, idle_rank, divergence)


def trials(number: int, seed: int) -> Iterator[Trial]:
    """Yields random trials, most of them with one fault, some with none or several."""
    rng = random.Random(seed)
    for _ in range(number):
        trial = Trial.clean(rng)
        for fault in rng.sample(FAULTS, rng.choice([0, 1, 1, 1, 1, 2, 3])):
            fault(trial, rng)
        yield trial


# -- expected results -----------------------------------------------------------------------------------------------


def expect(trial: Trial) -> tuple[str | None, str, Culprit | None]:
    """Returns (reason, message of the error, culprit)."""
    sources = [(m, r) for m in range(trial.num_micro_batches) for r in range(trial.world)]  # earliest first
    host = host_record(trial, 0)
    if trial.differs:
        ((name, value),) = trial.differs.items()
        odd = f"rank {trial.odd_rank}"
        messages = {
            "config_hash": f"'lr' is 1 on rank 0 and 2 on {odd}",
            "schedule_hash": f"number 1 of this step is reduce b on rank 0 and b2 on {odd}",
            "written_weights": f"'head.weight' was written to on {odd} and not on rank 0",
        }
        other = f"{name} is {getattr(host, name)} on rank 0 and {value} on {odd}"
        return "diverged", messages.get(name, other), None
    weights = {(m, r): trial.weights[r][m] for m, r in sources}
    bad = [source for source in sources if not 0 <= weights[source] < math.inf]
    if bad:
        which = f"the weight of micro-batch {bad[0][0]} of step {host.step} on rank {bad[0][1]}"
        return "bad_weight", f"{which} is negative or not finite", None
    losses = {(m, r): trial.losses[r][m] for m, r in sources}
    bad = [source for source in sources if not math.isfinite(losses[source])]
    if bad:
        infinite = int(math.isinf(losses[bad[0]]))
        counts = {"num_inf": infinite, "num_nan": 1 - infinite, "num_bad_losses": len(bad)}
        return "nonfinite_loss", "", Culprit(bad[0][1], host.step, "forward loss", bad[0][0], **counts)
    sums = reduced(trial)
    if any(not math.isfinite(total) for total in sums.values()):
        return "overflow", "", expect_gradient(trial, sums)
    return None if sum(weights.values()) > 0 else "empty", "", None


def reduced(trial: Trial) -> dict[tuple[int, int, int], float]:
    """Returns the bad elements of the main grads: (flat, slot, element) -> value."""
    sums: dict[tuple[int, int, int], float] = {}
    for bad in trial.effective_bad_elements:
        key = bad.flat, bad.slot, bad.element
        total = sums.get(key, 0.0) + trial.weights[bad.rank][bad.micro_batch] * bad.value
        sums[key] = total if abs(total) <= FP32_MAX else total * math.inf
    return sums


def expect_gradient(trial: Trial, sums: dict[tuple[int, int, int], float]) -> Culprit:
    order = trial.model.backward_slots
    totals: dict[tuple[int, int, int], float] = {}
    for one in trial.effective_bad_elements:
        gradient = (one.micro_batch, order.index((one.flat, one.slot)), one.rank)
        totals[gradient] = totals.get(gradient, 0.0) + one.value
    bad = [key for key, total in sums.items() if not math.isfinite(total)]
    # the sum over a finite gradient may overflow too: each rank reports its first, which the main grad may clear
    flagged = sorted(gradient for gradient, total in totals.items() if not abs(total) <= FP32_MAX)
    reported = {rank: (m, slot, rank) for m, slot, rank in reversed(flagged)}.values()
    first = min((g for g in reported if order[g[1]] in [key[:2] for key in bad]), default=None)
    if trial.world == trial.num_micro_batches == 1:
        first = (0, -1, 0)
    wanted = [order[first[1]], *order] if first and first[1] >= 0 else order
    flat, slot = next((key for key in wanted if any(other[:2] == key for other in bad)), (None, None))
    phase, micro_batch = ("local gradient", first[0]) if first else ("reduced gradient", None)
    where: dict[str, Any] = {"step": host_record(trial, 0).step, "phase": phase, "micro_batch": micro_batch}
    if flat is None or slot is None:
        return Culprit(rank=first[2] if first else -1, **where)
    elements = [key[2] for key in bad if key[:2] == (flat, slot)]
    values = [sums[flat, slot, element] for element in elements]
    layout = trial.model.layouts[flat]
    owner = min((layout.slots[slot].start + element) // layout.shard_numel for element in elements)
    infinite = sum(map(math.isinf, values))
    where |= {"tensor": layout.slots[slot].spec.name, "start": min(elements), "stop": max(elements) + 1}
    where |= {"num_inf": infinite, "num_nan": len(values) - infinite}
    return Culprit(rank=first[2] if first else owner, **where)


# -- the ranks ---------------------------------------------------------------------------------------------------------


class PendingText(Exception):
    """Carries the text that a rank exchanges; the other ranks' texts are supplied later."""


class SimulatedCommunicator(SingleRank):
    """The simulated collectives of one rank."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(CPU)
        self.rank, self.world_size = rank, world
        self.texts: list[str] | None = None
        self.rows: Tensor | None = None

    def exchange_text(self, text: str) -> list[str]:
        if self.texts is None:
            raise PendingText(text)
        assert self.texts[self.rank] == text
        return self.texts

    def gather_rows(self, row: Tensor, *, label: str) -> Tensor:
        assert self.rows is not None
        return self.rows.clone()


def host_record(trial: Trial, rank: int) -> HostRecord:
    values = {
        "step": 7, "config_hash": 1 << 54, "num_micro_batches": trial.num_micro_batches, "schedule_hash": 99,
        "data_cursor": 640, "lr": 1e-3, "loss_scale": SCALE, "max_grad_norm": MAX_GRAD_NORM,
        "grad_factor": 1.0, "written_weights": 0,
        "stop_requested": int(trial.stop == rank), "save_failed": int(trial.failed_save == rank), "busy_s": 0.0,
    }  # fmt: skip
    return HostRecord(**{**values, **(trial.differs if rank == trial.odd_rank else {})})


class Rank:
    """A simulated rank; its records are computed by methods of the engine and the sharded model."""

    chunk_squares = ShardedModel.chunk_squares
    canonical_sum = ShardedModel.canonical_sum
    _locate_culprit = StepEngine._locate_culprit
    explain_skips = False

    def __init__(self, rank: int, trial: Trial, main_grads: list[Tensor]) -> None:
        self.rank, self.trial, self.device, self.state_device = rank, trial, CPU, CPU
        self.layouts, self._backward_names = trial.model.layouts, trial.model.backward_names
        self.comm = self._comm = SimulatedCommunicator(rank, trial.world)
        self.states = SimpleNamespace(mesh=Mesh.of(self.comm, None), owned_shards=self.owned_shards)
        self._run = RunState("", 0)
        self._losses = LossAccumulator(CPU)
        self.monitor = GradientMonitor(len(trial.model.backward_slots))
        placement = Placement.SHARD if trial.sharded else Placement.REPLICATE
        self.segments = [placement.segment(layout, rank) for layout in self.layouts]
        self.main_grads = [segment.of(full) for segment, full in zip(self.segments, main_grads, strict=True)]
        self.host, self.vote = host_record(trial, rank), VoteTensors()
        scale = LossScaleState.of(LossScale("calibrated", init=SCALE, calibration_steps=2))
        config = CONFIG.replace("1", "2") if "config_hash" in trial.differs and rank == trial.odd_rank else CONFIG
        self.finalizer = StepFinalizer(
            self.comm,
            self._run,
            scale,
            SkipCounter(limit=2),
            self._locate_culprit,
            lambda *_: None,
            config,
            is_synchronous=False,
        )

    def row(self, squares: Tensor) -> Tensor:
        """Returns its row of the vote."""
        columns = self.host.to_row()
        sent = upload([*columns, *self._losses.micro_batches], CPU)
        return self.vote.record(sent, len(columns), self._losses, self.monitor, squares)

    def backward(self, gradients: dict[str, Tensor]) -> None:
        """Records the losses and gradients of all micro-batches."""
        trial = self.trial
        for micro_batch in range(trial.num_micro_batches):
            loss, weight = (table[self.rank][micro_batch] for table in (trial.losses, trial.weights))
            self._losses.add(micro_batch, torch.tensor(loss), torch.tensor(weight))
            self.monitor.is_enabled = trial.world > 1 or trial.num_micro_batches > 1
            self.monitor.records_magnitude = trial.measures
            first = 0
            for layout in trial.model.backward_order:
                grads = slot_views(gradients[layout.name][micro_batch, self.rank], layout)[::-1]
                for number, grad in enumerate(grads, first):
                    self.monitor.record_magnitude(number, grad)
                    self.monitor.record_finiteness(micro_batch, number, grad)
                first += len(grads)

    @property
    def buffers(self) -> list[Any]:
        """Returns stand-ins for flat buffers, which have what ``chunk_squares`` reads."""
        chunks = [grad.view(-1, CHUNK) for grad in self.owned_main_grads()]
        return [SimpleNamespace(gradient=SimpleNamespace(chunks=c, norms=c.norm(dim=1))) for c in chunks]

    def owned_main_grads(self) -> list[Tensor]:
        pairs = zip(self.segments, self.main_grads, strict=True)
        return [segment.shard_of(main_grad, self.rank) for segment, main_grad in pairs]

    def owned_shards(self, kind: str) -> Iterator[TensorShard]:
        for layout, grad in zip(self.layouts, self.owned_main_grads(), strict=True):
            for part in layout.intervals(*layout.shard(self.rank)):
                data = grad[part.offset : part.offset + part.stop - part.start]
                yield TensorShard(part.spec.name, kind, part.spec.shape, torch.float32, part.start, part.stop, data)

    def decide(self, rows: Tensor, squares: Tensor) -> None:
        """Decides from this rank's copy of the records."""
        sums: dict[str, Tensor] = {}
        if self.trial.canonical:
            self.comm.rows = squares
            weights = torch.tensor(self.trial.weights).T.flatten().double().sum()
            sums = {"sum_squares": self.canonical_sum(squares[self.rank]), "sum_weights": weights}
        self.decision, packed = self.vote.decide(rows, **sums)
        differs = self.trial.differs if self.rank == self.trial.odd_rank else {}
        written = '{"head.weight": 1}' if "written_weights" in differs else "{}"
        self.finalizer.post(packed, ("reduce a", "b2" if "schedule_hash" in differs else "reduce b"), written)

    def finalize_step(self) -> StepOutcome | tuple[type, str] | str:
        """Returns the outcome, the error that ends the run, or the text that this rank exchanges first."""
        try:
            self.finalizer.finalize_step()
        except PendingText as pending:
            return str(pending)
        except (DivergenceError, UsageError) as error:
            return type(error), str(error)
        return self.finalizer.outcome()


@contextmanager
def faulty_gradients(trial: Trial) -> Iterator[None]:
    """Writes the bad elements into the model's gradients while the block runs."""
    clean = []
    for bad in trial.effective_bad_elements:
        index = trial.model.layouts[bad.flat].slots[bad.slot].start + bad.element
        element = trial.model.gradients[bad.flat][bad.micro_batch, bad.rank, index]
        clean.append((element, element.clone()))
        element.fill_(bad.value)
    yield
    for element, value in clean:
        element.copy_(value)


def run_step(trial: Trial, ignored: str | None = None) -> tuple[tuple[float, float], list[Rank], list[Any]]:
    """Runs one step on all ranks; the field ``ignored`` of the rows has rank 0's value on all ranks.

    Returns:
        The scaled norm of the summed gradient and its largest element, if recorded; the ranks; what each ends with.
    """
    names = [layout.name for layout in trial.model.layouts]
    gradients = dict(zip(names, trial.model.gradients, strict=True))
    factors = torch.tensor(trial.weights).T.unsqueeze(-1)
    with faulty_gradients(trial):
        used = [gradient[: trial.num_micro_batches] for gradient in gradients.values()]
        main_grads = [(gradient.float() * factors).sum((0, 1)) for gradient in used]
        ranks = [Rank(rank, trial, main_grads) for rank in range(trial.world)]
        for rank in ranks:
            rank.backward(gradients)
        largest = max(gradient.abs().max().item() for gradient in used) if trial.measures else 0.0
    squares = torch.stack([rank.chunk_squares(each=True) for rank in ranks])
    pairs = zip(ranks, squares, strict=True)
    rows = torch.stack([rank.row(own) for rank, own in pairs])
    if ignored is not None:
        rows[:, COLUMNS[ignored]] = rows[0, COLUMNS[ignored]]
    for rank in ranks:
        rank.decide(rows.clone(), squares.clone())
    results = [rank.finalize_step() for rank in ranks]
    if isinstance(results[0], str):
        for rank in ranks:
            rank.comm.texts = results
        results = [rank.finalize_step() for rank in ranks]
    norm = math.sqrt(sum(grad.double().square().sum().item() for grad in main_grads))
    return (norm, largest), ranks, results


def check(trial: Trial, ignored: str | None = None) -> str | None:
    """Asserts that one step ends as expected; returns the reason."""
    reason, message, culprit = expect(trial)
    (norm, largest), ranks, results = run_step(trial, ignored)
    assert len({repr(result) for result in results}) == 1, "the ranks decided differently"
    assert len({repr((rank.finalizer.scale, rank._run.applied_steps)) for rank in ranks}) == 1
    assert [rank.finalizer.save_failed for rank in ranks] == [trial.failed_save is not None] * trial.world
    first, finalizer, result = ranks[0], ranks[0].finalizer, results[0]
    code = 0 if reason is None else 1 + REASONS.index(reason)
    assert [rank.decision.code.item() for rank in ranks] == [code] * trial.world
    if message:
        assert result[0] is (UsageError if reason == "bad_weight" else DivergenceError)
        assert message in result[1]
        assert first._run.applied_steps == 0
        return reason
    assert isinstance(result, StepOutcome), result
    assert (result.reason, result.applied, result.culprit) == (reason, reason is None, culprit)
    assert (result.loss_scale, result.lr) == (SCALE, first.host.lr)
    assert result.stop_requested == (trial.stop is not None)
    assert first._run.applied_steps == int(result.applied)
    assert finalizer.scale.scale == (SCALE / 2 if reason == "overflow" else SCALE)
    assert finalizer.scale.clean_steps == finalizer.scale.num_measured == int(result.applied)
    if result.applied:
        assert finalizer.scale.max_abs_grad == largest / SCALE
        weights, losses = (list(itertools.chain(*table)) for table in (trial.weights, trial.losses))
        total = sum(weights)
        norm /= SCALE * total
        assert result.loss == pytest.approx(sum(map(operator.mul, weights, losses)) / total, rel=1e-6)
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        divisor = SCALE * total / min(1.0, MAX_GRAD_NORM / (norm + 1e-6))
        assert first.decision.grad_divisor.item() == pytest.approx(divisor, rel=1e-5)
    return reason


@pytest.mark.parametrize("share", [0, *(pytest.param(share, marks=pytest.mark.exhaustive) for share in range(1, 4))])
def test_ranks_never_disagree_and_the_culprit_is_right(faults: FaultCounts, share: int) -> None:
    count = faults.count(ci=TRIALS // 16 if share else TRIALS // 32, full=TRIALS // 4)
    seen = Counter(check(trial) for trial in trials(count, seed=share))
    assert seen.total() == count
    for reason in (None, *REASONS):
        assert seen[reason] > count / 40, f"too few trials end with {reason}"
    faults.passed("F7", seen.total(), **{reason or "applied": number for reason, number in seen.items()})


@pytest.mark.parametrize(
    ("first_bad", "found", "expected"),
    [
        ([4, 1, -1], [("b", 0, 0, 9, 1, 0), ("b", 1, 12, 20, 0, 2)], (1, "local gradient", 0, "b", 0, 20, 1, 2)),
        ([0, 4], [("b", 0, 3, 4, 0, 1)], (1, "local gradient", 1, "b", 3, 4, 0, 1)),  # the main grad of "a" is finite
        ([-1, -1], [("b", 0, 5, 6, 1, 0), ("b", 1, 7, 9, 1, 0)], (0, "reduced gradient", None, "b", 5, 9, 2, 0)),
        ([-1, -1], [], (-1, "reduced gradient", None, None, None, None, 0, 0)),
    ],
)
def test_the_first_of_several_by_hand(first_bad: list[int], found: list[Any], expected: tuple[Any, ...]) -> None:
    """What few trials have; the number of a gradient is 3 x its micro-batch + its index in "abc"."""
    decision = decoded("overflow", 2.0, math.inf, [rank_records(bad_gradient=number) for number in first_bad])
    culprit = locate_bad_gradient(decision, [Finding(*one) for one in found], "abc", is_only_backward=False)
    assert culprit == Culprit(expected[0], decision.step, *expected[1:])


DECIDING = [name for name in COLUMNS if name != "busy_s"]
REST = {*MUST_AGREE} - {"step", "lr"}  # the unit tests have them too


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.exhaustive) if n in REST else n for n in DECIDING])
def test_every_field_of_the_record_is_needed(name: str) -> None:
    """Without any one field, some trial ends differently than expected."""
    with pytest.raises(AssertionError):
        all(check(trial, ignored=name) or True for trial in trials(1000, seed=99))

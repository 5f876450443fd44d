"""Trains many small cases and writes digests of their bits; compares two such files, of before and after a change.

``python -m tests.measure.bits OUT.json`` takes some minutes, and with ``--deepspeed``, which trains the cases of that
engine instead, two. ``--compare A.json B.json`` prints what differs. The script uses only what stays from version to
version: copied into an older checkout, it writes what that version computes.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import dtrain
from dtrain.checkpoint import open_newest
from tests.engines import float8_model, helpers
from tests.engines.helpers import digest
from tests.helpers.checkpoints import ALONE
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Run, start
from tests.helpers.zoo import ZOO, Micro, ZooEntry, make


def float8_of(seed: int) -> float8_model.Float8Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return float8_model.Float8Model()


ODD = sorted(ZOO)
ADDED = {
    "wide": ZooEntry("", partial(helpers.build, dropout=0.1, wide=True), lambda i: Micro((helpers.batch(i),), {})),
    "float8": ZooEntry("", float8_of, lambda i: Micro((float8_model.batch(i),), {})),
}
"""Models beside those of the zoo, which other tests train all of."""
FORMATS = {"fp32": "wide", "bf16": "wide", "fp16": "wide", "fp8": "float8"}
"""The model by precision."""
OPTIONS: dict[str, dict[str, Any]] = {
    "fp16": {"loss_scale": dtrain.LossScale("dynamic", init=2.0**20, backoff_factor=2.0**-12, growth_interval=1)},
    "calibrated": {
        "loss_scale": dtrain.LossScale("calibrated", init=2.0**20, backoff_factor=2.0**-12, calibration_steps=2)
    },
    "rules": {"precision": dtrain.PrecisionPolicy.named("bf16", rules={"blocks.0*": "fp32"})},
    "rowwise": {"precision": dtrain.PrecisionPolicy.named("fp8", float8=dtrain.Float8(recipe="rowwise"))},
    "reproducible": {"reproducible": True},
    "hybrid": {"shard_size": 2},
    "rounded": {"grad_dtype": "bf16"},
    "remainder": {"master": "remainder"},
    "offload": {"offload": "cpu"},
    "reduced": {"reduce_dtype": "bf16"},
    "kept": {"reshard_after_forward": False},
    "ahead": {"prefetch": 2, "keep_gathered": ["blocks.1*"]},
    "late": {"prefetch": 0, "sharding_units": ["blocks.*", "mix"]},
    "ema": {"ema_decay": 0.9},
    "audited": {"audit": 1},
    "replayed": {"audit": dtrain.Audit(every=1, replay_every=2)},
    "recomputed": {"blocks": dtrain.Blocks(recompute="full")},
    "selective": {"blocks": dtrain.Blocks(recompute="selective", recompute_every=2)},
    "moved": {"blocks": dtrain.Blocks(recompute="full", offload_activations=True)},
    "adam": {"optimizer": dtrain.Adam(lr=3e-3, weight_decay=0.1)},
    "compact": {"optimizer": dtrain.AdamWBF16(lr=3e-3)},
    "groups": {"optimizer": dtrain.AdamW(lr=3e-3, groups={"blocks.0*": {"lr_factor": 0.5, "weight_decay": 0.0}})},
    "lion": {"optimizer": dtrain.Lion(lr=1e-3)},
    "muon": {"optimizer": dtrain.Muon(lr=3e-3)},
    "sgd": {"optimizer": dtrain.SGD(lr=1e-2, nesterov=True)},
    "radam": {"optimizer": dtrain.TorchOptimizer(torch.optim.RAdam, lr=1e-3)},
}
"""Options of an engine by what a case names; what else it names, ``trained`` does."""
OF_ANY_ENGINE = (
    "unclipped recomputed selective moved whole measured asynchronous adam compact groups lion sgd radam ema"
)


@dataclass(frozen=True)
class Case:
    engine: str
    stage: int
    precision: str = "bf16"
    ranks: int = 2
    words: str = ""
    accumulation: int = 3
    model: str = "wide"

    def __str__(self) -> str:
        return "{} {}, {}, {} ranks, {}, x{}, {}".format(*astuple(self))

    @property
    def run(self) -> Run:
        options: dict[str, Any] = {"engine": self.engine, "zero_stage": self.stage, "precision": self.precision}
        for word in (self.precision, *self.words.split()):
            options |= OPTIONS.get(word, {})
        clip = None if "unclipped" in self.words else Run.max_grad_norm
        return Run(self.model, 0, self.accumulation, unequal_weights=True, max_grad_norm=clip, options=options)


def of_native() -> Iterator[Case]:
    native = partial(Case, "native")
    for stage, (precision, model) in product(range(4), FORMATS.items()):
        at, wider = partial(native, stage, precision, model=model), precision in ("fp32", "bf16")
        yield from (at(1), at(2, accumulation=1), at(2, "sockets"), at(2, "reproducible"), at(3))
        if stage == 0:
            yield at(1, "reproducible")
        if stage > 0:
            yield at(4, "hybrid sockets" if precision == "bf16" else "hybrid")
        if stage > 0 and wider:
            yield from (at(3, "reproducible sockets"), at(4, "reproducible hybrid"))
    words_of_each = "written modified skipped replayed unmarked rounded remainder muon"
    for stage, words in product(range(4), (*words_of_each.split(), "remainder rounded compact ema")):
        if (stage, words) != (3, "written"):  # a sharded weight is written in modify_weights only
            yield native(stage, words=words)
    for stage, words in product((1, 3), (*f"rules stepped reduced {OF_ANY_ENGINE}".split(), "remainder muon")):
        yield native(stage, "fp32" if words in ("reduced", "sgd") else "bf16", words=words)
    for stage, words in product((1, 2, 3), ("offload ema", "reproducible muon rounded")):
        yield native(stage, ranks=3, words=words)
    for stage, words in product((0, 2, 3), ("rowwise", "recomputed", "skipped", "modified replayed ema")):
        yield native(stage, "fp8", 2, words, 3, "float8")
    yield from (native(3, words=words) for words in ("ahead", "kept", "late", "ahead recomputed"))
    yield from (native(3, "fp8", words=words, model="float8") for words in ("ahead", "kept", "ema"))
    yield from (native(stage, "fp16", words="calibrated") for stage in (0, 3))
    for number, model in enumerate(ODD):
        for stage, precision in ((number % 2, "fp32"), (2 + number % 2, "bf16")):
            yield native(stage, precision, 2, "", 2, model)


def of_torch() -> Iterator[Case]:
    for engine, stage in (("ddp", 0), ("fsdp2", 2), ("fsdp2", 3)):
        for ranks, (precision, model) in product((1, 2), FORMATS.items()):
            yield Case(engine, stage, precision, ranks, model=model)
        some = "modified skipped", "replayed muon ema recomputed compact measured whole" * (stage != 2)
        yield from (Case(engine, stage, words=word) for word in " ".join(some).split())
        yield from (Case(engine, stage, model=model) for model in ("conv_batch_norm", "partly_frozen", "tied"))


def of_deepspeed() -> Iterator[Case]:
    for stage, ranks in product(range(4), (1, 2)):
        yield Case("deepspeed", stage, "bf16", ranks)
    for stage, words in ((1, "ema"), (2, "skipped"), (2, "compact audited"), (3, "modified"), (3, "recomputed sgd")):
        yield Case("deepspeed", stage, words=words)


def backward(case: Case, engine: Any, step: int, index: int) -> None:
    """Runs a micro-batch; the loss of each of the last rank's is infinite in a step to be skipped."""
    entry = make(case.model)
    is_bad = "skipped" in case.words and step % 2 == 1 and engine.rank == engine.world_size - 1
    loss = entry.loss(engine, entry.batch(index)) * (math.inf if is_bad else 1.0)
    engine.backward(loss, weight=case.run.weight(step, index))


def trained(case: Case, engine: Any, steps: range) -> list[dtrain.StepOutcome]:
    """Takes ``steps``, with all that the words of the case ask for."""
    words, outcomes, total = case.words.split(), [], case.accumulation * engine.world_size
    for step in steps:
        indices = range(step * total + engine.rank, (step + 1) * total, engine.world_size)
        with engine.measure_precision() if "measured" in words else nullcontext():
            if "unmarked" in words:
                for index in indices:
                    with engine.micro_batch(last=False):
                        backward(case, engine, step, index)
            else:
                for index in engine.accumulate(indices):
                    backward(case, engine, step, index)
            own = {"lr": 2e-3, "max_grad_norm": 0.1, "grad_factor": 0.5} if "stepped" in words else {}
            outcomes.append(engine.step(**own))
        engine.comm.barrier()  # another rank may still read this one's weights
        with torch.no_grad(), engine.modify_weights("embedding*") if "modified" in words else nullcontext():
            if {"modified", "written"} & set(words):
                engine.module.get_parameter("embedding.weight").mul_(0.5)
    return outcomes


def state(case: Case, engine: Any, folder: Path) -> dict[str, str]:
    """Returns digests of the saved tensors and masters, which rank 0 has, and of this rank's buffers and a forward."""
    engine.save(folder, asynchronous="asynchronous" in case.words)
    engine.wait_for_save()
    found = {f"master in full:{name}": digest(master) for name, master in engine.master_state().items()}
    if engine.rank == 0:
        reader = open_newest(folder, ALONE)
        found |= {f"saved {t.kind}:{t.name}": digest(reader.read(t.kind, t.name).view(t.shape)) for t in reader.tensors}
    found |= {f"buffer:{name}": digest(buffer) for name, buffer in engine.module.named_buffers()}
    entry, averaged = make(case.model), engine.ema() if engine.ema_decay is not None else nullcontext()
    with engine.full_model() if "whole" in case.words else averaged as model, engine.eval():
        found["forward"] = digest(entry.loss(model or engine, entry.batch(0)))
    return found


def digests(case: Case, folder: Path, comm: Any) -> dict[str, str]:
    """Returns digests of this rank's outcomes and states after three steps, and after two more on what they saved."""
    found: dict[str, str] = {}
    for phase, steps in (("trained", range(3)), ("resumed", range(3, 5))):
        torch.use_deterministic_algorithms(False)  # an earlier case may have set it
        engine = start(case.run, weights=steps.start, comm=comm)
        if steps.start:
            engine.load(folder)
        outcomes = trained(case, engine, steps)
        lists = {
            name: str([str(getattr(outcome, name)) for outcome in outcomes])
            for name in ("loss", "grad_norm", "loss_scale", "reason", "culprit")
        }
        state_digests = state(case, engine, folder)
        found |= {f"{phase}, rank {engine.rank}, {key}": value for key, value in (lists | state_digests).items()}
    return found


def on_rank(rank: int, world: int, cases: list[Case], folder: Path) -> dict[str, dict[str, str]]:
    with patch.dict(ZOO, ADDED):
        # the function has moved between versions, but initialize has always had it
        connect = vars(import_module("dtrain.engine.initialize"))["connect"]
        found = {}
        for number, case in enumerate(cases):
            comm = connect(torch.device("cpu"), shared_memory=False) if "sockets" in case.words else None
            try:
                found[str(case)] = digests(case, folder / str(number), comm)
            except Exception as error:
                error.add_note(f"case: {case}")
                raise
        return found


def trained_all(cases: list[Case]) -> dict[str, dict[str, str]]:
    """Returns the digests by case, of all ranks together; cases of equally many share processes."""
    found: dict[str, dict[str, str]] = {}
    for ranks in sorted({case.ranks for case in cases}):
        own = [case for case in cases if case.ranks == ranks]
        with tempfile.TemporaryDirectory() as folder:
            for of_rank in run_ranks(ranks, on_rank, own, Path(folder), timeout=3600.0):
                for name, digests_of_rank in of_rank.items():
                    found.setdefault(name, {}).update(digests_of_rank)
    return found


def differing(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yields a line for each case that is missing or differs, with the kinds that do and how many."""
    for name in sorted({*before, *after}):
        one, other = before.get(name), after.get(name)
        if one is None or other is None:
            yield f"{name}: only in the {'second' if one is None else 'first'} file"
            continue
        keys = (key for key in {*one, *other} if one.get(key) != other.get(key))
        kinds = Counter(key.split(", ", 2)[-1].split(":")[0] for key in keys)  # of any phase and rank
        if kinds:
            yield f"{name}: {'; '.join(f'{kind} ({number})' for kind, number in sorted(kinds.items()))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--compare", action="store_true", help="compare two files")
    parser.add_argument("--deepspeed", action="store_true", help="the cases of DeepSpeed instead")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases whose names match")
    options = parser.parse_args()
    if options.compare:
        lines = list(differing(*(json.loads(path.read_text(encoding="utf-8")) for path in options.files)))
        print("\n".join(lines) or "equal")
        raise SystemExit(bool(lines))
    cases = [*of_deepspeed()] if options.deepspeed else [*of_native(), *of_torch()]
    found = trained_all([case for case in cases if fnmatchcase(str(case), options.only)])
    options.files[0].write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    print(f"{len(found)} cases, {sum(map(len, found.values())):,} digests")


if __name__ == "__main__":
    main()

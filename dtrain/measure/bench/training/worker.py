"""One rank of a benchmark case. Requests come on standard input, results go to standard output, as lines of JSON.

The first line is a ``RankJob``. After it the result of ``{"steps": n}`` holds times and losses of n steps, and that of
``{"footprint": true}`` is a ``Footprint``; the end of the input ends the process. The result of a rank that fails is
``{"failure": reason}``. Between requests the rank is blocked on the pipe and takes no time from the others.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.config.dump import from_plain
from dtrain.config.engines import EngineConfig
from dtrain.config.model import ModelConfig
from dtrain.config.optim import OptimConfig
from dtrain.config.precision import Float8, LossScale, PrecisionConfig
from dtrain.config.schedule import Constant
from dtrain.config.schema import GROUP_OPTIONS, RunConfig, TelemetryConfig, TrainConfig
from dtrain.data import BatchLoader, load_dataset
from dtrain.device import peak_memory, peak_resident
from dtrain.distributed.startup.setup import choose_device, connect_by_file
from dtrain.measure.bench.peers import PEERS, PLAIN
from dtrain.measure.bench.peers.plain import Settings
from dtrain.measure.bench.records import Footprint, LinearFormat, RankJob
from dtrain.measure.bench.training.activations import bytes_kept
from dtrain.measure.bench.training.vote_timing import Stopwatch, time_vote
from dtrain.models import build_model
from dtrain.telemetry.throughput import device_name
from dtrain.tools.processes import failure_reason, open_result
from dtrain.train.validation import to_device


@dataclass(frozen=True)
class RankTraining:
    """A case that is ready to train in this process; the fields are as in :class:`Footprint`.

    Attributes:
        losses: an iterator that takes one step for each item, a function that returns its loss.
        parts: stopwatches around parts of a step, by name.
        activations: takes one more step; None: they are not measured.
        graphs: compiled so far; None: dtrain compiles nothing.
    """

    losses: Iterator[Callable[[], float]]
    num_parameters: int
    state: Callable[[], dict[str, int]]
    formula: Callable[[], dict[str, int] | None]
    parts: Mapping[str, Stopwatch] = field(default_factory=dict)
    linears: Sequence[LinearFormat] = ()
    host_kinds: Sequence[str] = ()
    activations: Callable[[], int] | None = None
    graphs: Callable[[], int | None] = lambda: None


def main() -> int:
    results = open_result()
    job = from_plain(RankJob, json.loads(sys.stdin.readline()))
    try:
        _serve(job, results)
    except Exception as error:  # a peer may raise anything; the starter reports it and continues with the other cases
        traceback.print_exc()
        _write(results, {"failure": failure_reason(error)})
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _serve(job: RankJob, results: IO[str]) -> None:
    bench = job.config["bench"]
    torch.set_num_threads(bench["threads_per_rank"])
    device = choose_device(bench["device"], job.rank)
    connect_by_file(job.store, job.rank, job.case.ranks, device)
    training = prepare(job, device)
    for line in sys.stdin:
        request = json.loads(line)
        if "steps" in request:
            _write(results, take_steps(training, device, request["steps"]))
        else:
            _write(results, asdict(footprint(training, device)))


def _write(results: IO[str], values: dict[str, Any]) -> None:
    results.write(json.dumps(values) + "\n")
    results.flush()


def prepare(job: RankJob, device: torch.device) -> RankTraining:
    """Builds the job's model, data and engine or peer; the process group exists."""
    case, config = job.case, run_config(job)
    dataset = load_dataset(config.data, config.model.max_seq_len)
    model = build_model(config.model, dataset.task, config.seed)
    loader = BatchLoader(
        dataset.train,
        seed=config.seed,
        micro_batch_size=config.train.micro_batch_size,
        num_micro_batches=1,
        rank=job.rank,
        world_size=case.ranks,
    )
    batches = (to_device(micro_batches[0], device) for micro_batches in loader)
    return prepare_training(job, config, model, batches, device)


def prepare_training(
    job: RankJob, config: RunConfig, model: nn.Module, batches: Iterator[dict[str, Tensor]], device: torch.device
) -> RankTraining:
    """Builds the job's engine or peer around ``model``; the process group that it needs exists."""
    case = job.case
    if case.is_dtrain:
        return _prepare_engine(job, config, model, batches, device)
    return _prepare_peer(job, config, model.to(device), batches)


def run_config(job: RankJob) -> RunConfig:
    values, case = job.config, job.case
    micro_batch_size = values["bench"]["micro_batch_size"]
    precision = PrecisionConfig(name=case.precision, loss_scale=LossScale(mode=case.loss_scale))
    if case.recipe is not None:
        float8 = replace(from_plain(Float8, values["float8"]), recipe=case.recipe)
        precision = replace(precision, float8=float8)
    model = from_plain(ModelConfig, values["model"])
    if case.blocks is not None:
        model = replace(model, **asdict(case.blocks))
    engine = EngineConfig()
    if case.is_dtrain:
        options: dict[str, Any] = {"reproducible": True} if case.reproducible else {}
        if case.offload != "none":
            options["offload"] = case.offload
        engine = GROUP_OPTIONS["engine"][case.engine](zero_stage=case.zero_stage, **options)
    return RunConfig(
        seed=values["seed"],
        train=TrainConfig(micro_batch_size=micro_batch_size, global_batch_size=micro_batch_size * case.ranks),
        engine=engine,
        precision=precision,
        model=model,
        data=from_plain(GROUP_OPTIONS["data"][values["data"]["name"]], values["data"]),
        optim=from_plain(OptimConfig, values["optim"]),
        schedule=Constant(warmup_steps=0),
    )


def _prepare_engine(
    job: RankJob,
    config: RunConfig,
    model: nn.Module,
    batches: Iterator[dict[str, Tensor]],
    device: torch.device,
) -> RankTraining:
    # Imported here, so that the peers' processes do not hold dtrain's engines in memory.
    from dtrain.distributed.startup.setup import connect
    from dtrain.telemetry.precision_files import PrecisionFiles
    from dtrain.train.sampling import PrecisionSampling
    from dtrain.train.setup import make_engine

    case = job.case
    engine = make_engine(config, model, connect(device))
    sinks = [PrecisionFiles(Path(job.store).parent, 0)] if case.samples and engine.rank == 0 else []
    sampling = PrecisionSampling(engine, TelemetryConfig(precision_every=int(case.samples)), sinks)

    def train() -> Iterator[Callable[[], float]]:
        for batch in batches:
            with sampling.around_step():
                engine.backward(engine(**batch))
                outcome = engine.step()
            yield partial(getattr, outcome, "loss")

    def state() -> dict[str, int]:
        return {kind: size for kind, size in engine.memory().items() if kind != "unreduced_grad"}

    def activations() -> int:
        batch = next(batches)
        output, nbytes = bytes_kept(lambda: engine(**batch), device)
        engine.backward(output)
        engine.step()
        return nbytes

    parts = time_vote(engine) if case.times_vote else {}
    times = {decision.name: (decision.bf16_ms, decision.float8_ms) for decision in engine.contract.decisions}
    linears = [
        LinearFormat(
            found.name, linear.out_features, linear.in_features, found.format, found.reason, *times.get(found.name, ())
        )
        for found in (engine.contract.modules if case.recipe is not None else ())
        if isinstance(linear := engine.module.get_submodule(found.name), nn.Linear)
    ]
    return RankTraining(
        train(),
        engine.num_parameters,
        state,
        engine.memory_formula,
        parts,
        linears,
        host_kinds=tuple(engine.host_kinds),
        activations=activations if case.blocks is not None else None,
        graphs=lambda: engine.compiled_graphs,
    )


def _prepare_peer(
    job: RankJob, config: RunConfig, model: nn.Module, batches: Iterator[dict[str, Tensor]]
) -> RankTraining:
    case, optim = job.case, cast(OptimConfig, config.optim)  # checked by cli.checks
    if case.ranks > 1:  # some libraries read a launcher's environment although the process group exists
        rank, world_size = str(job.rank), str(case.ranks)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    peer = PLAIN if case.engine == "plain" else PEERS[case.engine]
    num_parameters = sum(parameter.numel() for parameter in model.parameters())  # before a peer cuts them into shards
    settings = Settings(
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
        bf16=case.precision == "bf16",
        micro_batch_size=config.train.micro_batch_size,
        device=next(model.parameters()).device,
    )
    prepared = import_module(f"dtrain.measure.bench.peers.{peer.module}").prepare(model, settings, **peer.options)

    def state() -> dict[str, int]:
        return {kind: _nbytes(tensors) for kind, tensors in prepared.tensors().items()}

    return RankTraining((prepared.step(batch).item for batch in batches), num_parameters, state, lambda: None)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def take_steps(training: RankTraining, device: torch.device, count: int) -> dict[str, Any]:
    times, cpu_times, losses = [], [], []
    parts: dict[str, list[float]] = {name: [] for name in training.parts}
    for _ in range(count):
        start, cpu_start = time.perf_counter(), time.process_time()
        losses.append(next(training.losses)())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
        cpu_times.append(1000 * (time.process_time() - cpu_start))
        for name, stopwatch in training.parts.items():
            parts[name].append(stopwatch.take())
    return {"step_ms": times, "cpu_ms": cpu_times, "losses": losses, "parts_ms": parts}


def footprint(training: RankTraining, device: torch.device) -> Footprint:
    return Footprint(
        num_parameters=training.num_parameters,
        state=training.state(),
        formula=training.formula(),
        peak_rss=peak_resident(),
        peak_device=peak_memory(device) if device.type == "cuda" else None,
        device=device_name(device),
        linears=list(training.linears),
        host_kinds=list(training.host_kinds),
        activations=None if training.activations is None else training.activations(),
        graphs=training.graphs(),
    )


if __name__ == "__main__":
    sys.exit(main())

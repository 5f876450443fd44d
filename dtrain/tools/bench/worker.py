"""One rank of a contender: reads orders from standard input, answers on standard output, both as lines of JSON.

The first line is an ``Assignment``. Then ``{"steps": n}`` is answered by the times and losses of n steps, and
``{"footprint": true}`` by a ``Footprint``; the end of the input ends the process. A rank that cannot go on answers
``{"failure": reason}``. Between orders the rank is blocked on the pipe and takes no time from the others.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtrain.config.dump import from_plain
from dtrain.config.schema import (
    GROUP_OPTIONS,
    ConstantConfig,
    EngineConfig,
    Float8Config,
    LossScaleConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from dtrain.data import BatchLoader, load_dataset
from dtrain.distributed.file_store import join_ranks
from dtrain.distributed.setup import choose_device
from dtrain.errors import DtrainError
from dtrain.models import build_model
from dtrain.telemetry.throughput import device_name
from dtrain.tools.bench.peers import PEERS, PLAIN
from dtrain.tools.bench.peers.plain import Settings
from dtrain.tools.bench.records import Assignment, Contender, Footprint, LinearFormat
from dtrain.tools.bench.vote import Stopwatch, time_vote
from dtrain.tools.ranks import open_answer
from dtrain.train.trainer import to_device

if TYPE_CHECKING:
    from dtrain.engine.interface import Engine

_REASON_LENGTH = 500


@dataclass(frozen=True)
class Training:
    """A contender that is ready to train in this process.

    Attributes:
        losses: takes one step for each item.
        num_parameters: of the model.
        state: bytes of the model states by kind.
        formula: the same by the ZeRO formula, where there is one.
        parts: the clocks around parts of a step, by name.
        linears: of the model, where their products are FP8 or could be.
    """

    losses: Iterator[float]
    num_parameters: int
    state: Callable[[], dict[str, int]]
    formula: Callable[[], dict[str, int] | None]
    parts: Mapping[str, Stopwatch] = field(default_factory=dict)
    linears: Sequence[LinearFormat] = ()


def main() -> int:
    """Serves one contender's driver until it closes the pipe."""
    replies = open_answer()
    assignment = from_plain(Assignment, json.loads(sys.stdin.readline()))
    try:
        _serve(assignment, replies)
    except Exception as error:  # whatever a peer raises: the driver has to know, and other contenders go on
        traceback.print_exc()
        reason = str(error) if isinstance(error, DtrainError) else f"{type(error).__name__}: {error}"
        _reply(replies, {"failure": " ".join(reason.split())[:_REASON_LENGTH]})
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _serve(assignment: Assignment, replies: IO[str]) -> None:
    bench = assignment.config["bench"]
    torch.set_num_threads(bench["threads_per_rank"])
    device = choose_device(bench["device"], assignment.rank)
    join_ranks(assignment.store, assignment.rank, assignment.contender.ranks, device)
    training = _prepare(assignment, device)
    for line in sys.stdin:
        order = json.loads(line)
        answer = _steps(training, device, order["steps"]) if "steps" in order else asdict(_footprint(training, device))
        _reply(replies, answer)


def _reply(replies: IO[str], answer: dict[str, Any]) -> None:
    replies.write(json.dumps(answer) + "\n")
    replies.flush()


def _prepare(assignment: Assignment, device: torch.device) -> Training:
    contender, config = assignment.contender, _run_config(assignment)
    dataset = load_dataset(config.data, config.model.max_seq_len)
    model = build_model(config.model, dataset.vocab_size, config.seed)
    loader = BatchLoader(
        dataset.train,
        seed=config.seed,
        micro_batch_size=config.train.micro_batch_size,
        num_micro_batches=1,
        rank=assignment.rank,
        world_size=contender.ranks,
    )
    batches = (to_device(micro_batches[0], device) for micro_batches in loader)
    if contender.is_dtrain:
        return _prepare_engine(contender, config, model, batches, device)
    return _prepare_peer(assignment, config, model.to(device), batches)


def _run_config(assignment: Assignment) -> RunConfig:
    """The configuration of a training run that equals the suite's."""
    values, contender = assignment.config, assignment.contender
    micro_batch_size = values["bench"]["micro_batch_size"]
    return RunConfig(
        seed=values["seed"],
        train=TrainConfig(micro_batch_size=micro_batch_size, global_batch_size=micro_batch_size * contender.ranks),
        engine=_engine_config(contender),
        precision=_precision_config(values, contender),
        model=from_plain(ModelConfig, values["model"]),
        data=from_plain(GROUP_OPTIONS["data"][values["data"]["name"]], values["data"]),
        optim=from_plain(OptimConfig, values["optim"]),
        schedule=ConstantConfig(warmup_steps=0),
    )


def _precision_config(values: Mapping[str, Any], contender: Contender) -> PrecisionConfig:
    precision = PrecisionConfig(name=contender.precision, loss_scale=LossScaleConfig(mode=contender.loss_scale))
    if contender.recipe is None:
        return precision
    return replace(precision, float8=replace(from_plain(Float8Config, values["float8"]), recipe=contender.recipe))


def _engine_config(contender: Contender) -> EngineConfig:
    if not contender.is_dtrain:
        return EngineConfig()
    engine: EngineConfig = GROUP_OPTIONS["engine"][contender.engine](zero_stage=contender.zero_stage)
    return engine


def _prepare_engine(
    contender: Contender,
    config: RunConfig,
    model: nn.Module,
    batches: Iterator[dict[str, Tensor]],
    device: torch.device,
) -> Training:
    # imported here, so that the peers' processes hold nothing of dtrain's engines
    from dtrain.distributed.setup import connect
    from dtrain.train.setup import make_engine

    engine = make_engine(config, model, connect(device))

    def train() -> Iterator[float]:
        for batch in batches:
            engine.backward(engine(**batch))
            yield engine.step().loss

    def state() -> dict[str, int]:
        return {kind: size for kind, size in engine.memory().items() if kind != "unreduced_grad"}

    parts = time_vote(engine) if contender.times_vote else {}
    linears = [] if contender.recipe is None else _linears(engine)
    return Training(train(), engine.num_parameters, state, engine.memory_formula, parts, linears)


def _linears(engine: Engine) -> list[LinearFormat]:
    """Of the engine's model, in its order."""
    linears = ((found, engine.module.get_submodule(found.name)) for found in engine.contract.modules)
    return [
        LinearFormat(found.name, linear.out_features, linear.in_features, found.format, found.reason)
        for found, linear in linears
        if isinstance(linear, nn.Linear)
    ]


def _prepare_peer(
    assignment: Assignment, config: RunConfig, model: nn.Module, batches: Iterator[dict[str, Tensor]]
) -> Training:
    contender, optim = assignment.contender, config.optim
    if contender.ranks > 1:  # a launcher's environment, which some libraries read though the process group exists
        rank, world_size = str(assignment.rank), str(contender.ranks)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    peer = PLAIN if contender.engine == "plain" else PEERS[contender.engine]
    num_parameters = sum(parameter.numel() for parameter in model.parameters())  # before a peer cuts them into shards
    settings = Settings(
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
        bf16=contender.precision == "bf16",
        micro_batch_size=config.train.micro_batch_size,
        device=next(model.parameters()).device,
    )
    prepared = import_module(f"dtrain.tools.bench.peers.{peer.module}").prepare(model, settings, **peer.options)

    def state() -> dict[str, int]:
        return {kind: _nbytes(tensors) for kind, tensors in prepared.tensors().items()}

    return Training((prepared.step(batch) for batch in batches), num_parameters, state, lambda: None)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the distinct storages of ``tensors``."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _steps(training: Training, device: torch.device, count: int) -> dict[str, Any]:
    times, cpu_times, losses = [], [], []
    parts: dict[str, list[float]] = {name: [] for name in training.parts}
    for _ in range(count):
        start, cpu_start = time.perf_counter(), time.process_time()
        losses.append(next(training.losses))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
        cpu_times.append(1000 * (time.process_time() - cpu_start))
        for name, stopwatch in training.parts.items():
            parts[name].append(stopwatch.take())
    return {"step_ms": times, "cpu_ms": cpu_times, "losses": losses, "parts_ms": parts}


def _footprint(training: Training, device: torch.device) -> Footprint:
    return Footprint(
        num_parameters=training.num_parameters,
        state=training.state(),
        formula=training.formula(),
        peak_rss=_peak_rss(),
        peak_device=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        device=device_name(device),
        linears=list(training.linears),
    )


def _peak_rss() -> int:
    """Bytes. ``getrusage`` on Linux counts what the parent held when it started this process; ``VmHWM`` does not."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    sys.exit(main())

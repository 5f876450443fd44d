"""One training run, from a checked config to an exit code."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from dtrain.checkpoint.directory import step_name
from dtrain.checkpoint.huggingface.folder import TOKENIZER_FOLDER
from dtrain.checkpoint.huggingface.task_model import HF_CONFIG, TASK
from dtrain.config.dump import config_to_dict
from dtrain.config.schema import RunConfig
from dtrain.data import Dataset
from dtrain.data.tokenizer import copy_tokenizer
from dtrain.device import PeakMemory, free_memory
from dtrain.distributed.communicator import Communicator
from dtrain.distributed.consensus import describe
from dtrain.distributed.logging import configure_logging, logger
from dtrain.distributed.progress import Phase
from dtrain.distributed.rank_liveness import RankLiveness
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.distributed.startup.setup import choose_device, connect, disconnect
from dtrain.engine.interface import Engine
from dtrain.errors import CheckpointError
from dtrain.models import check_model
from dtrain.models.images.hf import HFImageModel
from dtrain.models.task_model import TaskModel
from dtrain.supervision.supervised import Supervision, supervised
from dtrain.tasks import SampleOptions
from dtrain.tasks.description import describe_task
from dtrain.telemetry.console import Console, memory_lines
from dtrain.telemetry.envelope import Envelope
from dtrain.telemetry.gpu import GPUState, describe_state
from dtrain.telemetry.host import ENVIRONMENT_FILE, environment
from dtrain.telemetry.metrics import (
    FAILURES,
    FailureFiles,
    MetricsFile,
    Sink,
    Summary,
    write_atomically,
    write_json,
    write_summary,
)
from dtrain.telemetry.precision_files import PrecisionFiles
from dtrain.telemetry.texts import compact, rate
from dtrain.telemetry.throughput import device_name, mfu, mfu_text
from dtrain.telemetry.trackers import check_tracker, open_tracker
from dtrain.train.attention import ATTENTION, compare_attention, describe_gpus
from dtrain.train.flops import flops_between, flops_by_seq_len
from dtrain.train.receipt import Planner, explained_out_of_memory, log_float8_line, write_page, write_receipt
from dtrain.train.restarts import counted_attempt
from dtrain.train.run_dir import (
    RunDir,
    check_not_newer,
    check_resume,
    decide_on_rank_0,
    open_run_dir,
    redacted,
    write_config,
    write_contract,
)
from dtrain.train.session import Session, make_model, open_data, with_model_facts
from dtrain.train.setup import (
    check_launcher,
    check_precision,
    set_threads,
    torch_settings_restored,
)
from dtrain.train.signals import StopSignals
from dtrain.train.trainer import TOKENS, SaveOptions, Trainer, TrainResult

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_STOPPED = 75  # sysexits' EX_TEMPFAIL: the same command continues the run

DATA_FINGERPRINT = "data_fingerprint"
"""Key in a checkpoint's extra."""


def run_training(config: RunConfig, *, job: int | None = None, planner: Planner | None = None) -> int:
    """Runs one training run; called on every rank.

    The first SIGTERM, SIGUSR1 or Ctrl-C on any rank ends the step on all ranks and saves; the same command and
    ``run_dir`` continue from there.

    Args:
        config: resolved and checked.
        job: the number of this run in a sweep, else None.
        planner: says what FP8 brings, writes ``memory.json`` and explains a lack of memory; None: none of it is done.

    Returns:
        0 when all steps are done, 75 when a signal stopped the run after saving.

    Raises:
        DtrainError: a refusal or a failure; its class has the exit code.
    """
    check_run(config)
    device = choose_device(config.launch.device, LaunchEnv.read().local_rank)
    for part in config.parts:
        check_precision(part, device)
    launch = config.launch
    # before the signal handlers: a signal must end a rank that waits here for others, since there is nothing to save
    comm = connect(device, timeout_s=launch.timeout_s, job=job or 0, shared_memory=launch.shared_memory)
    supervise = config.supervise
    limits_s = (supervise.limit_s, supervise.start_s, supervise.save_s)
    with StopSignals() as stop, torch_settings_restored(), ExitStack() as watched:
        failed = True
        try:
            configure_logging(comm.rank)
            watch = watched.enter_context(supervised(comm, limits_s, enabled=supervise.enabled))
            explained = explained_out_of_memory(config.parts[-1], comm, planner)
            with RankLiveness(comm).name_ended_rank(), ExitStack() as held, watch.ending(), explained:
                exit_code = _train(config, comm, planner, job, stop, held, watch)
            if exit_code == EXIT_STOPPED:
                # a launcher sends SIGTERM to the other ranks once one has left: rank 0's files must be written before
                comm.barrier()
                stop.ignore()
            comm.release()
            failed = False
            return exit_code
        finally:
            if failed and comm.process_group is not None:
                stop.keep()
            disconnect(failed=failed)


def check_run(config: RunConfig) -> None:
    """Runs the checks that need neither a device nor other ranks.

    Raises:
        ConfigError: a job of several tasks without ranks, no checkpoint at ``resume``, a tracker that is not installed,
            a file of advice that is none, no model at ``model.path``.
    """
    check_launcher(config.launch)
    check_resume(config)
    check_tracker(config.tracker)
    check_model(config.model)
    if config.telemetry.advice is not None:
        Envelope.read(Path(config.telemetry.advice))


def _train(
    config: RunConfig,
    comm: Communicator,
    planner: Planner | None,
    job: int | None,
    stop: StopSignals,
    held: ExitStack,
    watch: Supervision,
) -> int:
    start = time.monotonic()
    threads = set_threads(config, comm)
    dataset = open_data(config, comm)
    config = with_model_facts(config, dataset)
    meter = PeakMemory(comm.device)
    model = make_model(config, dataset)
    # before training: a model.path that is removed meanwhile must not end a finished run
    flops = flops_by_seq_len(config, dataset)
    # not earlier: a refusal above leaves no folder behind
    run_dir = open_run_dir(config, comm, job, held, dataset.task)
    if run_dir.finished:
        logger.info(
            "%s: all %d steps are done already; raise train.steps to continue", run_dir.path, config.train.steps
        )
        return EXIT_DONE
    watch.write_failures_to(run_dir.path / FAILURES)
    held.enter_context(counted_attempt(config, comm, run_dir))
    logger.info("run %s", run_dir.path)
    logger.info("data %s", dataset.description)
    num_parameters = sum(p.numel() for p in model.parameters())  # now, because engines may shard them
    saving = _saving(config, model, dataset, run_dir)
    session, tokens = _open(config, comm, run_dir, dataset, watch, model)
    engine = session.engine
    del model  # it holds the weights of an engine that a finish in another precision replaces
    held.enter_context(watch.following_compilation())  # to the end: the sample may be compiled too
    _describe(config, engine, threads, num_parameters)
    facts = describe_gpus(config, engine, dataset)
    if facts.get(ATTENTION) is not None:
        saving = replace(saving, extra=saving.extra | {ATTENTION: facts[ATTENTION]})
    if planner is not None and comm.rank == 0 and engine.contract.float8_modules:
        log_float8_line(partial(planner.float8_line, config, engine, dataset))
    sinks = _open_sinks(config, engine, dataset, run_dir, facts)
    exit_code = EXIT_FAILED
    try:
        with watch.ending():
            result = Trainer(session, saving, stop=stop, sinks=sinks, tokens_before=tokens).run()
            if result.finished and (step := session.config.switch_step) < config.train.steps:
                comm.schedule.progress.begin(Phase.START)
                del session, engine
                free_memory(comm.device)
                meter = PeakMemory(comm.device)
                saved = run_dir.checkpoints / step_name(step)
                last = replace(run_dir, load_from=saved, contract={}, step=step)
                session, tokens = _open(config, comm, last, dataset, watch)
                engine = session.engine
                decide_on_rank_0(comm, partial(write_contract, run_dir, engine.contract.to_dict(), step))
                _describe_memory(engine)
                result = Trainer(session, saving, stop=stop, sinks=sinks, tokens_before=tokens).run()
        peak = meter.total(comm.foreign_nbytes())  # of training, which is what was planned
        summary = _summarize(config, engine, result, flops, time.monotonic() - start)
        if comm.rank == 0:
            write_summary(run_dir.path, summary)
        exit_code = EXIT_DONE if result.finished else EXIT_STOPPED
    finally:
        for sink in sinks:
            sink.close(exit_code)
    # a signal may have reached only some ranks
    if decide_on_rank_0(comm, lambda: result.finished and not stop.requested):
        with watch.ending():
            _write_sample(session, run_dir)
    if comm.rank == 0:
        if config.report:
            with watch.ending():
                if planner is not None:
                    step_ms = 1e3 * result.timing.step_s or None
                    compare = partial(planner.receipt, session.config, engine, dataset, peak=peak, step_ms=step_ms)
                    write_receipt(run_dir.path, compare)
                write_page(run_dir.path)
        _log_summary(summary, run_dir, stop, dataset.task.unit)
    return exit_code


def _open(
    config: RunConfig,
    comm: Communicator,
    run_dir: RunDir,
    dataset: Dataset,
    watch: Supervision,
    model: nn.Module | None = None,
) -> tuple[Session, int]:
    """Opens the run where it continues, in the precision of that step; returns the tokens on which it was trained."""
    part = config.at(run_dir.step)
    if part is not config:
        float8 = config.precision.float8
        name = float8.finish_in.upper()
        logger.info("step %d: the last %d steps compute in %s", config.switch_step, float8.finish_steps, name)
    session = Session.open(part, comm, model=model, dataset=dataset, contract=run_dir.contract)
    session.engine.busy.every = config.telemetry.busy_every
    session.engine.explain_skips = config.telemetry.precision_every > 0 and not config.engine.graph
    with watch.following_compilation():
        tokens = _resume(config, session.engine, run_dir, dataset)
    if config.at(step := session.engine.attempted_steps) == part:
        return session, tokens
    # the newest checkpoint is damaged, and the one before it is of the steps in FP8
    del session, model
    return _open(config, comm, replace(run_dir, step=step), dataset, watch)


def _resume(config: RunConfig, engine: Engine, run_dir: RunDir, dataset: Dataset) -> int:
    """Loads the checkpoint, if any; returns the tokens on which it was trained."""
    if run_dir.load_from is None:
        return 0
    extra = engine.load(run_dir.load_from)
    if extra.get(DATA_FINGERPRINT, dataset.fingerprint) != dataset.fingerprint and engine.rank == 0:
        logger.warning("the data differs from the checkpoint's: from here the run sees other samples")
    compare_attention(extra, config, engine, dataset)

    decide_on_rank_0(engine.comm, lambda: check_not_newer(run_dir, engine.attempted_steps))
    # a checkpoint of a library user has no such entry
    tokens = extra.get(TOKENS, config.batch_growth.num_tokens(0, engine.applied_steps))
    if type(tokens) is not int or tokens < 0:  # a manifest's check leaves the extra alone: it is the user's
        raise CheckpointError(
            f"step {engine.attempted_steps} of {run_dir.load_from} has extra.{TOKENS}={tokens!r:.80}; expected a whole "
            f"number from 0; name an older checkpoint with resume=..."
        )
    return tokens


def _describe(config: RunConfig, engine: Engine, threads: int, num_parameters: int) -> None:
    if engine.rank != 0:
        return
    ranks = f"{engine.world_size} rank{'s' if engine.world_size > 1 else ''}"
    where = f"{device_name(engine.device)}, {threads} thread{'s' if threads > 1 else ''} each"
    trained = f", {compact(engine.num_parameters)} of them trained" if num_parameters > engine.num_parameters else ""
    logger.info("model %s: %s parameters%s", config.model.name, compact(num_parameters), trained)
    logger.info("engine %s: %s on %s", engine.name, ranks, where)
    _describe_memory(engine)
    _describe_growth(config)


def _describe_memory(engine: Engine) -> None:
    for line in memory_lines(engine.memory(), engine.memory_formula(), engine.host_kinds):
        logger.info(line)


def _describe_growth(config: RunConfig) -> None:
    growth, last = config.batch_growth, config.train.steps
    if len(growth.phases) == 1 and growth.largest.seq_len == growth.sample_len:
        return
    for phase in growth.phases:
        rows = phase.global_batch_size * growth.sample_len // phase.seq_len
        what = f"rows of {phase.seq_len} tokens" if config.data.is_language else "samples"
        logger.info("from step %d: %d %s in a step", phase.first_step, rows, what)
    if (first := growth.phases[-1].first_step) >= last:
        logger.warning("the run ends at step %d, before the batch that begins at step %d", last, first)


def _open_sinks(
    config: RunConfig, engine: Engine, dataset: Dataset, run_dir: RunDir, facts: dict[str, Any]
) -> list[Sink]:
    sinks: list[Sink] = []
    step = engine.attempted_steps

    def open_all() -> None:
        write_config(run_dir, config, step)
        write_json(run_dir.path / ENVIRONMENT_FILE, environment(engine.world_size) | facts, indent=2)
        write_contract(run_dir, engine.contract.to_dict(), step)
        if dataset.tokenizer_file is not None:
            end_id = None if dataset.codec is None else dataset.codec.end_id
            copy_tokenizer(dataset.tokenizer_file, end_id, run_dir.path / TOKENIZER_FOLDER)
        if engine.library_config is not None:
            write_json(run_dir.path / f"{engine.name}.json", engine.library_config, indent=2)
        sinks.append(MetricsFile(run_dir.path, step))
        sinks.append(FailureFiles(run_dir.path, engine.world_size))
        sinks.append(PrecisionFiles(run_dir.path, step))
        sinks.extend(open_tracker(config.tracker, run_dir.path, settings=redacted(config), start_step=step))
        sinks.append(Console(config.train.steps, step, run_dir.path, dataset.task.unit))

    decide_on_rank_0(engine.comm, open_all)
    return sinks


def _saving(config: RunConfig, model: nn.Module, dataset: Dataset, run_dir: RunDir) -> SaveOptions:
    extra: dict[str, Any] = {DATA_FINGERPRINT: dataset.fingerprint}
    # what a trained model needs beside its weights
    if (task := describe_task(dataset.task)) is not None:
        extra[TASK] = task
    if isinstance(model, TaskModel) and isinstance(model.model, HFImageModel):
        extra[HF_CONFIG] = model.model.hf_config()
    return SaveOptions(
        run_dir.checkpoints,
        settings=config_to_dict(config),  # the checkpoint blanks the secrets
        extra=extra,
        config=config.checkpoint,
    )


def _summarize(
    config: RunConfig, engine: Engine, result: TrainResult, flops: Mapping[int, tuple[int, int]] | None, wall_s: float
) -> Summary:
    device = device_name(engine.device)
    timing = result.timing
    is_rank_0_of_gpus = engine.rank == 0 and engine.device.type == "cuda"
    gpu = asdict(describe_state(engine.device.index or 0)) if is_rank_0_of_gpus else None
    found: list[float | None] = [None, None]
    if flops is not None and timing.steps:
        stop = engine.attempted_steps  # masked targets are computed too
        computed = flops_between(config.batch_growth, flops, stop - timing.steps, stop)
        rates = (each / timing.seconds / engine.world_size for each in computed)
        found = [mfu(device, engine.policy.name, flops_per_s) for flops_per_s in rates]
    return Summary(
        finished=result.finished,
        steps=engine.attempted_steps,
        applied_steps=engine.applied_steps,
        skipped_steps=engine.attempted_steps - engine.applied_steps,
        tokens=result.tokens,
        train_loss=result.train_loss,
        val_loss=result.val_losses.get("val_loss"),
        val_loss_ema=result.val_losses.get("val_loss_ema"),
        val_metrics={name: value for name, value in result.val_losses.items() if not name.startswith("val_loss")},
        tokens_per_s=timing.tokens_per_s if timing.steps else None,
        mfu=found[0],
        mfu_full=found[1],
        gpu=gpu,
        wall_s=wall_s,
        memory=engine.memory(),
        memory_formula=engine.memory_formula(),
        num_parameters=engine.num_parameters,
        world_size=engine.world_size,
        device=device,
        engine=engine.name,
        precision=engine.policy.name,
        contract=engine.contract.to_dict(),
    )


def _write_sample(session: Session, run_dir: RunDir) -> None:
    """Writes what the trained model does to the console of rank 0, to ``sample.txt`` and perhaps ``sample.png``."""
    config, engine, task = session.config, session.engine, session.dataset.task
    if not config.train.sample_tokens:
        return
    options = SampleOptions(config.train.sample_tokens, config.model.max_seq_len, config.seed)
    try:
        sample = task.sample(engine, session.validation_batches(), options)
        if engine.rank == 0:
            write_atomically(run_dir.path / "sample.txt", sample.text)
            if sample.figure is not None:
                sample.figure.savefig(run_dir.path / "sample.png")
    except Exception as error:  # perhaps in a user's model; the run is finished and saved
        if engine.rank == 0:
            logger.warning("no sample, which needs %s: %s", task.needs_for_sample, describe(error))
        return
    logger.info("sample:\n%s\n", sample.text)


def _log_summary(summary: Summary, run_dir: RunDir, stop: StopSignals, unit: str) -> None:
    if not summary.finished:
        logger.warning(
            "stopped at step %d%s after saving; start the same command with run_dir=%s to continue",
            summary.steps,
            f" by {stop.name}" if stop.requested else "",
            run_dir.path,
        )
        return
    losses = {name: getattr(summary, name) for name in ("train_loss", "val_loss", "val_loss_ema")}
    parts = [f"{name} {loss:.4f}" for name, loss in (losses | dict(summary.val_metrics)).items() if loss is not None]
    if summary.tokens_per_s is not None:
        parts.append(rate(summary.tokens_per_s, unit))
        parts.append(f"mfu {mfu_text(summary.mfu, summary.mfu_full, GPUState.of(summary.gpu))}")
    parts.append(f"{summary.skipped_steps} skipped")
    logger.info("done: %d steps  %s", summary.steps, "  ".join(parts))
    logger.info("results in %s", run_dir.path)

"""Runs the probe: trials, noise, analysis of the modules, its check, and the advice."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from dtrain.config.dump import config_to_dict, to_yaml
from dtrain.config.precision import LossScale
from dtrain.config.probe import PROBED_FORMATS, REFERENCE, ProbeConfig
from dtrain.config.schema import RunConfig
from dtrain.data import BatchLoader, Dataset
from dtrain.data.loader import Batch
from dtrain.distributed.logging import logger
from dtrain.distributed.startup.setup import choose_device, connect
from dtrain.errors import ConfigError, ProbeError
from dtrain.measure.noise import Noise
from dtrain.measure.probe.advice import advise
from dtrain.measure.probe.flips import flip
from dtrain.measure.probe.measures import add_to
from dtrain.measure.probe.records import Analysis, Flip, Trial, final_loss, last_quarter
from dtrain.measure.probe.report import NoiseRun, ProbeReport
from dtrain.measure.probe.sensitivity import ProbeSettings, analyze
from dtrain.measure.probe.trials import FormatTraining, failed_trial, interleave
from dtrain.measure.record import head
from dtrain.models import build_model
from dtrain.precision.fp16_products import FP16Products
from dtrain.precision.histogram import Histogram
from dtrain.redaction.redact import redact
from dtrain.telemetry.metrics import CONFIG_FILE, write_atomically
from dtrain.tools.report_dir import make_run_dir
from dtrain.tools.tables import plural
from dtrain.train.session import check_model_fits, open_data
from dtrain.train.setup import check_precision, set_threads, torch_settings_restored
from dtrain.train.validation import to_device


def run_probe(config: ProbeConfig, command: str) -> tuple[ProbeReport, Path]:
    """Probes the model of ``config``; returns the report, and the run directory.

    Raises:
        ConfigError: a format or rule that this machine or model excludes.
        ProbeError: FP32 cannot train this model.
    """
    device = choose_device(config.launch.device, 0)
    formats, left_out = choose_formats(config, device)
    with torch_settings_restored():
        probe = _Probe(config, formats, device)
        run_dir = make_run_dir(config.run_dir, "probe")
        write_atomically(run_dir / CONFIG_FILE, to_yaml(redact(config_to_dict(config))))
        logger.info("run %s", run_dir)
        for name, reason in left_out.items():
            logger.info("%s left out: %s", name, reason)
        if config.model.compile != "none":
            logger.info("model.compile=%s: the trials run the blocks uncompiled", config.model.compile)
        return probe.run(command, left_out), run_dir


def choose_formats(config: ProbeConfig, device: torch.device) -> tuple[list[str], dict[str, str]]:
    """Returns the formats to try, FP32 first, and why others are left out if the user has not chosen.

    Raises:
        ConfigError: ``device`` cannot compute in a format that the user has chosen.
    """
    chosen, left_out = [REFERENCE], {}
    for name in config.formats or PROBED_FORMATS:
        if name == REFERENCE:
            continue
        try:
            check_precision(config.training(name), device)
        except ConfigError as error:
            if config.formats is not None:
                raise ConfigError(f"formats has {name}: {error}") from None
            left_out[name] = str(error)
            continue
        chosen.append(name)
    return chosen, left_out


class _Probe:
    def __init__(self, config: ProbeConfig, formats: Sequence[str], device: torch.device) -> None:
        # with full logits: the output layer must be called as a module, because modules are what is compared
        config = replace(config, model=replace(config.model, loss_chunk="none"))
        self.config, self.formats, self.device = config, formats, device
        self.base = config.training(REFERENCE)
        comm = connect(device)
        set_threads(self.base, comm)
        self.dataset: Dataset = open_data(self.base, comm)
        self.steps = self._load_steps(config.seed)
        model = build_model(config.model, self.dataset.task, config.seed)
        for name in formats:  # before the run has a folder
            check_model_fits(config.training(name), model, self.dataset)
        self.num_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.seconds: dict[str, float] = {}
        self.retrained: list[Trial] = []
        self.first_gradients: dict[str, Tensor] = {}
        self.reference_loss = 0.0

    def _load_steps(self, seed: int) -> list[Batch]:
        """Returns the batches of all steps, in host memory."""
        if not self.dataset.train.num_samples:
            raise ConfigError("the training data has no sample")
        train = self.base.train
        num_micro_batches = train.global_batch_size // train.micro_batch_size
        loader = BatchLoader(self.dataset.train, seed, train.micro_batch_size, num_micro_batches)
        return list(islice(loader, train.steps))

    @property
    def batch(self) -> str:
        """The steps in words."""
        train, config = self.config.train, self.config
        num = train.global_batch_size // train.micro_batch_size
        return (
            f"{config.steps} steps of {plural(num, 'micro-batch') if num == 1 else f'{num} micro-batches'} of "
            f"{train.micro_batch_size} x {self.base.targets_per_sample} {self.dataset.task.unit}"
        )

    @contextmanager
    def stage(self, name: str, announcement: str) -> Iterator[None]:
        """Announces a stage, and takes its time."""
        logger.info("%s: %s", name, announcement)
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin

    def run(self, command: str, left_out: dict[str, str]) -> ProbeReport:
        with self.stage("trials", f"{', '.join(self.formats)}, interleaved; {self.batch}"):
            reference, trials = self._trials()
        with self.stage("noise", f"FP32 with weights an ulp away, and with {self.config.seeds} other seeds"):
            noise_runs = list(self._noise_runs())
        perturbed, *seeds = (final_loss(run.losses) for run in noise_runs)
        noise = Noise.of(self.reference_loss, [perturbed], seeds)
        with self.stage(
            "analysis", "every module and product, at the FP32 weights after the trial; gradients, also before"
        ):
            analysis, flips = self._analyze(reference)
        report = ProbeReport(
            **head(command, self.config),
            device=device_name(self.device),
            num_parameters=self.num_parameters,
            batch=self.batch,
            trials=trials,
            noise=noise,
            noise_runs=noise_runs,
            analysis=analysis,
            flips=flips,
            retrained=self.retrained,
            advice=None,  # type: ignore[arg-type]  # follows from the rest
            left_out=left_out,
            seconds=self.seconds,
        )
        with self.stage("advice", "trials with rules, if a format needs any"):
            return replace(report, advice=advise(report, self._retrain))

    def _trials(self) -> tuple[FormatTraining, list[Trial]]:
        trainings: list[FormatTraining] = []
        failed: dict[str, Trial] = {}
        for name in self.formats:
            config = self.config.training(name)
            try:
                trainings.append(self._training(config))
            except Exception as error:  # of a library or the user's model; the other formats are still tried
                if name == REFERENCE:
                    raise
                failed[name] = failed_trial(config, error)
        interleave(trainings, self.steps)
        reference = trainings[0]
        _require_finished(reference, "FP32, the reference,")
        self.reference_loss = final_loss(reference.losses)
        done = {training.name: training.trial(self.reference_loss) for training in trainings}
        return reference, [(done | failed)[name] for name in self.formats]

    def _training(self, config: RunConfig, *, perturbed: bool = False) -> FormatTraining:
        return FormatTraining(config, self.dataset, self.device, self.first_gradients, perturbed=perturbed)

    def _noise_runs(self) -> Iterator[NoiseRun]:
        yield self._noise_run("weights an ulp away", self._training(self.base, perturbed=True), self.steps)
        measured = last_quarter(self.steps)
        for seed in range(self.base.seed + 1, self.base.seed + self.config.seeds + 1):
            steps = [*self._load_steps(seed)[: -len(measured)], *measured]
            yield self._noise_run(f"seed {seed}", self._training(replace(self.base, seed=seed)), steps)

    def _noise_run(self, change: str, training: FormatTraining, steps: Sequence[Batch]) -> NoiseRun:
        for batch in steps:
            training.step(batch)
        _require_finished(training, f"FP32 with {change}")
        loss = final_loss(training.losses)
        logger.info("  %s: final loss %.4f (reference %.4f)", change, loss, self.reference_loss)
        return NoiseRun(change, training.losses)

    def _analyze(self, reference: FormatTraining) -> tuple[Analysis, list[Flip]]:
        config = self.config
        settings = ProbeSettings(
            seed=config.seed, lr=config.optim.lr, float8=config.precision.float8, fp16=FP16Products
        )
        # gradients are largest at the start, and a constant loss scale must hold there too
        start = build_model(config.model, self.dataset.task, config.seed).float().to(self.device)
        first_step, last_step = (
            [to_device(micro_batch, self.device) for micro_batch in batch] for batch in (self.steps[0], self.steps[-1])
        )
        first = analyze(start, first_step, [name for name in self.formats if name == "fp16"], settings)
        if first.loss_scale is not None:
            settings = replace(settings, max_scale=first.loss_scale)
        model = reference.plain_model()
        analysis = analyze(model, last_step, self.formats, settings)
        flips: list[Flip] = []
        for name in self.formats[1:]:
            flips += flip(model, last_step, analysis, name, settings=settings)
        merged = replace(
            analysis,
            gradients=_merge(first.gradients, analysis.gradients),
            activation_gradients=_merge(first.activation_gradients, analysis.activation_gradients),
        )
        return merged, flips

    def _retrain(self, format_name: str, rules: Mapping[str, str], loss_scale: float | None = None) -> Trial:
        config = self.config.training(format_name, {**self.config.precision.rules, **rules})
        if loss_scale is not None:
            scale = LossScale("static", init=loss_scale)
            config = replace(config, precision=replace(config.precision, loss_scale=scale))
        try:
            training = self._training(config)
            for batch in self.steps:
                training.step(batch)
            trial = training.trial(self.reference_loss)
        except Exception as error:  # a rule that does not fit the model
            trial = failed_trial(config, error)
        self.retrained.append(trial)
        outcome = f"fails: {trial.failure}" if trial.failure is not None else f"gap {trial.gap:+.4f}"
        scale_note = f" at the loss scale {loss_scale:g}" if loss_scale is not None else ""
        logger.info("  %s with %s%s: %s", format_name, plural(len(rules), "rule"), scale_note, outcome)
        return trial


def _merge(first: Mapping[str, Histogram], second: Mapping[str, Histogram]) -> dict[str, Histogram]:
    """Returns the histograms of both together, by name."""
    merged = dict(first)
    for name, histogram in second.items():
        add_to(merged, name, histogram)
    return merged


def _require_finished(training: FormatTraining, what: str) -> None:
    """Raises ``ProbeError`` unless every step of an FP32 training was applied."""
    if training.failure is None and not training.skipped:
        return
    why = (
        training.failure or f"{training.skipped} of {plural(len(training.losses), 'step')} have gradients that overflow"
    )
    raise ProbeError(
        f"{what} fails: {why}; without it no format can be compared: lower optim.lr, or check the model and the data"
    )


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU, or ``this CPU``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"

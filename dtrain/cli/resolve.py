"""Reads the jobs of a command line.

A job is one run; ``--multirun`` makes several. All are composed and checked before the first one starts, so that a
mistake in the last one costs no training.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import time
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, fields, replace
from typing import Any, Generic

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import env_override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from dtrain.cli.checks import check_config, check_suite
from dtrain.cli.compose import config_folder, load, open_loader, replacing
from dtrain.cli.explain import FREE_GROUPS, explain
from dtrain.cli.help import help_text
from dtrain.config.commands import TRAIN, Primary, Root
from dtrain.config.precision import unsupported_format_reason
from dtrain.config.schema import RunConfig
from dtrain.distributed.startup.launch_env import LaunchEnv
from dtrain.errors import ConfigError, nearest
from dtrain.redaction.redact import redact_text

PRECISION_VARIABLE = "DTRAIN_PRECISION"
_QUOTED_KEY = re.compile(r"""(?P<before>[{,]\s*)(?P<quote>["'])(?P<key>[^"']+)(?P=quote)\s*:""")
_SPECIAL = re.compile(r"[\\()\[\]{}:=,\s]")  # characters that Hydra's grammar needs escaped
_HYDRA_KEYS = ("hydra.searchpath", "hydra.sweeper.params", "hydra.help", "hydra.verbose")


@dataclass(frozen=True)
class Job:
    """One run. In a sweep ``number`` counts from 1 and ``label`` names the job's values; else None and empty."""

    config: RunConfig
    number: int | None = None
    label: str = ""


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the resolved and checked configuration for ``overrides`` (``["precision=bf16", "optim.lr=1e-3"]``).

    Raises:
        ConfigError: an unknown key or option, a value of the wrong type or out of range, or keys that contradict
            each other or the number of ranks; one line each.
    """
    return _load(_Request(TRAIN, open_loader(), TRAIN.name, [*map(_with_plain_keys, overrides)]))


def read_jobs(argv: Sequence[str], command: str = "", num_planned: int | None = None) -> list[Job]:
    """Reads the runs that ``argv`` (Hydra's options and overrides, without the verb) requests.

    Empty if ``argv`` only asks for information, which is then printed: ``--help``, ``--cfg job``, ``--info``, ...

    ``command`` is the command in the usage line, if it is not ``train``; ``num_planned`` is the number of ranks of a
    job that is only planned.

    Raises:
        ConfigError: as ``compose``; also for an unknown option of the command line.
    """
    request = _read(argv, TRAIN, command)
    if request is None:
        return []
    request = replace(request, num_planned=num_planned)
    return _sweep(request) if request.multirun else [Job(_load(request))]


def read_suite(argv: Sequence[str], primary: Primary[Root]) -> Root | None:
    """Reads the configuration of ``dtrain parity`` or a suite of ``dtrain bench``; None as ``read_jobs`` is empty.

    Raises:
        ConfigError: as ``read_jobs``; also for ``--multirun``.
    """
    request = _read(argv, primary)
    if request is None:
        return None
    if request.multirun:
        raise ConfigError(f"dtrain {primary.command} runs once; remove --multirun")
    return _load(request)


@dataclass(frozen=True)
class _Request(Generic[Root]):
    """A parsed command line that is not composed yet."""

    primary: Primary[Root]
    loader: ConfigLoaderImpl
    config_name: str
    overrides: list[str]
    multirun: bool = False
    num_planned: int | None = None


def _read(argv: Sequence[str], primary: Primary[Root], command: str = "") -> _Request[Root] | None:
    parser, args = _parse(argv)
    loader = open_loader(args.config_path, args.config_dir)
    args.overrides = [_with_plain_keys(override) for override in args.overrides]
    parsed = _parse_overrides(loader, primary, args.overrides, multirun=args.multirun)
    if primary.chooses_precision:
        args.overrides += _precision_override(loader, parsed)
    if args.help:
        config = _compose(_Request(primary, loader, args.config_name or primary.name, args.overrides))
        print(help_text(primary, config, command))
        return None
    if args.hydra_help or args.cfg or args.info or args.shell_completion or args.resolve:
        args.overrides = replacing(args.overrides, primary)
        _run_hydra_option(parser, args, primary)
        return None
    return _Request(primary, loader, args.config_name or primary.name, args.overrides, args.multirun)


@contextmanager
def _explained(primary: Primary[Any]) -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError, OSError, yaml.YAMLError) as error:
        raise explain(error, primary) from error


def _compose(request: _Request[Root]) -> Root:
    with _explained(request.primary):
        return load(request.loader, request.primary, request.config_name, request.overrides)


def _load(request: _Request[Root]) -> Root:
    config = _compose(request)
    if not isinstance(config, RunConfig):
        check_suite(config)
        return config
    # imported here because it imports torch: a misspelled key is reported without that wait
    from dtrain.distributed.startup.setup import processes_to_start

    started = LaunchEnv.read().world_size * processes_to_start(config.launch.num_processes, config.launch.device)
    check_config(config, started, request.num_planned)
    return config


def _without_local_rank(argv: Sequence[str]) -> list[str]:
    """Drops the ``--local_rank=N`` that launchers append; the environment has it too."""
    kept, words = [], iter(argv)
    for word in words:
        if word in ("--local_rank", "--local-rank"):
            next(words, None)
        elif not word.startswith(("--local_rank=", "--local-rank=")):
            kept.append(word)
    return kept


def _parse(argv: Sequence[str]) -> tuple[ArgumentParser, Namespace]:
    """Hydra's own options and the overrides, in any order."""
    parser = get_args_parser()
    parser.allow_abbrev, parser.exit_on_error = False, False
    try:
        args, unknown = parser.parse_known_intermixed_args(_without_local_rank(argv))
    except ArgumentError as error:
        raise ConfigError(str(error)) from None
    if unknown:
        options = [name for action in parser._actions for name in action.option_strings]
        raise ConfigError(f"unknown option '{unknown[0]}'{nearest(unknown[0], options)}")
    if args.experimental_rerun is not None:
        raise ConfigError("--experimental-rerun reads a pickle, which can run code; use --config-dir with your YAML")
    return parser, args


def _parse_overrides(
    loader: ConfigLoaderImpl, primary: Primary[Any], overrides: list[str], *, multirun: bool
) -> list[Override]:
    """Parses the overrides, and refuses those that Hydra would accept and ignore, or refuse without naming a key."""
    with _explained(primary):
        parsed = OverridesParser.create(loader).parse_overrides(overrides)
    groups = loader.list_groups("")
    own_groups = {*FREE_GROUPS, *(item.name for item in fields(primary.schema))}
    for override in parsed:
        key, written = override.key_or_group, str(override.input_line)
        if not key:
            raise ConfigError(f"cannot read '{written}'; write key=value")
        if override.is_hydra_override() and not key.startswith(_HYDRA_KEYS):
            raise ConfigError(
                f"'{key}' has no effect: dtrain runs its jobs itself, each in run_dir; remove '{written}'"
            )
        if override.is_sweep_override():
            if not multirun:
                raise ConfigError(
                    f"{written} gives several values; add --multirun to run each, or write a list as [a,b]"
                )
        elif override.is_add() and key in own_groups:
            raise ConfigError(f"'{key}' is chosen already; write {written.lstrip('+')} without '+'")
        elif key in groups and not override.is_delete() and not isinstance(override.value(), str):
            options = ", ".join(sorted(loader.get_group_options(key)))
            raise ConfigError(f"{written}: '{key}' takes one of its options: {options}")
    return parsed


def _with_plain_keys(override: str) -> str:
    """Rewrites ``key={"*.head": fp32}`` for Hydra, whose grammar has no quoted keys: ``key={*.head: fp32}``."""
    key, equals, value = override.partition("=")
    if not value.startswith("{"):
        return override

    def plain(found: re.Match[str]) -> str:
        return found["before"] + _SPECIAL.sub(r"\\\g<0>", found["key"]) + ":"

    return key + equals + _QUOTED_KEY.sub(plain, value)


def _precision_override(loader: ConfigLoaderImpl, parsed: list[Override]) -> list[str]:
    """Returns ``precision=NAME`` from the environment, unless the command line chooses the precision."""
    name = os.environ.get(PRECISION_VARIABLE)
    if not name or any(override.key_or_group in ("precision", "precision.name") for override in parsed):
        return []
    options = loader.get_group_options("precision")
    if name not in options:
        reason = unsupported_format_reason(name)
        why = f": {reason}" if reason else f" is not a precision{nearest(name, options)}"
        raise ConfigError(f"{PRECISION_VARIABLE}={name} in the environment{why}")
    return [f"precision={name}"]


def _run_hydra_option(parser: ArgumentParser, args: Namespace, primary: Primary[Any]) -> None:
    shown = io.StringIO()
    try:
        # the variable makes Hydra raise instead of printing and exiting
        with _explained(primary), env_override({"HYDRA_FULL_ERROR": "1"}), redirect_stdout(shown):
            _run_hydra(args, parser, read_jobs, str(config_folder()), primary.name)
    except SystemExit as stop:
        if stop.code:
            raise ConfigError("Hydra cannot show that, for the reason above") from None
    finally:
        print(redact_text(shown.getvalue()), end="")


def _sweep(request: _Request[RunConfig]) -> list[Job]:
    """Returns the cartesian product of the swept values in Hydra's order: the last key varies fastest."""
    loader, overrides = request.loader, request.overrides
    parser = OverridesParser.create(loader)
    with _explained(request.primary):
        whole = loader.load_configuration(
            request.config_name, overrides, RunMode.MULTIRUN, validate_sweep_overrides=False
        )
        params = [f"{key}={value}" for key, value in (whole.hydra.sweeper.params or {}).items()]
        given = {item.get_key_element(): item for item in parser.parse_overrides(params + overrides)}
        choices = [
            [f"{key}={value}" for value in item.sweep_string_iterator()]
            if item.is_sweep_override()
            else [item.input_line]
            for key, item in given.items()
        ]
    base = time.strftime("runs/%Y-%m-%d_%H-%M-%S")
    swept = [len(values) > 1 for values in choices]
    jobs = []
    for number, chosen in enumerate(itertools.product(*choices), start=1):
        config = _load(replace(request, overrides=[str(item) for item in chosen]))
        label = " ".join(str(item) for item, varies in zip(chosen, swept, strict=True) if varies)
        jobs.append(Job(replace(config, run_dir=config.run_dir or base), number, label))
    return jobs

"""The cases of the engine suite: plain PyTorch, the peers, and dtrain's engines, each after its peer.

Imports no torch, so that a misspelt engine is reported at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from dtrain.config.capabilities import CAPABILITIES, check
from dtrain.config.engines import Native
from dtrain.config.schema import GROUP_OPTIONS
from dtrain.config.tool_schema import EngineBenchConfig
from dtrain.errors import ConfigError, nearest
from dtrain.measure.bench.peers import DEFAULT_PEERS
from dtrain.measure.bench.records import BenchmarkCase

StagedEngine: TypeAlias = tuple[str, int]
"""An engine's name and its ZeRO stage."""

BASELINE_PEERS: dict[StagedEngine, str] = {
    ("ddp", 0): "ddp",
    ("fsdp2", 2): "fsdp2_no_reshard",
    ("fsdp2", 3): "fsdp2",
    **{("deepspeed", stage): f"deepspeed_{stage}_fp32" for stage in (1, 2, 3)},
}
"""The key of ``bench.peers.PEERS`` with the same library doing the same work."""

_ENGINES = [name for name in CAPABILITIES if name != "native"]


def chosen_engines(names: Sequence[str] | None) -> list[StagedEngine]:
    """Parses ``bench.engines``, each an engine's name or ``name:stage``; None: all that are installed.

    Raises:
        ConfigError: not an engine's name; native, which ``bench.stages`` measures; or a stage that is no number.
    """
    if names is None:
        names = [name for name in _ENGINES if not CAPABILITIES[name].missing_requirement]
    return [_parse_engine(name) for name in names]


def _parse_engine(text: str) -> StagedEngine:
    name, colon, stage = text.partition(":")
    if name == "native":
        raise ConfigError("bench.engines: the native engine is measured at bench.stages; list its stages there")
    if name not in _ENGINES:
        raise ConfigError(f"bench.engines: unknown engine '{name}'{nearest(name, _ENGINES)}")
    if not colon:
        return name, GROUP_OPTIONS["engine"][name]().zero_stage
    if stage not in ("0", "1", "2", "3"):
        raise ConfigError(f"bench.engines: '{text}' must be an engine or engine:stage, such as {name}:2")
    return name, int(stage)


def check_engines(names: Sequence[str], ranks: int) -> None:
    """Checks ``bench.engines`` against the engines' capabilities, and against ``bench.ranks``.

    Raises:
        ConfigError: not an engine's name, a stage that it does not have or that has no peer, a package that is not
            installed, a duplicate; or one rank, with which no peer runs.
    """
    if names and ranks == 1:
        raise ConfigError(f"bench.engines={list(names)} has no effect with bench.ranks=1: peers run on several ranks")
    chosen = chosen_engines(names)
    for name, stage in chosen:
        check(name, zero_stage=stage)
        if (name, stage) not in BASELINE_PEERS:
            raise ConfigError(f"bench.engines: no peer does the work of {name} at stage {stage}")
    if len(set(chosen)) < len(chosen):
        raise ConfigError(f"bench.engines={list(names)} lists an engine more than once at one stage")


def engine_cases(bench: EngineBenchConfig) -> list[BenchmarkCase]:
    """Returns plain PyTorch and native on one rank; then, on several, the peers, the other engines, and native."""

    def native(title: str, ranks: int, stage: int) -> list[BenchmarkCase]:
        case = BenchmarkCase(title, "native", ranks, bench.precision, stage)
        variants: dict[str, Any] = {name: {name: True} for name in ("reproducible", "graph") if getattr(bench, name)}
        return [case, *(replace(case, name=f"{title}, {name}", **keys) for name, keys in variants.items())]

    cases = [
        BenchmarkCase("plain", "plain", 1, bench.precision),
        *native("native, 1 rank", 1, Native().zero_stage),
    ]
    if bench.ranks == 1:
        return cases
    lower_bound = BenchmarkCase(f"plain, {bench.ranks} at once", "plain", bench.ranks, bench.precision)
    stages = [case for stage in bench.stages for case in native(f"native, stage {stage}", bench.ranks, stage)]
    return [*cases, lower_bound, *peer_cases(bench), *stages]


def peer_cases(bench: EngineBenchConfig) -> list[BenchmarkCase]:
    """Returns the peers, and after its peer each engine, so that both see the same noise.

    An engine brings its peer even if ``bench.peers`` does not list it. The first pair is followed by the control: its
    peer's script in other processes. The control's distance from the first is the noise of equal work.
    """

    def peer(title: str, name: str, baseline: str | None = None) -> BenchmarkCase:
        return BenchmarkCase(title, name, bench.ranks, bench.precision, baseline=baseline)

    engines = {BASELINE_PEERS[engine]: engine for engine in chosen_engines(bench.engines)}
    names = dict.fromkeys([*(DEFAULT_PEERS if bench.peers is None else bench.peers), *engines])
    control = next((name for name in names if name in engines), None)
    cases = []
    for name in names:
        cases.append(peer(name, name))
        if name in engines:
            engine, stage = engines[name]
            has_one_stage = len(CAPABILITIES[engine].values("zero_stage")) == 1
            title = f"dtrain {engine}" if has_one_stage else f"dtrain {engine}, stage {stage}"
            cases.append(BenchmarkCase(title, engine, bench.ranks, bench.precision, stage, baseline=name))
        if name == control:
            cases.append(peer(f"{name} again", name, baseline=name))
    return cases

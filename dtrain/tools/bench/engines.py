"""dtrain's engines over other libraries: which are raced, and next to which peer that does the same work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from dtrain.config.capabilities import CAPABILITIES, check
from dtrain.config.schema import GROUP_OPTIONS, EngineBenchConfig
from dtrain.errors import ConfigError, nearest
from dtrain.tools.bench.peers import RIVALS
from dtrain.tools.bench.records import Contender

StagedEngine: TypeAlias = tuple[str, int]
"""An engine's name and its ZeRO stage."""

TWINS: dict[StagedEngine, str] = {
    ("ddp", 0): "ddp",
    ("fsdp2", 2): "fsdp2_no_reshard",
    ("fsdp2", 3): "fsdp2",
    **{("deepspeed", stage): f"deepspeed_{stage}_fp32" for stage in (1, 2, 3)},
}
"""The peer of ``bench.peers.PEERS`` that has the same library do the same work."""

_ENGINES = [name for name in CAPABILITIES if name != "native"]


def chosen_engines(words: Sequence[str] | None) -> list[StagedEngine]:
    """What ``bench.engines`` lists, each an engine's name or ``name:stage``; None: all that are installed.

    Raises:
        ConfigError: no engine's name, native among them, which ``bench.stages`` races; or a stage that is no number.
    """
    if words is None:
        words = [name for name in _ENGINES if CAPABILITIES[name].is_installed]
    return [_staged(word) for word in words]


def _staged(word: str) -> StagedEngine:
    name, colon, stage = word.partition(":")
    if name == "native":
        raise ConfigError("bench.engines: the native engine is raced at bench.stages; list it there")
    if name not in _ENGINES:
        raise ConfigError(f"bench.engines: unknown engine '{name}'{nearest(name, _ENGINES)}")
    if not colon:
        return name, GROUP_OPTIONS["engine"][name]().zero_stage
    if stage not in ("0", "1", "2", "3"):
        raise ConfigError(f"bench.engines: '{word}' must be an engine or engine:stage, such as {name}:2")
    return name, int(stage)


def check_engines(words: Sequence[str], ranks: int) -> None:
    """Checks what ``bench.engines`` lists against what each engine can do, and against ``bench.ranks``.

    Raises:
        ConfigError: no engine's name, a stage that it does not have or that has no peer, a package that is not
            installed, twice the same; or one rank, where no peer runs.
    """
    if words and ranks == 1:
        raise ConfigError(f"bench.engines={list(words)} has no effect with bench.ranks=1: peers run on several ranks")
    chosen = chosen_engines(words)
    for name, stage in chosen:
        check(name, zero_stage=stage)
        if (name, stage) not in TWINS:
            raise ConfigError(f"bench.engines: no peer does the work of {name} at stage {stage}")
    if len(set(chosen)) < len(chosen):
        raise ConfigError(f"bench.engines={list(words)} lists an engine more than once at one stage")


def peer_contenders(bench: EngineBenchConfig) -> list[Contender]:
    """The peers, and after its peer each engine, so that what a machine does meets both.

    An engine brings its peer where ``bench.peers`` does not list it. The first pair is followed by its peer once more:
    the same script in processes of its own, whose distance from the first shows what noise makes of equal work.
    """

    def peer(title: str, name: str, pair: str | None = None) -> Contender:
        return Contender(title, name, bench.ranks, bench.precision, pair=pair)

    engines = {TWINS[engine]: engine for engine in chosen_engines(bench.engines)}
    names = dict.fromkeys([*(RIVALS if bench.peers is None else bench.peers), *engines])
    control = next((name for name in names if name in engines), None)
    contenders = []
    for name in names:
        contenders.append(peer(name, name))
        if name in engines:
            engine, stage = engines[name]
            title = _title(engine, stage)
            contenders.append(Contender(title, engine, bench.ranks, bench.precision, stage, pair=name))
        if name == control:
            contenders.append(peer(f"{name} again", name, pair=name))
    return contenders


def _title(engine: str, stage: int) -> str:
    only_one = len(CAPABILITIES[engine].values("zero_stage")) == 1
    return f"dtrain {engine}" if only_one else f"dtrain {engine}, stage {stage}"

"""The state of an engine beside its tensors, as a record that checks itself: [Note: training state].

The hashes prove that a manifest is what was written; this record proves that it is possible: every field has its type
and range, and agrees with the others, the step and the files. It is built wherever a manifest is read, so a load,
``dtrain checkpoint verify`` and retention refuse the same states, and before one is saved, so nothing is saved that a
load would refuse. The contents of ``extra``, ``config`` and ``optimizer`` are not checked: the first is the user's, and
nothing is restored from the others. A snapshot that no engine took has a state of its own, which is passed on as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dtrain.checkpoint.frozen_source import FrozenSource
from dtrain.config.fields import CheckedRecord, at_least, between, from_json, setting, shown
from dtrain.errors import ConfigError
from dtrain.precision.loss_scale import LossScaleState

KEYED_BY = ["seed", "attempted_steps", "global_micro_batch"]
"""Values that key the random numbers of a forward (``dtrain.engine.rng``)."""

_COUNT = {"min": 0, "max": 2**63 - 1}
_OWN_KEYS = {"run_id", "engine_state", "rng", "data_cursor"}  # those that only an engine's state has
_CALIBRATED = {"is_calibrated", "max_abs_grad", "num_measured"}  # absent in checkpoints from before this mode
_WORD = re.compile(r"[a-z][a-z0-9_]{0,39}")
_HASH = re.compile(r"([0-9a-f]{64})?")
_LONGEST_ID = 200  # characters


@dataclass(frozen=True)
class RandomState(CheckedRecord):
    """Key of the random numbers; an imported model has no seed yet."""

    seed: int | None = field(metadata={"min": 0, "max": 2**64 - 1})
    keyed_by: list[str]

    def _check(self) -> None:
        if self.keyed_by != KEYED_BY:
            raise ConfigError(f"{self._key('keyed_by')}={shown(self.keyed_by)}; expected {shown(KEYED_BY)}")


@dataclass(frozen=True)
class EngineState(CheckedRecord):
    """The counters and numbers that decide the next step.

    Attributes:
        rules: the numbers that each optimizer group shares over its elements; absent in older checkpoints.
        missed_updates: applied steps that left a parameter alone, by its name; absent in older checkpoints.
    """

    attempted_steps: int = field(metadata=_COUNT)
    applied_steps: int = field(metadata=_COUNT)
    loss_scale: LossScaleState
    rules: list[dict[str, float]] = setting([], "")
    missed_updates: dict[str, int] = setting({}, "")

    def _check(self) -> None:
        scale = self.loss_scale
        try:
            scale.check()
        except ConfigError as error:
            raise ConfigError(str(error).replace("LossScaleState.", f"{self._key('loss_scale')}.")) from None
        attempted, applied = self.attempted_steps, self.applied_steps
        self._at_most("applied_steps", applied, "attempted_steps", attempted)
        self._at_most("loss_scale.clean_steps", scale.clean_steps, "attempted_steps", attempted)
        self._at_most("loss_scale.num_measured", scale.num_measured, "applied_steps", applied)
        for number, values in enumerate(self.rules):
            self._at_most(f"rules[{number}].applied_steps", values.get("applied_steps", 0), "applied_steps", applied)
        for name, missed in self.missed_updates.items():
            self._at_most(f"missed_updates['{name}']", missed, "applied_steps", applied)

    def _at_most(self, name: str, value: float, limit: str, largest: int) -> None:
        if not (0 <= value <= largest and value == int(value)):
            raise ConfigError(f"{self._key(name)}={shown(value)}; expected a whole number from 0 to {limit}={largest}")


@dataclass(frozen=True)
class _Module(CheckedRecord):
    format: str


@dataclass(frozen=True)
class _Decision(CheckedRecord):
    name: str
    is_float8: bool
    reason: str
    bf16_ms: float | None = setting(None, "")
    low_ms: float | None = setting(None, "")  # its name in older checkpoints
    float8_ms: float | None = setting(None, "")
    products: list[str] = setting([], "")


@dataclass(frozen=True)
class TrainingState(CheckedRecord):
    """The ``state`` of a manifest that an engine saved; a field with a default is absent in some checkpoints.

    Attributes:
        shard_size: ranks of a replica, of which the first has saved it; None: one replica of all ranks.
    """

    run_id: str
    engine: str
    world_size: int = field(metadata={"min": 1})
    engine_state: EngineState
    rng: RandomState
    data_cursor: int = field(metadata=_COUNT)
    extra: dict[str, Any]
    zero_stage: int = between(0, 0, 3, "")
    optimizer: dict[str, Any] = setting({}, "")
    contract: dict[str, Any] | None = setting(None, "")
    versions: dict[str, str] = setting({}, "")
    aliases: dict[str, str] = setting({}, "")
    metrics: dict[str, float | None] = setting({}, "")
    config: dict[str, Any] = setting({}, "")
    config_hash: str = setting("", "")
    frozen_source: dict[str, Any] | None = setting(None, "")
    shard_size: int | None = at_least(None, 1, "")

    @property
    def source(self) -> FrozenSource | None:
        """The source of the frozen weights, of which the checkpoint then holds none."""
        return from_json(FrozenSource, self.frozen_source, "state.frozen_source") if self.frozen_source else None

    @staticmethod
    def of(state: Mapping[str, Any], *, step: int, num_files: int) -> TrainingState | None:
        """Returns the state of a checkpoint of ``step`` in ``num_files`` files; None if no engine saved it.

        Raises:
            ConfigError: names the first field that is impossible, with what was expected.
        """
        if _OWN_KEYS.isdisjoint(state):
            return None
        found = from_json(TrainingState, state, "state")
        saved_scale = state["engine_state"]["loss_scale"]
        if found.engine_state.loss_scale.rule.mode == "calibrated" and (missing := _CALIBRATED - saved_scale.keys()):
            raise ConfigError(f"state.engine_state.loss_scale.{min(missing)} is missing; mode calibrated needs it")
        if found.engine_state.attempted_steps != step:
            raise ConfigError(
                f"state.engine_state.attempted_steps={found.engine_state.attempted_steps}; expected {step}, the "
                f"checkpoint's step"
            )
        if found.shard_size is None and found.world_size != num_files:
            raise ConfigError(f"state.world_size={found.world_size}; expected {num_files}, a data file for each rank")
        if found.shard_size is not None and found.shard_size != num_files:
            raise ConfigError(
                f"state.shard_size={found.shard_size}; expected {num_files}, a data file for each rank of a replica"
            )
        return found

    def _check(self) -> None:
        for name, valid, expected in (
            ("run_id", 0 < len(self.run_id) <= _LONGEST_ID, f"1 to {_LONGEST_ID} characters"),
            ("engine", _WORD.fullmatch(self.engine), "a lower-case word"),
            ("config_hash", _HASH.fullmatch(self.config_hash), "a SHA-256"),
        ):
            if not valid:
                raise ConfigError(f"{self._key(name)}={shown(getattr(self, name))}; expected {expected}")
        if self.rng.seed is None and self.engine_state.attempted_steps:  # only an imported model has none yet
            raise ConfigError(f"{self._key('rng')}.seed=null; expected a whole number after the first step")
        if self.frozen_source is not None and (self.source is None or self.source.sha256 is None):
            raise ConfigError(f"{self._key('frozen_source')}.sha256 is missing")
        if self.shard_size is not None and self.world_size % self.shard_size:
            raise ConfigError(
                f"{self._key('shard_size')}={self.shard_size}; expected a divisor of world_size={self.world_size}"
            )
        self._check_contract()

    def _check_contract(self) -> None:
        contract, path = self.contract or {}, self._key("contract")
        modules, decisions = contract.get("modules", {}), contract.get("decisions", [])
        if not isinstance(modules, dict) or not isinstance(decisions, list):
            raise ConfigError(f"{path} has no mapping 'modules' and list 'decisions', as a precision contract has")
        if not isinstance(contract.get("float8"), dict | None):
            raise ConfigError(f"{path}.float8={shown(contract['float8'])} is not a mapping or null")
        for name, module in modules.items():
            from_json(_Module, module, f"{path}.modules['{name}']")
        for number, decision in enumerate(decisions):
            from_json(_Decision, decision, f"{path}.decisions[{number}]")

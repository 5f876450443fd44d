from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import dtrain
from dtrain.config.capabilities import CAPABILITIES, SETTINGS, check, supporting_engines
from dtrain.config.engines import ENGINES, settings_of
from dtrain.config.optim import OPTIMIZERS
from dtrain.errors import ConfigError
from dtrain.precision.float8.linear import Float8Linear
from dtrain.precision.float8.weights import Cache
from dtrain.tools.doctor.reference import engine_table, reasons
from tests.helpers.one_rank import loss_of
from tests.helpers.ranks import run_ranks


def test_unknown_settings_are_not_refused() -> None:
    check("deepspeed", precision="fp16")
    check("deepspeed", precision="fp16", device_type="cuda")
    assert supporting_engines({"zero_stage": 0, "compile": True}) == ["native"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"package": "not_a_package"}, "engine=deepspeed needs the package not_a_package, which is not installed: pip"),
        ({"torch": "99.1"}, r"engine=deepspeed needs torch 99\.1 or later; this is \d"),
    ],
)
def test_missing_requirements_are_named(change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CAPABILITIES, "deepspeed", replace(CAPABILITIES["deepspeed"], **change))
    with pytest.raises(ConfigError, match=message):
        check("deepspeed", zero_stage=2)


def test_table_is_consistent() -> None:
    for name, capabilities in CAPABILITIES.items():
        for key, supported in capabilities.supported.items():
            assert supported.values, f"{name} {key}"
            assert set(supported.values) < set(SETTINGS[key]), f"{name} {key} restricts nothing"
        for combination in capabilities.unsupported:
            assert all(capabilities.supports(key, value) for key, value in combination.settings.items()), name
    assert {len(row) for row in engine_table().rows} == {1 + len(CAPABILITIES)}
    for key in SETTINGS:
        used = any(key in e.supported or any(key in x.settings for x in e.unsupported) for e in CAPABILITIES.values())
        assert used or key == "precision", f"{key} distinguishes no engines"
    assert all(reason and not reason.endswith(".") for _, _, reason in reasons())
    # a setting of one engine needs no row
    assert {name for name, what, _ in reasons() if what == "prefetch"} == CAPABILITIES.keys() - {"native"}


def test_defaults_of_every_engine_are_supported() -> None:
    assert ENGINES.keys() == CAPABILITIES.keys()
    for name, record in ENGINES.items():
        config = record()
        check(name, **{key: getattr(config, key) for key in settings_of(record) if key in SETTINGS})


RADAM = dtrain.TorchOptimizer(torch.optim.RAdam)
FEW = {"zero_stage": (0, 1, 2, 3), "precision": ("bf16",), "rules": ("fp32",), "optimizer": ("lion",)}
"""Values started with DeepSpeed, whose start takes seconds; its own tests have the rest."""


def cells(engine: str) -> list[tuple[str, Any]]:
    """Every (key, value) that one process on a CPU can try."""
    # compiled code has tests of its own; TF32 is refused by the device, not by an engine
    costly = {("compile", True), ("compile_blocks", "blocks"), ("precision", "tf32")}
    return [
        (key, value)
        for key, values in SETTINGS.items()
        for value in values
        if key != "device_type" and ((key, value) not in costly or not CAPABILITIES[engine].supports(key, value))
    ]


def arguments(key: str, value: Any) -> dict[str, Any]:
    """Arguments of ``initialize`` with this value."""
    named: dict[str, Callable[[], tuple[str, Any]]] = {
        "compile": lambda: ("optimizer", dtrain.AdamW(compile=value)),
        "optimizer": lambda: (key, RADAM if value == "torch" else OPTIMIZERS[value]()),
        "replay_every": lambda: ("audit", dtrain.Audit(replay_every=1 if value else 0)),
        "compile_blocks": lambda: ("blocks", dtrain.Blocks(compile=value)),
        "rules": lambda: ("precision", dtrain.PrecisionPolicy.named("bf16", rules={"0": value})),
    }
    precision = "fp16" if (key, value) == ("reduce_dtype", "fp16") else "fp32"
    return {"precision": precision, "loss_scale": 1.0, **dict([named.get(key, lambda: (key, value))()])}


def attempt(engine: str, key: str, value: Any) -> str:
    """Starts the engine with this one value and takes a step; returns the contradiction to the table, or nothing."""
    reason = reason_of(engine, key, value)
    if reason is None and engine == "deepspeed" and value not in FEW.get(key, ()):
        return ""
    torch.manual_seed(0)  # the first and second product can be FP8
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 1))
    try:
        started = dtrain.initialize(model, engine=engine, seed=0, **arguments(key, value))
        started.backward(loss_of(started, torch.ones(3, 16)))
        outcome = started.step()
    except ConfigError as error:
        if reason is None:
            return f"refused, but the table supports it: {error}"
        return "" if reason in str(error) else f"refused for another reason: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    if reason is not None:
        return "accepted, but the table refuses it"
    caches = [module.quantized_weight.cache for module in model.modules() if isinstance(module, Float8Linear)]
    if any((cache is Cache.NEVER) is not CAPABILITIES[engine].casts_each_time for cache in caches):
        return "FP8 weights are not cast when the table says they are"
    return "" if outcome.applied else f"the step was skipped: {outcome.reason}"


def reason_of(engine: str, key: str, value: Any) -> str | None:
    """Reason for which the table refuses this value on a CPU."""
    capabilities = CAPABILITIES[engine]
    if not capabilities.supports(key, value):
        return capabilities.supported[key].reason
    together = {key: value, "device_type": "cpu"}
    return next((x.reason for x in capabilities.unsupported if x.settings.items() <= together.items()), None)


def attempt_all(rank: int, world: int, engine: str) -> dict[str, str]:
    return {f"{key}={value}": attempt(engine, key, value) for key, value in cells(engine)}


@pytest.mark.processes
@pytest.mark.parametrize("engine", CAPABILITIES)
def test_table_is_true(engine: str) -> None:
    """In a process of its own, because a library may leave a process group behind."""
    results = run_ranks(1, attempt_all, engine)[0]
    assert len(results) >= sum(len(values) for values in SETTINGS.values()) - 5
    wrong = {cell: problem for cell, problem in results.items() if problem}
    assert not wrong

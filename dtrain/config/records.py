"""The check of the records of a run against each other, before its device and its model are known."""

from __future__ import annotations

from collections.abc import Callable, Collection

from dtrain.config.audit import Audit
from dtrain.config.blocks import Blocks
from dtrain.config.capabilities import SETTINGS, Setting, check
from dtrain.config.engines import EngineConfig
from dtrain.config.optim import Optimizer


def check_records(
    engine: EngineConfig,
    optimizer: Optimizer,
    audit: Audit,
    blocks: Blocks,
    precision: str,
    rules: Collection[str],
    format_key: Callable[[str], str],
) -> None:
    """Checks that an engine supports an optimizer, a precision with the formats of its rules, and other settings.

    The name of a user's own policy is not known here. ``format_key`` writes a key as the caller's user knows it.

    Raises:
        ConfigError: as ``dtrain.config.capabilities.check`` and ``EngineConfig.check_exclusions``.
    """
    may_have_bf16 = precision not in ("fp32", "tf32", "fp16") or "bf16" in rules
    facts = {"has_bf16_weights": may_have_bf16, "has_bf16_gradients": may_have_bf16}
    for rule in dict.fromkeys(("fp32", *rules)):
        settings: dict[str, Setting] = {"precision": precision} if precision in SETTINGS["precision"] else {}
        settings |= {
            "rules": rule,
            "compile": getattr(optimizer, "compile", "auto"),
            "optimizer": optimizer.name,
            "replay_every": "above 0" if audit.replay_every else 0,
            "compile_blocks": blocks.compile,
            "zero_stage": engine.zero_stage,
        }
        check(engine.name, format_key=format_key, **settings)
        engine.check_exclusions(format_key, **settings, **facts)

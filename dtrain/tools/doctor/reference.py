"""Tables of the engines and of the keys, generated from the records that also check every configuration."""

from __future__ import annotations

from importlib.metadata import version

from dtrain.config.capabilities import CAPABILITIES, SETTINGS, Capabilities, Setting, listed
from dtrain.config.commands import TRAIN
from dtrain.config.engines import ENGINES, engines_with, settings_of
from dtrain.config.fields import written
from dtrain.config.keys import Key
from dtrain.tools.tables import Table

_MAIN = ("what it is", "`zero_stage`", "`precision` (tf32 on GPUs)", "`reproducible`", "`optim`", "checkpoints")


def engine_table(main: bool = False) -> Table:
    """Returns the capabilities of each engine, the main ones or all; docs/reference/engines.md has the Markdown."""
    engines = CAPABILITIES.values()

    def supporting(key: str, value: Setting) -> list[str]:
        return ["yes" if engine.supports(key, value) else "no" for engine in engines]

    def having(setting: str, text: str) -> list[str]:
        return [text if name in engines_with(setting) else "no" for name in CAPABILITIES]

    rows: list[tuple[str, ...]] = [
        ("what it is", *(engine.summary for engine in engines)),
        ("`zero_stage`", *(", ".join(map(str, engine.values("zero_stage"))) for engine in engines)),
        ("`precision` (tf32 on GPUs)", *(_precisions(engine) for engine in engines)),
        ("`precision.rules`", *(", ".join(engine.values("rules")) for engine in engines)),
        ("weights in a forward", *(engine.weights for engine in engines)),
        ("micro-batches summed in FP32", *(engine.accumulation for engine in engines)),
        ("a micro-batch's weight multiplies", *(engine.weighting for engine in engines)),
        ("`reduce_dtype`", *(_dtypes(engine.values("reduce_dtype")) for engine in engines)),
        ("`reproducible`", *supporting("reproducible", True)),
        ("`sharding_units` by name patterns", *having("sharding_units", "yes")),
        ("replicas of `shard_size` ranks", *having("shard_size", "stages 1 to 3")),
        ("`optim`", *(", ".join(engine.values("optimizer")) for engine in engines)),
        ("`optim.compile`", *supporting("compile", True)),
        ("`offload`", *having("offload", "cpu, stages 1 to 3")),
        ("checkpoints", *("from any engine, any number of ranks" for _ in engines)),
        ("needs torch from", *(engine.torch for engine in engines)),
        ("needs a package", *(engine.package or "no" for engine in engines)),
    ]
    shown = [row for row in rows if row[0] in _MAIN] if main else rows
    return Table("Engines", ("", *(f"`{name}`" for name in CAPABILITIES)), shown)


def reasons() -> list[tuple[str, str, str]]:
    """Triples (engine, ``key=value``, reason) of everything that an engine does not support."""
    rows = []
    for name, capabilities in CAPABILITIES.items():
        for key, supported in capabilities.supported.items():
            refused = [value for value in SETTINGS[key] if value not in supported.values]
            rows.append((name, f"{key}={listed(refused)}", supported.reason))
        for combination in capabilities.unsupported:
            words = " with ".join(f"{key}={written(value)}" for key, value in combination.settings.items())
            rows.append((name, words, combination.reason))
    own = dict.fromkeys(setting for record in ENGINES.values() for setting in settings_of(record))
    for setting in own:
        owners = engines_with(setting)
        rows += [(name, setting, f"a setting of {listed(owners)}") for name in ENGINES if name not in owners]
    return rows


def _dtypes(values: tuple[Setting, ...]) -> str:
    return ", ".join(value for value in values if value != "auto")


def _precisions(engine: Capabilities) -> str:
    excluded = [
        combination.settings["precision"]
        for combination in engine.unsupported
        if combination.settings.get("device_type") == "cpu"
    ]
    names = _dtypes(tuple(name for name in engine.values("precision") if name not in excluded))
    return f"{names}; {', '.join(excluded)} on GPUs" if excluded else names


def engine_tables() -> list[Table]:
    """Returns the capabilities, the reasons of all refusals, and which engines can run on this machine."""
    usable = [(f"`{name}`", _usable(engine)) for name, engine in CAPABILITIES.items()]
    owners: dict[tuple[str, str], list[str]] = {}
    for name, what, why in reasons():
        owners.setdefault((what, why), []).append(f"`{name}`")
    refused = [(f"`{what}`", ", ".join(names), why) for (what, why), names in owners.items()]
    return [
        engine_table(),
        Table("What is refused, and why", ("refused", "by", "because"), refused),
        Table("On this machine", ("engine", "can be used"), usable),
    ]


def _usable(engine: Capabilities) -> str:
    if engine.missing_requirement:
        return f"no, it {engine.missing_requirement}"
    return f"yes, {engine.package} {version(engine.package)}" if engine.package else "yes"


def key_table() -> Table:
    """Returns the keys of ``dtrain train``; docs/reference/keys.md holds the Markdown."""
    from dtrain.cli.help import documented_keys  # brings Hydra, which the engines do not need

    rows = [_row(key) for group in documented_keys(TRAIN) for key in group.keys]
    return Table("Keys", ("key", "default", "meaning", "values"), rows)


def _row(key: Key) -> tuple[str, ...]:
    owners = f"`{key.path.partition('.')[0]}={'|'.join(key.options)}` only. " if key.options else ""
    cells = (f"`{key.path}`", f"`{key.default}`" if key.default else "", f"{owners}{key.doc}", key.values)
    return tuple(cell.replace("|", "\\|") for cell in cells)

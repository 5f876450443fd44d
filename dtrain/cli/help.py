"""``--help`` of the commands that take ``key=value``: every key with its default, its meaning and its values."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping
from typing import Any

from dtrain.cli.compose import config_folder
from dtrain.cli.explain import FREE_GROUPS
from dtrain.config.capabilities import SETTINGS
from dtrain.config.commands import TRAIN, Primary, Root
from dtrain.config.dump import config_to_dict
from dtrain.config.fields import written
from dtrain.config.keys import Key, KeyGroup, list_keys
from dtrain.config.schema import GROUP_OPTIONS
from dtrain.redaction.redact import redact

_KEY_WIDTH = 34  # of "  key=default"; a longer one has a line of its own
_FREE_GROUP_DOCS = {
    "experiment": "Named set of overrides; your own with --config-dir FOLDER.",
    "debug": "Named set of overrides that is applied last.",
}
_MULTIRUN = "  --multirun, -m        run every combination of comma-separated values: optim.lr=1e-3,2e-3"
_HYDRA_OPTIONS = """  --cfg job             print the composed configuration and stop
  --config-dir FOLDER   take groups and options from your own YAML too
  --hydra-help          more options of Hydra"""


def documented_keys(primary: Primary[Any]) -> list[KeyGroup]:
    """The keys of a command by group; the first group has the keys at the root."""
    options = {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in config_folder().iterdir()}
    options |= {name: list(records) for name, records in GROUP_OPTIONS.items()}  # in the order of the schema
    options["precision"] = list(SETTINGS["precision"]) if primary.chooses_precision else []
    groups = list_keys(primary.schema, options)
    if primary is TRAIN:
        free = [Key(name, "null", _FREE_GROUP_DOCS[name], ", ".join(options[name])) for name in FREE_GROUPS]
        groups[0] = KeyGroup("", "", (*groups[0].keys, *free))
    return groups


def help_text(primary: Primary[Root], config: Root, command: str = "") -> str:
    """The text of ``--help``: the values of ``config`` are shown as defaults; ``command`` is for the usage line."""
    values = _flat(redact(config_to_dict(config)))
    groups = documented_keys(primary)
    width = min(shutil.get_terminal_size().columns, 120)
    lines = [f"usage: dtrain {command or primary.command} [key=value ...] [option ...]", ""]
    for group in groups:
        if not group.keys:
            continue
        lines += [*_title(group, width), *(line for key in group.keys for line in _entry(key, values, width)), ""]
    return "\n".join([*lines, "Options:", *([_MULTIRUN] if primary is TRAIN else []), _HYDRA_OPTIONS])


def _title(group: KeyGroup, width: int) -> list[str]:
    lines = [group.name or "run"]
    if group.keys[0].path == group.name:  # whose line has the text
        return lines
    for paragraph in group.doc.split("\n\n"):
        lines += textwrap.wrap(paragraph, width, initial_indent="  ", subsequent_indent="  ")
    return lines


def _entry(key: Key, values: Mapping[str, Any], width: int) -> list[str]:
    default = key.default
    value = values.get(f"{key.path}.name", values.get(key.path))
    if key.path in values and written(value) != default.partition(" (")[0]:
        default = written(value)
    limits = " ".join(f"[{text}]" for text in (key.values, _owners(key)) if text)
    text = f"{key.doc} {limits}".strip()
    head = f"  {key.path}={default}"
    indent = " " * _KEY_WIDTH
    wrapped = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if len(head) < _KEY_WIDTH - 1:
        wrapped[0] = head.ljust(_KEY_WIDTH) + wrapped[0].lstrip()
        return wrapped
    return [head, *wrapped]


def _owners(key: Key) -> str:
    return f"{key.path.partition('.')[0]}={'|'.join(key.options)} only" if key.options else ""


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found[f"{prefix}{name}"] = value
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
    return found

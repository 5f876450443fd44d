"""The keys of a command as a list: what ``--help`` prints, and ``docs/reference/keys.md`` shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any

from dtrain.config.fields import default_of, written
from dtrain.config.schema import GROUP_OPTIONS


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        path: as on the command line, such as ``optim.lr``.
        default: as on the command line; options of the group that differ are named, as in ``2 (ddp: 0)``.
        values: the permitted values; empty if any value of its type is.
        options: the options of the group that have it; empty if all do.
    """

    path: str
    default: str
    doc: str
    values: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class KeyGroup:
    """Keys with the same first part; ``name`` and ``doc`` are empty for the keys at the root."""

    name: str
    doc: str
    keys: tuple[Key, ...]


def list_keys(schema: type[Any], options: Mapping[str, Sequence[str]]) -> list[KeyGroup]:
    """The keys of ``schema`` by group, those of the root first.

    Args:
        schema: the record of a command.
        options: the options of each group, ``{"engine": ["native", ...]}``; a group with several is a key itself.
    """
    root = KeyGroup("", "", tuple(_key(item, "") for item in fields(schema) if not _is_group(item)))
    return [root, *(_group(item, options.get(item.name, ())) for item in fields(schema) if _is_group(item))]


def _group(item: Field[Any], options: Sequence[str]) -> KeyGroup:
    doc = item.metadata["doc"].replace("``", "`")
    keys = [Key(item.name, str(default_of(item).name), doc, _listed(options))] if len(options) > 1 else []
    records = GROUP_OPTIONS.get(item.name, {"": item.default_factory})
    merged: dict[str, dict[str, Key]] = {}
    for option, record in records.items():
        for key in _record_keys(record, f"{item.name}."):
            merged.setdefault(key.path, {})[option] = key
    # an option's own keys come after those of all options
    for by_option in sorted(merged.values(), key=lambda found: len(found) < len(records)):
        keys.append(_merge(by_option, () if len(by_option) == len(records) else tuple(by_option)))
    return KeyGroup(item.name, doc, tuple(keys))


def _merge(by_option: dict[str, Key], options: tuple[str, ...]) -> Key:
    first = next(iter(by_option.values()))
    others = [f"{option}: {key.default}" for option, key in by_option.items() if key.default != first.default]
    default = f"{first.default} ({', '.join(others)})" if others else first.default
    doc = _joined({option: key.doc for option, key in by_option.items()}, " ")
    values = _joined({option: key.values for option, key in by_option.items()}, "; ")
    return Key(first.path, default, doc, values, options)


def _joined(texts: dict[str, str], separator: str) -> str:
    by_text: dict[str, list[str]] = {}
    for option, text in texts.items():
        by_text.setdefault(text, []).append(option)
    named = (f"{', '.join(options)}: {text}" for text, options in by_text.items())
    return separator.join(by_text if len(by_text) == 1 else named)


def _record_keys(record: Any, prefix: str) -> Iterator[Key]:
    for item in fields(record):
        if _is_group(item):
            yield from _record_keys(item.default_factory, f"{prefix}{item.name}.")
        elif item.name != "name":  # it repeats the option that was chosen
            yield _key(item, prefix)


def _key(item: Field[Any], prefix: str) -> Key:
    return Key(f"{prefix}{item.name}", written(default_of(item)), item.metadata["doc"], _values(item))


def _values(item: Field[Any]) -> str:
    metadata = item.metadata
    if "choices" in metadata:
        return _listed(metadata["choices"])
    low, bound, high = (metadata.get(name) for name in ("min", "above", "max"))
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    limits = (("at least", low), ("above", bound), ("at most", high))
    return ", ".join(f"{words} {limit:g}" for words, limit in limits if limit is not None)


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(written, values))


def _is_group(item: Field[Any]) -> bool:
    return is_dataclass(item.default_factory)

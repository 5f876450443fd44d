"""Composes YAML and overrides to a typed configuration, with Hydra.

dtrain runs the jobs itself, so no rank creates Hydra's folders or logs. The schema classes are
registered with Hydra's ConfigStore; the YAML under ``conf/`` picks among them and overrides values, as a suite's row of
``dtrain bench`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import create_config_search_path
from hydra.conf import HydraConf
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf

from dtrain.cli.explain import unknown_key
from dtrain.config.commands import PRIMARIES, TRAIN, Primary, Root
from dtrain.config.fields import in_keys
from dtrain.config.growth import BY_STEP_KEYS
from dtrain.config.schema import GROUP_OPTIONS
from dtrain.config.yaml_files import check_size
from dtrain.errors import ConfigError, nearest

_HYDRA_GROUPS = {
    "sweeper": "basic",
    "hydra_help": "default",
    "hydra_logging": "none",
    **dict.fromkeys(("output", "launcher", "help", "job_logging", "callbacks", "env")),
}
"""Options of Hydra's own groups. Those without one set up logs, folders and launchers, which dtrain replaces."""


def config_folder() -> Path:
    """Folder of the YAML that comes with dtrain: inside the installed package, else ``conf/`` of the checkout.

    Raises:
        ConfigError: neither exists.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / f"{TRAIN.name}.yaml").is_file():
            return folder
    raise ConfigError(f"no conf/{TRAIN.name}.yaml inside or beside {package}; reinstall dtrain")


@cache
def register_schema() -> None:
    """Registers the schemas in Hydra's ConfigStore, once, as ``PRIMARY_schema`` and ``GROUP_OPTION_schema``."""
    version.setbase("1.3")
    setup_globals()
    Plugins.instance()  # registers Hydra's own sources, which the checked ones replace
    SourcesRegistry.instance().types |= {"file": _Files, "pkg": _Packages}
    store = ConfigStore.instance()
    # Hydra copies its sources, and with them this store, for each run; a node that it takes from the store is a copy
    vars(store)["__deepcopy__"] = lambda memo: store
    groups = [{group: option} for group, option in _HYDRA_GROUPS.items()]
    store.store(group="hydra", name="config", node=HydraConf(defaults=groups), provider="dtrain")
    for primary in PRIMARIES:
        root = _writable(OmegaConf.structured(primary.schema))
        # a group whose options differ in keys starts empty: merging one option over another would keep the other's keys
        for group in GROUP_OPTIONS.keys() & root.keys():
            root._set_item_impl(group, DictConfig(MISSING, ref_type=Any))
        store.store(name=f"{primary.name}_schema", node=root, provider="dtrain")
        if primary.defaults is not None:
            store.store(name=primary.name, node=_composition(primary), provider="dtrain")
    for group, options in GROUP_OPTIONS.items():
        for option, schema in options.items():
            node = _writable(OmegaConf.structured(schema))
            store.store(name=f"{group}_{option}_schema", node=node, provider="dtrain")


def _composition(primary: Primary[Any]) -> DictConfig:
    """Returns what a file of a command in ``conf/`` would say: its defaults list, and values of keys."""
    defaults = primary.defaults or {}
    groups = [{key: value} for key, value in defaults.items() if "." not in key]
    values = OmegaConf.create({"defaults": [f"{primary.name}_schema", *groups, "_self_"]})
    OmegaConf.update(values, "hydra.job.name", primary.command.split()[0])
    for key, value in defaults.items():
        if "." in key:
            OmegaConf.update(values, key, value)
    return values


def _writable(node: DictConfig) -> DictConfig:
    """Clears the read-only flag that OmegaConf sets for a frozen dataclass, because merging would fail on it.

    Mappings take any key, without a '+' before them.
    """
    node._set_flag("readonly", None)
    if OmegaConf.get_type(node) is dict:
        node._set_flag("struct", False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _writable(child)
    return node


class _SizeCheck:
    """Part of a source of YAML: its files are checked before OmegaConf copies what each alias stands for."""

    def load_config(self, config_path: str) -> ConfigResult:
        source: Any = self
        name = source._normalize_file_name(config_path)
        file = resources.files(source.path) if source.scheme() == "pkg" else Path(source.path)
        file = file.joinpath(*name.split("/"))
        if file.is_file():
            with suppress(yaml.YAMLError):  # which Hydra reports
                check_size(file.read_text(encoding="utf-8"), file)
        return super().load_config(config_path)  # type: ignore[misc,no-any-return]


class _Files(_SizeCheck, FileConfigSource): ...


class _Packages(_SizeCheck, ImportlibResourcesConfigSource): ...


def open_loader(config_path: str | None = None, config_dir: str | None = None) -> ConfigLoaderImpl:
    """Returns Hydra's loader over dtrain's YAML (or ``config_path`` instead) and the user's ``config_dir``.

    Raises:
        ConfigError: one of the two is not a folder.
    """
    register_schema()
    for option, given in (("--config-path", config_path), ("--config-dir", config_dir)):
        if given is not None and not Path(given).is_dir():
            raise ConfigError(f"{option} {given} is not a folder")
    search_path = create_config_search_path(str(Path(config_path).resolve() if config_path else config_folder()))
    if config_dir is not None:
        folder = f"file://{Path(config_dir).resolve()}"
        search_path.prepend("command-line", folder, SearchPathQuery(provider="schema"))
    return ConfigLoaderImpl(config_search_path=search_path)


def load(loader: ConfigLoaderImpl, primary: Primary[Root], config_name: str, overrides: Sequence[str]) -> Root:
    """Composes one run as the frozen records of the schema, each of which checks itself.

    Raises:
        HydraException, OmegaConfBaseException, ValueError, OSError: wrong YAML or overrides; see ``explain``.
        ConfigError: the primary YAML does not build on the schema, an added key is unknown to it, or a record refuses a
            value.
    """
    composed = loader.load_configuration(config_name, replacing(overrides, primary), run_mode=RunMode.RUN)
    HydraConfig.instance().set_config(composed)  # for interpolations such as ${hydra:runtime.cwd}
    if OmegaConf.get_type(composed) is not primary.schema:
        raise ConfigError(f"{config_name}.yaml lacks the schema; begin its defaults list with '{primary.name}'")
    OmegaConf.set_struct(composed, False)
    composed.pop("hydra")
    _check_added_keys(composed, primary)
    values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    config: Root = _build(composed, values)
    return config


def replacing(overrides: Sequence[str], primary: Primary[Any]) -> list[str]:
    """Returns ``overrides`` with which a mapping of sizes by step replaces that of a file; Hydra would unite them."""
    if primary is not TRAIN:
        return list(overrides)
    replaced: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key in BY_STEP_KEYS and value.startswith("{"):
            replaced.append(f"{key}=null")
        replaced.append(override)
    return replaced


def _check_added_keys(node: DictConfig, primary: Primary[Any], prefix: str = "") -> None:
    """Raises for a key that ``+key=value`` has added to a typed node: the frozen record cannot hold it."""
    schema = OmegaConf.get_type(node)
    if not is_dataclass(schema):
        return
    known = {item.name for item in fields(schema)}
    for key in map(str, node):
        if key not in known:
            raise ConfigError(unknown_key(f"{prefix}{key}", schema, primary))
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not (child._is_missing() or child._is_none() or child._is_interpolation()):
            _check_added_keys(child, primary, f"{prefix}{key}.")


def _build(node: DictConfig, values: Any, prefix: str = "") -> Any:
    """Returns the record of a typed node, with the records inside it; ``prefix`` is the node's key and a dot."""
    record: Any = OmegaConf.get_type(node)
    _check_option(record, values, prefix)
    arguments: dict[str, Any] = {}
    for item in fields(record):
        value = values[item.name]
        if is_dataclass(item.default_factory):
            value = _build(node[item.name], value, f"{prefix}{item.name}.")
        elif isinstance(value, dict):
            value = {str(key): entry for key, entry in value.items()}  # YAML reads the module name `0` as a number
        arguments[item.name] = _as_numbers(value) if f"{prefix}{item.name}" in BY_STEP_KEYS else value
    try:
        return record(**arguments)
    except ConfigError as error:
        raise in_keys(error, record, prefix) from None


def _as_numbers(value: Any) -> Any:
    """Reads texts as whole numbers, such as that of ``${oc.env:SIZE}``, as OmegaConf does for keys of one type."""
    if isinstance(value, dict):
        return {key: _as_numbers(entry) for key, entry in value.items()}
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _check_option(record: type[Any], values: Any, prefix: str) -> None:
    group, name = prefix.rstrip("."), values.get("name")
    options = GROUP_OPTIONS.get(group, {})
    if options and options.get(name) is not record:
        hint = nearest(f"{group}={name}", [f"{group}={option}" for option in options])
        raise ConfigError(f"{group}.name={name} does not choose an option; use {group}=OPTION{hint}")

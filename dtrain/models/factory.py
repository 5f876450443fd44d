"""Builds the model that ``model.factory`` names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dtrain.config.schema import FACTORY_FORM, ModelConfig
from dtrain.errors import ConfigError, nearest


def vocabulary(config: ModelConfig, data_vocab_size: int) -> int:
    """The number of tokens that the model knows: ``config.vocab_size``, or the data's where that is null.

    Raises:
        ConfigError: fewer than the data has, whose larger tokens would have no embedding.
    """
    if config.vocab_size is None:
        return data_vocab_size
    if config.vocab_size < data_vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.vocab_size} is smaller than the data's vocabulary of {data_vocab_size} tokens; "
            f"make it {data_vocab_size} or more, or null"
        )
    return config.vocab_size


def build_model(config: ModelConfig, vocab_size: int, seed: int) -> nn.Module:
    """Calls ``config.factory(config, vocab_size)`` with torch's generators seeded by ``seed``.

    ``vocab_size`` is the data's; the factory gets that of :func:`vocabulary`.
    The CPU generator is restored afterwards. The factory is code, so it may only come from the user's own command line
    or configuration, never from a checkpoint. Its module may lie in the working directory.

    Raises:
        ConfigError: the factory is not of the form ``package.module:function``, cannot be imported, does not exist, or
            does not return an ``nn.Module``; or as :func:`vocabulary`. What the factory itself raises is passed on.
    """
    factory = _load(config.factory)
    vocab_size = vocabulary(config, vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = factory(config, vocab_size)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.factory={config.factory} returned a {type(model).__name__}; expected a torch nn.Module"
        )
    return model


def _load(factory: str) -> Callable[[ModelConfig, int], Any]:
    if not FACTORY_FORM.fullmatch(factory):
        raise ConfigError(f"model.factory={factory} is not of the form package.module:function")
    module_name, name = factory.split(":")
    module = _import(module_name, factory)
    function = getattr(module, name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"model.factory={factory}: module {module_name} has no {name}{nearest(name, known)}")
    if not callable(function):
        raise ConfigError(f"model.factory={factory} is of type {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def _import(module_name: str, factory: str) -> ModuleType:
    if not module_name.startswith("dtrain."):
        # as `python -m` does; a console script leaves the working directory out. It stays, for later imports
        cwd = os.getcwd()
        if cwd not in sys.path and "" not in sys.path:
            sys.path.insert(0, cwd)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"model.factory={factory}: no module named {error.name} on the Python path or in {os.getcwd()}"
            ) from error
        raise ConfigError(f"model.factory={factory}: importing {module_name} failed: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"model.factory={factory}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error

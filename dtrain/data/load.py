"""Opens the data set that a run's configuration names."""

from __future__ import annotations

from collections.abc import Callable

from dtrain.config.data import (
    ArraysDataConfig,
    ChatDataConfig,
    DataConfig,
    FriedmanDataConfig,
    GlyphsDataConfig,
    ImagesDataConfig,
    StdlibDataConfig,
    TextDataConfig,
    TokensDataConfig,
)
from dtrain.data.chat import load_chat
from dtrain.data.dataset import Dataset
from dtrain.data.text import load_text
from dtrain.data.tokens import load_tokens
from dtrain.errors import ConfigError


def load_dataset(config: DataConfig, seq_len: int, on_progress: Callable[[], None] = lambda: None) -> Dataset:
    """Opens the data of ``config`` as samples of ``seq_len`` tokens.

    Args:
        on_progress: called now and then while files are listed, read or tokenized, which may take long.

    Raises:
        ConfigError: the files are missing, unreadable or damaged, or give no training or no validation sample.
    """
    if isinstance(config, (StdlibDataConfig, TextDataConfig)):
        return load_text(config, seq_len)
    if isinstance(config, TokensDataConfig):
        return load_tokens(config, seq_len)
    if isinstance(config, ChatDataConfig):
        return load_chat(config, seq_len, on_progress)
    if isinstance(config, (ImagesDataConfig, GlyphsDataConfig)):
        from dtrain.data.images import load_images

        return load_images(config, on_progress)
    if isinstance(config, (ArraysDataConfig, FriedmanDataConfig)):
        from dtrain.data.arrays import load_arrays

        return load_arrays(config, on_progress)
    raise ConfigError(f"data={config.name} is no source of data")

"""Opens the data set that a run's configuration names."""

from __future__ import annotations

from dtrain.config.data import ChatDataConfig, DataConfig, StdlibDataConfig, TextDataConfig, TokensDataConfig
from dtrain.data.chat import load_chat
from dtrain.data.dataset import Dataset
from dtrain.data.text import load_text
from dtrain.data.tokens import load_tokens
from dtrain.errors import ConfigError


def load_dataset(config: DataConfig, seq_len: int) -> Dataset:
    """Opens the data of ``config`` as samples of ``seq_len`` tokens.

    Raises:
        ConfigError: the files are missing, unreadable or damaged, or give no training or no validation sample.
    """
    if isinstance(config, (StdlibDataConfig, TextDataConfig)):
        return load_text(config, seq_len)
    if isinstance(config, TokensDataConfig):
        return load_tokens(config, seq_len)
    if isinstance(config, ChatDataConfig):
        return load_chat(config, seq_len)
    raise ConfigError(f"data={config.name} is no source of data")

"""Builds the model that ``model.factory`` names, and counts the FLOPs of the built-in ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dtrain.config.imports import load_named
from dtrain.config.model import DEFAULT_FACTORY, GPT2_FACTORY, HF_FACTORY, HF_IMAGES_FACTORY, ModelConfig
from dtrain.errors import ConfigError
from dtrain.models import hf
from dtrain.models.attention import AttentionShape
from dtrain.models.gpt2 import ffn_dim
from dtrain.models.images import hf as images_hf
from dtrain.models.loss_head import check_loss_keys
from dtrain.models.task_model import TaskModel
from dtrain.models.transformer import Dims
from dtrain.tasks import Language, Task


def vocabulary(config: ModelConfig, task: Task | int) -> int:
    """Returns the model's vocabulary size: ``config.vocab_size``, or the data's if that is null; with model=hf its own.

    Args:
        task: of the data, whose outputs they are if it is no language; a number is the vocabulary of the data.

    Raises:
        ConfigError: it is smaller than the data's, so that some tokens would have no embedding; or the folder of
            model=hf holds no model that can be trained.
    """
    data_vocab_size = task if isinstance(task, int) else task.num_outputs
    if isinstance(task, Task) and not isinstance(task, Language):
        return data_vocab_size
    if config.factory == HF_FACTORY:
        return _hf_vocabulary(config, data_vocab_size)
    if config.vocab_size is None:
        return data_vocab_size
    if config.vocab_size < data_vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.vocab_size} is smaller than the data's vocabulary of {data_vocab_size} tokens; "
            f"make it {data_vocab_size} or more, or null"
        )
    return config.vocab_size


def check_model(config: ModelConfig) -> None:
    """Runs the checks of a folder that need no weights, for which transformers is imported; other models have none.

    Raises:
        ConfigError: the folder holds no model that can be trained, or a target of the adapters is none of its Linears.
    """
    if config.factory == HF_FACTORY:
        hf.check_model(config)
    elif config.factory == HF_IMAGES_FACTORY and config.path is not None:
        images_hf.check_model(config)


def _hf_vocabulary(config: ModelConfig, data_vocab_size: int) -> int:
    size = hf.vocabulary_size(config)
    if config.vocab_size not in (None, size):
        raise ConfigError(
            f"model.vocab_size={config.vocab_size} and the vocabulary of model.path={config.path} of {size} tokens "
            "differ; make it null, or replace it by model.args={vocab_size: ...} with model.weights=random"
        )
    if size < data_vocab_size:
        raise ConfigError(
            f"the vocabulary of model.path={config.path} has {size} tokens, fewer than the data's {data_vocab_size}; "
            "tokenize the data with the model's own tokenizer"
        )
    return size


def build_model(config: ModelConfig, task: Task | int, seed: int) -> nn.Module:
    """Calls the factory of ``config`` with torch's generators seeded by ``seed``.

    A factory of a language model is called with ``(config, vocab_size)``, and its model computes its own loss; all
    others are called with ``(config, task)``, and their model becomes that of a ``TaskModel``.

    The CPU generator is restored afterwards. The factory is code, so it may only come from the user's own command line
    or configuration, never from a checkpoint. Its module may be in the working directory.

    Args:
        task: of the data. A number is the vocabulary of a language model, of which the factory gets the result of
            ``vocabulary``.

    Raises:
        ConfigError: the factory cannot be imported, does not exist, or
            does not return an ``nn.Module``; the model ignores keys of the loss that are set; or as
            ``vocabulary``. Exceptions of the factory itself propagate.
    """
    factory = _load(config.factory)
    argument = vocabulary(config, task) if isinstance(task, (Language, int)) else task
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = factory(config, argument)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.factory={config.factory} returned a {type(model).__name__}; expected a torch nn.Module"
        )
    if isinstance(argument, Task):
        return TaskModel.of(model, argument, config)
    check_loss_keys(config, model)
    return model


def attention_shape(config: ModelConfig) -> AttentionShape | None:
    """Returns the attention of a built-in language model, or of one of transformers; None: it is not known."""
    if config.factory == HF_FACTORY:
        return hf.attention_shape(config)
    if config.factory not in (DEFAULT_FACTORY, GPT2_FACTORY):
        return None
    kv_heads = config.num_kv_heads if config.factory == DEFAULT_FACTORY else None
    head_dim = config.hidden_dim // config.num_heads
    return AttentionShape(config.num_heads, kv_heads or config.num_heads, head_dim, config.dropout)


def train_flops_per_token(config: ModelConfig, vocab_size: int, context: float) -> tuple[int, int] | None:
    """Returns the model FLOPs of one forward and backward per trained token, or None if they are not known.

    The first number counts attention by its causal half, the second one all of it, as PaLM does.

    They are not for a user factory and for a mixture of experts.

    This is the numerator of MFU. It follows PaLM (Chowdhery et al., 2022, appendix B): a multiply-add is two FLOPs and
    the backward costs twice the forward, so each matmul parameter counts 6; attention's two matmuls over the context
    are added (12 x layers x heads x head dimension x ``context``, or half of it). The output head counts. The embedding
    look-up, norms, biases, positions, softmax, the padding of the vocabulary and recomputation do not.

    Args:
        context: mean over tokens of the length of their sequence, or of their document if documents share one.
    """
    if config.factory == HF_FACTORY:
        return hf.train_flops_per_token(config, context)
    hidden = config.hidden_dim
    if config.factory == DEFAULT_FACTORY:
        dims = Dims.of(config)
        layer = hidden * (2 * hidden + 2 * dims.num_kv_heads * dims.head) + 3 * hidden * dims.ffn
    elif config.factory == GPT2_FACTORY:
        layer = 4 * hidden * hidden + 2 * hidden * ffn_dim(config)
    else:
        return None
    matmuls = 6 * (config.num_layers * layer + hidden * vocabulary(config, vocab_size))
    attention = 6 * config.num_layers * hidden * context
    return matmuls + round(attention), matmuls + round(2 * attention)


def _load(factory: str) -> Callable[[ModelConfig, Any], Any]:
    function = load_named(factory, "model.factory")
    if not callable(function):
        raise ConfigError(f"model.factory={factory} is of type {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]

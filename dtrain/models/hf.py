"""Causal language models of transformers, from a local folder: ``model=hf``.

No code of the folder runs, no pickle is read, and nothing is fetched. The functions that need transformers import it,
which takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.checkpoint.huggingface.folder import CONFIG, HFFolder, read_config
from dtrain.checkpoint.huggingface.same_model import replaced
from dtrain.config.model import ModelConfig
from dtrain.distributed.logging import logger
from dtrain.errors import CheckpointError, ConfigError, nearest, one_line
from dtrain.models.adapters import add_adapters
from dtrain.models.attention import AttentionShape
from dtrain.models.causal_lm import ModelOutput
from dtrain.models.hf_forwards import (
    keeps_documents_apart,
    logits_needed_reason,
    output_layer_name,
    takes_positions,
    text_config,
)
from dtrain.models.loss_head import LossHead

_ADAPTER = "adapter_config.json"
_TIMM = "timm_wrapper"


class HFCausalLM(nn.Module):
    """A causal language model of transformers with the interface of the built-in models.

    Attributes:
        hf: the model of transformers. Its parameters are called ``hf.`` and transformers' name.
        keeps_documents_apart: whether tokens of a document that ``positions`` mark see no other document.
        loss_head: computes the loss.
    """

    uses_loss_keys = True

    def __init__(self, hf: Any, loss_head: LossHead, *, keeps_documents_apart: bool) -> None:
        super().__init__()
        self.hf = hf
        self.loss_head = loss_head
        self.keeps_documents_apart = keeps_documents_apart

    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> ModelOutput:
        """Predicts the next token at each position.

        Args:
            tokens: int64 [B, T].
            targets: int64 [B, T], the tokens one position ahead; ``IGNORE_INDEX`` (-100) is left out of the loss.
            positions: int64 [B, T], from 0 in each document, which then sees no other; None: one document a row.

        Raises:
            ConfigError: as ``check_positions``, or as ``LossHead.is_chunked``.
        """
        inputs = {"input_ids": tokens}
        if positions is not None:
            self.check_positions()
            # without an attention mask and a cache, transformers finds the documents in the positions
            inputs["position_ids"] = positions
        head = self.hf.get_output_embeddings()
        if targets is not None and self.training and self.loss_head.is_chunked(head, targets):
            hidden = self.hf.base_model(**inputs, use_cache=False)[0]
            return self.loss_head.chunked(head, hidden, targets)
        logits = self.hf(**inputs, use_cache=False).logits
        return self.loss_head.output(logits, targets, training=self.training)

    def check_positions(self) -> None:
        """Raises ``ConfigError`` if the model cannot keep the documents apart that ``positions`` mark."""
        if not self.keeps_documents_apart:
            raise ConfigError(
                f"model_type {text_config(self.hf).model_type} cannot keep packed documents apart: a token of one "
                "changes the logits of another; train it on data=tokens data.documents=cross"
            )


def build(config: ModelConfig, vocab_size: int) -> HFCausalLM:
    """Builds the model of ``config.path`` in FP32, whatever its files hold; on ``meta`` without reading weights.

    With ``config.lora`` its weights are frozen, and adapters are trained beside them. Two forwards of six tokens show
    that the model is causal, and whether it keeps packed documents apart; on ``meta`` it does if it takes positions.

    The auxiliary loss of a mixture of experts is off: the loss is the cross entropy alone.

    Args:
        vocab_size: as ``vocabulary_size`` returns it.

    Raises:
        ConfigError: transformers is missing, or the folder holds no model that can be trained.
    """
    hf_config = read_hf_config(config)
    model_class = import_transformers().MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    attention = "sdpa" if model_class._supports_sdpa else "eager"
    options = {"dtype": torch.float32, "attn_implementation": attention}
    is_meta = torch.empty(0).is_meta
    with quiet():
        try:
            if config.weights == "random" or is_meta:
                model = model_class._from_config(hf_config, **options)
            else:
                model = load_weights(model_class, hf_config, str(config.path), options)
            keeps_apart = takes_positions(model) if is_meta else keeps_documents_apart(model)
            loss_head = _loss_head(config, model, vocab_size)
        except ConfigError:
            raise
        except Exception as error:  # the class decides what it raises for values and weights that do not fit
            raise ConfigError(
                f"model.path={config.path}: transformers cannot build the model: {one_line(error)}"
            ) from error
    if config.lora.r:
        add_adapters(model, config.lora)
    return HFCausalLM(model, loss_head, keeps_documents_apart=keeps_apart)


def _loss_head(config: ModelConfig, hf: Any, vocab_size: int) -> LossHead:
    """Returns how the loss is computed.

    Raises:
        ConfigError: by a number of rows, but the model needs its logits.
    """
    loss_head = LossHead.of(config, vocab_size)
    if config.loss_chunk == "none":
        return loss_head
    name = f"hf.{output_layer_name(hf, hf.get_output_embeddings())}"
    loss_head = replace(loss_head, name=name, unsupported_reason=logits_needed_reason(hf))
    loss_head.check_supported()
    return loss_head


def load_weights(
    model_class: Any, hf_config: Any, path: str, options: dict[str, Any], *, draws_head: bool = False
) -> Any:
    """Returns a model with the weights of the folder ``path``.

    Args:
        model_class: of transformers.
        hf_config: configuration of the model.
        path: a folder that ``check_folder`` has accepted.
        options: further arguments of ``from_pretrained``.
        draws_head: whether weights outside of the base model may be drawn at random, if the folder has none that fit.

    Raises:
        ConfigError: the files lack other weights, or hold them in another shape.
    """
    model, info = model_class.from_pretrained(
        path,
        config=hf_config,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # else transformers refuses with a report in its log
        **options,
    )
    head: list[str] = []
    for problem, found in (("lack", info["missing_keys"]), ("have another shape for", info["mismatched_keys"])):
        names = sorted(entry if isinstance(entry, str) else entry[0] for entry in found)
        others = [name for name in names if not draws_head or name.startswith(f"{model.base_model_prefix}.")]
        if others:  # transformers would draw these at random
            raise ConfigError(
                f"model.path={path}: its weights {problem} {others[0]!r} (in all {len(others)}) of "
                f"{model_class.__name__}; give the folder of the whole model, or model.weights=random"
            )
        head += names
    if head:
        logger.info("model.path=%s: the head is new, drawn at random: %s", path, ", ".join(sorted(head)))
    if unused := info["unexpected_keys"]:
        logger.info(
            "model.path=%s: %s has no place for %d tensors of the files, such as '%s'; they are left out, also "
            "of an export",
            *(path, model_class.__name__, len(unused), min(unused)),
        )
    return model


def read_hf_config(config: ModelConfig) -> Any:
    """Returns the configuration of transformers for ``model=hf``, with ``config.args`` in it, after all checks.

    Raises:
        ConfigError: transformers is missing, or the folder holds no model that can be trained.
    """
    hf_config = make_config(check_folder(config), config.args, f"model.path={config.path}")
    transformers, kind = import_transformers(), hf_config.model_type
    if type(hf_config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"model.path={config.path}: model_type {kind} is no causal language model")
    if (text := hf_config.get_text_config()) is not hf_config:
        model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
        if getattr(model_class, "config_class", None) is type(text):  # the text half of a model of images and text
            hf_config = text
    limit = getattr(text, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < config.max_seq_len:  # negative: no limit
        raise ConfigError(
            f"model.max_seq_len={config.max_seq_len} is more than the {limit} positions of the model "
            f"(max_position_embeddings); make it {limit} or less"
        )
    if getattr(hf_config, "output_router_logits", False):
        hf_config.output_router_logits = False
    return hf_config


def make_config(values: Mapping[str, Any], args: Mapping[str, Any], source: str) -> Any:
    """Returns the configuration of transformers with entries ``values``, and ``args`` in it.

    Args:
        values: what ``config.json`` holds.
        args: entries that replace some of it.
        source: setting that ``values`` come from, for messages.

    Raises:
        ConfigError: transformers has no such model, or no such entry, or does not accept one.
    """
    transformers = import_transformers()
    kind = values.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        code = " its own Python files would run, and dtrain runs none;" if "auto_map" in values else ""
        raise ConfigError(
            f"{source}: transformers {transformers.__version__} has no model_type {kind!r:.80};{code} "
            "take a model that transformers contains"
        )
    if kind == _TIMM:
        raise ConfigError(f"{source}: model_type {kind} is a model of timm, which may fetch or unpickle; take another")
    config_class = transformers.CONFIG_MAPPING[kind]
    with quiet():
        try:
            aliases, known = config_class.attribute_map, {*config_class().to_dict(), *values}
            for key in args:
                if key in aliases:
                    raise ConfigError(f"model.args.{key} is called {aliases[key]} in the config.json of {kind}")
                if key not in known:
                    raise ConfigError(f"model.args.{key} is no entry of the config.json of {kind}{nearest(key, known)}")
            return config_class.from_dict(replaced(values, args))
        except ConfigError:
            raise
        except Exception as error:  # the class decides what it raises for a bad value
            raise ConfigError(f"{source}: {CONFIG} is not valid: {one_line(error)}") from error


def check_folder(config: ModelConfig) -> dict[str, Any]:
    """Returns ``config.json`` of ``config.path`` after the checks that need no import of transformers.

    Raises:
        ConfigError: transformers is not installed, there is no such folder or file, or the weights are quantized or an
            adapter.
    """
    check_installed(config)
    path = Path(str(config.path))
    try:
        values = read_config(path)
        if not (path / _ADAPTER).exists() and config.weights == "load":
            HFFolder(path)  # reads the headers of all its files
    except CheckpointError as error:
        raise ConfigError(f"model.path={config.path}: {error}") from error
    if (path / _ADAPTER).exists():
        raise ConfigError(
            f"model.path={config.path} holds an adapter ({_ADAPTER}); give the folder of its base model, or merge both"
        )
    if values.get("quantization_config") is not None:
        raise ConfigError(
            f"model.path={config.path}: its weights are quantized (quantization_config), and training needs the "
            "unrounded ones; give the folder of the model before quantization"
        )
    return values


def check_installed(config: ModelConfig) -> None:
    """Raises ``ConfigError`` if transformers is not installed, without importing it."""
    if find_spec("transformers") is None:
        raise ConfigError(f"model={config.name} needs transformers, which is not installed; pip install 'dtrain[hf]'")


def check_model(config: ModelConfig) -> None:
    """Builds the model on ``meta``, with its adapters; raises as ``build``."""
    with torch.device("meta"):
        build(config, 0)


def vocabulary_size(config: ModelConfig) -> int:
    """Returns the vocabulary of the model of ``config.path``."""
    size: int = read_hf_config(config).get_text_config().vocab_size
    return size


def attention_shape(config: ModelConfig) -> AttentionShape | None:
    """Returns the attention as ``dtrain.models.factory.attention_shape``; None: it may have a mask, or no fused kernel.

    Models call the dropout of attention by several names; without one that says so, the largest dropout counts.
    """
    hf_config = read_hf_config(config)
    text = hf_config.get_text_config()
    model_class = import_transformers().MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    heads, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    # with v_head_dim values have other dimensions than keys; some models have a number of heads for each layer
    has_mask = getattr(text, "sliding_window", None) or hasattr(text, "v_head_dim") or not model_class._supports_sdpa
    if has_mask or not isinstance(heads, int) or not isinstance(hidden, int):
        return None
    head_dim, kv_heads = getattr(text, "head_dim", None), getattr(text, "num_key_value_heads", None)
    named = {name: x for name, x in text.to_dict().items() if "drop" in name and isinstance(x, (int, float))}
    dropouts = {name: x for name, x in named.items() if "att" in name} or named
    return AttentionShape(heads, kv_heads or heads, head_dim or hidden // heads, max([0.0, *dropouts.values()]))


def train_flops_per_token(config: ModelConfig, context: float) -> tuple[int, int] | None:
    """Returns the FLOPs as ``dtrain.models.factory.train_flops_per_token``.

    None: a mixture of experts, or a model without attention heads.
    """
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        model = build(config, 0)
    text = text_config(model.hf)
    if any(p.dim() > 2 for p in model.parameters()) or not hasattr(text, "num_attention_heads"):
        return None
    products = {id(m.weight): m.weight for m in model.modules() if isinstance(m, (nn.Linear, Conv1D))}
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    attention: float = text.num_hidden_layers * text.num_attention_heads * head_dim * context
    # a frozen weight has no gradient: two products instead of three
    matmuls = sum((6 if weight.requires_grad else 4) * math.prod(weight.shape) for weight in products.values())
    return matmuls + round(6 * attention), matmuls + round(12 * attention)


@cache
def import_transformers() -> Any:
    """Imports transformers; raises ``ConfigError`` if that fails."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"transformers is needed, but its import failed: {one_line(error)}; pip install 'dtrain[hf]'"
        ) from error
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Context without the progress bars and warnings of transformers; its errors are raised."""
    from transformers.utils import logging

    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()

"""Conversion between dtrain's ``model.*`` keys and Hugging Face's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from dtrain.checkpoint.huggingface.task_model import task_of
from dtrain.config.model import DEFAULT_FACTORY, GPT2_FACTORY, LANGUAGE_FACTORIES, ModelConfig
from dtrain.errors import CheckpointError, nearest

_ROPE_THETA = 10000.0
_LARGEST = 1e300


def model_values(state: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns the keys of the model in a checkpoint's state; raises ``CheckpointError`` if it is not exportable."""
    config = state.get("config")
    values = config.get("model") if isinstance(config, Mapping) else None
    if not isinstance(values, Mapping) or "factory" not in values:
        raise CheckpointError(
            f"{where} does not name its model: it was saved without the configuration of a run; export supports "
            "checkpoints of dtrain train, or of engine.save(..., config={'model': ...}) with its keys"
        )
    known = {item.name for item in fields(ModelConfig)}
    for name in values:
        if name not in known:
            raise CheckpointError(f"{where}: the model has the unknown key {name!r}{nearest(name, known)}")
    if values["factory"] not in LANGUAGE_FACTORIES and task_of(state) is None:
        raise CheckpointError(
            f"{where}: model.factory={values['factory']} cannot be exported; supported are {DEFAULT_FACTORY} (as "
            f"Llama), {GPT2_FACTORY} (as GPT-2), model=hf, and models that dtrain train trained on images or numbers. "
            "Read the masters of another model from its safetensors files"
        )
    return values


def built_in_model(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns the model of dtrain's own factories with these keys; raises ``CheckpointError`` for bad values."""
    model = _Values(values, f"{where}: model")
    if model.values.get("vocab_size") is None:
        raise CheckpointError(
            f"{where} does not state its vocabulary size (model.vocab_size), only the padded one; one more step of "
            "dtrain train from it saves a checkpoint that does"
        )
    return ModelConfig(
        name=str(values.get("name")),
        factory=str(values["factory"]),
        num_layers=model.count("num_layers"),
        hidden_dim=model.count("hidden_dim"),
        num_heads=model.count("num_heads"),
        num_kv_heads=model.count_or_none("num_kv_heads"),
        ffn_dim=model.count_or_none("ffn_dim"),
        max_seq_len=model.count("max_seq_len"),
        vocab_size=model.count("vocab_size"),
        tie_embeddings=model.flag("tie_embeddings"),
        dropout=model.number("dropout"),
        rope_theta=model.number("rope_theta"),
        norm_eps=model.number("norm_eps"),
    )


def to_hf(model: ModelConfig) -> dict[str, Any]:
    """Returns the ``config.json``, without its dtype, of a model of dtrain's own factories, whose ``ffn_dim`` is set.

    The tokens for begin and end stay null, because the tokenizer defines them.
    """
    common: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if model.factory == GPT2_FACTORY:
        return common | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": model.hidden_dim,
            "n_layer": model.num_layers,
            "n_head": model.num_heads,
            "n_inner": model.ffn_dim,
            "n_positions": model.max_seq_len,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": model.norm_eps,
            "embd_pdrop": model.dropout,
            "attn_pdrop": model.dropout,
            "resid_pdrop": model.dropout,
        }
    return common | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads or model.num_heads,
        "max_position_embeddings": model.max_seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": model.dropout,
    }


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the model of a ``config.json``; every key that changes the computation is either read or refused."""
    values = _Values(config, "config.json")
    readers = {"llama": _from_llama, "gpt2": _from_gpt2}
    kind = config.get("model_type")
    if kind not in readers:
        raise CheckpointError(
            f"config.json: model_type {kind!r:.80} cannot be imported; supported are llama (LlamaForCausalLM) and gpt2 "
            "(GPT2LMHeadModel)"
        )
    return readers[kind](values)


def _from_llama(values: _Values) -> ModelConfig:
    values.require("hidden_act", "silu")
    values.require("attention_bias", False)
    values.require("mlp_bias", False)
    values.require("sliding_window", None)
    values.require("pretraining_tp", 1)
    values.require("quantization_config", None)
    hidden, heads = values.count("hidden_size"), values.count("num_attention_heads")
    kv_heads = values.count("num_key_value_heads", heads)
    if hidden % heads or hidden // heads % 2 or heads % kv_heads:
        raise CheckpointError(
            f"config.json: hidden_size {hidden}, num_attention_heads {heads} and num_key_value_heads {kv_heads} do not "
            "fit together (the head size must be even, and the heads a multiple of the key-value heads)"
        )
    values.require("head_dim", hidden // heads)
    return ModelConfig(
        name="llama",
        factory=DEFAULT_FACTORY,
        num_layers=values.count("num_hidden_layers"),
        hidden_dim=hidden,
        num_heads=heads,
        num_kv_heads=None if kv_heads == heads else kv_heads,
        ffn_dim=values.count("intermediate_size"),
        max_seq_len=values.count("max_position_embeddings", 2048),
        vocab_size=values.count("vocab_size"),
        tie_embeddings=values.flag("tie_word_embeddings", False),
        rope_theta=_rope_theta(values),
        norm_eps=values.number("rms_norm_eps", 1e-6),
    )


def _rope_theta(values: _Values) -> float:
    """Reads ``rope_theta`` with ``rope_scaling``, or ``rope_parameters`` (transformers 5 and later)."""
    scaling = values.values.get("rope_scaling")
    parameters = values.values.get("rope_parameters")
    for name, rope in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, Mapping) else rope
        if kind not in (None, "default"):
            raise CheckpointError(
                f"config.json: {name} {rope!r:.120} cannot be imported: dtrain's transformer has plain rotary "
                "positions only"
            )
    own = _Values(parameters, "config.json: rope_parameters") if isinstance(parameters, Mapping) else values
    own.require("partial_rotary_factor", 1.0)
    return own.number("rope_theta", values.number("rope_theta", _ROPE_THETA))


def _from_gpt2(values: _Values) -> ModelConfig:
    if values.values.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        values.require("activation_function", "gelu_new")
    values.require("scale_attn_weights", True)
    values.require("scale_attn_by_inverse_layer_idx", False)
    values.require("add_cross_attention", False)
    values.require("quantization_config", None)
    hidden, heads = values.count("n_embd"), values.count("n_head")
    if hidden % heads:
        raise CheckpointError(f"config.json: n_embd {hidden} is not a multiple of n_head {heads}")
    return ModelConfig(
        name="gpt2",
        factory=GPT2_FACTORY,
        num_layers=values.count("n_layer"),
        hidden_dim=hidden,
        num_heads=heads,
        ffn_dim=values.count_or_none("n_inner") or 4 * hidden,
        max_seq_len=values.count("n_positions"),
        vocab_size=values.count("vocab_size"),
        tie_embeddings=values.flag("tie_word_embeddings", True),
        norm_eps=values.number("layer_norm_epsilon", 1e-5),
    )


class _Values:
    """An untrusted JSON object whose values are checked when they are read; null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self._where = where

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int or not 1 <= value < 1 << 40:
            raise self._bad(key, value, "an integer of at least 1")
        return value

    def count_or_none(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.count(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LARGEST:
            raise self._bad(key, value, "a number of at least 0")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, value, "true or false")
        return value

    def require(self, key: str, expected: object) -> None:
        """Raises unless the value is absent or the one that dtrain's models implement."""
        value = self.values.get(key)
        if value is not None and (value != expected or isinstance(value, bool) != isinstance(expected, bool)):
            raise CheckpointError(
                f"{self._where}: {key} {value!r:.120} cannot be imported; dtrain's model has {expected!r} there"
            )

    def _bad(self, key: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {key} is {value!r:.120}, expected {expected}")

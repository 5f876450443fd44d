"""The keys of a model: sizes of the built-in ones, a folder of transformers with adapters, or your own factory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from dtrain.config.blocks import Blocks
from dtrain.config.fields import (
    CheckedRecord,
    above,
    at_least,
    between,
    default_of,
    group,
    one_of,
    setting,
    similar,
    written,
)
from dtrain.config.imports import NAMED
from dtrain.errors import ConfigError

DEFAULT_FACTORY = "dtrain.models.transformer:build"
GPT2_FACTORY = "dtrain.models.gpt2:build"
HF_FACTORY = "dtrain.models.hf:build"
CONVNET_FACTORY = "dtrain.models.images.convnet:build"
HF_IMAGES_FACTORY = "dtrain.models.images.hf:build"
DENOISER_FACTORY = "dtrain.models.images.denoiser:build"
MLP_FACTORY = "dtrain.models.mlp:build"
LANGUAGE_FACTORIES = (DEFAULT_FACTORY, GPT2_FACTORY, HF_FACTORY)
"""The factories of models of tokens."""
VOCAB_MULTIPLE = 64
"""Multiple to which the vocabulary of the built-in models is padded."""

_BUILT_IN = (
    "num_layers",
    "hidden_dim",
    "num_heads",
    "num_kv_heads",
    "ffn_dim",
    "dropout",
    "tie_embeddings",
    "rope_theta",
    "norm_eps",
)
"""Keys of the built-in models."""

LOSS_KEYS = ("loss_chunk", "label_smoothing", "z_loss")
"""Keys that a user's own model of tokens must use itself."""

USED_KEYS = {
    CONVNET_FACTORY: ("num_layers", "hidden_dim", "channels_last", "label_smoothing"),
    HF_IMAGES_FACTORY: ("path", "weights", "args", "channels_last", "label_smoothing"),
    DENOISER_FACTORY: ("num_layers", "hidden_dim", "channels_last"),
    MLP_FACTORY: ("num_layers", "hidden_dim", "dropout", "label_smoothing"),
}
"""Keys that the models of images and numbers use."""

_KEYS_OF_ALL = ("name", "factory")

_CHUNKS = "none, auto, or a number of rows"


@dataclass(frozen=True)
class Lora(CheckedRecord):
    """Low-rank adapters (Hu et al., 2021) beside the frozen weights of model=hf. See docs/run/models.md."""

    r: int = at_least(0, 0, "Rank of the adapters; 0: none, all weights are trained.")
    alpha: float = above(16.0, 0.0, "The product of an adapter is multiplied by alpha / r.")
    dropout: float = between(0.0, 0.0, 1.0, "Dropout probability of an adapter's input.")
    targets: list[str] = setting([], "Last names of the Linears that get adapters, such as [q_proj,v_proj].")

    def _check(self) -> None:
        if self.dropout == 1.0:
            raise ConfigError(f"{self._entry('dropout')} would drop every input, so that no adapter learns; lower it")
        if bool(self.r) != bool(self.targets):
            raise ConfigError(
                f"{self._entry('r')} with {self._key('targets')}={written(self.targets)}: adapters need both, such as "
                "model.lora={r: 16, alpha: 32, targets: [q_proj, v_proj]}"
            )


@dataclass(frozen=True)
class ModelKeys(CheckedRecord):
    """The keys of ``ModelConfig`` that say which model is built."""

    name: str = "tiny"
    factory: str = setting(
        DEFAULT_FACTORY,
        "Function that builds the model: package.module:function, called with (config, vocab_size), and for images and "
        "numbers with (config, task).",
    )
    num_layers: int = at_least(
        4, 1, "Transformer blocks; of convnet and denoiser residual blocks of a stage, of mlp hidden layers."
    )
    hidden_dim: int = at_least(
        256, 1, "Width of the residual stream, of the hidden layers, or of the first stage of convnet and denoiser."
    )
    num_heads: int = at_least(4, 1, "Attention heads of a block.")
    num_kv_heads: int | None = at_least(None, 1, "Key-value heads of a block; null: as many as num_heads.")
    ffn_dim: int | None = at_least(
        None, 1, "Width of the feed-forward; null: 8/3 x hidden_dim, rounded up to 64, and 4 x hidden_dim in GPT-2."
    )
    max_seq_len: int = at_least(256, 1, "Tokens in a sequence.")
    vocab_size: int | None = at_least(None, 1, "Vocabulary; null: the data's, otherwise at least that.")
    dropout: float = between(0.0, 0.0, 1.0, "Dropout probability.")
    tie_embeddings: bool = setting(True, "Share one weight between the embedding and the output layer.")
    rope_theta: float = at_least(10000.0, 1.0, "Base of the rotary position embedding.")
    norm_eps: float = at_least(1e-5, 0.0, "Term added to the variance in norms.")
    loss_chunk: Any = setting(
        "none",
        "Compute output layer and loss of training for this many tokens at a time, without logits of the whole batch; "
        "auto: if that pays, with a twentieth of their memory; none: from full logits.",
        kind=str | int,
        what=_CHUNKS,
    )
    label_smoothing: float = between(
        0.0, 0.0, 1.0, "Share of the target that is spread over all tokens or classes, in training."
    )
    z_loss: float = at_least(
        0.0, 0.0, "Coefficient of the mean squared logarithm of the softmax's denominator in the loss of training."
    )
    channels_last: Any = setting(
        "auto",
        "Lay images out with the channels last in memory; auto: where it is faster.",
        choices=("auto", True, False),
    )
    path: str | None = setting(
        None,
        "Folder of a model of transformers: of a causal language model (hf, required), or for images (vit).",
        is_path=True,
    )
    weights: str = one_of("load", "random", doc="hf, vit: load the weights of path, or take its config.json only.")
    lora: Lora = group(Lora)
    args: dict[str, Any] = setting(
        {}, "Free keys for a factory of your own; hf, vit with weights=random: entries of config.json to replace."
    )

    def _check(self) -> None:
        chunk = self.loss_chunk
        if chunk not in ("none", "auto") and (isinstance(chunk, str) or chunk < 1):
            raise ConfigError(f"{self._entry('loss_chunk')} is not {_CHUNKS} from 1{similar(chunk, ('none', 'auto'))}")
        if not NAMED.fullmatch(self.factory):
            raise ConfigError(f"{self._entry('factory')} must be package.module:function, such as {DEFAULT_FACTORY}")
        if self.factory == HF_FACTORY:
            self._check_hf()
            return
        if self.factory in USED_KEYS:
            self._check_used()
            return
        for name in ("path", "weights", "lora"):
            if getattr(self, name) != self._default(name):
                models = "hf; choose it" if name == "lora" else "hf|vit; choose one"
                raise ConfigError(f"{self._key(name)} is for model={models}, or remove the key")
        if self.factory not in (DEFAULT_FACTORY, GPT2_FACTORY):
            return
        if self.args:
            raise ConfigError(
                f"{self._key('args')}.{next(iter(self.args))} is for a {self._key('factory')} of your own; the "
                "built-in one takes none"
            )
        if self.channels_last != self._default("channels_last"):
            raise ConfigError(f"{self._entry('channels_last')} is for models of images; remove it")
        heads = self._entry("num_heads")
        if self.hidden_dim % self.num_heads:
            raise ConfigError(f"{self._entry('hidden_dim')} does not divide by {heads}; each head takes the same share")
        if self.factory == GPT2_FACTORY:
            self._check_gpt2()
            return
        head_dim = self.hidden_dim // self.num_heads
        if head_dim % 2:
            raise ConfigError(
                f"{self._entry('hidden_dim')} / {heads} gives heads of odd dim {head_dim}; rotary position embedding "
                "rotates pairs, so make it even"
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{heads} does not divide by {self._entry('num_kv_heads')}; each key-value head serves the same number "
                "of heads"
            )

    def _default(self, name: str) -> Any:
        return default_of(ModelConfig.__dataclass_fields__[name])

    def _check_hf(self) -> None:
        if not self.path:
            raise ConfigError(
                f"model=hf needs {self._key('path')}, a folder with config.json, such as model.path=/models/qwen3-0.6b"
            )
        for name in (*_BUILT_IN, "channels_last"):
            if getattr(self, name) != self._default(name):
                raise ConfigError(
                    f"{self._entry(name)} is not used with model=hf, whose config.json has the sizes; remove it, or "
                    f"replace entries of config.json by {self._key('args')} with {self._key('weights')}=random"
                )
        if self.args and self.weights == "load":
            raise ConfigError(
                f"{self._key('args')}.{next(iter(self.args))} replaces an entry of config.json, so the stored weights "
                f"may not fit; it needs {self._key('weights')}=random"
            )

    def _check_used(self) -> None:
        used = USED_KEYS[self.factory]
        if self.lora != self._default("lora"):
            raise ConfigError(f"{self._key('lora')} is for model=hf; choose it, or remove the key")
        for item in fields(ModelKeys):
            if item.name not in (*_KEYS_OF_ALL, *used) and getattr(self, item.name) != self._default(item.name):
                raise ConfigError(
                    f"{self._entry(item.name)} is not used with {self._key('factory')}={self.factory}, which takes "
                    f"{', '.join(used)}; remove it"
                )
        if self.factory == HF_IMAGES_FACTORY and self.path and self.args and self.weights == "load":
            raise ConfigError(
                f"{self._key('args')}.{next(iter(self.args))} replaces an entry of config.json, so the stored weights "
                f"may not fit; it needs {self._key('weights')}=random"
            )

    def _check_gpt2(self) -> None:
        for name in ("num_kv_heads", "rope_theta"):
            if getattr(self, name) != self._default(name):
                raise ConfigError(
                    f"{self._entry(name)} is not used with {self._key('factory')}={GPT2_FACTORY}, which has no grouped "
                    "queries and learned positions; remove it"
                )


@dataclass(frozen=True)
class ModelConfig(Blocks, ModelKeys):
    """Model to train: a built-in one, one of transformers (model=hf), or your own factory's. See docs/run/models.md."""

    def _check(self) -> None:
        ModelKeys._check(self)
        Blocks._check(self)

    @property
    def block_options(self) -> Blocks:
        """The keys of the blocks, as the argument ``blocks`` of ``initialize``."""
        return Blocks(**{item.name: getattr(self, item.name) for item in fields(Blocks)})

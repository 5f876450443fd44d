"""Folders of tiny random models of transformers, one for each family, as ``save_pretrained`` writes them."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.config.model import HF_FACTORY, ModelConfig
from dtrain.models import build_model

FAMILIES = ("llama", "qwen3", "gemma", "gpt2", "mixtral")
VOCAB, POSITIONS = 128, 32
TOKENS = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(0))

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 64}


def hf_config(family: str, **changes: Any) -> Any:
    """Returns the configuration of a tiny model whose files say BF16."""
    import transformers

    common = {"vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "dtype": "bfloat16"}
    own: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("LlamaConfig", SIZES),
        "qwen3": ("Qwen3Config", SIZES | {"head_dim": 8, "tie_word_embeddings": True}),
        "gemma": ("GemmaConfig", SIZES | {"head_dim": 8}),
        "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}),
        "mixtral": ("MixtralConfig", SIZES | {"num_local_experts": 4, "output_router_logits": True}),
    }
    name, sizes = own[family]
    no_dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0} if family == "gpt2" else {}
    return getattr(transformers, name)(**(common | sizes | no_dropout | changes))


def save_hf(folder: Path, family: str, **changes: Any) -> Path:
    """Writes a model with FP32 weights so large that attention looks at some positions more than at others."""
    import transformers

    config = hf_config(family, **changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "wpe" not in name:
                parameter.mul_(5.0)
    model.config.dtype = torch.bfloat16  # what the files of a model usually say
    model.save_pretrained(folder)
    return folder


def load_hf(folder: Path | str) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    ).eval()


def model_config(folder: Path | str, **changes: Any) -> ModelConfig:
    return ModelConfig(**({"name": "hf", "factory": HF_FACTORY, "path": str(folder), "max_seq_len": 16} | changes))


def build_hf(folder: Path | str, **changes: Any) -> nn.Module:
    return build_model(model_config(folder, **changes), VOCAB, seed=0)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every connection to another host, and every look-up of a name, fail the test."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and str(address[0]) not in ("127.0.0.1", "::1", "localhost"):
            pytest.fail(f"a connection to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: pytest.fail(f"a look-up of {host}"))

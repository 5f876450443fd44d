"""Families of causal language models of transformers, and methods of peft, train to the losses of plain PyTorch."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn

import dtrain

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes]  # some families look for a compiler

FAMILIES = (
    *("bloom", "codegen", "cohere", "doge", "gemma2", "glm", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granite"),
    *("helium", "jamba", "llama", "mamba", "mistral", "mixtral", "mpt", "nemotron", "olmo2", "olmoe", "opt"),
    *("persimmon", "phi", "phi3", "qwen2_moe", "qwen3", "qwen3_moe", "recurrent_gemma", "rwkv", "smollm3", "stablelm"),
    *("starcoder2", "xglm"),
)
ENGINES: tuple[dict[str, Any], ...] = (
    {"engine": "native", "zero_stage": 2},
    {"engine": "fsdp2"},
    {"engine": "native", "zero_stage": 3},
    {"engine": "ddp"},
)
# the names of one size differ from family to family; a configuration takes those that it has
WIDTH = dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32)
INNER = dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 48)
LAYERS = dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2)
HEADS = dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), 4)
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts"), 4) | {"num_experts_per_tok": 2}
INNER |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16)
OTHERS = {
    "vocab_size": 64,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "rotary_dim": 4,
    "state_size": 4,
    "use_cache": False,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DROPOUTS = (
    "hidden_dropout",
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "dropout",
    "activation_dropout",
)
SIZES = WIDTH | INNER | LAYERS | HEADS | EXPERTS | OTHERS | TOKENS | dict.fromkeys(DROPOUTS, 0.0)

QV, Q = ["q_proj", "v_proj"], ["q_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4, "target_modules": QV}),
    "dora": ("LoraConfig", {"r": 4, "target_modules": QV, "use_dora": True}),
    "saved head": ("LoraConfig", {"r": 4, "target_modules": QV, "modules_to_save": ["lm_head"]}),
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "loha": ("LoHaConfig", {"r": 4, "target_modules": QV}),
    "lokr": ("LoKrConfig", {"r": 4, "target_modules": QV}),
    "adalora": ("AdaLoraConfig", {"init_r": 6, "target_r": 4, "total_step": 20, "target_modules": QV}),
    "oft": ("OFTConfig", {"oft_block_size": 4, "target_modules": QV}),
    "boft": ("BOFTConfig", {"boft_block_size": 4, "target_modules": QV}),
    "vera": ("VeraConfig", {"r": 4, "target_modules": Q}),
    "fourierft": ("FourierFTConfig", {"n_frequency": 50, "target_modules": QV}),
    "hra": ("HRAConfig", {"r": 4, "target_modules": QV}),
    "layer norms": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "miss": ("MissConfig", {"r": 4, "target_modules": QV}),
    "randlora": ("RandLoraConfig", {"r": 4, "target_modules": Q}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
    "adaption": ("AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 1}),
    "tokens": ("TrainableTokensConfig", {"token_indices": [5, 6, 7], "target_modules": ["embed_tokens"]}),
    "vblora": ("VBLoRAConfig", {"r": 4, "num_vectors": 16, "vector_length": 8, "target_modules": QV}),
    "c3a": ("C3AConfig", {"block_size": 8, "target_modules": Q}),
    "shira": ("ShiraConfig", {"r": 2, "target_modules": QV}),
    "road": ("RoadConfig", {"group_size": 4, "target_modules": QV}),
}


def build(family: str) -> nn.Module:
    config = transformers.AutoConfig.for_model(family)
    config = type(config)(**{name: value for name, value in SIZES.items() if hasattr(config, name)})
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model


def adapted(adapter: str) -> nn.Module:
    kind, options = ADAPTERS[adapter]
    torch.manual_seed(3)
    model: nn.Module = peft.get_peft_model(build("llama"), getattr(peft, kind)(task_type="CAUSAL_LM", **options))
    return model.eval()  # without dropout, which an engine draws by keys of its own


def batch(step: int) -> dict[str, Any]:
    tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def require_the_losses_of_plain_torch(plain: nn.Module, model: nn.Module, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0)
    record = dtrain.AdamW(lr=3e-3, weight_decay=0.0, betas=(0.9, 0.999))
    engine = dtrain.initialize(model, optimizer=record, precision="fp32", max_grad_norm=None, seed=0, **options)
    for step in range(4):
        optimizer.zero_grad()
        expected = plain(**batch(step)).loss
        expected.backward()
        optimizer.step()
        loss = engine(**batch(step)).loss
        engine.backward(loss)
        assert engine.step().applied
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5), step


@pytest.mark.parametrize(("family", "options"), zip(FAMILIES, cycle(ENGINES), strict=False))
def test_a_family(family: str, options: dict[str, Any]) -> None:
    require_the_losses_of_plain_torch(build(family), build(family), options)


@pytest.mark.parametrize(("adapter", "options"), zip(ADAPTERS, cycle(ENGINES), strict=False))
def test_an_adapter(adapter: str, options: dict[str, Any]) -> None:
    require_the_losses_of_plain_torch(adapted(adapter), adapted(adapter), options)

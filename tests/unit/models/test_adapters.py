from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dtrain
from dtrain.config.model import Lora
from dtrain.config.precision import Float8
from dtrain.config.schema import RunConfig
from dtrain.engine.adapters.native import NativeEngine
from dtrain.errors import ConfigError
from dtrain.models import train_flops_per_token
from dtrain.parameters.groups import find_units
from dtrain.precision.contract import resolve
from dtrain.precision.policy import PrecisionPolicy
from dtrain.train.run_dir import compare_configs, redacted
from tests.helpers.hf_models import TOKENS, VOCAB, build_hf, load_hf, model_config

LORA = Lora(r=16, alpha=32, targets=["q_proj", "v_proj"])


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_adapters_are_fp32_beside_a_frozen_base_that_computes_as_before(folders: dict[str, Path]) -> None:
    model, again = (build_hf(folders["qwen3"], lora=LORA) for _ in range(2))
    plain = load_hf(folders["qwen3"])
    assert set(trained(model)) == {
        f"hf.model.layers.{layer}.self_attn.{target}_proj.lora_{matrix}.default.weight"
        for layer in range(2) for target in "qv" for matrix in "AB"
    }  # fmt: skip
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, again.get_parameter(name)), "the seed decides"
        if not parameter.requires_grad:
            own = name.removeprefix("hf.").replace(".base_layer", "")
            assert torch.equal(parameter, plain.get_parameter(own))
        assert parameter.requires_grad == (".lora_" in name)
        assert (".lora_B." in name) == (not parameter.any())
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
    assert find_units(model, "auto") == ["hf.model.layers.0", "hf.model.layers.1"]


def test_formats_of_base_and_adapters(folders: dict[str, Path]) -> None:
    """An FP8 rule for a layer is not for its adapters; the contract, so the plan too, is the same on ``meta``."""
    policies = [
        PrecisionPolicy.named("fp8"),
        PrecisionPolicy.named("bf16", rules={"hf.model.layers.*": "fp8"}, float8=Float8("rowwise")),
    ]
    for policy in policies:
        engine = dtrain.initialize(build_hf(folders["qwen3"], lora=LORA), precision=policy)
        formats = {module.name: (module.format, module.reason) for module in engine.contract.modules}
        layer = "hf.model.layers.0.self_attn.q_proj"
        assert formats[f"{layer}.base_layer"][0] == formats["hf.model.layers.1.mlp.up_proj"][0] == "fp8"
        for matrix in "AB":
            assert formats[f"{layer}.lora_{matrix}.default"] == (
                "bf16", "an adapter: small products, which FP8 would not make faster"
            )  # fmt: skip
        with torch.device("meta"):
            model = build_hf(folders["qwen3"], lora=LORA)
        planned = resolve(policy.on(torch.device("cpu")), model, "quantized", engine.contract.decisions)
        assert {m.name: m.format for m in planned.modules} == {m.name: m.format for m in engine.contract.modules}
    named = PrecisionPolicy.named("bf16", rules={f"{layer}.lora_A.default": "fp8"})
    contract = resolve(named.on(torch.device("cpu")), model, "quantized")
    assert contract.float8_modules == (f"{layer}.lora_A.default",)


def test_a_frozen_weight_costs_two_products(folders: dict[str, Path]) -> None:
    own = train_flops_per_token(model_config(folders["qwen3"]), VOCAB, 16)
    with_adapters = train_flops_per_token(model_config(folders["qwen3"], lora=LORA), VOCAB, 16)
    matmuls = VOCAB * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64)
    adapters = 2 * 16 * (32 + 32 + 32 + 16)
    assert own is not None
    assert with_adapters == tuple(flops - 2 * matmuls + 6 * adapters for flops in own)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "vproj"], r"'vproj' is the name of no Linear of Qwen3ForCausalLM; did you mean 'v_proj'?"),
        (["embed_tokens"], "'embed_tokens' is the name of no Linear of Qwen3ForCausalLM; valid: down_proj, gate"),
        (["proj"], "'proj' is the name of no Linear"),  # not the end of a word
        (["lm_head"], "the weight of 'lm_head' is tied to that of another module"),
    ],
)
def test_a_wrong_target_is_one_line(targets: list[str], message: str, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        build_hf(folders["qwen3"], lora=Lora(r=2, targets=targets))
    assert "\n" not in str(caught.value)


def test_a_run_with_another_alpha_is_another_model() -> None:
    models = [model_config("m", lora=replace(LORA, alpha=alpha)) for alpha in (8.0, 16.0)]
    before, now = (redacted(RunConfig(model=model)) for model in models)
    with pytest.raises(ConfigError, match=r"holds another model: model\.lora\.alpha=8\.0 \(now 16\.0\)"):
        compare_configs(before, now, 4)


def test_a_skip_is_explained_beside_frozen_float8_weights(folders: dict[str, Path]) -> None:
    engine = dtrain.initialize(build_hf(folders["qwen3"], lora=LORA), precision="fp8", zero_stage=3, seed=0)
    assert isinstance(engine, NativeEngine)
    with engine.modify_weights("*.layers.1.mlp.down_proj"):
        weight = engine.module.get_parameter("hf.model.layers.1.mlp.down_proj.weight")
        weight[0, 0] = torch.inf
    engine.explain_skips = True
    for tokens in engine.accumulate(TOKENS.split(1)):
        engine.backward(engine(tokens[:, :-1], targets=tokens[:, 1:]))
    outcome = engine.step()
    assert (outcome.applied, outcome.reason) == (False, "nonfinite_loss")
    assert outcome.culprit is not None
    assert outcome.culprit.origin is not None
    assert outcome.culprit.origin.module == "hf.model.layers.1.mlp.down_proj"

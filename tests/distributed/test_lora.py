"""``model.lora``: adapters by peft over frozen weights, trained as in plain PyTorch, saved, resumed and exported."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dtrain
from dtrain.checkpoint import export
from dtrain.checkpoint.format.integrity import verify_checkpoint
from dtrain.config.model import Lora
from dtrain.engine.step import StepEngine
from dtrain.errors import CheckpointError, ContractError
from dtrain.models import build_model
from dtrain.tools.checkpoint.cli import main
from dtrain.train.adapters import AdapterCheck
from tests.helpers.hf_models import TOKENS, VOCAB, build_hf, load_hf, model_config, save_hf
from tests.helpers.oracle import normwise_error
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes

WORLD, STEPS, LR = 2, 3, 1e-3
LORAS = {
    "llama": Lora(r=4, alpha=8, targets=["q_proj", "v_proj", "down_proj"]),
    "gpt2": Lora(r=4, alpha=6, targets=["c_attn", "mlp.c_proj"]),  # its weights are transposed
}


def batch(step: int) -> Tensor:
    """The tokens [WORLD, 9] of one step, a row for each micro-batch."""
    return torch.randint(VOCAB, (WORLD, 9), generator=torch.Generator().manual_seed(step))


def start(folder: Path, name: str, stage: int, precision: str = "fp32", **options: Any) -> Any:
    options |= {"precision": precision, "zero_stage": stage, "frozen_source": dtrain.FrozenSource(str(folder / name))}
    options |= {"optimizer": dtrain.AdamW(lr=LR, weight_decay=0.1), "max_grad_norm": 1.0, "seed": 0, "audit": 2}
    return dtrain.initialize(build_hf(folder / name, lora=LORAS[name]), **options)


def train(engine: StepEngine, steps: range) -> list[float]:
    check, losses = AdapterCheck(engine), []
    for step in steps:
        rows = batch(step).split(1)
        for tokens in engine.accumulate(rows[engine.rank :: engine.world_size]):
            engine.backward(engine(tokens[:, :-1], targets=tokens[:, 1:]))
        outcome = engine.step()
        check.after(outcome)
        losses.append(outcome.loss)
    return losses


def save(engine: StepEngine, folder: Path, run: str) -> None:
    name = run.partition("-")[0]
    config = {"model": asdict(model_config(folder / name, lora=LORAS[name]))}
    engine.save(folder / run / "checkpoints", config=config)


def on_two_ranks(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in LORAS:
        engine = start(folder, name, 3)
        found[name] = train(engine, range(STEPS)), engine.master_state()
        save(engine, folder, f"{name}-fp32")
        with engine.full_model() as model:
            found[f"{name}-logits"] = model(TOKENS).logits
    for precision in ("bf16", "fp8"):
        first = start(folder, "llama", 3, precision, reproducible=True)
        losses = train(first, range(2))
        save(first, folder, f"llama-{precision}")
        with first.eval():
            logits = first(TOKENS).logits
        with first.full_model() as model:
            assert torch.equal(model(TOKENS).logits, logits)
        found[f"never-stopped-{precision}"] = losses + train(first, range(2, 4)), first.master_state()
    for name, stage in OTHERS.items():
        engine = start(folder, "llama", stage, "bf16", engine=name)
        found[name] = train(engine, range(2))
        save(engine, folder, f"llama-{name}")
    for loses in (True, False):
        engine = start(folder, "llama", 3)
        if loses:
            dict(engine.module.named_parameters())[f"{PATH}.lora_B.default.weight"].register_hook(torch.zeros_like)
        else:  # as the layers of an expert without tokens, which is no fault
            engine.module.get_submodule("hf.model.layers.1.mlp").forward = torch.zeros_like  # type: ignore[assignment]
        with pytest.raises(ContractError) if loses else nullcontext() as caught:
            train(engine, range(1))
        found["fault"] = found.get("fault") or str(caught.value)
    return found


PATH = "hf.model.layers.1.self_attn.v_proj"
OTHERS = {"ddp": 0, "fsdp2": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    for name in LORAS:
        save_hf(folder / name, name)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[str, Any]:
    return run_ranks(WORLD, on_two_ranks, folder)[0]


def plain(folder: Path, name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Trains all rows with ``peft`` in plain PyTorch, from the same adapters."""
    from peft import LoraConfig, get_peft_model

    lora = LORAS[name]
    ranks = {"r": lora.r, "lora_alpha": int(lora.alpha), "fan_in_fan_out": name == "gpt2"}
    model = get_peft_model(load_hf(folder / name).train(), LoraConfig(target_modules=lora.targets, **ranks))
    own = build_hf(folder / name, lora=lora).state_dict()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for n, p in trained.items():
            p.copy_(own[f"hf.{n.removeprefix('base_model.model.')}"])
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        tokens = batch(step)
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {f"hf.{n.removeprefix('base_model.model.')}": p.detach() for n, p in trained.items()}


def test_adapters_train_as_by_peft_in_plain_pytorch(folder: Path, ranks: dict[str, Any]) -> None:
    for name in LORAS:
        losses, weights = plain(folder, name)
        assert losses[-1] != losses[0]
        single = start(folder, name, 2)
        for own_losses, own in (ranks[name], (train(single, range(STEPS)), single.master_state())):
            assert own_losses == pytest.approx(losses, rel=1e-5)
            assert own.keys() == weights.keys()
            for key, expected in weights.items():
                assert normwise_error(own[key], expected) < 1e-5, key
                assert ".lora_B." not in key or own[key].any(), key
    lost = ranks["fault"]
    assert lost.startswith(f"after the first applied step '{PATH}.lora_B.default.weight' is still zero")
    assert "(so: 1 of 6 adapters)" in lost


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_resumed_run_has_the_same_bits(precision: str, folder: Path, ranks: dict[str, Any]) -> None:
    losses, masters = ranks[f"never-stopped-{precision}"]
    run = folder / f"llama-{precision}"
    kinds = {entry.kind for entry in verify_checkpoint(next((run / "checkpoints").glob("step*"))).tensors}
    assert kinds == {"master", "exp_avg", "exp_avg_sq"}
    engine = start(folder, "llama", 0, precision, reproducible=True)
    engine.load(run)
    assert train(engine, range(2, 4)) == losses[2:]
    assert all(torch.equal(values, masters[name]) for name, values in engine.master_state().items())


def test_every_engine_trains_adapters_over_a_bf16_base(folder: Path, ranks: dict[str, Any]) -> None:
    """FP32 masters beside BF16 frozen weights, in checkpoints without these, which any engine loads."""
    losses, _ = ranks["never-stopped-bf16"]
    engine = start(folder, "llama", 2, "bf16")
    for name in OTHERS:
        assert ranks[name] == pytest.approx(losses[:2], rel=5e-3)
        engine.load(folder / f"llama-{name}")
        assert train(engine, range(2, 3)) == pytest.approx(losses[2:3], rel=5e-3)


@pytest.mark.parametrize("name", LORAS)
def test_peft_loads_the_adapters_and_transformers_the_merged_model(
    name: str, folder: Path, ranks: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel

    out = export(folder / f"{name}-fp32", folder / f"{name}-adapter")
    assert sorted(file.name for file in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / name)
    loaded = PeftModel.from_pretrained(load_hf(config["base_model_name_or_path"]), out)
    own = {f"hf.{n.removeprefix('base_model.model.')}": p for n, p in loaded.named_parameters() if ".lora_" in n}
    masters = ranks[name][1]
    assert own.keys() == masters.keys()
    assert all(torch.equal(values, masters[key]) for key, values in own.items())
    with torch.no_grad():
        # not by their bits: those of an activation depend on the process that computes it
        torch.testing.assert_close(loaded(TOKENS).logits, ranks[f"{name}-logits"], rtol=1e-5, atol=1e-5)
        base = load_hf(folder / name)(TOKENS).logits
        assert not torch.allclose(base, ranks[f"{name}-logits"], rtol=1e-3)
    assert main(["export", str(folder / f"{name}-fp32"), str(folder / f"{name}-merged"), "--merge"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    merged, expected = load_hf(folder / f"{name}-merged"), loaded.merge_and_unload()
    for (key, own), (other, values) in zip(merged.named_parameters(), expected.named_parameters(), strict=True):
        assert key == other
        assert torch.allclose(own, values, rtol=1e-6, atol=1e-8), key
    with torch.no_grad():
        assert torch.allclose(merged(TOKENS).logits, ranks[f"{name}-logits"], rtol=1e-4, atol=1e-4)


def test_a_merge_starts_from_the_unrounded_folder(folder: Path, ranks: dict[str, Any], tmp_path: Path) -> None:
    """Though the run computed with weights in FP8; rounded to BF16 once, at the end."""
    from safetensors.torch import load_file

    out = export(folder / "llama-fp8", tmp_path / "merged", dtype="bf16", merge=True)
    own, base = (load_file(path / "model.safetensors") for path in (out, folder / "llama"))
    assert own.keys() == base.keys()
    changed = {key for key, values in base.items() if not torch.equal(own[key], values.bfloat16())}
    names = dict(build_hf(folder / "llama", lora=LORAS["llama"]).named_parameters())
    targets = {name.removeprefix("hf.").partition(".lora_B.")[0] for name in names if ".lora_B." in name}
    assert changed == {f"{key}.weight" for key in targets}
    key = "model.layers.1.mlp.down_proj"
    adapter = load_file(export(folder / "llama-fp8", tmp_path / "adapter") / "adapter_model.safetensors")
    a, b = (adapter[f"base_model.model.{key}.lora_{matrix}.weight"] for matrix in "AB")
    assert torch.equal(own[f"{key}.weight"], (base[f"{key}.weight"] + 2.0 * (b @ a)).bfloat16())


def test_exports_that_are_refused(folder: Path, ranks: dict[str, Any], tmp_path: Path) -> None:
    other = save_hf(tmp_path / "other", "llama", vocab_size=VOCAB + 1)
    moved = Path(shutil.copytree(folder / "llama", tmp_path / "moved"))
    for merge in (False, True):
        with pytest.raises(CheckpointError, match=r"was trained over the frozen weights of .*llama \(sha256 .*other"):
            export(folder / "llama-fp32", tmp_path / "out", base=other, merge=merge)
        with pytest.raises(CheckpointError, match=r"nowhere holds no config\.json, and .* --base FOLDER"):
            export(folder / "llama-fp32", tmp_path / "out", base=tmp_path / "nowhere", merge=merge)
        export(folder / "llama-fp32", tmp_path / f"moved-{merge}", base=moved, merge=merge)
    config = json.loads((tmp_path / "moved-False" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(moved)
    # random frozen weights are in no folder: only the whole model can be written
    config = model_config(folder / "llama", lora=LORAS["llama"], weights="random")
    engine = dtrain.initialize(build_model(config, VOCAB, seed=3), precision="fp32", seed=0)
    engine.save(tmp_path / "run" / "checkpoints", config={"model": asdict(config)})
    with pytest.raises(CheckpointError, match=r"holds frozen weights of its own, .* --merge"):
        export(tmp_path / "run", tmp_path / "adapter")
    merged = load_hf(export(tmp_path / "run", tmp_path / "merged", merge=True))
    plain_config = model_config(folder / "llama", weights="random")
    with torch.no_grad():
        expected = build_model(plain_config, VOCAB, seed=3)(TOKENS).logits  # adapters begin as zeros
        assert torch.equal(merged(TOKENS).logits, expected)

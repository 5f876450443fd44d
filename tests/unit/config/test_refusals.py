from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import make_dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.cli.checks import check_config
from dtrain.config import model
from dtrain.config.audit import Audit
from dtrain.config.blocks import Blocks
from dtrain.config.capabilities import check
from dtrain.config.data import ArraysDataConfig as Arrays
from dtrain.config.data import ChatDataConfig as Chat
from dtrain.config.data import FriedmanDataConfig as Friedman
from dtrain.config.data import GlyphsDataConfig as Glyphs
from dtrain.config.data import ImagesDataConfig as Images
from dtrain.config.data import TokensDataConfig as Tokens
from dtrain.config.engines import DDP, FSDP2, DeepSpeed, Native
from dtrain.config.model import CONVNET_FACTORY, HF_FACTORY, HF_IMAGES_FACTORY, MLP_FACTORY, Lora, ModelConfig
from dtrain.config.optim import OPTIM_KEYS, SGD, Adam, AdamW, EmaConfig, OptimConfig, TorchOptimizer
from dtrain.config.precision import Float8, LossScale, PrecisionConfig
from dtrain.config.schedule import WSD, Cosine, Linear, Schedule
from dtrain.config.schema import CheckpointConfig, LaunchConfig, RunConfig, TelemetryConfig, TrainConfig
from dtrain.errors import ConfigError

RAdam = torch.optim.RAdam


NoOptimizer = make_dataclass("NoOptimizer", [("lr", float, 0.1)])


def assert_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build()
    rest = str(refused.value)
    assert "\n" not in rest
    for part in message.split(" ... "):
        assert part in rest, refused.value
        rest = rest.partition(part)[2]


RECORDS: list[tuple[Callable[[], object], str]] = [
    # engines
    (lambda: Native(zero_stage=1, keep_gathered=["a"]), "Native.keep_gathered=['a'] is used with Native.zero_stage=3"),
    (lambda: Native(sharding_units=[3]), "Native.sharding_units=[3] is not auto or a list of name patterns"),
    (lambda: Native(offload="cpu", zero_stage=0), "offload=cpu with Native.zero_stage=0 ... zero_stage=1, 2 or 3"),
    (lambda: Native(offload="cpu", master="remainder"), "offload=cpu with Native.master=remainder ... remove one of"),
    (lambda: Native(offload="cpu", reproducible=True), "offload=cpu with Native.reproducible=true ... remove one of"),
    (lambda: DeepSpeed(offload="cpu", zero_stage=0), "DeepSpeed.offload=cpu with DeepSpeed.zero_stage=0: DeepSpeed"),
    (lambda: Native(shard_size=1), "Native.shard_size=1 ... every rank would hold all states, which is Native.zero_st"),
    (lambda: Native(shard_size=2, zero_stage=0), "shard_size=2 with Native.zero_stage=0: ... set ... =1, 2 or 3"),
    (lambda: Native(shard_size=2, offload="cpu"), "shard_size=2 with Native.offload=cpu: ... remove one of the two"),
    (lambda: Native(shard_size=2, grad_dtype="bf16"), "with Native.grad_dtype=bf16: sums across replicas are FP32"),
    (lambda: Native(shard_size=6, reproducible=True), "a power of two; set Native.shard_size=4 or 8, or remove one"),
    (lambda: Native(shard_size=3).check_ranks(8), "shard_size=3 does not divide the number of ranks, 8; set it to 2"),
    # what an engine supports
    (lambda: DDP(zero_stage=2), "engine=ddp cannot do DDP.zero_stage=2: every rank holds the whole model"),
    (lambda: FSDP2(reproducible=True), "engine=fsdp2 cannot do FSDP2.reproducible=true: ... or engine=native"),
    (lambda: check("deepspeed", precision="fp16", device_type="cpu"), "precision=fp16 with device_type=cpu ... use"),
    (lambda: check("fsdp2", compile=True), "compile=true ... use compile=auto or false, or engine=native"),
    (lambda: check("native", zero_stage=7), "zero_stage=7 is not one of 0, 1, 2, 3"),
    (lambda: check("native", reproducible=3), "reproducible=3 is not one of false, true"),
    (lambda: check("native", reduce_dtype="bf61"), "reduce_dtype=bf61 ... did you mean 'bf16'?"),
    (lambda: check("fsdp"), "engine 'fsdp' is not one of native, fsdp2, deepspeed, ddp; did you mean 'fsdp2'?"),
    # blocks and models
    (lambda: Blocks(recompute="ful"), "Blocks.recompute=ful is not one of none, selective, full; did you mean 'full'?"),
    (lambda: Blocks(blocks="layers"), "Blocks.blocks=layers must be auto or a list of name patterns"),
    (lambda: Blocks(recompute_every=2), "Blocks.recompute_every=2 with Blocks.recompute=none ... set"),
    (lambda: Blocks(offload_activations=True), "offload_activations=True ... it needs Blocks.recompute=full;"),
    (lambda: Blocks(recompute="full", offload_activations=True, compile="blocks"), "offload_activations=True with"),
    (lambda: ModelConfig(loss_chunk="aut"), "loss_chunk=aut is not none, auto, or a number of rows ... did you mean"),
    (lambda: ModelConfig(loss_chunk=0), "ModelConfig.loss_chunk=0 is not none, auto, or a number of rows"),
    (lambda: ModelConfig(factory="mine"), "factory=mine must be package.module:function, such as dtrain.models."),
    (lambda: ModelConfig(path="/x"), "ModelConfig.path is for model=hf|vit; choose one, or remove the key"),
    (lambda: ModelConfig(lora=Lora(4, targets=["a"])), "ModelConfig.lora is for model=hf; choose it, or remove the"),
    (lambda: ModelConfig(args={"depth": 3}), "ModelConfig.args.depth is for a ModelConfig.factory of your own"),
    (lambda: ModelConfig(channels_last=True), "ModelConfig.channels_last=True is for models of images; remove it"),
    (lambda: ModelConfig(num_heads=3), "ModelConfig.hidden_dim=256 does not divide by ModelConfig.num_heads=3"),
    (lambda: ModelConfig(num_heads=256), "heads of odd dim 1; rotary position embedding rotates pairs, so make it"),
    (lambda: ModelConfig(num_kv_heads=3), "num_heads=4 does not divide by ModelConfig.num_kv_heads=3"),
    (lambda: ModelConfig(factory=model.GPT2_FACTORY, num_kv_heads=4), "num_kv_heads=4 is not used with ... learned"),
    (lambda: ModelConfig(factory=HF_FACTORY), "model=hf needs ModelConfig.path, a folder with config.json"),
    (lambda: ModelConfig(factory=HF_FACTORY, path="a", num_layers=9), "num_layers=9 is not used with model=hf"),
    (lambda: ModelConfig(factory=HF_FACTORY, path="a", args={"b": 1}), "args.b ... ModelConfig.weights=random"),
    (lambda: ModelConfig(factory=HF_IMAGES_FACTORY, path="a", args={"b": 1}), "args.b ... ModelConfig.weights=random"),
    (lambda: ModelConfig(factory=CONVNET_FACTORY, num_heads=8), "num_heads=8 is not used ... takes num_layers,"),
    (lambda: ModelConfig(factory=MLP_FACTORY, path="/x"), "path=/x is not used with ... num_layers, hidden_dim,"),
    (lambda: ModelConfig(factory=CONVNET_FACTORY, lora=Lora(4, targets=["head"])), "ModelConfig.lora is for model=hf;"),
    (lambda: Lora(4), "Lora.r=4 with Lora.targets=[]: adapters need both"),
    (lambda: Lora(4, dropout=1.0, targets=["a"]), "Lora.dropout=1.0 would drop every input"),
    # precision
    (lambda: PrecisionConfig("bf16", rules={"head": "fp4"}), "precision rule 'head': 'fp4' ... did you mean 'fp8'"),
    (lambda: PrecisionConfig("bf16", rules={"head": "tf32"}), "precision rule 'head': ... use precision=tf32, and no"),
    (lambda: PrecisionConfig("fp16", rules={"head": "fp8"}), "precision=fp16 ... use precision=fp8 or bf16"),
    (lambda: PrecisionConfig("bf16", float8=Float8(recipe="rowwise")), "PrecisionConfig.float8.recipe=rowwise is not"),
    (lambda: PrecisionConfig("bf16", loss_scale=LossScale(init=8.0)), "loss_scale.init=8.0 is not used with"),
    (lambda: PrecisionConfig("fp16", loss_scale=LossScale("none", hysteresis=2)), "hysteresis=2 ... mode=dynamic"),
    (lambda: PrecisionConfig("fp16", loss_scale=LossScale("static", growth_factor=4)), "factor=4.0 ... =dynamic"),
    (lambda: PrecisionConfig("fp16", loss_scale=LossScale(margin=4.0)), "margin=4.0 ... loss_scale.mode=calibrated"),
    (lambda: LossScale(init=1e9), "LossScale.init=1000000000.0 must lie between LossScale.min="),
    (lambda: LossScale.of(None), "loss_scale=null is not a mode"),  # type: ignore[arg-type]
    # data
    (lambda: Chat(files="a"), "data=chat needs ChatDataConfig.tokenizer, such as data.tokenizer="),
    (lambda: Images(), "data=images needs ImagesDataConfig.path ... photos/cat/1.jpg"),
    (lambda: Images(path="a", validation_path="a"), "validation_path=a is trained on; name another folder, or null"),
    (lambda: Arrays(), "data=arrays needs ArraysDataConfig.path ... with x and y"),
    (lambda: Arrays(path="a", validation_path="a"), "validation_path=a is trained on; name another file, or null"),
    (lambda: Tokens(), "data=tokens needs TokensDataConfig.path, a folder of token shards, or"),
    (lambda: Tokens(path="a", mixture={"b": 1.0}), "data=tokens needs ... and not both"),
    (lambda: Tokens(mixture={"a": 0.0}), "mixture gives a the weight 0; expected above 0"),
    (lambda: Tokens(mixture={"a": 1.0}, validation_path="a"), "validation_path=a is trained on"),
    (lambda: Tokens(path="a", pack="best_fit", documents="cross"), "pack=best_fit ... needs ... Config.documents=m"),
    # sizes by step
    (lambda: TrainConfig(seq_len={}), "TrainConfig.seq_len={} has no number for step 0 ... such as {0: 1}"),
    (lambda: TrainConfig(seq_len={5: 8}), "seq_len={5: 8} has no number for step 0 ... such as {0: 8,5: 8}"),
    (lambda: TrainConfig(seq_len={0: 8, -1: 8}), "{0: 8,-1: 8}: -1 is not a step; expected a whole number from 0"),
    (lambda: TrainConfig(seq_len={0: 8, True: 8}), "true is not a step"),
    (lambda: TrainConfig(seq_len={0: 0}), "TrainConfig.seq_len=0 from step 0 is too small; it must be at least 1"),
    (lambda: TrainConfig(seq_len={0: 8.0}), "seq_len={0: 8} is not null, a whole number, or a mapping {step: number}"),
    (lambda: TrainConfig(global_batch_size="x"), "global_batch_size='x' is not a whole number, or a mapping {step:"),
    # schedules
    (lambda: Linear(11, 10), "Linear.warmup_steps=11 is more than Linear.total_steps=10; set Linear.warmup_steps to"),
    (lambda: Cosine(0, 10, min_ratio=math.nan), "Cosine.min_ratio=nan is not a finite number"),
    (lambda: WSD(5, 10, 6), "WSD.warmup_steps=5 + WSD.decay_steps=6 is more than WSD.total_steps=10"),
    (lambda: WSD(None, 12, 12), "WSD.warmup_steps=1 + WSD.decay_steps=12 is more"),
    (lambda: Cosine(5).over(), "Cosine.total_steps is null; give the number of steps over which the rate falls"),
    (lambda: Schedule(lambda step: math.inf), "returns inf at step 0; expected a finite number >= 0, the fraction of"),
    (lambda: Schedule(lambda step: 0.5 - step), "returns -0.5 at step 1"),
    (lambda: Schedule(lambda step: math.nan if step == 4 else 1.0).factor(4), "returns nan at step 4"),
    (lambda: Schedule([1.0, 0.5, 0.25].__getitem__).factor(3), "function fails at step 3: IndexError: list index out"),
    (lambda: Schedule(lambda: 1.0), "fails at step 0: TypeError"),  # type: ignore[arg-type, misc]
    (lambda: Schedule(0.5), "Schedule(0.5) needs a function of the number of applied steps"),  # type: ignore[arg-type]
    # optimizers
    (lambda: AdamW(betas=(0.9,)), "AdamW.betas"),  # type: ignore[arg-type]
    (lambda: AdamW(betas=(0.9, 1.0)), "AdamW.betas=[0.9, 1.0] must be two numbers in [0, 1), such as [0.9, 0.95]"),
    (lambda: Adam(betas=(-0.1, 0.9)), "Adam.betas=[-0.1, 0.9] must be two numbers in [0, 1)"),
    (lambda: SGD(momentum=1.0), "SGD.momentum=1.0 never forgets a gradient"),
    (lambda: SGD(momentum=0.0, nesterov=True), "SGD.nesterov=True needs SGD.momentum above 0"),
    (lambda: AdamW(groups={"*": {"momentum": 0.1}}), "AdamW.groups: '*' sets momentum; a group of adamw can set"),
    (lambda: AdamW(groups={"*": {"eps": -1.0}}), "AdamW.groups, '*': AdamW.eps=-1.0 is too small"),
    (lambda: AdamW(groups={"*": {"lr_factor": -1}}), "lr_factor=-1 of '*' must be a finite number >= 0"),
    (lambda: AdamW(groups={"*": {"lr_factor": True}}), "lr_factor=true of '*' must be a finite number >= 0"),
    (lambda: EmaConfig(decay=1.0), "EmaConfig.decay=1.0 keeps the first weights; it must be below 1"),
    (lambda: TorchOptimizer(nn.Linear), "factory=the class torch.nn.modules.linear.Linear is not a class derived from"),
    (lambda: TorchOptimizer(NoOptimizer()), "TorchOptimizer.factory= ... NoOptimizer ...  is not text"),  # type: ignore[arg-type]
    (lambda: TorchOptimizer("RAdam"), "factory=RAdam must be package.module:Class, such as torch.optim:RAdam"),
    (lambda: TorchOptimizer(RAdam, betas=torch.ones(2)), "options= ...  must be numbers, text, or lists of them"),
    (lambda: TorchOptimizer(RAdam, params=[]), "options sets params"),
    (lambda: TorchOptimizer(RAdam, groups={"*": {"lr": 0.1}}), "groups, '*': ... options sets lr; give ... lr_factor"),
    (lambda: TorchOptimizer("torch.optim:RAdamm").load(), "module torch.optim has no RAdamm; did you mean 'RAdam'"),
    (lambda: TorchOptimizer("nowhere.at.all:X").load(), "no module named nowhere on the Python path"),
    (lambda: TorchOptimizer("torch.nn:Linear").load(), "is not a class derived from torch.optim.Optimizer"),
    # the rest of a run
    (lambda: CheckpointConfig(when_busy="skip", asynchronous=False), "when_busy=skip works only with"),
    (lambda: LaunchConfig(num_processes="all"), "num_processes=all must be a number, auto (one a GPU), or null"),
    (lambda: TelemetryConfig(precision_every=0, advice="a"), "advice=a needs sampled steps; set"),
    (lambda: RunConfig(run_dir=""), "run_dir is empty; name a folder, or leave it null for runs/<date>_<time>"),
    (lambda: RunConfig(resume=""), "resume is empty; it is auto, none, or the path of a checkpoint"),
]


@pytest.mark.parametrize(("build", "message"), RECORDS, ids=[message for _, message in RECORDS])
def test_a_record_refuses(build: Callable[[], object], message: str) -> None:
    assert_refused(build, message)


FACTORIES = {"convnet": CONVNET_FACTORY, "denoiser": model.DENOISER_FACTORY, "mlp": MLP_FACTORY}
CONVNET, DENOISER, MLP = ({"model": ModelConfig(name=name, factory=path)} for name, path in FACTORIES.items())
NOISY = {"data": Glyphs(task="denoising")}
OFFLOADED = {"engine": Native(offload="cpu")}
FP16_HEAD, FP8_BLOCKS = (PrecisionConfig("bf16", rules=rules) for rules in ({"head": "fp16"}, {"blocks.*": "fp8"}))
OF_TORCH = {
    "optim": OPTIM_KEYS["torch"](factory="torch.optim:RAdam"),
    "engine": Native(master="remainder"),
    "precision": PrecisionConfig("bf16"),
}
RUNS: list[tuple[dict[str, Any], str]] = [
    ({"train": TrainConfig(global_batch_size=12)}, "global_batch_size=12 does not ... 8 x 1 rank; ... do: 8 or 16"),
    ({"train": TrainConfig(global_batch_size=4)}, "train.global_batch_size=4 does not ... the nearest that does: 8"),
    ({"train": TrainConfig(global_batch_size={0: 8, 9: 12})}, "train.global_batch_size=12 from step 9 ... 8 or 16"),
    ({"train": TrainConfig(seq_len=100)}, "seq_len=100 does not divide model.max_seq_len=256 ... that do: 64 or 128"),
    ({"train": TrainConfig(seq_len={0: 64, 9: 512})}, "train.seq_len=512 from step 9 ... the nearest that does: 256"),
    ({"train": TrainConfig(seq_len=64), "data": Chat(files="x", tokenizer="y")}, "train.seq_len ... data=chat"),
    ({"train": TrainConfig(seq_len=8), "data": Glyphs(), **CONVNET}, "train.seq_len=8 is for tokens; remove it with"),
    ({"schedule": Cosine(20), "train": TrainConfig(steps=10)}, "schedule.warmup_steps=20 is more than train.steps=10"),
    ({"schedule": WSD(), "train": TrainConfig(steps=43)}, "schedule.warmup_steps=4 + schedule.decay_steps=40 ... most"),
    ({"data": Glyphs()}, "model=tiny takes tokens, which data=glyphs has not; choose model=convnet, vit or mlp"),
    ({"data": Friedman()}, "model=tiny takes tokens, which data=friedman has not; choose model=mlp"),
    (NOISY, "model=tiny takes tokens, which data=glyphs has not; choose model=denoiser"),
    (CONVNET, "model=convnet takes images or numbers, but data=stdlib has tokens; choose data=images or glyphs"),
    (MLP, "model=mlp takes images or numbers, but data=stdlib has tokens; choose data=arrays or friedman"),
    ({**DENOISER, "data": Glyphs()}, "does not learn data.task=classification; choose data.task=denoising, or"),
    ({**DENOISER, "data": Friedman()}, "model=denoiser does not learn data=friedman; choose model=mlp"),
    ({**MLP, **NOISY}, "model=mlp does not learn data.task=denoising; choose model=denoiser"),
    ({"engine": Native(shard_size=3)}, "engine.shard_size=3 does not divide the number of ranks, 1; remove it"),
    ({"engine": DeepSpeed(), "optim": OptimConfig(compile=True)}, "engine=deepspeed cannot do optim.compile=true"),
    ({"engine": DeepSpeed(), "audit": Audit(replay_every=5)}, "audit.replay_every=above 0: ... use"),
    ({"engine": DeepSpeed(), "optim": OPTIM_KEYS["muon"]()}, "cannot do optim=muon: ... no whole matrix"),
    ({"engine": DeepSpeed(), "precision": PrecisionConfig("fp8")}, "cannot do precision=fp8: ... engine=native, fsdp2"),
    ({"engine": DeepSpeed(), "precision": FP16_HEAD}, "precision.rules=fp16: ... use precision.rules=fp32, or engine="),
    ({"engine": DeepSpeed(zero_stage=3), "model": ModelConfig(compile="blocks")}, "cannot do model.compile=blocks"),
    ({**OFFLOADED, "precision": PrecisionConfig("fp8")}, "engine.offload=cpu with precision=fp8: ... remove one of"),
    ({**OFFLOADED, "precision": FP8_BLOCKS}, "engine.offload=cpu with precision.rules=fp8: ... remove one of the two"),
    ({**OFFLOADED, "optim": OPTIM_KEYS["muon"]()}, "engine.offload=cpu with optim=muon: whole matrices ... remove one"),
    ({"engine": Native(grad_dtype="bf16"), "precision": PrecisionConfig("fp16")}, "engine.grad_dtype=bf16 with"),
    ({"engine": Native(master="remainder"), "precision": PrecisionConfig("fp32")}, "engine.master=remainder with"),
    (OF_TORCH, "engine.master=remainder with optim=torch: ... use one of dtrain's optimizers, or engine.master=full"),
]
"""Records that contradict each other, and the message in the keys of the command line."""


@pytest.mark.parametrize(("records", "message"), RUNS, ids=[message for _, message in RUNS])
def test_a_run_refuses_records_that_contradict_each_other(records: dict[str, Any], message: str) -> None:
    assert_refused(lambda: check_config(replace(RunConfig(), **records), 1), message)

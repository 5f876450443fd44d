"""Mistakes on the command line of ``dtrain train``: the arguments, and what the message must contain.

The full messages are in ``golden/messages.txt``.
"""

from __future__ import annotations

from contextlib import redirect_stderr
from functools import cache
from io import StringIO

from dtrain.__main__ import main

CASES: dict[str, tuple[str, ...]] = {
    # unknown keys and options
    "engin=native": ("engin", "did you mean 'engine'"),
    "engin.zero_stage=1": ("engin.zero_stage", "did you mean 'engine.zero_stage'"),
    "engine.zero=1": ("engine.zero", "did you mean 'engine.zero_stage'"),
    "train.stepz=1": ("train.stepz", "did you mean 'train.steps'"),
    "lr=1e-3": ("lr", "did you mean 'optim.lr'"),
    "model.lora={r:4,lora_dropout:0.1,targets:[q_proj]}": (
        "unknown key 'model.lora.lora_dropout'",
        "did you mean 'model.lora.dropout'",
    ),
    "zzz=3": ("zzz", "valid: audit, checkpoint, data, debug, ema, engine, experiment, launch,"),
    "optim.lr.x=3": ("optim.lr.x", "did you mean 'optim.lr'"),
    "experimnt=smoke": ("experimnt", "did you mean 'experiment'"),
    "+foo=1": ("foo", "valid: audit, checkpoint, data, debug, ema, engine, experiment, launch,"),
    "++train.stepz=1": ("train.stepz", "did you mean 'train.steps'"),
    "~foo": ("foo", "valid: audit, checkpoint, data, debug, ema, engine, experiment, launch,"),
    "model=tinny": ("model=tinny", "did you mean 'model=tiny'"),
    "experiment=smoek": ("experiment=smoek", "did you mean 'experiment=smoke'"),
    "engine=megatron": ("engine=megatron", "did you mean 'engine=native'"),
    "precision=fp9": ("precision=fp9", "did you mean 'precision=fp8'"),
    "precision=mxfp8": ("precision=mxfp8", "use fp8"),
    "precision.fp32_modules=[head]": ("precision.fp32_modules", "did you mean 'precision.rules'"),
    "precision.rules.blocks.0=fp32": ("precision.rules.blocks.0", "did you mean 'precision.rules'"),
    "+train.steps=3": ("train.steps", "write it without '+'"),
    "+experiment=smoke": ("experiment=smoke", "write experiment=smoke without '+'"),
    "schedule=constant schedule.min_ratio=0.1": (
        "schedule.min_ratio",
        "it belongs to schedule=cosine|linear|wsd",
        "valid: schedule.name, schedule.total_steps, schedule.warmup_steps",
    ),
    "data.files=*.txt": (
        "data.files",
        "it belongs to data=text",
        "valid: data.name, data.prefetch, data.validation_percent",
    ),
    # wrong types
    "train.steps=abc": ("train.steps=abc", "is not a whole number"),
    "train.steps=1.5": ("train.steps=1.5", "is not a whole number"),
    "train.steps=null": ("train.steps=null", "is not a whole number"),
    "optim.lr=fast": ("optim.lr=fast", "is not a number"),
    "optim.lr=": ("optim.lr=", "is not a number"),
    "engine.reproducible=maybe": ("engine.reproducible=maybe", "is not true or false"),
    "model.num_kv_heads=a": ("model.num_kv_heads=a", "is not a whole number or null"),
    "optim.betas=3": ("optim.betas=3", "is not a list of 2 numbers"),
    "optim.betas=[a,b]": ("optim.betas", "is not a number"),
    "tracker=wandb tracker.tags=x": ("tracker.tags=x", "is not a list"),
    "model.args=3": ("model.args=3", "is not a mapping {key: value}"),
    "precision.rules=[head]": ("precision.rules", "not a list"),
    "precision.rules={head:null}": ("precision.rules.head", "is not text"),
    "checkpoint.keep_last.x=3 checkpoint=default": ("checkpoint.keep_last.x", "did you mean 'checkpoint.keep_last'"),
    "optim=null": ("optim=null", "takes one of its options: adam, adamw, adamw-bf16, lion, muon, sgd, torch"),
    "schedule=[cosine,linear]": ("schedule=[cosine,linear]", "takes one of its options: constant, cosine, linear, wsd"),
    # impossible values
    "train.steps=0": ("train.steps=0", "it must be at least 1"),
    "optim.lr=-1": ("optim.lr=-1", "it must be at least 0"),
    "optim.max_grad_norm=0": ("optim.max_grad_norm=0", "it must be above 0"),
    "precision=fp16 precision.loss_scale.min=0": ("precision.loss_scale.min=0", "it must be above 0"),
    "precision=fp16 precision.loss_scale.backoff_factor=0": (
        "precision.loss_scale.backoff_factor=0",
        "it must be above 0",
    ),
    "precision=fp16 precision.loss_scale.backoff_factor=1.5": (
        "precision.loss_scale.backoff_factor=1.5",
        "it must be at most 1",
    ),
    "optim.lr=nan": ("optim.lr=nan", "is not a finite number"),
    "launch.timeout_s=inf": ("launch.timeout_s=inf", "is not a finite number"),
    "engine.zero_stage=4": ("engine.zero_stage=4", "it must be at most 3"),
    "precision.name=fp9": ("precision.name=fp9", "did you mean 'fp8'"),
    "precision=fp8 precision.float8.grad_format=e5m3": ("precision.float8.grad_format=e5m3", "did you mean 'e5m2'"),
    'precision.rules={"head":fp4}': ("precision rule 'head'", "'fp4'", "did you mean 'fp8'"),
    "precision.rules={head:tf32}": ("precision rule 'head'", "use precision=tf32, and no rule"),
    "optim.compile=never": ("optim.compile=never", "is not one of auto, true, false"),
    "engine.name=ddp": ("engine.name=ddp", "did you mean 'engine=ddp'"),
    "engine.sharding_units=[3]": ("engine.sharding_units=[3]", "name patterns of modules, such as [blocks.*]"),
    "schedule.name=linear": ("schedule.name=linear", "did you mean 'schedule=linear'"),
    "run_dir=": ("run_dir", "name a folder, or leave it null for runs/<date>_<time>"),
    "resume=": ("resume", "it is auto, none, or the path of a checkpoint"),
    "optim.betas=[0.9]": ("optim.betas=[0.9]", "must be two numbers in [0, 1), such as [0.9, 0.95]"),
    "optim.betas=[0.9,1.0]": ("optim.betas", "must be two numbers in [0, 1), such as [0.9, 0.95]"),
    # contradictions between keys
    "precision=fp16 precision.rules={head:fp8}": ("precision=fp16", "use precision=fp8 or bf16"),
    "precision=bf16 precision.float8.recipe=rowwise": (
        "precision.float8.recipe=rowwise",
        "remove it, or set precision=fp8",
    ),
    "precision=fp8 engine=deepspeed": (
        "engine=deepspeed",
        "use precision=auto, fp32, tf32, bf16 or fp16, or engine=native, fsdp2",
    ),
    "precision=bf16 engine=deepspeed precision.rules={head:fp16}": (
        "precision.rules",
        "use precision.rules=fp32, or engine=native, fsdp2 or ddp",
    ),
    "checkpoint.when_busy=skip checkpoint.asynchronous=false": (
        "checkpoint.asynchronous",
        "remove it, or set checkpoint.asynchronous=true",
    ),
    "engine.prefetch=2": ("engine.prefetch=2", "remove it, or set engine.zero_stage=3"),
    "engine.zero_stage=1 engine.keep_gathered=[blocks.0]": (
        "engine.keep_gathered",
        "remove it, or set engine.zero_stage=3",
    ),
    "engine=fsdp2 engine.prefetch=2": ("engine.prefetch", "it belongs to engine=native"),
    "engine=ddp engine.zero_stage=2": ("engine.zero_stage=2", "use engine.zero_stage=0, or engine=native, fsdp2 or"),
    "engine=deepspeed engine.zero_stage=0 engine.offload=cpu": (
        "engine.offload=cpu with engine.zero_stage=0",
        "set engine.zero_stage=1, 2 or 3",
    ),
    "model.recompute=ful": ("model.recompute=ful is not one of none, selective, full; did you mean 'full'?",),
    "model.recompute_every=2": ("model.recompute_every=2 with model.recompute=none", "set model.recompute=full"),
    "model.offload_activations=true": ("model.offload_activations=True", "it needs model.recompute=full"),
    "model.blocks=layers": ("model.blocks=layers must be auto or a list of name patterns",),
    "engine=deepspeed engine.zero_stage=3 model.compile=blocks": (
        "engine=deepspeed cannot do model.compile=blocks with engine.zero_stage=3: DeepSpeed gathers",
        "use model.compile=none or auto, or engine=native",
    ),
    "precision=bf16 engine.offload=cpu engine.master=remainder": (
        "engine.offload=cpu with engine.master=remainder: the weight, which is half of each master, is on the device",
    ),
    "engine.zero_stage=0 engine.offload=cpu": (
        "engine.offload=cpu with engine.zero_stage=0: every rank would hold",
        "set engine.zero_stage=1, 2 or 3",
    ),
    "engine.reproducible=true engine.offload=cpu": ("engine.offload=cpu with engine.reproducible=true", "remove one"),
    "precision=fp8 engine.offload=cpu": ("engine.offload=cpu with precision=fp8: scales of FP8 weights", "remove one"),
    "precision=bf16 precision.rules={blocks.*:fp8} engine.offload=cpu": (
        "engine.offload=cpu with precision.rules=fp8",
        "remove one of the two",
    ),
    "optim=muon engine.offload=cpu": ("engine.offload=cpu with optim=muon: whole matrices", "remove one of the two"),
    "engine.offload=nvme": ("engine.offload=nvme", "is not one of none, cpu"),
    "engine=fsdp2 engine.offload=cpu": ("engine.offload", "it belongs to engine=native|deepspeed"),
    "schedule.total_steps=10 schedule.warmup_steps=20": (
        "schedule.warmup_steps=20",
        "set schedule.warmup_steps to at most 10",
    ),
    "precision=bf16 precision.loss_scale.init=8": (
        "precision.loss_scale.init=8",
        "remove it, or set precision.loss_scale.mode=dynamic",
    ),
    "precision=fp16 precision.loss_scale.mode=none precision.loss_scale.hysteresis=2": (
        "precision.loss_scale.hysteresis=2",
        "remove it, or set precision.loss_scale.mode=dynamic",
    ),
    "precision=fp16 precision.loss_scale.mode=static precision.loss_scale.growth_factor=4": (
        "precision.loss_scale.growth_factor=4",
        "remove it, or set precision.loss_scale.mode=dynamic",
    ),
    "precision=fp16 precision.loss_scale.margin=4": (
        "precision.loss_scale.margin=4",
        "remove it, or set precision.loss_scale.mode=calibrated",
    ),
    "precision=fp16 precision.loss_scale.mode=calibrated precision.loss_scale.calibration_steps=0": (
        "precision.loss_scale.calibration_steps=0",
        "it must be at least 1",
    ),
    "precision=fp16 precision.loss_scale.init=1e9": ("precision.loss_scale.init", "must lie between"),
    "data=text": ("data=text needs data.files",),
    "train.steps=10 schedule.warmup_steps=20": (
        "schedule.warmup_steps=20",
        "train.steps=10",
        "set schedule.warmup_steps to at most 10",
    ),
    "schedule=wsd train.steps=43": ("schedule.warmup_steps=4", "schedule.decay_steps=40", "at most 43"),
    "train.global_batch_size=12": ("train.global_batch_size=12", "the nearest that do: 8 or 16"),
    "train.global_batch_size=4": ("train.global_batch_size=4", "the nearest that does: 8"),
    "train.global_batch_size=x": ("train.global_batch_size='x'", "a whole number, or a mapping {step: number}"),
    "train.global_batch_size={100:16}": ("train.global_batch_size={100: 16}", "such as {0: 16,100: 16}"),
    "train.global_batch_size={0:8,9:12}": ("train.global_batch_size=12 from step 9", "the nearest that do: 8 or 16"),
    "train.seq_len=100": ("train.seq_len=100", "model.max_seq_len=256", "the nearest that do: 64 or 128"),
    "train.seq_len={0:64,9:512}": ("train.seq_len=512 from step 9", "the nearest that does: 256"),
    "train.seq_len=64 data=chat data.files=x data.tokenizer=y": ("train.seq_len", "data=chat", "model.max_seq_len"),
    "model.num_heads=3": ("model.num_heads=3", "does not divide"),
    "model.num_heads=256": ("model.num_heads=256", "make it even"),
    "model.num_kv_heads=3": ("model.num_kv_heads=3", "does not divide by model.num_kv_heads=3"),
    "model.factory=mine": ("model.factory=mine", "must be package.module:function"),
    "model.factory=mine:Class.build": ("model.factory=mine:Class.build", "must be package.module:function"),
    "model.args.depth=3": ("model.args.depth", "the built-in one takes none"),
    "model=gpt2-124m model.num_kv_heads=4": ("model.num_kv_heads=4", "remove it"),
    "model=gpt2-124m model.rope_theta=500": ("model.rope_theta=500", "remove it"),
    "model=gpt2-124m model.num_heads=5": ("model.num_heads=5", "does not divide"),
    "model=gpt2-124m model.args.a=1": ("model.args.a", "the built-in one takes none"),
    # tasks
    "data=glyphs": ("model=tiny takes tokens", "data=glyphs", "choose model=convnet, vit or mlp"),
    "data=friedman": ("model=tiny takes tokens", "data=friedman", "choose model=mlp"),
    "data=glyphs data.task=denoising": ("model=tiny takes tokens", "choose model=denoiser"),
    "model=convnet": (
        "model=convnet takes images or numbers",
        "data=stdlib has tokens",
        "choose data=images or glyphs",
    ),
    "model=denoiser data=glyphs": ("model=denoiser does not learn data.task=classification", "data.task=denoising"),
    "model=denoiser data=friedman": ("model=denoiser does not learn data=friedman; choose model=mlp",),
    "model=mlp data=glyphs data.task=denoising": ("model=mlp", "data.task=denoising", "choose model=denoiser"),
    "model=mlp data=friedman data.task=denoising": ("unknown key 'data.task'", "it belongs to data=images|glyphs"),
    "model=convnet data=glyphs train.seq_len=8": ("train.seq_len=8 is for tokens", "remove it with data=glyphs"),
    "model=convnet data=glyphs model.num_heads=8": ("model.num_heads=8 is not used", "takes num_layers, hidden_dim"),
    "model=convnet data=glyphs model.lora={r:4,targets:[head]}": ("model.lora is for model=hf; choose it, or remove",),
    "model=mlp data=friedman model.path=/x": ("model.path=/x is not used", "num_layers, hidden_dim, dropout"),
    "model=convnet data=images": ("data=images needs data.path", "photos/cat/1.jpg"),
    "model=mlp data=arrays": ("data=arrays needs data.path", "with x and y"),
    "model=convnet data=images data.path=a data.validation_path=a": ("data.validation_path=a is trained on",),
    "model.vocab_size=0": ("model.vocab_size=0", "it must be at least 1"),
    # syntax and interpolation
    "foo": ("foo", "write key=value, and quote values with special characters"),
    "=3": ("=3", "write key=value"),
    "optim.lr={": ("optim.lr={", "write key=value, and quote values with special characters"),
    "optim.lr=${": ("optim.lr=${", "write key=value, and quote values with special characters"),
    "optim.lr=${oc.env:DTRAIN_NO_SUCH}": ("optim.lr=${oc.env:DTRAIN_NO_SUCH}", "not found"),
    "seed=${train.stepz}": ("seed=${train.stepz}", "did you mean 'train.steps'"),
    "seed=${model.name}": ("seed=${model.name}", "is not a whole number"),
    "seed=${seed}": ("seed=${seed}", "Recursive interpolation"),
    "run_dir=???": ("run_dir", "give run_dir=VALUE"),
    "~schedule": ("schedule", "choose schedule=cosine|linear|constant|wsd"),
    "engine=???": ("'engine'", "ddp; deepspeed; fsdp2; native"),
    "~optim.lr": ("optim.lr", "cannot be removed"),
    # options of the command line
    "optim.lr=1e-3,2e-3": ("optim.lr=1e-3,2e-3", "add --multirun to run each, or write a list as [a,b]"),
    "hydra.run.dir=x": ("hydra.run.dir=x", "remove 'hydra.run.dir=x'"),
    "--multirn": ("--multirn", "did you mean '--multirun'"),
    "--cfg jobs": ("--cfg", "jobs"),
    "--config-dir /no/such": ("/no/such", "is not a folder"),
    "--config-name nope": ("primary config 'nope'",),
    "--experimental-rerun x": ("pickle", "use --config-dir with your YAML"),
    "-m optim.lr=1e-3,-1": ("optim.lr=-1.0", "it must be at least 0"),
    "-m model=tiny,tinny": ("model=tinny", "did you mean 'model=tiny'"),
}


@cache
def message(arguments: str) -> str:
    """The error of ``dtrain train ARGUMENTS``, without the name of the program."""
    captured = StringIO()
    with redirect_stderr(captured):
        code = main(["train", *arguments.split()])
    (line,) = captured.getvalue().splitlines()
    assert code == 2, line
    assert line.startswith("dtrain: ")
    return line.removeprefix("dtrain: ")

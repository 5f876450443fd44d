"""Every mistake on the command line: one line that names the key and the cure, exit code 2, no training."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.__main__ import main

TOP_LEVEL = (
    "checkpoint, data, debug, engine, experiment, launch, model, optim, precision, resume, run_dir, schedule, seed, "
    "tracker, train"
)
SYNTAX = "write key=value, and quote values with special characters"

UNKNOWN = [
    ("engin=native", "unknown key 'engin'; did you mean 'engine'?"),
    ("engin.zero_stage=1", "unknown key 'engin.zero_stage'; did you mean 'engine.zero_stage'?"),
    ("engine.zero=1", "unknown key 'engine.zero' with engine=native; did you mean 'engine.zero_stage'?"),
    ("train.stepz=1", "unknown key 'train.stepz'; did you mean 'train.steps'?"),
    ("lr=1e-3", "unknown key 'lr'; did you mean 'optim.lr'?"),
    ("zzz=3", f"unknown key 'zzz'; valid: {TOP_LEVEL}"),
    ("optim.lr.x=3", "unknown key 'optim.lr.x'; did you mean 'optim.lr'?"),
    ("experimnt=smoke", "unknown key 'experimnt'; did you mean 'experiment'?"),
    ("+foo=1", f"unknown key 'foo'; valid: {TOP_LEVEL}"),
    ("++train.stepz=1", "unknown key 'train.stepz'; did you mean 'train.steps'?"),
    ("~foo", f"unknown key 'foo'; valid: {TOP_LEVEL}"),
    ("model=tinny", "unknown option 'model=tinny'; did you mean 'model=tiny'?"),
    ("experiment=smoek", "unknown option 'experiment=smoek'; did you mean 'experiment=smoke'?"),
    ("engine=megatron", "unknown option 'engine=megatron'; did you mean 'engine=native'?"),
    ("precision=fp9", "unknown option 'precision=fp9'; did you mean 'precision=fp8'?"),
    (
        "precision=mxfp8",
        "precision=mxfp8: mxfp8 has a scale for each block of 32 elements, which the Tensor Cores of Blackwell apply "
        "and those of Hopper do not; use fp8",
    ),
    ("precision.fp32_modules=[head]", "unknown key 'precision.fp32_modules'; did you mean 'precision.rules'?"),
    ("precision.rules.blocks.0=fp32", "unknown key 'precision.rules.blocks.0'; did you mean 'precision.rules'?"),
    ("+train.steps=3", "'train.steps' exists already; write it without '+'"),
    ("+experiment=smoke", "'experiment' is chosen already; write experiment=smoke without '+'"),
    (
        "schedule=constant schedule.min_ratio=0.1",
        "unknown key 'schedule.min_ratio' with schedule=constant; it belongs to schedule=cosine|linear|wsd; "
        "valid: schedule.name, schedule.warmup_steps",
    ),
    (
        "data.files=*.txt",
        "unknown key 'data.files' with data=stdlib; it belongs to data=text; valid: data.name, data.validation_percent",
    ),
]

WRONG_TYPE = [
    ("train.steps=abc", "train.steps=abc is not a whole number"),
    ("train.steps=1.5", "train.steps=1.5 is not a whole number"),
    ("train.steps=null", "train.steps=null is not a whole number"),
    ("optim.lr=fast", "optim.lr=fast is not a number"),
    ("optim.lr=", "optim.lr= is not a number"),
    ("engine.reproducible=maybe", "engine.reproducible=maybe is not true or false"),
    ("model.num_kv_heads=a", "model.num_kv_heads=a is not a whole number or null"),
    ("optim.betas=3", "optim.betas=3 is not a list of 2 numbers"),
    ("optim.betas=[a,b]", "optim.betas[0]=a is not a number"),
    ("tracker=wandb tracker.tags=x", "tracker.tags=x is not a list"),
    ("model.args=3", "model.args=3 is not a mapping {key: value}"),
    ("precision.rules=[head]", "'precision.rules' is a mapping {key: value}, not a list"),
    ("precision.rules={head:null}", "precision.rules.head=None is not text"),
    (
        "checkpoint.keep_last.x=3 checkpoint=default",
        "unknown key 'checkpoint.keep_last.x'; did you mean 'checkpoint.keep_last'?",
    ),
    ("optim=null", "optim=null: 'optim' takes one of its options: adamw"),
    (
        "schedule=[cosine,linear]",
        "schedule=[cosine,linear]: 'schedule' takes one of its options: constant, cosine, linear, wsd",
    ),
]

IMPOSSIBLE = [
    ("train.steps=0", "train.steps=0 is too small; it must be at least 1"),
    ("optim.lr=-1", "optim.lr=-1.0 is too small; it must be at least 0"),
    ("optim.max_grad_norm=0", "optim.max_grad_norm=0.0 is too small; it must be above 0"),
    (
        "precision=fp16 precision.loss_scale.min=0",
        "precision.loss_scale.min=0.0 is too small; it must be above 0",
    ),
    (
        "precision=fp16 precision.loss_scale.backoff_factor=0",
        "precision.loss_scale.backoff_factor=0.0 is too small; it must be above 0",
    ),
    (
        "precision=fp16 precision.loss_scale.backoff_factor=1.5",
        "precision.loss_scale.backoff_factor=1.5 is too large; it must be at most 1",
    ),
    ("optim.lr=nan", "optim.lr=nan is not a finite number"),
    ("launch.timeout_s=inf", "launch.timeout_s=inf is not a finite number"),
    ("engine.zero_stage=4", "engine.zero_stage=4 is too large; it must be at most 3"),
    ("precision.name=fp9", "precision.name=fp9 is not one of auto, fp32, tf32, bf16, fp16, fp8; did you mean 'fp8'?"),
    (
        "precision=fp8 precision.float8.grad_format=e5m3",
        "precision.float8.grad_format=e5m3 is not one of auto, e5m2, e4m3; did you mean 'e5m2'?",
    ),
    (
        'precision.rules={"head":fp4}',
        "precision rule 'head': 'fp4' is not one of fp32, bf16, fp16, fp8; did you mean 'fp8'?",
    ),
    (
        "precision.rules={head:tf32}",
        "precision rule 'head': tf32 is a mode of the whole process, not of a module: backward runs long after a "
        "module's forward has ended; use precision=tf32, and no rule",
    ),
    ("optim.compile=never", "optim.compile=never is not one of auto, true, false"),
    (
        "engine.zero_stage=1 engine.grad_reduction=allreduce",
        "engine.grad_reduction=allreduce is not one of auto, all_reduce, reduce_scatter; did you mean 'all_reduce'?",
    ),
    (
        "schedule.name=linear",
        "schedule.name=linear does not choose an option; use schedule=OPTION; did you mean 'schedule=linear'?",
    ),
    ("run_dir=", "run_dir is empty; name a folder, or leave it null for runs/<date>_<time>"),
    ("resume=", "resume is empty; it is auto, none, or the path of a checkpoint"),
    ("optim.betas=[0.9]", "optim.betas=[0.9] must be two numbers in [0, 1), such as [0.9, 0.95]"),
    ("optim.betas=[0.9,1.0]", "optim.betas=[0.9, 1.0] must be two numbers in [0, 1), such as [0.9, 0.95]"),
]

CONTRADICTIONS = [
    (
        "precision=fp16 precision.rules={head:fp8}",
        "an fp8 rule under precision=fp16: FP8 products give BF16, so all else computes in BF16 too; use precision=fp8 "
        "or bf16",
    ),
    (
        "precision=bf16 precision.float8.recipe=rowwise",
        "precision.float8.recipe=rowwise is not used with precision=bf16 and no fp8 rule; remove it, or set "
        "precision=fp8",
    ),
    (
        "precision=fp8 precision.float8.recipe=rowwise precision.float8.weight_scale=delayed",
        "precision.float8.weight_scale=delayed needs precision.float8.recipe=tensorwise: a row has no scale of its own "
        "to keep",
    ),
    (
        "precision=fp8 engine=deepspeed",
        "engine=deepspeed cannot do precision=fp8: ZeRO holds all weights in one dtype, without scales; use "
        "precision=auto, fp32, tf32, bf16 or fp16, or engine=native, fsdp2 or ddp",
    ),
    (
        "precision=bf16 engine=deepspeed precision.rules={head:fp16}",
        "engine=deepspeed cannot do precision.rules=fp16: ZeRO holds all weights in one dtype; a module can only "
        "compute on FP32 copies; use precision.rules=fp32, or engine=native, fsdp2 or ddp",
    ),
    (
        "checkpoint.when_busy=skip checkpoint.asynchronous=false",
        "checkpoint.when_busy=skip is used with checkpoint.asynchronous=true only: a synchronous save has ended before "
        "the next one is due; remove it, or set checkpoint.asynchronous=true",
    ),
    (
        "engine.prefetch=2",
        "engine.prefetch=2 is used with engine.zero_stage=3 only, and engine.zero_stage=2; remove it, or set "
        "engine.zero_stage=3",
    ),
    (
        "engine.zero_stage=1 engine.keep_gathered=[blocks.0]",
        "engine.keep_gathered=['blocks.0'] is used with engine.zero_stage=3 only, and engine.zero_stage=1; remove it, "
        "or set engine.zero_stage=3",
    ),
    (
        "engine.grad_reduction=all_reduce",
        "engine.grad_reduction=all_reduce is used with engine.zero_stage=1 only, and engine.zero_stage=2; remove it, "
        "or set engine.zero_stage=1",
    ),
    (
        "precision=bf16 precision.loss_scale.init=8",
        "precision.loss_scale.init=8.0 is not used with precision=bf16 and precision.loss_scale.mode=auto; remove it, "
        "or set precision.loss_scale.mode=dynamic",
    ),
    (
        "precision=fp16 precision.loss_scale.mode=none precision.loss_scale.hysteresis=2",
        "precision.loss_scale.hysteresis=2 is not used with precision=fp16 and precision.loss_scale.mode=none; remove "
        "it, or set precision.loss_scale.mode=dynamic",
    ),
    (
        "precision=fp16 precision.loss_scale.mode=static precision.loss_scale.growth_factor=4",
        "precision.loss_scale.growth_factor=4.0 is not used with precision=fp16 and precision.loss_scale.mode=static; "
        "remove it, or set precision.loss_scale.mode=dynamic",
    ),
    (
        "precision=fp16 precision.loss_scale.margin=4",
        "precision.loss_scale.margin=4.0 is not used with precision=fp16 and precision.loss_scale.mode=auto; remove "
        "it, or set precision.loss_scale.mode=calibrated",
    ),
    (
        "precision=fp16 precision.loss_scale.mode=calibrated precision.loss_scale.calibration_steps=0",
        "precision.loss_scale.calibration_steps=0 is too small; it must be at least 1",
    ),
    (
        "precision=fp16 precision.loss_scale.init=1e9",
        "precision.loss_scale.init=1000000000.0 must lie between precision.loss_scale.min=6.103515625e-05 and "
        "precision.loss_scale.max=16777216.0",
    ),
    ("data=text", "data=text needs data.files, a glob such as data.files='/data/**/*.txt'"),
    (
        "train.steps=10",
        "schedule.warmup_steps=20 is more than train.steps=10; set schedule.warmup_steps to at most 10",
    ),
    (
        "schedule=wsd train.steps=50",
        "schedule.warmup_steps=20 + schedule.decay_steps=40 is more than train.steps=50; their sum must be at most 50",
    ),
    (
        "train.global_batch_size=12",
        "train.global_batch_size=12 does not divide by train.micro_batch_size=8 x 1 rank; the nearest that do: 8 or 16",
    ),
    (
        "train.global_batch_size=4",
        "train.global_batch_size=4 does not divide by train.micro_batch_size=8 x 1 rank; the nearest that does: 8",
    ),
    ("model.num_heads=3", "model.hidden_dim=256 does not divide by model.num_heads=3; each head takes the same share"),
    (
        "model.num_heads=256",
        "model.hidden_dim=256 / model.num_heads=256 gives heads of odd dim 1; rotary position embedding turns pairs, "
        "so make it even",
    ),
    (
        "model.num_kv_heads=3",
        "model.num_heads=4 does not divide by model.num_kv_heads=3; each key-value head serves the same number of "
        "heads",
    ),
    (
        "model.factory=mine",
        "model.factory=mine must be package.module:function, such as dtrain.models.transformer:build",
    ),
    (
        "model.factory=mine:Class.build",
        "model.factory=mine:Class.build must be package.module:function, such as dtrain.models.transformer:build",
    ),
    ("model.args.depth=3", "model.args.depth is for a model.factory of your own; the built-in one takes none"),
    (
        "model=gpt2-124m model.num_kv_heads=4",
        "model.num_kv_heads=4 is not used with model.factory=dtrain.models.gpt2:build, which has no grouped queries "
        "and learned positions; remove it",
    ),
    (
        "model=gpt2-124m model.rope_theta=500",
        "model.rope_theta=500.0 is not used with model.factory=dtrain.models.gpt2:build, which has no grouped queries "
        "and learned positions; remove it",
    ),
    (
        "model=gpt2-124m model.num_heads=5",
        "model.hidden_dim=768 does not divide by model.num_heads=5; each head takes the same share",
    ),
    ("model=gpt2-124m model.args.a=1", "model.args.a is for a model.factory of your own; the built-in one takes none"),
    ("model.vocab_size=0", "model.vocab_size=0 is too small; it must be at least 1"),
]

SYNTAX_AND_INTERPOLATION = [
    ("foo", f"cannot read 'foo' (missing EQUAL at '<EOF>'); {SYNTAX}"),
    ("=3", "cannot read '=3'; write key=value"),
    ("optim.lr={", f"cannot read 'optim.lr={{' (no viable alternative at input '{{'); {SYNTAX}"),
    ("optim.lr=${", f"cannot read 'optim.lr=${{' (extraneous input '{{' expecting <EOF>); {SYNTAX}"),
    (
        "optim.lr=${oc.env:DTRAIN_NO_SUCH}",
        "optim.lr=${oc.env:DTRAIN_NO_SUCH} cannot be resolved: Environment variable 'DTRAIN_NO_SUCH' not found",
    ),
    ("seed=${train.stepz}", "seed=${train.stepz}: 'train.stepz' is not a key; did you mean 'train.steps'?"),
    ("seed=${model.name}", "seed=${model.name} gives tiny, which is not a whole number"),
    ("seed=${seed}", "seed=${seed} cannot be resolved: Recursive interpolation detected"),
    ("run_dir=???", "'run_dir' is required; give run_dir=VALUE"),
    ("~schedule", "'schedule' is required; choose schedule=cosine|linear|constant|wsd"),
    ("engine=???", "You must specify 'engine', e.g, engine=<OPTION>; Available options: ddp; deepspeed; fsdp2; native"),
    ("~optim.lr", "'optim.lr' cannot be removed: every key of the schema has a value"),
]

OPTIONS = [
    (
        "optim.lr=1e-3,2e-3",
        "optim.lr=1e-3,2e-3 gives several values; add --multirun to run each, or write a list as [a,b]",
    ),
    (
        "hydra.run.dir=x",
        "'hydra.run.dir' has no effect: dtrain runs its jobs itself, each in run_dir; remove 'hydra.run.dir=x'",
    ),
    ("--multirn", "unknown option '--multirn'; did you mean '--multirun'?"),
    ("--cfg jobs", "argument --cfg/-c: invalid choice: 'jobs' (choose from 'job', 'hydra', 'all')"),
    ("--config-dir /no/such", "--config-dir /no/such is not a folder"),
    ("--config-name nope", "Cannot find primary config 'nope'. Check that it's in your config search path"),
    (
        "--experimental-rerun x",
        "--experimental-rerun reads a pickle, which can run code; use --config-dir with your YAML",
    ),
    ("-m optim.lr=1e-3,-1", "optim.lr=-1.0 is too small; it must be at least 0"),
    ("-m model=tiny,tinny", "unknown option 'model=tinny'; did you mean 'model=tiny'?"),
]

CASES = [*UNKNOWN, *WRONG_TYPE, *IMPOSSIBLE, *CONTRADICTIONS, *SYNTAX_AND_INTERPOLATION, *OPTIONS]


@pytest.fixture(autouse=True)
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise AssertionError("training started")

    monkeypatch.setattr("dtrain.train.run.run_training", refuse)


def fails_with(line: str, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["train", *argv])
    captured = capsys.readouterr()
    assert (code, captured.err, captured.out) == (2, f"dtrain: {line}\n", "")


@pytest.mark.parametrize(("arguments", "line"), CASES)
def test_one_line_and_exit_code_2(arguments: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    fails_with(line, arguments.split(), capsys)


def test_batch_that_the_ranks_cannot_share(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    line = "train.global_batch_size=64 does not divide by train.micro_batch_size=8 x 3 ranks"
    fails_with(f"{line}; the nearest that do: 48 or 72", ["train.global_batch_size=64"], capsys)


def test_other_ranks_let_rank_0_speak_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    naps: list[float] = []
    monkeypatch.setattr("dtrain.__main__.time.sleep", naps.append)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "engin=native"]) == 2
    assert naps == [5.0]
    assert capsys.readouterr() == ("", "dtrain: rank 1: unknown key 'engin'; did you mean 'engine'?\n")


def test_half_a_launcher_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    line = "the environment sets RANK but not WORLD_SIZE; a launcher sets both, or unset RANK"
    fails_with(line, [], capsys)


FILES = {
    "model/unknown.yaml": (
        "hidden_dimm: 3",
        "unknown key 'model.hidden_dimm'; did you mean 'model.hidden_dim'? (in {})",
    ),
    "model/wrong.yaml": ("hidden_dim: abc", "model.hidden_dim=abc is not a whole number (in {})"),
    "experiment/group.yaml": (
        "# @package _global_\ndefaults:\n  - override /modle: tiny",
        "no group 'modle' to override; did you mean 'model'? (in {})",
    ),
    "experiment/option.yaml": (
        "# @package _global_\ndefaults:\n  - override /model: tinny",
        "unknown option 'model=tinny'; did you mean 'model=tiny'?",
    ),
}


@pytest.mark.parametrize("name", sorted(FILES))
def test_mistakes_in_yaml_name_the_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, line = FILES[name]
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text(text + "\n", encoding="utf-8")
    fails_with(line.format(name), ["--config-dir", str(tmp_path), f"{path.parent.name}={path.stem}"], capsys)


def test_broken_yaml_is_one_line_with_the_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/broken.yaml").write_text("hidden_dim: [\n", encoding="utf-8")
    assert main(["train", "--config-dir", str(tmp_path), "model=broken"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dtrain: ")
    assert line.endswith('model/broken.yaml", line 2, column 1')


def test_primary_config_without_the_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 3\n", encoding="utf-8")
    line = "mine.yaml lacks the schema; begin its defaults list with 'train'"
    fails_with(line, ["--config-dir", str(tmp_path), "--config-name", "mine"], capsys)

"""A script for accelerate on one rank: the same training as plain accelerate's, and refusals by name."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs, GradScalerKwargs, ProfileKwargs
from torch import nn

import dtrain
from dtrain.errors import CheckpointError, ConfigError, UsageError
from dtrain.integrations.accelerate import Accelerator
from tests.helpers.accelerate_loops import F, Script, build, decay_groups, loader_options, reset_accelerate, run
from tests.helpers.net import Net

CPU = {"cpu": True}


def fresh(**options: Any) -> Accelerator:
    reset_accelerate()
    return Accelerator(**{**CPU, **options})


def prepared(lr: float = 1e-2, **options: Any) -> tuple[Accelerator, Any, Any]:
    accelerator, model = fresh(**options), build()
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=lr))


def loss_of(model: Any) -> torch.Tensor:
    x = torch.arange(24.0).view(4, 6) / 24
    return F.cross_entropy(model(x), torch.tensor([0, 1, 2, 3]))


def test_a_script_trains_as_with_plain_accelerate() -> None:
    # 10 batches an epoch, the last one of two samples, accumulated three at a time: the last step has one of them
    script = Script(lambda model: torch.optim.AdamW(decay_groups(model), lr=2e-2), max_norm=0.5)
    options = {"gradient_accumulation_steps": 3, **loader_options()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        want = run(accelerate.Accelerator(**options), script)
        reset_accelerate()
        got = run(Accelerator(engine=dtrain.Native(zero_stage=2), **options), script)
    assert got.losses == pytest.approx(want.losses, rel=1e-5)
    assert got.norms == pytest.approx(want.norms, rel=1e-5)
    assert (got.lrs, got.accuracies, got.skipped) == (want.lrs, want.accuracies, [])
    assert list(got.weights) == list(want.weights)
    for name, value in want.weights.items():
        torch.testing.assert_close(got.weights[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_and_weights_of_micro_batches_are_the_engines_own(precision: str) -> None:
    accelerator, model, optimizer = prepared(mixed_precision=precision, gradient_accumulation_steps=2)
    options = {"optimizer": model.engine.options.optimizer, "max_grad_norm": None, "seed": model.engine.seed}
    own: Any = dtrain.initialize(build(), precision=precision, **options)
    batches = [(torch.ones(1, 6), torch.tensor([1]), 3.0), (torch.zeros(1, 6), torch.tensor([2]), 1.0)]
    for _ in range(3):
        for (x, y, weight), _ in zip(batches, own.accumulate(batches), strict=True):
            own.backward(F.cross_entropy(own(x), y), weight=weight)
            with accelerator.accumulate(model):
                assert model(x).dtype == torch.float32
                accelerator.backward(F.cross_entropy(model(x), y), weight=weight)
                optimizer.step()
        own.step()
    got = accelerator.get_state_dict(model)
    assert all(torch.equal(got[name], value) for name, value in own.master_state().items())
    assert (accelerator.mixed_precision, accelerator.scaler) == (precision, None)
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_backwards_before_a_step_add_up_without_accumulate() -> None:
    def losses(model: Any) -> list[torch.Tensor]:
        return [loss_of(model), 0.5 * model(torch.ones(2, 6)).square().mean()]

    accelerator, model, optimizer = prepared()
    reference = build()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for _ in range(3):
        plain.zero_grad()
        sum(losses(reference)).backward()  # type: ignore[union-attr]
        plain.step()
        for loss in losses(model):  # both forwards come before the first backward
            accelerator.backward(loss)
            model.eval()
            with torch.no_grad():
                loss_of(model)
            loss_of(model)  # with gradients, and no backward
            model.train()
        optimizer.step()
    for name, value in reference.named_parameters():
        torch.testing.assert_close(accelerator.get_state_dict(model)[name], value.detach(), rtol=1e-4, atol=1e-6)


def test_two_models_have_an_engine_each() -> None:
    """As in the example of a DCGAN."""
    torch.manual_seed(3)
    nets = [nn.Linear(3, 6), nn.Linear(6, 1)]
    plain = copy.deepcopy(nets)
    accelerator = fresh()
    g, d, *optimizers = accelerator.prepare(*nets, *(torch.optim.SGD(net.parameters(), lr=0.1) for net in nets))
    plain_optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in plain]
    for step in range(3):
        real, noise = torch.full((4, 6), 0.1 * step), torch.ones(4, 3)
        for own_g, own_d, (step_g, step_d) in ((g, d, optimizers), (*plain, plain_optimizers)):
            is_ours = own_g is g
            for loss in (F.softplus(-own_d(real)).mean(), F.softplus(own_d(own_g(noise).detach())).mean()):
                accelerator.backward(loss) if is_ours else loss.backward()  # two backwards a step
            step_d.step()
            step_d.zero_grad()
            loss = F.softplus(-own_d(own_g(noise))).mean()
            if is_ours:
                with pytest.raises(UsageError, match="depends on the parameters of 2 prepared models"):
                    accelerator.backward(loss)
            accelerator.backward(loss, model=g) if is_ours else loss.backward()
            step_g.step()
            step_g.zero_grad()
            if not is_ours:
                step_d.zero_grad()  # of the gradients for the generator
    for net, own in zip(plain, (g, d), strict=True):
        for name, value in accelerator.get_state_dict(own).items():
            torch.testing.assert_close(value, net.get_parameter(name).detach())


def test_a_skipped_step_leaves_weights_and_scheduler() -> None:
    accelerator, model = fresh(), build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    seen = []
    for factor in (1.0, float("inf"), 1.0):
        before = accelerator.get_state_dict(model)
        accelerator.backward(loss_of(model) * factor)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        assert norm.isnan()
        for each in (optimizer.step, scheduler.step, optimizer.zero_grad):
            each()
        changed = any(not torch.equal(before[name], value) for name, value in accelerator.get_state_dict(model).items())
        rate = scheduler.get_last_lr()[0]
        seen.append((accelerator.optimizer_step_was_skipped, changed, rate, bool(norm.isfinite())))
    assert seen == [(False, True, 5e-3, True), (True, False, 5e-3, False), (False, True, 2.5e-3, True)]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm, self.base = nn.BatchNorm1d(4), nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.config = {"vocab": 5}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(self.norm(self.embed(tokens))))


def test_whole_weights_and_the_users_module(tmp_path: Path) -> None:
    accelerator, module = fresh(zero_stage=3), Tied()
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
    model, optimizer = accelerator.prepare(module, optimizer)
    found = accelerator.get_state_dict(model)
    assert list(found) == list(initial)
    assert all(torch.equal(found[name], value) for name, value in initial.items())
    assert found["head.weight"] is found["embed.weight"]
    assert list(model.state_dict()) == list(initial)
    assert accelerator.unwrap_model(model) is module is model.module
    assert model.config == {"vocab": 5}
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    tokens = torch.arange(5)
    accelerator.backward(F.cross_entropy(model(tokens), tokens))
    optimizer.step()
    model.eval()
    evaluating = []
    module.register_forward_pre_hook(lambda *_: evaluating.append(model.driver.engine._batch.is_evaluating))
    with torch.inference_mode():
        want = model(tokens)
    assert evaluating == [True]
    with torch.no_grad():
        assert torch.equal(model(tokens), want)
    model.train()
    accelerator.save_model(model, tmp_path)
    other = Tied()
    accelerate.load_checkpoint_in_model(other, tmp_path)
    assert torch.equal(other.eval()(tokens), want)
    model.load_state_dict(initial)
    assert all(torch.equal(value, initial[name]) for name, value in accelerator.get_state_dict(model).items())


def test_a_folder_that_is_saved_to_again_holds_the_newest_state(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared()
    teacher = accelerator.prepare(build(4).requires_grad_(False))

    class Counter:
        value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    counter, called = Counter(), []
    accelerator.register_for_checkpointing(counter)
    accelerator.register_save_state_pre_hook(
        lambda models, weights, _: called.append((len(models), len(weights.pop(0))))
    )
    accelerator.register_load_state_pre_hook(lambda models, folder: called.append(models[0] is model.module))
    for value in (1, 2):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model))
            optimizer.step()
        counter.value = value
        accelerator.save_state(tmp_path)
    want = accelerator.get_state_dict(model)
    accelerator.backward(loss_of(model))
    optimizer.step()
    counter.value, accelerator.step = 5, 5
    (tmp_path / "random_states_0.pkl").unlink()  # as for a rank that has not saved
    teacher.module[0].weight.data.zero_()
    loss_of(model)  # a forward without a backward
    accelerator.load_state(tmp_path)
    assert torch.equal(teacher.module[0].weight, build(4)[0].weight)
    assert (counter.value, accelerator.step) == (2, 2)
    assert model.engine.applied_steps == 2
    assert all(torch.equal(value, want[name]) for name, value in accelerator.get_state_dict(model).items())
    assert [path.name for path in (tmp_path / "dtrain").glob("save-*")] == ["save-2"]
    assert called == [(2, 6), (2, 6), True]
    (tmp_path / "dtrain" / "current.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected a folder that dtrain's Accelerator\.save_state has written"):
        accelerator.load_state(tmp_path)


def test_an_optimizer_prepared_before_its_model() -> None:
    losses = []
    for is_first in (False, True):
        accelerator, module = fresh(engine=dtrain.Native(zero_stage=2)), build()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 - n / 10)
        if is_first:
            optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
            assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 1e-2
            model = accelerator.prepare(module)
        else:
            model, optimizer, scheduler = accelerator.prepare(module, optimizer, scheduler)
        for _ in range(3):
            losses.append(float(loss := loss_of(model)))
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(scheduler.get_last_lr()[0])
    assert losses[:4] == losses[4:]


def test_an_output_that_cannot_refuse_its_backward() -> None:
    class Output:
        def __init__(self, logits: torch.Tensor) -> None:
            self.logits = logits

    class Wrapped(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return Output(super().forward(x))

    model = fresh().prepare(Wrapped(6, 4))
    with pytest.raises(UsageError, match="training a prepared model whose optimizer is not prepared"):
        model(torch.ones(1, 6))
    with torch.no_grad():
        assert model(torch.ones(1, 6)).logits.shape == (1, 4)


def test_a_script_that_marks_a_step_as_skipped() -> None:
    accelerator, model, optimizer = prepared()
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda n: 1 - n / 10))
    rates = []
    for mark in (False, True, False):
        accelerator.backward(loss_of(model))
        optimizer.step()  # ends an earlier mark
        if mark:
            optimizer._is_overflow = True
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates == pytest.approx([9e-3, 9e-3, 8e-3])


def test_a_model_prepared_before_its_optimizer() -> None:
    accelerator = fresh(precision="bf16")
    model = accelerator.prepare(build())
    output = model(torch.ones(1, 6))
    assert (output.dtype, output.requires_grad) == (torch.float32, True)
    with pytest.raises(UsageError, match="training a prepared model whose optimizer is not prepared"):
        output.sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    assert model(torch.ones(1, 6)).dtype == torch.float32
    model.train()
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    assert accelerator.prepare(model, optimizer) == (model, optimizer)
    assert accelerator.prepare_model(model.module, evaluation_mode=True) is model
    before = loss_of(model)
    accelerator.backward(before)
    optimizer.step()
    assert loss_of(model) < before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deepspeed_plugin": object()}, "Accelerator(deepspeed_plugin=...) chooses another backend"),
        ({"dynamo_backend": "inductor"}, "dynamo_backend=inductor"),
        ({"kwargs_handlers": [GradScalerKwargs()]}, "kwargs_handlers has GradScalerKwargs"),
        ({"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="bf16")]}, "DistributedDataParallelKwargs("),
        ({"mixed_precision": "bf16", "precision": "fp16"}, "mixed_precision='bf16' contradicts precision=fp16"),
        ({"mixed_precision": "int8"}, "mixed_precision='int8' is not one of no, bf16, fp16, fp8"),
        ({"engine": 3}, "engine=3 is not a record such as dtrain.Native"),
        ({"zero_stagee": 3}, "Accelerator(zero_stagee=...) is unknown; did you mean 'zero_stage'?"),
        ({"engine": "ddp", "prefetch": 2}, "prefetch"),
        ({"engine": dtrain.Native(zero_stage=1), "zero_stage": 3}, "set it in the record only"),
    ],
)  # fmt: skip
def test_options_of_other_backends_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        fresh(**options)


def test_an_engine_is_named_with_its_settings() -> None:
    for options in ({"engine": "native", "zero_stage": 3, "prefetch": 2}, {"zero_stage": 3, "prefetch": 2}):
        _, model, _ = prepared(**options)
        assert model.engine.options.engine == dtrain.Native(zero_stage=3, prefetch=2)


def test_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Precision follows accelerate's own setting; other backends and ranks that it does not see are refused."""
    assert fresh().policy.name == "fp32"
    assert fresh(precision="tf32", mixed_precision="no").mixed_precision == "no"
    handlers = [ProfileKwargs(), DistributedDataParallelKwargs(find_unused_parameters=True)]
    assert fresh(mixed_precision="fp8", kwargs_handlers=handlers).policy.name == "fp8"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert fresh().policy.name == "bf16"
    assert fresh(precision="fp16").mixed_precision == "fp16"
    for name in ("DEEPSPEED", "PARALLELISM_CONFIG"):
        with monkeypatch.context() as patch:
            patch.setenv(f"ACCELERATE_USE_{name}", "true")
            with pytest.raises(ConfigError, match=f"ACCELERATE_USE_{name}=true chooses another backend than dtrain"):
                fresh()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda **_: None)
    with pytest.raises(ConfigError, match=re.escape("give Accelerator(cpu=True)")):
        fresh(cpu=False)


def test_calls_that_cannot_be_kept_are_refused() -> None:
    accelerator, model, optimizer = prepared()
    parameters = list(model.parameters())
    before = accelerator.get_state_dict(model)

    def refused(message: str, call: Callable[[], Any], kind: type[Exception] = UsageError) -> None:
        with pytest.raises(kind, match=re.escape(message)):
            call()

    refused("clip_grad_value_: gradients are reduced sums", lambda: accelerator.clip_grad_value_(parameters, 1.0))
    refused("not all of one prepared model's", lambda: accelerator.clip_grad_norm_(parameters[:-1], 1.0))
    refused("clip_grad_norm_(norm_type=inf)", lambda: accelerator.clip_grad_norm_(parameters, 1.0, float("inf")))
    refused("clip_grad_norm_(max_norm=0)", lambda: accelerator.clip_grad_norm_(parameters, 0))
    refused("optimizer.step() without accelerator.backward", optimizer.step)
    refused("optimizer.step(closure)", lambda: optimizer.step(lambda: 0.0))
    refused("add_param_group after accelerator.prepare", lambda: optimizer.add_param_group({}))
    refused("was saved without dtrain", lambda: optimizer.load_state_dict({"state": {0: {}}, "param_groups": []}))
    refused("accelerator.backward(retain_graph=...)", lambda: accelerator.backward(loss_of(model), retain_graph=True))
    stray = accelerator.prepare(torch.optim.AdamW(build().parameters()))
    refused("no prepared model has its parameters", stray.zero_grad)
    refused("no prepared model has its parameters", stray.step)
    both = [*model.parameters(), *accelerator.prepare(build()).parameters()]
    refused("has parameters of 2 models", lambda: accelerator.prepare(torch.optim.AdamW(both)), ConfigError)
    refused("has an optimizer already", lambda: accelerator.prepare(torch.optim.AdamW(parameters)), ConfigError)
    accelerator.backward(loss_of(model))
    refused("would discard the gradients of this step", optimizer.zero_grad)
    refused("would discard the gradients of this step", model.zero_grad)
    refused("with a weight and without one", lambda: accelerator.backward(loss_of(model), weight=2.0))
    assert all(torch.equal(value, before[name]) for name, value in accelerator.get_state_dict(model).items())
    optimizer.step()
    with accelerator.no_sync(model):
        accelerator.backward(loss_of(model))
    accelerator.backward(loss_of(model))
    optimizer.step()
    accelerator.backward(loss_of(model))
    refused(
        "of a step but the last into 'with accelerator.no_sync(model):'", lambda: accelerator.backward(loss_of(model))
    )


@pytest.mark.parametrize("engine", [dtrain.Native(zero_stage=0), dtrain.Native(zero_stage=3), dtrain.DDP()])
def test_the_unwrapped_model_reads_as_with_plain_accelerate(engine: Any) -> None:
    """Also after each step, from references that were kept, in a moving average by hand, and in a copy."""
    accelerator = fresh(mixed_precision="bf16", engine=engine)
    module = Net(lambda net, x: x * net.a, a=nn.Parameter(torch.zeros(())))
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    unwrapped, (kept,) = accelerator.unwrap_model(model), model.parameters()
    average, want = torch.zeros(()), 0.0
    assert isinstance(unwrapped, Net)
    for index in range(12):
        accelerator.backward((model(torch.tensor([1.0 + index / 7])) - 2).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        master = accelerator.get_state_dict(model)["a"].item()
        want += 0.1 * (master - want)
        average.lerp_(unwrapped.a.detach(), 0.1)
        values = (unwrapped.a, kept, model.a, copy.deepcopy(unwrapped).a, unwrapped.state_dict()["a"])
        assert {(value.dtype, value.item()) for value in values} == {(torch.float32, master)}
    assert average.item() == pytest.approx(want, rel=1e-6)
    assert unwrapped.a.item() == pytest.approx(0.76584, rel=2e-3)  # of plain accelerate, which multiplies in FP32
    assert unwrapped.a.item() != unwrapped.a.bfloat16().item()
    with torch.no_grad():
        computed = unwrapped(torch.tensor([1.0])).item()
        assert computed == model(torch.tensor([1.0])).item()
    assert engine.name == "ddp" or computed == unwrapped.a.bfloat16().item()
    loss = model(torch.tensor([1.0])).mean() + unwrapped.a.square()  # a penalty on the master
    accelerator.backward(loss)
    optimizer.step()
    assert unwrapped.a.item() == pytest.approx(master - 0.1 * (1 + 2 * master), rel=1e-2)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_script_writes_and_generates_at_its_end(stage: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    accelerator = fresh(mixed_precision="bf16", engine=dtrain.Native(zero_stage=stage))
    shape = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    module = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape, decoder_start_token_id=0))
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-4))
    tokens = torch.arange(8)[None]
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        tmp_path, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )  # the last lines of the scripts of transformers
    torch.save(model.state_dict(), tmp_path / "model.pt")
    accelerator.save(unwrapped.state_dict(), tmp_path / "accelerate.bin")
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).state_dict()
    files = [torch.load(tmp_path / name) for name in ("model.pt", "accelerate.bin")]
    for name, master in accelerator.get_state_dict(model).items():
        for found in (loaded, *files):
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], master), name
    model.eval()
    assert unwrapped.generate(tokens, max_new_tokens=3, do_sample=False).shape[0] == 1
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()

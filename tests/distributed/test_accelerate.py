"""Scripts for accelerate on two ranks: the same training as plain accelerate's, skips and resumption on all ranks."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.local_sgd import LocalSGD
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dtrain
from dtrain.errors import DivergenceError, UsageError
from dtrain.integrations.accelerate import Accelerator
from tests.distributed.test_frozen import message
from tests.helpers.accelerate_loops import History, Script, build, decay_groups, launched, loader_options, run, samples
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.processes


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(decay_groups(model), lr=2e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


# each with the stage that trains it; 38 samples in batches of 4 give two ranks unequal numbers of them
SCRIPTS = {
    "drop-last": (Script(drop_last=True, max_norm=0.3, epochs=1), {}, 0),
    "accumulated": (Script(grouped, max_norm=0.3), {"gradient_accumulation_steps": 2}, 3),
    "split": (Script(sgd, epochs=1), {"split": True}, 1),
}


def _equal(rank: int, world: int) -> dict[str, tuple[History, History]]:
    found = {}
    for name, (script, extra, stage) in SCRIPTS.items():
        options = {**loader_options(), **extra}
        options["dataloader_config"].split_batches = options.pop("split", False)
        with launched(rank, world):
            want = run(accelerate.Accelerator(**options), script)
        with launched(rank, world):
            accelerator = Accelerator(engine=dtrain.Native(zero_stage=stage), **options)
            found[name] = want, run(accelerator, script)
            assert accelerator.distributed_type == accelerate.DistributedType.MULTI_CPU
            assert not any(isinstance(m, nn.parallel.DistributedDataParallel) for m in accelerator._models)
    return found


def test_scripts_train_as_with_plain_accelerate() -> None:
    for rank, found in enumerate(run_ranks(2, _equal)):
        for name, (want, got) in found.items():
            assert got.losses == pytest.approx(want.losses, rel=1e-5), name
            assert got.norms == pytest.approx(want.norms, rel=1e-5), name
            assert (got.lrs, got.accuracies) == (want.lrs, want.accuracies), name
            assert list(got.weights) == ([] if rank else list(want.weights))
            for key, value in got.weights.items():
                torch.testing.assert_close(value, want.weights[key], rtol=1e-4, atol=1e-6)
            if rank == 0:  # 11 samples, of which two ranks see one twice
                model = build()
                model.load_state_dict(got.weights)
                x, y = samples(11, seed=2).tensors
                assert got.accuracies[-1] == float((model(x).argmax(dim=1) == y).double().mean())


def _part(rank: int, world: int, folder: str, save_at: int, resume_at: int) -> History:
    options = {"precision": "fp32", "engine": dtrain.Native(zero_stage=2), **loader_options()}
    script = Script(grouped, max_norm=0.5)
    with launched(rank, world):
        return run(Accelerator(**options), script, save_at=save_at, folder=folder, resume_at=resume_at, seed=resume_at)


def _load(rank: int, world: int, folder: str) -> tuple[int, dict[str, Tensor]]:
    with launched(rank, world):
        accelerator = Accelerator(cpu=True, engine="ddp", precision="fp32")
        model = build(7)
        model, _ = accelerator.prepare(model, grouped(model))
        accelerator.load_state(folder)
        return model.engine.applied_steps, accelerator.get_state_dict(model)


def test_a_run_resumes_with_equal_bits_and_loads_on_other_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path)
    whole = run_ranks(2, _part, folder, 0, 0)
    run_ranks(2, _part, folder, 7, 0)
    resumed = run_ranks(2, _part, folder, 0, 7)
    for got, want in zip(resumed, whole, strict=True):
        assert (got.losses, got.lrs, got.norms) == (want.losses[7:], want.lrs[7:], want.norms[7:])
    assert whole[0].weights.keys() == resumed[0].weights.keys() != set()
    assert all(torch.equal(value, whole[0].weights[name]) for name, value in resumed[0].weights.items())
    assert (tmp_path / "random_states_1.pkl").exists()
    ((steps, weights),) = run_ranks(1, _load, folder)
    assert steps == 7
    assert weights.keys() == whole[0].weights.keys()


def _accumulate_by_hand(kind: type, **options: Any) -> Tensor:
    """Steps after the first backward, then after every third, and lastly with ``no_sync``; returns the weight."""
    accelerator, model = kind(cpu=True, **options), nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for index in range(9):
        is_step = index in (0, 3, 6, 8)
        with nullcontext() if is_step or index < 7 else model.no_sync():
            x = torch.full((1, 2), index + accelerator.process_index + 1.0)
            accelerator.backward(model(x).mean() / 3)
        if is_step:
            optimizer.step()
            optimizer.zero_grad()
    weight: Tensor = accelerator.unwrap_model(model).weight.detach().clone()
    return weight


def _by_hand(rank: int, world: int) -> tuple[list[Tensor], list[str]]:
    found, messages = [], []
    for kind, options in ((accelerate.Accelerator, {}), (Accelerator, {}), (Accelerator, {"engine": "ddp"})):
        with launched(rank, world):
            found.append(_accumulate_by_hand(kind, **options))
    with launched(rank, world):
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model := build(), sgd(model))
        local = LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2)
        messages.append(message(UsageError, local.__enter__))
        with model.no_sync():
            accelerator.backward(nn.functional.cross_entropy(model(torch.ones(1, 6)), torch.tensor([1])))
            messages.append(message(UsageError, optimizer.step))
        optimizer.step()
    return found, messages


def test_backwards_that_a_loop_counts_itself() -> None:
    for (want, *got), (local, inside) in run_ranks(2, _by_hand):
        for weight in got:
            torch.testing.assert_close(weight, want)
        assert local.startswith("accelerate.local_sgd.LocalSGD cannot be kept: each rank would take a step of its own")
        assert inside.startswith("optimizer.step() inside no_sync on 2 ranks: each rank would take a step of its own")


def _batches(rank: int, world: int, folder: str, stop: int, start: int) -> list[list[float]]:
    """Takes 3 batches in each of 3 epochs, in the default order of accelerate; saves after ``stop`` of them."""
    torch.manual_seed(start)
    with launched(rank, world):
        accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
        rows = DataLoader(TensorDataset(torch.arange(12.0)[:, None]), 2, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, sgd(model), rows)
        if start:
            accelerator.load_state(folder)
        seen: list[list[float]] = []
        for epoch in range(start // 3, 3):
            skip = start % 3 if epoch == start // 3 else 0
            for (x,) in accelerator.skip_first_batches(loader, skip) if skip else loader:
                accelerator.backward(model(x / 12).square().mean())
                optimizer.step()
                seen.append(x.flatten().tolist())
                if start + len(seen) == stop:
                    accelerator.save_state(folder)
                    return seen
        return seen


def test_a_resumed_run_sees_the_batches_of_the_whole_one(tmp_path: Path) -> None:
    folder = str(tmp_path)
    whole = run_ranks(2, _batches, folder, 0, 0)
    assert {value for batches in whole for batch in batches[:3] for value in batch} == set(range(12))
    for stop in (3, 4):
        heads = run_ranks(2, _batches, folder, stop, 0)
        rests = run_ranks(2, _batches, folder, 0, stop)
        assert [head + rest for head, rest in zip(heads, rests, strict=True)] == whole


def _prepared_again(rank: int, world: int) -> list[dict[str, Tensor]]:
    """Trains one model under several engines, one after the other; returns its weights before and after each change."""
    model, found, ended = build(), [], []
    engines = ({"zero_stage": 3}, {"engine": "fsdp2"}, {"zero_stage": 1}, {"engine": "ddp"}, {"engine": "ddp"})
    for options in (*engines, {"zero_stage": 3}):
        with launched(rank, world):
            accelerator = Accelerator(cpu=True, mixed_precision="bf16", **options)
            prepared, optimizer = accelerator.prepare(model, sgd(model))
            ended.append(prepared.engine)
            found.append(accelerator.get_state_dict(prepared))
            accelerator.backward(nn.functional.cross_entropy(prepared(torch.ones(1, 6)), torch.tensor([rank])))
            optimizer.step()
            found.append(accelerator.get_state_dict(prepared))
    return found


def test_each_engine_continues_with_the_weights_of_the_one_before() -> None:
    weights = run_ranks(2, _prepared_again)[0]
    for after, following in zip(weights[1:-1:2], weights[2::2], strict=True):
        assert all(torch.equal(following[name], value) for name, value in after.items())
    assert not torch.equal(weights[0]["0.weight"], weights[-1]["0.weight"])


def _misuse(rank: int, world: int, folder: str) -> list[str]:
    with launched(rank, world):
        accelerator, model = Accelerator(cpu=True), build()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        messages = [message(UsageError, lambda: accelerator.join_uneven_inputs([model]).__enter__())]
        accelerator.save_model(model, folder)
        accelerator.wait_for_everyone()
        accelerator.backward(nn.functional.cross_entropy(model(torch.ones(1, 6)), torch.tensor([1])))
        accelerator.clip_grad_norm_(model.parameters(), 1.0 + rank)
        return [*messages, message(DivergenceError, optimizer.step), *sorted(os.listdir(folder))]


def test_what_all_ranks_must_do_alike(tmp_path: Path) -> None:
    for found in run_ranks(2, _misuse, str(tmp_path)):
        assert found[0].startswith("join_uneven_inputs: all ranks of an engine take the same number of steps")
        assert "max_grad_norm is 1.0 on rank 0 and 2.0 on rank 1; every rank must run the same loop" in found[1]
        assert found[2:] == ["model.safetensors"]


def _read(rank: int, world: int, engine: Any, folder: Path) -> str:
    with launched(rank, world):
        accelerator, model = Accelerator(cpu=True, mixed_precision="bf16", engine=engine), build()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.backward(nn.functional.cross_entropy(model(torch.ones(1, 6)), torch.tensor([rank])))
        optimizer.step()
        whole = model.state_dict()
        if accelerator.is_main_process:  # they are gathered already, so one rank may read alone
            torch.save(accelerator.unwrap_model(model).state_dict(), folder / "weights.pt")
        masters = accelerator.get_state_dict(model)
        assert not masters or {n: v.tolist() for n, v in masters.items()} == {n: v.tolist() for n, v in whole.items()}
        assert all(torch.equal(torch.load(folder / "weights.pt")[name], v) for name, v in masters.items())
        assert all(value.dtype == torch.float32 for value in whole.values())
        with pytest.raises(DivergenceError) as caught:  # noqa: PT012
            if accelerator.is_main_process:
                accelerator.unwrap_model(model)[0].weight.sum()
            accelerator.wait_for_everyone()
        return str(caught.value)


@pytest.mark.parametrize("engine", [dtrain.Native(zero_stage=2), dtrain.Native(zero_stage=3), dtrain.FSDP2()])
def test_all_ranks_read_the_masters_and_one_alone_is_told_so(engine: Any, tmp_path: Path) -> None:
    for said in run_ranks(2, _read, engine, tmp_path):
        assert "rank 0 is at gather_rows(text size, 1 x int64) in a read of the weights, rank 1 is at" in said
        assert "in wait_for_everyone; every rank must call the same methods" in said

"""Recomputed blocks: the same bits in less memory; which modules are blocks, and mistakes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtrain
from dtrain.config.model import ModelConfig
from dtrain.engine.blocks import compiled as compiled_blocks
from dtrain.engine.blocks import recompute
from dtrain.engine.blocks.compiled import CompiledBlocks, resolve_compile
from dtrain.engine.blocks.install import find_blocks, install_blocks
from dtrain.errors import ConfigError, UsageError
from dtrain.models import build_model
from tests.engines.test_blocks import without_inductor
from tests.helpers.net import Net

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TOKENS = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))


def language_model(dropout: float = 0.2) -> Any:
    config = ModelConfig(dropout=dropout, num_layers=3, hidden_dim=32, num_heads=2, max_seq_len=16)
    return build_model(config, 64, seed=0)


def start(model: nn.Module, precision: str = "fp32", engine: str = "native", **blocks: Any) -> Any:
    settings = {"precision": precision, "optimizer": dtrain.SGD(), "seed": 3, "audit": 0}
    return dtrain.initialize(model, engine=engine, blocks=dtrain.Blocks(**blocks), **settings)


def train(engine: Any, steps: int = 2) -> list[float]:
    curve = []
    for _ in range(steps):
        for tokens in engine.accumulate([TOKENS, TOKENS.flip(1)]):
            engine.backward(engine(tokens=tokens[:, :-1], targets=tokens[:, 1:]))
        outcome = engine.step()
        curve += [outcome.loss, outcome.grad_norm]
    return curve


def train_on(engine: Any, x: Tensor) -> list[float]:
    curve = []
    for _ in range(2):
        engine.backward(engine(x).square().mean())
        outcome = engine.step()
        curve += [outcome.loss, outcome.grad_norm]
    return curve


def test_other_blocks_and_inputs_on_the_host_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, whose random numbers are drawn again."""
    moved: list[int] = []
    real = recompute.to_host
    want = train(start(language_model()))
    for way in ({"recompute_every": 2}, {"blocks": ["blocks.*.attn", "blocks.*.ffn"]}):
        assert train(start(language_model(), recompute="full", **way)) == want, way
    monkeypatch.setattr(recompute, "to_host", lambda tensor: moved.append(tensor.numel()) or real(tensor))
    assert train(start(language_model(), recompute="full", offload_activations=True)) == want
    assert not moved, "on a CPU they are there already"
    monkeypatch.setattr(recompute, "is_on_gpu", lambda tensor: tensor.dim() > 0)
    assert train(start(language_model(), recompute="full", offload_activations=True)) == want
    num_blocks, num_batches = 3, 2 * 2
    assert moved.count(TOKENS[:, :-1].numel() * 32) == num_blocks * num_batches, "the input of each block, no weight"


def test_every_second_block_runs_once_without_gradients_and_twice_with() -> None:
    model, calls = language_model(), Counter[int]()
    for number, block in enumerate(model.blocks):
        block.attn_norm.register_forward_pre_hook(lambda *_, number=number: calls.update([number]))
    engine = start(model, recompute="full", recompute_every=2)
    with engine.eval():
        logits = engine(tokens=TOKENS[:, :-1]).logits
    assert (calls, logits.requires_grad) == ({0: 1, 1: 1, 2: 1}, False)
    train(engine, steps=1)
    assert calls == {0: 1 + 2 * 2, 1: 1 + 2, 2: 1 + 2 * 2}, "two micro-batches"


class Odd(nn.Module):
    """Statistics, an argument by keyword, dropout, and a Linear that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.3)
        self.shared = nn.Linear(32, 32)

    def forward(self, x: Tensor, *, shift: Tensor) -> dict[str, Any]:
        x = self.shared(self.norm(self.first(x)) + shift).tanh()
        return {"x": self.dropout(self.shared(x)), "name": "odd"}


class OddNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(32, 32)
        self.blocks = nn.ModuleList([Odd(), Odd()])
        self.leave = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = shift = self.enter(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[1]):
            x = block(x, shift=shift)["x"]
        return self.leave(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", ["native", "ddp"])
def test_blocks_of_any_kind(engine: str) -> None:
    """Running statistics are updated once, keywords are arguments, and caches of casts change nothing."""
    x, found = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)), []
    for way in ("none", "full", "selective"):
        torch.manual_seed(0)
        model = OddNet()
        run = start(model, "fp8", engine, recompute=way)
        found.append((train_on(run, x), [*run.master_state().values(), *(b.clone() for b in model.buffers())]))
    want, tensors = found.pop(0)
    for curve, others in found:
        assert curve == want
        assert all(torch.equal(*pair) for pair in zip(others, tensors, strict=True))


def test_blocks_are_found() -> None:
    def names(**options: Any) -> list[str]:
        return [name for name, _ in find_blocks(language_model(), dtrain.Blocks(**options))]

    assert names(recompute="full") == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(compile="blocks", blocks=["blocks.1", "*.2"]) == ["blocks.1", "blocks.2"]
    assert names() == []
    lists = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])])
    assert len(find_blocks(nn.ModuleDict({"a": lists}), dtrain.Blocks(recompute="full"))) == 2, "a list has no forward"


class Own(nn.Linear):
    """Recomputes by itself."""

    gradient_checkpointing = True


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (language_model, {"recompute": "full", "blocks": ["block.*"]}, "'block.*' matches no module; did you mean"),
        (lambda: Own(4, 4), {"recompute": "selective"}, "Own has no ModuleList or Sequential"),
        (lambda: nn.Sequential(Own(4, 4)), {"recompute": "full"}, "'0' recomputes its activations itself"),
    ],
)
def test_mistakes(model: Callable[[], nn.Module], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        start(model(), **options)


def test_blocks_that_are_no_record_or_contain_a_unit_of_sharding() -> None:
    with pytest.raises(ConfigError, match=r"blocks=full is not a record such as dtrain\.Blocks\("):
        dtrain.initialize(language_model(), blocks="full")
    model, options = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2))}), dtrain.Blocks(compile="blocks", blocks=["a"])
    with pytest.raises(ConfigError, match=r"block 'a' contains the unit of sharding 'a\.0'"):
        install_blocks(model, options, "auto", CompiledBlocks.__new__(CompiledBlocks))


def reentrant(net: Any, x: Tensor) -> Any:
    return checkpoint(net.blocks[0], x, use_reentrant=True) + checkpoint(net.blocks[0], x, use_reentrant=True)


def changing(net: Any, x: Tensor) -> Any:
    y = net.blocks[0](x)
    x.mul_(0.5)
    return x + y


def test_what_fails_in_the_backward_is_named() -> None:
    for run, offloads, error, message in (
        (reentrant, False, UsageError, "use_reentrant=False"),
        (changing, True, RuntimeError, "an input of a recomputed block was modified in place"),
    ):
        parts = {"enter": nn.Linear(4, 4), "blocks": nn.ModuleList([nn.Linear(4, 4)])}
        model = Net(lambda net, x, run=run: run(net, net.enter(x)), **parts)
        engine = start(model, recompute="full", offload_activations=offloads)
        loss = engine(torch.ones(2, 4)).mean()
        with pytest.raises(error, match=message):
            engine.backward(loss)


def test_a_compiler_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_blocks, "has_compiler", lambda device: False)
    assert [resolve_compile(mode, CPU) for mode in ("none", "auto")] == ["none", "none"]
    assert resolve_compile("auto", GPU) == "none"
    with pytest.raises(ConfigError, match=r"compile=blocks needs a C\+\+ compiler, .* set compile=none"):
        resolve_compile("blocks", CPU)
    with pytest.raises(ConfigError, match="compile=blocks needs Triton and a C compiler"):
        resolve_compile("blocks", GPU)
    monkeypatch.setattr(compiled_blocks, "has_compiler", lambda device: True)
    assert [resolve_compile(mode, GPU) for mode in ("blocks", "auto")] == ["blocks", "auto"]
    assert resolve_compile("auto", CPU) == "none", "there is nothing to win"


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are traced and not compiled, which takes a tenth of the time."""
    torch._dynamo.reset()
    monkeypatch.setattr(CompiledBlocks, "_compile", without_inductor)


@pytest.mark.compile
@pytest.mark.usefixtures("traced")
def test_a_new_shape_is_compiled_once_more_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine, counts = start(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), compile="blocks"), []
    with caplog.at_level("INFO", "dtrain"):
        for rows in (4, 4, 6, 7, 9):
            engine.backward(engine(torch.ones(rows, 8)).square().mean())
            engine.step()
            counts.append(engine.compiled_graphs)
        with engine.eval():
            for rows in (2, 3, 5):
                engine(torch.ones(rows, 8))
    first = counts[0]
    assert first <= 2, "the input of the first block needs no gradient"
    assert counts == [first, first, 2 * first, 2 * first, 2 * first], "the number of rows becomes a variable"
    assert engine.compiled_graphs == 2 * first, "evaluation is not compiled"
    lines = [record.message for record in caplog.records if "compiled" in record.message]
    assert len(lines) == 2
    assert lines[0].startswith(f"blocks compiled: {first} graph")
    assert re.match(r"step 3 compiled blocks again: .*; because this no longer held: .* mismatch", lines[1])


@pytest.mark.compile
@pytest.mark.usefixtures("traced")
def test_auto_measures_under_hooks_of_an_engine_and_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement changes no buffer, runs no hook, and takes a block that has something to differentiate."""
    monkeypatch.setattr("dtrain.engine.initialize.resolve_compile", lambda mode, device: mode)
    monkeypatch.setattr(compiled_blocks, "_ROUNDS", 1)
    for engine in ("native", "ddp"):
        model = OddNet()
        model.enter.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        run = start(model, "fp32", engine, compile="auto")
        run.backward(run(torch.randn(16, 32)).square().mean())
        run.step()
        assert [int(block.norm.num_batches_tracked) for block in model.blocks] == [1, 2]
        assert not run._between.parts.compiled._measures


@pytest.mark.compile
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("times", [[2.0, 1.0], [1.0, 2.0]])
def test_auto_compiles_what_is_faster(times: list[float], monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr("dtrain.engine.initialize.resolve_compile", lambda mode, device: mode)
    monkeypatch.setattr(compiled_blocks, "measure", lambda *_: times)
    curves = []
    for mode in ("none", "auto"):
        engine = start(language_model(dropout=0.0), compile=mode)
        with caplog.at_level("INFO", "dtrain"):
            curves.append(train(engine, steps=2))
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert re.search(r"a block takes \S+ ms compiled and \S+ ms eager \(.*x\), so blocks are", caplog.text)
    is_faster = times[1] < times[0]
    assert (engine.compiled_graphs is not None) is is_faster
    assert ("so blocks are not compiled" in caplog.text) is not is_faster


class Regional(nn.Module):
    """A region of FP32 in a block, with an FP8 Linear in it and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.coupling = nn.Parameter(torch.eye(32) / 3)

    def forward(self, x: Tensor) -> Tensor:
        with dtrain.full_precision():
            inside = torch.einsum("bi,ij->bj", self.linear(x), self.coupling)
            assert inside.dtype == torch.float32
        return x + self.linear(inside.tanh())


@pytest.mark.compile
@pytest.mark.usefixtures("traced")
def test_a_compiled_block_contains_its_regions() -> None:
    curves, x = [], torch.linspace(-1, 1, 4 * 32).view(4, 32)
    for mode in ("none", "blocks"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.ModuleList([Regional() for _ in range(2)]), nn.Linear(32, 32))
        model.forward = lambda x, model=model: model[2](model[1][1](model[1][0](model[0](x))))  # type: ignore[method-assign]
        engine = start(model, "fp8", compile=mode, blocks=["1.*"])
        curves.append(train_on(engine, x))
    assert curves[1] == pytest.approx(curves[0], rel=1e-3), "the gradients of a weight that is used twice are summed"
    assert engine.compiled_graphs == 1

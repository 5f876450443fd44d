"""Rules: which format each module gets and why, against expectations written by hand; and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dtrain.config.precision import Float8
from dtrain.engine.observation import observe_forward
from dtrain.errors import ConfigError, ContractError
from dtrain.precision.contract import Contract, earlier_decisions, float8_candidates, resolve
from dtrain.precision.float8.choice import Float8Candidate, Float8Decision
from dtrain.precision.float8.linear import Float8Linear
from dtrain.precision.forward import Autocast
from dtrain.precision.policy import PrecisionPolicy
from dtrain.precision.regions import full_precision
from dtrain.precision.rules import is_compiled
from tests.helpers.op_dtypes import OpDtypes

CPU = torch.device("cpu")
BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A transformer without attention."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 48, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3))
        self.classify = nn.Sequential(nn.Linear(32, 32), nn.Softmax(-1))
        self.loss = nn.CrossEntropyLoss()


class Energy(nn.Module):
    """Code that multiplies and solves with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.coupling = nn.Parameter(torch.eye(16))
        self.attend = nn.MultiheadAttention(32, 2)
        self.small = nn.Linear(8, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.double = nn.Linear(32, 32).double().requires_grad_(False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.mine = nn.Linear(32, 32)
        self.mine.forward = lambda x: x  # type: ignore[method-assign]
        self.compiled = nn.Sequential(nn.Linear(32, 32))
        self.compiled.compile()
        self.wide = nn.Linear(32, 32)
        self.last = nn.Linear(32, 16)


def resolved(
    model: nn.Module, name: str, rules: dict[str, str] | None = None, weights: str = "quantized", **options: object
) -> Contract:
    policy = PrecisionPolicy.named(name, rules=rules, float8=Float8(**options))  # type: ignore[arg-type]
    return resolve(policy.on(CPU), model, weights)


def table(contract: Contract) -> dict[str, str]:
    """Returns ``format: reason`` by module, or only the format if the policy alone decided."""
    return {m.name: m.format if m.reason == "policy" else f"{m.format}: {m.reason}" for m in contract.modules}


PLAIN = "bf16: only a plain nn.Linear has FP8 products"
NORM = "fp32: norm"


def net(*blocks: tuple[str, ...], embed: str, head: str) -> dict[str, str]:
    """The table of Net; of each block the formats of ``norm``, ``up`` and ``down``."""
    parts = [zip(("norm", "up", "down"), formats, strict=True) for formats in blocks]
    inside = {f"blocks.{number}.{name}": found for number, rows in enumerate(parts) for name, found in rows}
    return {"embed": embed, **inside, "norm": NORM, "head": head}


DOWN, BOTH = "fp8: rule 'blocks.*.down'", "fp32: rule 'blocks.[01]'"
TABLES = [
    (Net, "fp8", {}, net(*[(NORM, "fp8", "fp8")] * 3, embed=PLAIN, head="bf16: last product")),
    (
        Net,
        "bf16",
        {"blocks.0": "fp32", "blocks.*.down": "fp8", "blocks.2.*": "fp16", "blocks.1.norm": "bf16", "head": "fp8"},
        net(
            ("fp32: rule 'blocks.0'", "fp32: rule 'blocks.0'", DOWN),
            ("bf16: rule 'blocks.1.norm'", "bf16", DOWN),
            (NORM, "fp16: rule 'blocks.2.*'", "fp16: rule 'blocks.2.*'"),
            embed="bf16",
            head="fp8: rule 'head'",
        ),
    ),
    (
        lambda: Net(tied=True),
        "fp8",
        {"*": "fp8", "blocks.[01]": "fp32", "blocks.1": "bf16"},
        net(
            (BOTH, BOTH, BOTH),
            (BOTH, "bf16: rule 'blocks.1'", "bf16: rule 'blocks.1'"),  # of a container's name: norms are not meant
            (NORM, "fp8: rule '*'", "fp8: rule '*'"),
            embed=PLAIN,
            head="bf16: weight tied to 'embed.weight'",
        ),
    ),
    (
        Vision,
        "fp32",
        {"features.*": "bf16", "classify.1": "bf16"},
        {
            "features.0": "bf16: rule 'features.*'",
            "features.1": "fp32: norm",
            "features.3": "bf16: rule 'features.*'",
            "classify.0": "fp32",
            "classify.1": "bf16: rule 'classify.1'",
            "loss": "fp32: loss",
        },
    ),
    (
        Energy,
        "fp8",
        {},
        {
            **dict.fromkeys(("", "attend", "attend.out_proj", "normed", "normed.parametrizations.weight"), PLAIN),
            "normed.parametrizations.weight.0": NORM,
            "small": "bf16: too small for FP8: a dimension below 16",
            "double": "bf16: its weight is float64",
            "mine": "bf16: its forward is replaced",
            "compiled.0": "bf16: inside the compiled module 'compiled'",
            "frozen": "fp8",
            "wide": "fp8",
            "last": "bf16: last product",
        },
    ),
]


@pytest.mark.parametrize(("build", "name", "rules", "expected"), TABLES)
def test_tables(build: Callable[[], nn.Module], name: str, rules: dict[str, str], expected: dict[str, str]) -> None:
    assert table(resolved(build(), name, rules)) == expected


def test_a_forward_that_is_compiled_by_itself_is_seen() -> None:
    """No class is replaced and no hook called inside such a forward."""

    class Compiled(Block):
        forward = torch.compile(Block.forward, backend="eager")

    class Excluded(Block):
        forward = torch.compiler.disable(Block.forward)

    model = Net()
    model.blocks[0] = Compiled()
    model.blocks[1].forward = torch.compile(model.blocks[1].forward, backend="eager")
    model.blocks[2] = Excluded()
    found = table(resolved(model, "fp8"))
    for i in range(2):
        assert found[f"blocks.{i}.up"] == f"bf16: inside the compiled module 'blocks.{i}'"
    assert found["blocks.2.up"] == "fp8"
    prepared(model, "bf16", {"blocks": "fp32"})
    assert [is_compiled(block) for block in model.blocks] == [True, True, False], "through the forwards of regions"


@pytest.mark.parametrize(
    ("weights", "fp8", "fp16"), [("quantized", E4M3, FP16), ("policy", BF16, FP32), ("fp32", FP32, FP32)]
)
def test_replica_dtypes_by_storage_of_weights(weights: str, fp8: torch.dtype, fp16: torch.dtype) -> None:
    rules = {"blocks.0.up": "fp8", "blocks.1.up": "fp16", "blocks.2.up": "fp32"}
    contract = resolved(Net(), "bf16", rules, weights)
    default = FP32 if weights == "fp32" else BF16
    found = contract.replica_dtypes
    assert [found[f"blocks.{i}.up.weight"] for i in range(3)] == [fp8, fp16, FP32]
    assert [found[f"blocks.{i}.up.bias"] for i in range(3)] == [default, fp16, FP32], "only the weight is quantized"
    assert contract.parameter_dtype("blocks.0.up.weight") == default
    assert found["head.weight"] == default
    assert contract.policy.dtype_during_reduction(FP16) == FP32
    tied = resolved(Net(tied=True), "bf16", {"head": "fp16"})
    assert tied.replica_dtypes["embed.weight"] == FP32, "of two formats"


def test_a_module_used_twice_is_one_module() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 32), "first": nn.Linear(32, 32), "head": nn.Linear(32, 32)})
    model["second"] = model["first"]
    model = nn.ModuleDict(dict(model.items()) | {"last": nn.Linear(32, 32)})
    contract = resolved(model, "fp8", {"second": "fp32"})
    assert table(contract)["first"] == "fp32: rule 'second'"
    assert resolved(model, "fp8").float8_modules == ("first", "head"), "it is not tied to itself"


def test_a_narrow_format_anywhere_makes_a_model_mixed() -> None:
    rules: list[dict[str, str]] = [{}, {"head": "fp32"}, {"head": "bf16"}]
    assert [resolved(Net(), "fp32", one).is_mixed for one in rules] == [False, False, True]


def test_fp16_anywhere_needs_a_loss_scale() -> None:
    assert not resolved(Net(), "bf16").needs_loss_scale
    assert resolved(Net(), "fp16").needs_loss_scale
    assert resolved(Net(), "bf16", {"head": "fp16"}).needs_loss_scale
    assert resolved(Net(), "fp32", {"head": "fp16"}).needs_loss_scale


def test_describe() -> None:
    lines = resolved(Net(), "fp8", {"blocks.0": "bf16"}, recipe="rowwise").describe()
    assert lines[2:] == [
        "modules: 4 in bf16, 4 in fp32, 4 in fp8",
        "  1 in bf16 (only a plain nn.Linear has FP8 products): embed",
        "  4 in fp32 (norm): blocks.0.norm, blocks.1.norm, blocks.2.norm, ...",
        "  2 in bf16 (rule 'blocks.0'): blocks.0.up, blocks.0.down",
        "  4 in fp8 (policy): blocks.1.up, blocks.1.down, blocks.2.up, ...",
        "  1 in bf16 (last product): head",
        "float8: rowwise, E4M3 gradients, emulated",
    ]
    assert "4 in fp8" in lines[1]
    assert len(resolved(Net(), "bf16").describe()) == 2, "nothing to explain"


@pytest.mark.parametrize(
    ("name", "rules", "message"),
    [
        ("bf16", {"hed": "fp32"}, "precision rule 'hed' matches no module; did you mean 'head'?"),
        ("bf16", {"head": "fp4"}, "precision rule 'head': 'fp4' is not one of fp32, bf16, fp16, fp8; did you mean"),
        ("bf16", {"*": "nvfp4"}, "precision rule '*': nvfp4 needs the FP4 Tensor Cores of Blackwell"),
        ("bf16", {"*": "tf32"}, "precision rule '*': tf32 is a mode of the whole process"),
        ("fp16", {"head": "fp8"}, "an fp8 rule under precision=fp16: FP8 products return BF16"),
        ("fp8", {"embed": "fp8"}, "precision rule 'embed: fp8': only a plain nn.Linear has FP8 products; give it bf16"),
        ("fp8", {"*norm": "fp8"}, "precision rule '*norm: fp8' reaches no Linear that can be FP8"),
        ("fp8", {"head": "fp8"}, "precision rule 'head: fp8': weight tied to 'embed.weight'; give it bf16"),
        ("fp8", {"h*": "fp8"}, "precision rule 'h*: fp8' reaches no Linear that can be FP8 ('head': weight tied to"),
        ("mxfp8", {}, "precision=mxfp8: mxfp8 has a scale for each block of 32 elements"),
        ("fp7", {}, "precision=fp7 is not one of auto, fp32, tf32, bf16, fp16, fp8; did you mean 'fp8'?"),
    ],
)
def test_refusals(name: str, rules: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolved(Net(tied=True), name, rules)
    assert str(raised.value).startswith(message)


def test_a_rule_for_a_part_of_attention_alone_is_refused() -> None:
    for rules in ({"attend.out_proj": "fp16"}, {"attend.*": "fp32"}, {"*": "fp32", "attend": "bf16", "*proj": "fp32"}):
        with pytest.raises(ConfigError, match=r"'attend.out_proj' cannot be fp.* reads its weights and never calls it"):
            resolved(Energy(), "bf16", rules)
    found = table(resolved(Energy(), "bf16", {"attend": "fp16"}))
    assert found["attend"] == found["attend.out_proj"] == "fp16: rule 'attend'"


def test_candidates_are_the_linears_that_no_rule_covers() -> None:
    policy = PrecisionPolicy.named("fp8", rules={"blocks.0": "bf16", "blocks.1": "fp8"}).on(CPU)
    model = Net()
    up, down = Float8Candidate("blocks.2.up", 64, 32), Float8Candidate("blocks.2.down", 32, 64)
    assert float8_candidates(policy, model) == [up, down]
    slow = Float8Decision("blocks.2.up", False, "timed 1.2 of BF16")
    decisions = (slow, Float8Decision("blocks.2.down", True, "timed 0.8"))
    found = table(resolve(policy, model, "quantized", decisions))
    assert found["blocks.2.up"] == "bf16: timed 1.2 of BF16"
    assert found["blocks.2.down"] == "fp8: timed 0.8"
    assert found["blocks.1.up"] == "fp8: rule 'blocks.1'"


def test_a_resumed_run_keeps_its_decisions() -> None:
    policy = PrecisionPolicy.named("fp8").on(CPU)
    decisions = (Float8Decision("blocks.2.up", False, "timed 1.2 of BF16", 1.0, 1.2),)
    saved = resolve(policy, Net(), "quantized", decisions).to_dict()
    assert earlier_decisions(saved, policy) == decisions
    rowwise = PrecisionPolicy.named("fp8", float8=Float8(recipe="rowwise")).on(CPU)
    assert earlier_decisions(saved, rowwise) == (), "of other products"
    assert earlier_decisions({}, policy) == ()
    removed = saved | {"float8": saved["float8"] | {"weight_scale": "current"}}
    assert earlier_decisions(removed, policy) == decisions, "an option that is gone"
    for item in saved["decisions"]:
        item["low_ms"] = item.pop("bf16_ms")
    assert earlier_decisions(saved, policy) == decisions, "the key of earlier versions"
    assert earlier_decisions(resolve(PrecisionPolicy.named("bf16"), Net()).to_dict(), policy) == ()


def prepared(model: nn.Module, name: str, rules: dict[str, str], weights: str = "policy") -> tuple[Autocast, Contract]:
    contract = resolved(model, name, rules, weights)
    for key, parameter in model.named_parameters():
        parameter.data = parameter.data.to(contract.parameter_dtype(key))
    return Autocast(contract, model, CPU), contract


def test_regions_of_other_16_bit_formats() -> None:
    model = Net()
    autocast, contract = prepared(model, "bf16", {"blocks.0.up": "fp16", "blocks.1": "fp32", "blocks.1.up": "bf16"})
    regions = {name: dtype for name, dtype in contract.regions.items() if "norm" not in name}
    assert regions == {"blocks.0.up": FP16, "blocks.1": FP32, "blocks.1.up": BF16, "blocks.1.down": FP32}
    inner = torch.randn(2, 3, 32, dtype=BF16)
    with autocast():
        half = model.blocks[0].up(inner)
        block = model.blocks[1](inner)
        inside = model.blocks[1].up(inner.float())
    assert half.dtype == BF16, "cast back to the format of the parent"
    up = model.blocks[0].up
    want = torch.nn.functional.linear(inner.half(), up.weight.half(), up.bias.half()).to(BF16)
    assert torch.equal(half, want), "computed in FP16"
    assert block.dtype == FP32
    assert inside.dtype == BF16
    with torch.autocast("cpu", enabled=False), autocast.backward():
        assert model.blocks[1].up(inner.float()).dtype == FP32, "cast back to the format of the parent"


class Heads(nn.Module):
    """Modules that are FP32 by their class: with parameters, with buffers, with neither, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.batch = nn.BatchNorm1d(32)
        self.soft = nn.Softmax(-1)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor) -> Tensor:
        y = self.soft(self.batch(self.norm(self.inner(x))))
        self.between = y.dtype
        return self.loss(y, torch.zeros(len(x), dtype=torch.long))


@pytest.mark.parametrize("weights", ["quantized", "policy", "fp32"])
@pytest.mark.parametrize(("name", "rule_format"), [("bf16", "bf16"), ("bf16", "fp16"), ("fp32", "bf16")])
def test_a_rule_by_name_computes_what_autocast_keeps_in_fp32(name: str, rule_format: str, weights: str) -> None:
    model = Heads()
    rules = dict.fromkeys(("norm", "batch", "soft", "loss"), rule_format)
    autocast, contract = prepared(model, name, rules, weights)
    assert contract.fp32_class_overrides == tuple(rules)
    x = torch.randn(4, 32)
    with autocast(), observe_forward(model, contract), OpDtypes(model) as ops:
        loss = model(x)
    assert loss.dtype == FP32
    assert model.between == {"bf16": BF16, "fp32": FP32}[name], "cast back to the format of the parent"
    kernels = {"native_layer_norm", "native_batch_norm", "_softmax", "_log_softmax", "nll_loss_forward"}
    seen = {ran.op.partition(".")[0]: ran.outputs for ran in ops.ran if ran.op.partition(".")[0] in kernels}
    assert seen.keys() == kernels
    assert all(outputs[0] == rule_format for outputs in seen.values()), seen
    with autocast.backward():
        loss.backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
    with autocast(), full_precision(), OpDtypes(model) as ops:
        model.norm(x)
    (norm,) = [ran for ran in ops.ran if "layer_norm" in ran.op]
    exempt = name == "bf16"  # without autocast the region has no effect
    assert norm.outputs == ("fp32",) or not exempt, "full_precision() in code wins over a rule"


def test_float8_modules_are_made_and_named() -> None:
    model = Net()
    autocast, contract = prepared(model, "fp8", {"blocks.0": "fp32", "blocks.0.up": "fp8"})
    made = [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]
    linears = [f"blocks.{i}.{name}" for i in (1, 2) for name in ("up", "down")]
    assert tuple(made) == contract.float8_modules == ("blocks.0.up", *linears)
    assert {model.get_submodule(name).recipe for name in made} == {contract.recipe}
    tokens = torch.arange(6).view(2, 3)
    with autocast():
        output = model(tokens)
        assert model.blocks[1].up(torch.randn(2, 32)).dtype == BF16
    output.float().sum().backward()
    contract.check_parameters(dict(model.named_parameters()), dict(model.named_modules()))
    model.blocks[1].up = nn.Linear(32, 64).to(BF16)
    with pytest.raises(ContractError, match=r"'blocks\.1\.up' is a Linear, the contract says that its products are"):
        contract.check_parameters(dict(model.named_parameters()), dict(model.named_modules()))

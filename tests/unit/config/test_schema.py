from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.cli.checks import check_config
from dtrain.config.data import ArraysDataConfig, ChatDataConfig, ImagesDataConfig, TextDataConfig, TokensDataConfig
from dtrain.config.fields import CheckedRecord, check_field, setting
from dtrain.config.optim import AdamW, OptimConfig, TorchOptimizer
from dtrain.config.schema import GROUP_OPTIONS, RunConfig, TrainConfig
from dtrain.errors import ConfigError


def records(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    found = [(prefix, config)]
    for item in fields(config):
        if is_dataclass(getattr(config, item.name)):
            found += records(getattr(config, item.name), f"{prefix}{item.name}.")
    return found


NEEDS: dict[type[Any], dict[str, Any]] = {
    TextDataConfig: {"files": "*.txt"},
    ImagesDataConfig: {"path": "photos"},
    ArraysDataConfig: {"path": "a.safetensors"},
    TokensDataConfig: {"path": "tokens"},
    ChatDataConfig: {"files": "*.jsonl", "tokenizer": "model"},
}


OPTIONS = [schema(**NEEDS.get(schema, {})) for options in GROUP_OPTIONS.values() for schema in options.values()]
BOUNDED = [
    (record, item)
    for record in [*(record for _, record in records(RunConfig())), *OPTIONS]
    for item in fields(record)
    if item.metadata.keys() & {"min", "above", "max"}
]


@settings(max_examples=200)
@given(st.sampled_from(BOUNDED), st.one_of(st.sampled_from([0.0, 1.0]), st.floats(min_value=-1e6, max_value=1e6)))
def test_a_value_passes_exactly_inside_its_range(bounded: tuple[Any, Any], value: float) -> None:
    record, item = bounded
    low, high = item.metadata.get("min", float("-inf")), item.metadata.get("max", float("inf"))
    is_inside = low <= value <= high and value > item.metadata.get("above", float("-inf"))
    given = value if "float" in item.type else int(value)
    if given != value:
        is_inside = low <= given <= high
    kind, name = type(record), f"{type(record).__name__}.{item.name}"
    with nullcontext() if is_inside else pytest.raises(ConfigError, match=f"{name}="):
        check_field(kind, item.name, given, name)


@dataclass(frozen=True)
class Every(CheckedRecord):
    """A field of each type."""

    number: float = setting(1.0, "")
    count: int | None = setting(1, "")
    flag: bool = setting(False, "")
    text: str = setting("a", "")
    pair: tuple[float, float] = setting((0.0, 1.0), "")
    names: list[str] = setting([], "")
    formats: dict[Any, str] = setting({}, "")
    patterns: Any = setting("auto", "", kind=str | list[str], what="auto or a list")
    inner: TrainConfig = setting(TrainConfig(), "")
    either: bool | str = setting("auto", "", choices=("auto", True, False))


@pytest.mark.parametrize(
    ("field", "value", "stored"),
    [
        ("number", 3, 3.0),
        ("count", None, None),
        ("pair", [1, 2], (1.0, 2.0)),
        ("names", ("a", "b"), ["a", "b"]),
        ("patterns", ["a"], ["a"]),
        ("patterns", "auto", "auto"),
        ("either", True, True),
    ],
)
def test_a_value_is_stored_as_its_type(field: str, value: Any, stored: Any) -> None:
    found = getattr(Every(**{field: value}), field)
    assert (found, type(found)) == (stored, type(stored))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("number", "1", "Every.number='1' is not a number"),
        ("number", True, "Every.number=true is not a number"),
        ("count", True, "Every.count=true is not a whole number or null"),
        ("count", 1.0, "Every.count=1.0 is not a whole number or null"),
        ("count", "2", "Every.count='2' is not a whole number or null"),
        ("flag", 1, "Every.flag=1 is not true or false"),
        ("text", None, "Every.text=null is not text"),
        ("pair", (1, "2"), r"Every.pair=\[1,2\] is not a list of 2 numbers"),
        ("names", "a", "Every.names='a' is not a list"),
        ("names", [1], r"Every.names=\[1\] is not a list"),
        ("formats", ["a"], r"Every.formats=\[a\] is not a mapping"),
        ("formats", {"a": 1}, r"Every.formats=\{a: 1\} is not a mapping"),
        ("patterns", [{"params": []}], r"Every.patterns=\[\{params: \[\]\}\] is not auto or a list"),
        ("inner", {}, r"Every.inner=\{\} is not a TrainConfig"),
        ("either", 1, "Every.either=1 is not one of auto, true, false"),
        ("text", object(), "Every.text=a builtins.object is not text"),
        ("text", TrainConfig, "Every.text=the class dtrain.config.schema.TrainConfig is not text"),
        ("text", ["x" * 200], r"Every.text=\[x{70,90}\.\.\. is not text"),
    ],
)
def test_a_value_of_another_type_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        Every(**{field: value})


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 2000))
def test_the_sizes_named_for_a_batch_that_does_not_divide_are_the_nearest(micro: int, world: int, batch: int) -> None:
    config = replace(RunConfig(), train=TrainConfig(micro_batch_size=micro, global_batch_size=batch))
    if batch % (micro * world) == 0:
        check_config(config, world)
        return
    with pytest.raises(ConfigError, match="does not divide") as caught:
        check_config(config, world)
    named = [int(word) for word in str(caught.value).rpartition(": ")[2].split(" or ")]
    divisible = [size for size in range(1, batch + micro * world + 1) if size % (micro * world) == 0]
    assert named == [size for size in divisible if abs(size - batch) < micro * world]


def test_the_record_is_text_and_numbers_and_keeps_the_class() -> None:
    class Local(torch.optim.RAdam):
        pass

    record = TorchOptimizer(Local, 0.1, weight_decay=0.2, groups={"*.bias": {"weight_decay": 0.0, "lr_factor": 2.0}})
    assert record.factory == f"{__name__}:test_the_record_is_text_and_numbers_and_keeps_the_class.<locals>.Local"
    assert json.loads(json.dumps(asdict(record)))["options"] == {"weight_decay": 0.2}
    for other in (replace(record, lr=0.2), record.with_changes("*.bias"), copy.deepcopy(record)):
        assert other.load() is Local
        assert other.factory == record.factory
    assert record.with_changes("*.bias").options == {"weight_decay": 0.0}
    assert record.with_changes("*.bias").groups == {}
    assert copy.deepcopy(record) == record != replace(record, lr=0.2)
    named = TorchOptimizer("torch.optim:RAdam", 1e-3, options={"betas": [0.9, 0.99]})
    assert named == replace(TorchOptimizer(torch.optim.RAdam, betas=(0.9, 0.99)), factory="torch.optim:RAdam")
    assert named.load() is torch.optim.RAdam
    assert named.options == {"betas": (0.9, 0.99)}


def test_the_optimizer_of_a_configuration_and_its_weight_decay() -> None:
    assert OptimConfig(lr=0.5, max_grad_norm=None).optimizer == AdamW(lr=0.5), "without the keys beside it"
    assert TorchOptimizer(torch.optim.AdamW).decay == 0.01
    assert TorchOptimizer(torch.optim.AdamW).without_decay().options == {"weight_decay": 0.0}
    assert TorchOptimizer("torch.optim:AdamW", weight_decay=0.3).decay == 0.3
    assert TorchOptimizer(torch.optim.Rprop).decay == 0.0
    assert TorchOptimizer(torch.optim.Rprop).without_decay() == TorchOptimizer(torch.optim.Rprop)

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from dtrain.config.model import ModelConfig
from dtrain.errors import ConfigError
from dtrain.models import build_model, vocabulary

MODULE = """
import torch
from torch import nn

WIDTH = 4

def build_net(config, vocab_size):
    return nn.Linear(vocab_size, config.args.get("width", WIDTH))

def build_dict(config, vocab_size):
    return {"weight": torch.zeros(3)}

def build_broken(config, vocab_size):
    raise RuntimeError("the user's own error")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "factory_of_mine.py").write_text(MODULE)
    (tmp_path / "factory_needs.py").write_text("import a_package_nobody_has")
    (tmp_path / "factory_syntax.py").write_text("def build(:")
    monkeypatch.chdir(tmp_path)
    # what a console script sees: the working directory is not on the path
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("factory_")]:
        del sys.modules[name]


def build(factory: str, seed: int = 0, **args: object) -> nn.Module:
    return build_model(ModelConfig(factory=factory, args=args), 10, seed)


def test_a_module_in_the_working_directory_is_found() -> None:
    model = build("factory_of_mine:build_net", width=7)
    assert isinstance(model, nn.Linear)
    assert (model.in_features, model.out_features) == (10, 7)
    with pytest.raises(RuntimeError, match="the user's own error"):
        build("factory_of_mine:build_broken")


def test_a_vocabulary_of_its_own_may_be_larger_than_the_datas() -> None:
    for own, expected in ((None, 10), (10, 10), (64, 64)):
        config = ModelConfig(factory="factory_of_mine:build_net", vocab_size=own)
        assert vocabulary(config, 10) == expected
        assert build_model(config, 10, 0).in_features == expected
    with pytest.raises(ConfigError, match=r"model.vocab_size=9 is smaller than the data's vocabulary of 10 tokens"):
        build_model(ModelConfig(vocab_size=9), 10, 0)


def test_the_seed_decides_the_weights_and_the_callers_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = (build("factory_of_mine:build_net", seed) for seed in (1, 1, 2))
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_bad_form_is_refused() -> None:
    for factory in ("", "build", "a:b:c", "a.b", "pkg.mod:", ":build", "os:sys.exit", "a-b:c", "a b:c"):
        with pytest.raises(ConfigError, match=r"must be package\.module:function"):
            build(factory)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("factory_of_yours:build", "no module named factory_of_yours on the Python path or in /"),
        ("factory_of_mine.sub:build", "no module named factory_of_mine.sub on"),
        ("factory_needs:build", "importing factory_needs failed: No module named 'a_package_nobody_has'"),
        ("factory_syntax:build", "importing factory_syntax failed: SyntaxError"),
        ("factory_of_mine:build_nett", "has no build_nett; did you mean 'build_net'"),
        ("factory_of_mine:xyzzy", "has no xyzzy; valid: build_broken, build_dict, build_net"),
        ("factory_of_mine:WIDTH", "is of type int, not a function"),
        ("factory_of_mine:build_dict", "returned a dict; expected a torch nn.Module"),
    ],
)
def test_errors_name_the_factory_in_one_line(factory: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(factory)
    assert str(caught.value).startswith(f"model.factory={factory}")
    assert "\n" not in str(caught.value)

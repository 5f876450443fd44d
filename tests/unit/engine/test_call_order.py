"""The order of an engine's calls: what is refused has no effect, and what ends a batch early.

A script is a row of words, each a call (see ``Player.call``); ``word!key`` is refused with ``ERRORS[key]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.errors import UsageError
from tests.helpers.one_rank import X, masters, start, unchanged

ERRORS = {
    "inside": "inside micro-batch 0, which has not ended; leave its 'with' block, or the loop over",
    "after": "after micro-batch {n}, which was the last of this step or ended with an exception; call engine.step()",
    "outside": "engine.backward outside a micro-batch, after micro-batch {n}; put every backward",
    "whole": "after an engine.backward outside of any, which is a whole step's; call engine.step() first",
    "second": "a second engine.backward",
    "again": "called again before engine.step, or after engine.micro_batch; one batch makes one step",
    "loop": "engine.step was called inside a loop over engine.accumulate",
    "none": "engine.step without engine.backward",
    "empty": "empty batch",
    "loss": "call engine.backward(loss) instead",
    "graph": "the loss has no graph",
    "save": "engine.save between backward and step; call it after engine.step",
    "load": "engine.load between backward and step; call it after engine.step",
}  # fmt: skip


def items(number: int) -> Iterator[int]:
    yield from range(number)
    raise KeyError("the loader broke")


class Player:
    """Calls an engine as the words of a script say; ``outcomes`` are those of its steps."""

    def __init__(self, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        # the masks, and with them the gradients, depend on the numbers of step, micro-batch and forward
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        self.engine = start(model, **options)
        self.folder = folder
        self.outcomes: list[Any] = []
        self.iterator: Any = iter(())
        self.opened: AbstractContextManager[None] = nullcontext()

    def play(self, script: str) -> Player:
        for word in script.split():
            call, _, key = word.partition("!")
            name, number = re.fullmatch(r"([a-z]+)(\d*)", call).groups()  # type: ignore[union-attr]
            message = re.escape(ERRORS[key]).replace(r"\{n\}", r"\d") if key else ""
            with pytest.raises(UsageError, match=message) if key else nullcontext():
                self.call(name, int(number or 0))
        return self

    def loss(self) -> Tensor:
        return self.engine(X).square().mean()

    def call(self, word: str, number: int) -> None:
        engine = self.engine
        match word:
            case "forward":
                self.loss()
            case "back":
                engine.backward(self.loss())
            case "own":  # not through the engine
                self.loss().backward()
            case "detached":
                engine.backward(self.loss().detach())
            case "step":
                self.outcomes.append(engine.step())
            case "more" | "last":
                opened = engine.micro_batch(last=word == "last")
                opened.__enter__()
                self.opened = opened
            case "end":
                self.opened.__exit__(None, None, None)
            case "fail":  # the body of the micro-batch raises
                assert not self.opened.__exit__(KeyError, KeyError(), None), "it is not swallowed"
            case "batch" | "loader":  # begins a loop; a loader breaks after the last item
                iterator = engine.accumulate(range(number) if word == "batch" else items(number))
                next(iterator)
                self.iterator = iterator
            case "next":
                next(self.iterator)
            case "done":
                assert next(self.iterator, None) is None
            case "broken":
                with pytest.raises(KeyError, match="the loader broke"):
                    next(self.iterator)
            case "drop":  # leaves the loop by ``break``, or late by the garbage collector
                self.iterator.close()
            case "eval":
                with engine.eval():
                    assert not self.loss().requires_grad
            case "save":
                engine.save(self.folder)
            case "load":
                engine.load(self.folder)


SAME = ""  # as the script without what is refused
SCRIPTS: dict[str, tuple[str, str]] = {
    # a script, and another one with the same outcomes and weights
    "one that is left out has a number": ("more end last back end step", "batch2 next back done step"),
    "evaluations have none": ("more eval back end last eval back eval end step", "more back end last back end step"),
    "after the last one": ("last back end last!after step last back end step", SAME),
    "inside another": ("more last!inside back end last back end step", SAME),
    "inside a loop": ("batch2 last!inside back next back done step", SAME),
    "a backward outside": ("more back end back!outside last back end back!outside step", ""),
    "a backward after the loop": ("batch2 back next done back!outside step back step", ""),
    "after a backward of a whole step": ("back last!whole batch1!whole last!whole step", "back step"),
    "a second backward": ("back back!second step", SAME),
    "a second backward of one": ("last back back!second end step", "last back forward end step"),
    "a batch after one": ("more back end batch2!again last batch2!again back end step", SAME),
    "two batches in a step": ("batch2 back next back done batch2!again step batch1 back done step", SAME),
    "an empty batch": ("batch0!empty batch1 back done step", SAME),
    "a step inside a loop": ("batch3 back step next!loop back step", SAME),
    "a step inside the last": ("last back step end batch1 back step done last back end step", SAME),
    "a step without a backward": ("step!none back step step!none back step", SAME),
    "a batch without a backward": ("last forward end step!none last back end step", "last back end step"),
    "one without a backward, not the last": (
        "more forward end step!none batch2 back next back done step",
        "batch2 back next back done step",
    ),
    "a loop left before a backward": ("batch3 forward drop last back end step", "last back end step"),
    "an exception before a backward": ("more end more forward fail last back end step", "last back end step"),
    "an exception after a backward": (
        "more back end more fail last!after batch2!again step last back end step",
        "more back end step last back end step",
    ),
    "a loop left after a backward": ("batch3 back drop last!after batch3!again step", "more back end step"),
    "a loader that breaks": ("loader2 broken last back end step", "last back end step"),
    "an old loop closed late": (
        "batch3 back step more drop back end last back end step",
        "more back end step more back end last back end step",
    ),
    "a loss of one's own": ("own!loss back step", "forward back step"),
    "a loss without a graph": ("detached!graph back step", "forward back step"),
    "a save in a step": ("back save!save load!load step save load back step", "back step back step"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_refused_has_no_effect(name: str, tmp_path: Path) -> None:
    script, like = SCRIPTS[name]
    played = Player(tmp_path).play(script)
    plain = " ".join(word for word in script.split() if "!" not in word)
    other = Player(tmp_path).play(like or plain)
    assert played.outcomes == other.outcomes
    assert all(outcome.applied for outcome in played.outcomes)
    assert unchanged(played.engine, masters(other.engine))


def test_a_message_says_how_to_continue(tmp_path: Path) -> None:
    player = Player(tmp_path).play("batch2 back drop")
    for word in ("last", "batch2"):
        with pytest.raises(UsageError, match=r"incomplete on this rank: .* build a new engine and load a checkpoint"):
            player.play(word)
    player = Player(tmp_path).play("last back")
    with pytest.raises(UsageError, match=r"'with engine\.micro_batch\(last=\.\.\.\):'"):
        player.play("back")


def fail(*_: Any) -> None:
    raise RuntimeError("the graph broke")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_works_after_a_failed_backward(tmp_path: Path, stage: int) -> None:
    player = Player(tmp_path, zero_stage=stage)
    engine, before = player.engine, masters(player.engine)
    hook = engine.module[0].register_full_backward_pre_hook(fail)  # in the middle of a backward
    with pytest.raises(RuntimeError, match="the graph broke"), engine.micro_batch(last=False):
        player.play("back")
    hook.remove()
    with pytest.raises(UsageError, match="build a new engine and load a checkpoint"):
        player.play("last")
    for word in ("step", "back", "save", "load"):
        verb = "backward" if word == "back" else word
        with pytest.raises(UsageError, match=f"engine.{verb} after an engine.backward that failed half-way"):
            player.play(word)
    assert unchanged(engine, before)

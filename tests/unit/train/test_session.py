"""A session is what ``dtrain train`` does, step by step; and nothing else in dtrain has a loop of its own."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import dtrain
from dtrain.__main__ import main
from dtrain.errors import ConfigError
from dtrain.tasks import IGNORE_INDEX
from dtrain.train.session import StepWatch

ROOT = Path(__file__).parents[3]
WORDS = [
    *("model=tiny", "precision=fp32", "optim.compile=false", "launch.device=cpu", "launch.threads_per_rank=1"),
    *("train.micro_batch_size=2", "train.global_batch_size=4", "train.steps=3", "train.eval_batches=2"),
    *("schedule.warmup_steps=1", "supervise.enabled=false"),
]


def test_a_session_trains_what_the_command_trains(tmp_path: Path) -> None:
    run = f"run_dir={tmp_path}/run train.log_every=1 report=false train.sample_tokens=0".split()
    assert main(["train", *WORDS, *run]) == 0
    logged = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    session = dtrain.Session.open(overrides=WORDS)
    outcomes = [session.step() for _ in range(3)]
    losses = [line["loss"] for line in logged if "loss" in line]
    assert [outcome.loss for outcome in outcomes] == losses
    assert session.validate()["loss"] == json.loads((tmp_path / "run/summary.json").read_text())["val_loss"]


def test_a_save_resumes_after_the_batches_that_the_session_drew_itself(tmp_path: Path) -> None:
    session = dtrain.Session.open(overrides=WORDS)
    session.step()
    session.engine.save(tmp_path)
    expected = session.step().loss
    resumed = dtrain.Session.open(overrides=WORDS)
    resumed.engine.load(tmp_path)
    assert resumed.step().loss == expected
    cursor = resumed.engine.data_cursor
    resumed.step(next(session.loader))
    assert resumed.engine.data_cursor == cursor, "a batch of the caller is no sample of the data"


class _Log(StepWatch):
    def __init__(self) -> None:
        self.events: list[Any] = []

    @contextmanager
    def _noted(self, *event: Any) -> Iterator[None]:
        self.events.append(event)
        yield
        self.events.append("end")

    def forward(self, micro: Any) -> AbstractContextManager[object]:
        return self._noted("forward", len(micro["targets"]))

    def backward(self, micro: Any, output: Any, weight: float) -> AbstractContextManager[object]:
        return self._noted("backward", output.loss.dim(), weight)

    def update(self) -> AbstractContextManager[object]:
        return self._noted("update")


def test_a_micro_batch_counts_by_its_targets_and_its_parts_can_be_watched() -> None:
    session, log = dtrain.Session.open(overrides=WORDS), _Log()
    whole, masked = next(session.loader)
    masked["targets"][:, 8:] = IGNORE_INDEX
    share = 8 / masked["targets"].shape[1]
    plain = dtrain.Session.open(overrides=WORDS).engine
    expected = []
    for micro in plain.accumulate([whole, masked]):
        expected.append(plain(**micro).loss.item())
        plain.backward(plain(**micro), weight=1.0 if micro is whole else share)
    outcome, reference = session.step([whole, masked], watch=log), plain.step()
    assert outcome.loss == pytest.approx((expected[0] + share * expected[1]) / (1 + share), rel=1e-6)
    for name, value in session.engine.master_state().items():
        assert torch.equal(value, plain.master_state()[name]), name
    assert (outcome.weight, reference.weight) == (1 + share, 1 + share)
    parts = [event for weight in (1.0, share) for event in (("forward", 2), "end", ("backward", 0, weight), "end")]
    assert log.events == [*parts, ("update",), "end"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["modle=tiny"], "modle"),
        (["engine.keep_gathered=[nothing]", "engine.zero_stage=3"], "keep_gathered"),
        (["train.global_batch_size=3", "train.micro_batch_size=2"], "global_batch_size"),
    ],
)
def test_a_mistake_is_named_as_on_the_command_line(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        dtrain.Session.open(overrides=[*WORDS, *words])


OWN_LOOPS = {
    "dtrain/train/session.py": "the body of the loop",
    "dtrain/integrations/": "the loops are transformers' and accelerate's",
    "dtrain/measure/bench/peers/": "the other libraries' own loops",
}
"""Where ``accumulate`` or ``backward`` may be called, and why."""


def test_there_is_one_body_of_a_training_loop() -> None:
    found = set()
    for room in ("train", "planning", "measure", "tools", "integrations"):
        for path in (ROOT / "dtrain" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    owner = ast.unparse(node.func.value)
                    if node.func.attr in ("accumulate", "backward") and owner.endswith("engine"):
                        found.add(str(path.relative_to(ROOT)))
    assert all(any(path.startswith(own) for path in found) for own in OWN_LOOPS), "an entry is not needed any more"
    others = {path for path in found if not any(path.startswith(own) for own in OWN_LOOPS)}
    assert not others, "these write a loop of their own; they should call Session.step"

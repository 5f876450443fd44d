"""What the tests of transformers' Trainer state of losses by tokens, and of a resumed run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.faults.deepspeed_weights import a_resumed_run_has_the_frozen_weights_of_the_one_that_saved
from tests.corpus.faults.loops_accumulation import tokens_count_alike_in_micro_batches_of_unequal_length
from tests.corpus.rows import assertion
from tests.corpus.training import SETTINGS, TOLERANCES, compare_masters, seeded, start
from tests.engines.matrix import Trial
from tests.helpers.oracle import Oracle

VOCAB, LENGTH, IGNORED = 11, 7, -100


class Bigram(nn.Module):
    """Predicts the next token; padding does not count. Summed losses serve a user who divides by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(VOCAB, 5), nn.Linear(5, 7), nn.Linear(7, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        logits = self.head(torch.tanh(self.hidden(self.embedding(tokens)))).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction)


def bigram() -> Bigram:
    return seeded(Bigram, 2)


def rows(step: int) -> dict[str, Tensor]:
    """Six sequences of one to six tokens that count."""
    tokens = torch.randint(VOCAB, (6, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    counts = (torch.arange(6) + step) % 6 + 1
    targets = tokens[:, 1:].masked_fill(torch.arange(LENGTH) >= counts[:, None], IGNORED)
    return {"tokens": tokens[:, :-1], "targets": targets}


def counted(batch: dict[str, Tensor]) -> int:
    return int((batch["targets"] != IGNORED).sum())


def follow_whole_batches(trial: Trial, engine: Any, backward: Any) -> None:
    """Asserts that steps on one sequence a micro-batch are those of one process on whole batches."""
    oracle = Oracle(bigram(), optimizer=SETTINGS)
    for step in range(3):
        batch, before = rows(step), oracle.masters()
        want = oracle.step([(batch, 1.0)])
        for row in engine.accumulate(range(trial.rank, 6, trial.ranks)):
            backward({name: value[row : row + 1] for name, value in batch.items()}, counted(batch))
        outcome = engine.step()
        assert outcome.loss == pytest.approx(want.loss, rel=1e-5)
        assert outcome.grad_norm == pytest.approx(want.grad_norm, rel=1e-5)
        if masters := engine.master_state():
            compare_masters(masters, oracle.masters(), before, TOLERANCES["fp32"])


@assertion(
    "huggingface/transformers tests/trainer/test_trainer_distributed_loss.py::test_trainer",
    "Losses on several ranks are those on one, if each divides its summed loss by all ranks' number of tokens.",
)
def summed_losses_over_the_tokens_of_all_ranks_are_those_of_the_whole_batch(trial: Trial) -> None:
    """The mean over six micro-batches of six times their shares of the mean."""
    engine = start(trial, bigram())

    def backward(batch: dict[str, Tensor], tokens: int) -> None:
        engine.backward(engine(**batch, reduction="sum") * (6 / tokens))

    follow_whole_batches(trial, engine, backward)


def frozen(seed: int) -> Bigram:
    """With a frozen layer; another seed gives other weights."""
    model = seeded(Bigram, seed)
    model.hidden.requires_grad_(False)
    return model


def train(trial: Trial, engine: Any, step: int) -> None:
    batch = rows(step)
    for row in engine.accumulate(range(trial.rank, 6, trial.ranks)):
        engine.backward(engine(**{name: value[row : row + 1] for name, value in batch.items()}))
    assert engine.step().applied


assertion(
    "huggingface/transformers tests/trainer/test_trainer_checkpointing.py::test_resume_training_with_frozen_params",
    "In a resumed run a frozen parameter keeps its value.",
)(a_resumed_run_has_the_frozen_weights_of_the_one_that_saved)

assertion(
    "huggingface/transformers tests/trainer/test_trainer.py::test_gradient_accumulation_loss_alignment_with_model_loss",
    "Losses with accumulation are those of whole batches, even if micro-batches differ in their number of tokens.",
)(tokens_count_alike_in_micro_batches_of_unequal_length)

"""Language modeling: the next token, and a text at the end. The models compute this loss themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dtrain.tasks.task import Sample, SampleOptions, Task, Validation

if TYPE_CHECKING:
    from dtrain.engine.interface import Engine


class Codec(Protocol):
    """Text of tokens.

    Attributes:
        end_id: token that ends a document, or None; a sample of text begins with it.
    """

    @property
    def end_id(self) -> int | None: ...

    def decode(self, tokens: Iterable[int] | Tensor) -> str:
        """Returns the text of 1-D ``tokens``; tokens outside of the vocabulary become U+FFFD."""


@dataclass(frozen=True)
class Language(Task):
    """Next-token prediction.

    Attributes:
        num_outputs: number of tokens that the data may contain.
        codec: text of its tokens; None: it is not known, and there is no sample.
    """

    name = "language"
    unit = "tokens"
    needs_for_sample = "a model(tokens) whose output has logits"
    num_outputs: int
    codec: Codec | None = None
    input_shape: tuple[int, ...] = ()

    def loss(self, prediction: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError("a language model computes its own loss: forward(tokens=..., targets=...)")

    def describe(self, batch: dict[str, Tensor]) -> list[str]:
        return [] if self.codec is None else [self.codec.decode(tokens) for tokens in batch["tokens"]]

    def sample(self, engine: Engine, validation: Validation, options: SampleOptions) -> Sample:
        """Returns a text that the model continues from the end of a document."""
        assert self.codec is not None
        prompt = torch.tensor([[self.codec.end_id or 0]], device=engine.device)
        generator = torch.Generator().manual_seed(options.seed)
        # all ranks generate it, because the forward of a sharded model communicates
        with engine.eval():
            tokens = generate(engine, prompt, options.num_tokens, options.max_seq_len, generator)
        return Sample(self.codec.decode(tokens[0, 1:]))


@torch.no_grad()
def generate(
    model_forward: Callable[[Tensor], Any],
    tokens: Tensor,
    num_tokens: int,
    max_seq_len: int,
    generator: torch.Generator,
    temperature: float = 0.8,
) -> Tensor:
    """Appends ``num_tokens`` sampled tokens to each row of ``tokens``.

    Args:
        model_forward: maps int64 [B, T] to an object with ``logits`` [B, T, vocab_size]. Put the model in eval mode.
        tokens: prompt, int64 [B, T] with T >= 1.
        max_seq_len: largest number of tokens that the model sees, counted from the end.
        generator: generator of the draws, which run on its device.
        temperature: divisor of the logits; below 1 favors likely tokens.

    Returns:
        int64 [B, T + num_tokens].
    """
    for _ in range(num_tokens):
        logits = model_forward(tokens[:, -max_seq_len:]).logits[:, -1].float()
        probabilities = torch.softmax(logits / temperature, dim=-1).to(generator.device)
        drawn = torch.multinomial(probabilities, num_samples=1, generator=generator)
        tokens = torch.cat((tokens, drawn.to(tokens.device)), dim=1)
    return tokens

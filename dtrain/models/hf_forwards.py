"""Finds by short forwards, of a model of transformers: its causality, its masks, and the place of its output layer."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError

_LEAK = 1e-4
"""Change of a logit that must not change, as a share of the change of one that may; FP32 rounds to about 1e-6."""

_MARK = 1000.0
"""Size of the marks that stand for logits, so large that a soft cap changes them."""

_CONFIGURED = (
    "final_logit_softcapping",
    "final_logits_soft_cap",
    "logits_soft_cap",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_logit_soft_cap",
)
"""Entries of config.json by which a model changes its logits, for a model on ``meta``, which has no values."""


def text_config(hf: Any) -> Any:
    """Returns the part of the configuration of a model of transformers that describes the language model."""
    return hf.config.get_text_config()


def takes_positions(hf: Any) -> bool:
    return "position_ids" in signature(hf.forward).parameters


def _short_row(hf: Any) -> list[int]:
    """Returns six tokens that are no padding."""
    config = text_config(hf)
    tokens = [token for token in range(min(7, config.vocab_size)) if token != getattr(config, "pad_token_id", None)]
    return (tokens * 6)[:6]


@torch.no_grad()
def keeps_documents_apart(hf: Any) -> bool:
    """Changes one token, and returns whether the logits of another document keep their values.

    Raises:
        ConfigError: those of earlier tokens change, so that the model sees the tokens that it is to predict.
    """
    row = _short_row(hf)
    has_positions = takes_positions(hf)
    positions = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])} if has_positions else {}
    hf.eval()
    before, after = (
        hf(input_ids=torch.tensor([ids]), use_cache=False, **positions).logits[0].float()
        for ids in (row, [row[0], row[0], *row[2:]])  # the second token becomes the first one
    )
    hf.train()
    change = (after - before).abs().amax(-1)
    if change[0] > _LEAK * change[1]:
        raise ConfigError(
            f"model_type {text_config(hf).model_type} is not causal with this config.json: the logits of a token "
            "change with the token after it, which they are to predict; set is_decoder in config.json if the model has "
            "that entry"
        )
    return has_positions and not bool((change[3:] > _LEAK * change[1]).any())


def output_layer_name(hf: nn.Module, head: Any) -> str:
    """Returns the name of ``head`` in ``hf``; ``lm_head`` if it is none of its modules."""
    return next((name for name, module in hf.named_modules() if module is head), "lm_head")


@torch.no_grad()
def logits_needed_reason(hf: Any) -> str:
    """Returns why the logits of ``hf`` are not its output layer applied to its base model; empty if they are.

    A forward of six tokens proves it: the layer must take what the base model returns, and what it returns must be the
    logits. So a soft cap or a scale of the logits is found whatever the model calls it. On ``meta`` the names of known
    entries of the configuration decide.
    """
    head, base = hf.get_output_embeddings(), hf.base_model
    if type(head) is not nn.Linear:
        return f"is a {type(head).__name__}, not a plain nn.Linear"
    if base is hf:
        return "has no base model below it"
    if head.weight.is_meta:
        changes = [name for name in _CONFIGURED if getattr(hf.config, name, None) not in (None, 1)]
        return f"is not the last operation: the model changes its logits by {changes[0]}" if changes else ""
    taken: list[Tensor] = []
    given: list[Tensor] = []

    def mark(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        taken.append(args[0])
        marks = torch.arange(output.numel(), dtype=output.dtype, device=output.device)
        given.append(_MARK * (marks.view(output.shape) + 1))
        return given[-1]

    was_training = hf.training
    hf.eval()
    handle = head.register_forward_hook(mark)
    try:
        inputs = {"input_ids": torch.tensor([_short_row(hf)]), "use_cache": False}
        logits, hidden = hf(**inputs).logits, base(**inputs)[0]
    finally:
        handle.remove()
        hf.train(was_training)
    if len(taken) != 1:
        return "is called not once in a forward"
    if not torch.equal(logits, given[0]):
        return "is not the last operation: the model changes its logits, such as by a soft cap or a scale"
    return "" if torch.equal(hidden, taken[0]) else "does not take the output of the base model as it is"

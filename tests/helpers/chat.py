"""Conversations with a tokenizer: data in which few targets count, and another number in each sample."""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"


def masked_data(folder: Path) -> list[str]:
    """Writes them to ``folder``; returns the keys of a run that trains on them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|user|>", "<|assistant|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=259, show_progress=False, initial_alphabet=alphabet, special_tokens=special
    )
    tokenizer.train_from_iterator([], trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")
    talks = [{"prompt": "a" * (1 + n % 3), "completion": "b" * (1 + 3 * n % 11)} for n in range(40)]
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)), encoding="utf-8")
    return ["data=chat", f"data.files={folder}/talks.jsonl", f"data.tokenizer={folder}", "data.validation_percent=0"]

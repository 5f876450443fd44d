from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtrain.cli.resolve import compose
from dtrain.config.data import ChatDataConfig, TextDataConfig
from dtrain.config.schema import RunConfig
from dtrain.data import Dataset, load_dataset
from dtrain.data.token_samples import mean_context
from dtrain.data.tokenizer import TokenizerFile
from dtrain.errors import ConfigError
from dtrain.tasks import IGNORE_INDEX
from dtrain.telemetry.metrics import read_metrics
from dtrain.train.run import run_training

pytestmark = pytest.mark.usefixtures("no_network")

MARKED = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LAST_ONLY = (  # drops the thoughts of all answers but the last, as templates of reasoning models do
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' and loop.last %}<think>{% endif %}"
    "{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
UNTERMINATED = (  # the marked part begins with a space and ends with the content
    "{% for m in messages %}{{ m['role'] }}:{% if m['role'] == 'assistant' %}{% generation %} {{ m['content'] }}"
    "{% endgeneration %}{% else %} {{ m['content'] }}{% endif %}<|end|>{% endfor %}"
)
SPACED = (  # a space is the last character before the answer
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


@pytest.fixture(scope="module")
def tokenizer_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": SPECIAL}
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, **alphabet)
    tokenizer.train_from_iterator(["what is two plus two, and who is there?"], trainer)
    return str(tokenizer.to_str())


@pytest.fixture
def make_folder(tmp_path: Path, tokenizer_json: str) -> Any:
    def make(template: Any, *, trims_offsets: bool = False, end: str = "<|end|>") -> Path:
        folder = tmp_path / "tokenizer"
        folder.mkdir(exist_ok=True)
        content = json.loads(tokenizer_json)
        if trims_offsets:  # as GPT-2 and Llama 3 do
            trimming = dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), True)
            content["post_processor"] = {"type": "ByteLevel", **trimming}
        (folder / "tokenizer.json").write_text(json.dumps(content))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        config |= {} if template is None else {"chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    return make


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


WHO = {"prompt": "who is there?", "completion": "two plus two"}
LONG = [turn("system", "be brief"), turn("user", "two plus two?"), turn("assistant", "four é")]
TALK = [*LONG, turn("user", "and who is there?"), turn("assistant", "nobody")]


def load(tmp_path: Path, folder: Path, lines: Any, seq_len: int = 64, mark: Any = lambda: None, **keys: Any) -> Dataset:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (tmp_path / "talks.jsonl").write_text(text, encoding="utf-8")
    files = str(tmp_path / "*.jsonl")
    return load_dataset(ChatDataConfig(files=files, tokenizer=str(folder), **keys), seq_len, mark)


def shown(data: Dataset) -> list[tuple[str, str]]:
    """Text and counted text of each training document."""
    found = []
    batch = data.train.batch(np.arange(data.train.num_samples))
    for tokens, targets, positions in zip(*(batch[name] for name in ("tokens", "targets", "positions")), strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        for start, stop in pairwise(starts):
            own = targets[start:stop]
            if (own != IGNORE_INDEX).any():  # the last counted target is one ahead of the inputs
                found.append((data.codec.decode(tokens[start:stop]), data.codec.decode(own[own != IGNORE_INDEX])))
    return found


def test_only_the_answers_count_by_both_kinds_of_template(tmp_path: Path, make_folder: Any) -> None:
    lines = [{"messages": TALK}, {"prompt": "who?", "completion": "me"}, {"messages": LONG}]
    found = []
    for template in (MARKED, PLAIN):
        folder = make_folder(template)
        data = load(tmp_path, folder, lines, validation_percent=0)
        # none is held out by its hash, so the last conversation is
        assert sorted(counted for _, counted in shown(data)) == ["four é<|end|>nobody<|end|>", "me<|end|>"]
        by_answer = {counted: text for text, counted in shown(data)}
        talk = "<|system|>be brief<|end|><|user|>two plus two?<|end|><|assistant|>four é<|end|>"
        assert by_answer["four é<|end|>nobody<|end|>"].startswith(talk)
        assert data.validation.num_samples == 1
        assert "3 conversations in 1 files, 1 of them held out for validation" in data.description
        batch = data.train.batch(np.arange(data.train.num_samples))
        assert list(batch) == ["tokens", "targets", "positions"]
        assert {(values.dtype, values.shape[1]) for values in batch.values()} == {(torch.int64, 64)}
        assert (batch["tokens"] >= 0).all()
        assert data.mean_context == mean_context(data.train)
        found.append((batch, data.fingerprint))
    (marked, of_marked), (plain, of_plain) = found
    assert all(torch.equal(plain[name], marked[name]) for name in marked)
    others = [load(tmp_path, folder, lines, validation_percent=30), load(tmp_path, folder, lines[1:])]
    assert len({of_marked, of_plain, *(data.fingerprint for data in others)}) == 4


@pytest.mark.parametrize("trims_offsets", [False, True])
def test_each_token_of_an_answer_counts(tmp_path: Path, make_folder: Any, trims_offsets: bool) -> None:
    data = load(tmp_path, make_folder(UNTERMINATED, trims_offsets=trims_offsets), [{"messages": TALK}] * 2, seq_len=96)
    assert "cut" not in data.description
    ((_, counted),) = shown(data)
    assert counted == " four é nobody"  # é is two tokens
    data = load(tmp_path, make_folder(SPACED, trims_offsets=trims_offsets), [WHO] * 2)
    assert shown(data) == [("user: who is there?<|end|>assistant: two plus two", " two plus two<|end|>")]


def test_long_conversations_are_cut_and_those_without_an_answer_left_out(tmp_path: Path, make_folder: Any) -> None:
    never = {"messages": [turn("user", "who is there? " * 40), turn("assistant", "me")]}
    partly = {"messages": [turn("user", "who?"), turn("assistant", "a b c d " * 40)]}
    silent = {"messages": [turn("user", "who?")]}
    lines = [never, partly, silent, {"messages": LONG}, {"messages": LONG}]
    data = load(tmp_path, make_folder(MARKED), lines, seq_len=32, validation_percent=0)
    assert "1 of them held out for validation, 2 cut at 32 tokens, 2 without an answer left out" in data.description
    assert any(counted.startswith("a b c d a") and "<|end|>" not in counted for _, counted in shown(data))


def refusal(tmp_path: Path, folder: Path, lines: list[Any], seq_len: int = 64) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, folder, lines, seq_len)
    message = str(caught.value)
    assert "\n" not in message, message
    return message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"messages": [}', "talks.jsonl:2 is not JSON"),
        ({"text": "x", "id": 1}, "talks.jsonl:2 has the keys text, id; expected"),
        ([1], "talks.jsonl:2 has a list; expected"),
        ("[" * 100_000, "talks.jsonl:2 is not JSON: maximum recursion depth exceeded"),
        ({"prompt": "\ud800", "completion": "x"}, r"talks.jsonl:2 has '\ud800', half of a character; repair the text"),
        ({"messages": []}, "talks.jsonl:2 has the keys messages; expected"),
        ({"messages": [{"role": "user"}]}, "talks.jsonl:2: message 1 is {'role': 'user'}; expected role and content"),
        ({"prompt": 3, "completion": "x"}, "talks.jsonl:2: message 1 is"),
        ({"messages": LONG[2:]}, "talks.jsonl:2 begins with the assistant, and what the chat template of"),
        ({"messages": [turn("tool", "x")]}, "rejects the conversation: TemplateError: no tools here"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, make_folder: Any, line: Any, expected: str) -> None:
    assert expected in refusal(tmp_path, make_folder(PLAIN), [{"messages": LONG}, line])


def test_mistakes_of_the_tokenizer(tmp_path: Path, make_folder: Any) -> None:
    lines = [{"messages": TALK}] * 3
    assert "none is not a folder; expected one with tokenizer.json" in refusal(tmp_path, tmp_path / "none", lines)
    assert "has no chat template; save one with the tokenizer" in refusal(tmp_path, make_folder(None), lines)
    assert "talks.jsonl:1: the chat template" in (found := refusal(tmp_path, make_folder(LAST_ONLY), lines))
    assert "mark it in the template with {% generation %}" in found
    several = make_folder([{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": PLAIN}])
    assert "has several chat templates (default, tool_use); keep one" in refusal(tmp_path, several, lines)
    (empty := tmp_path / "empty").mkdir()
    assert "empty/tokenizer.json cannot be read: No such file" in refusal(tmp_path, empty, lines)
    found = refusal(tmp_path, make_folder(PLAIN), [{"messages": LONG}, {"messages": [turn("user", "x")]}])
    assert "gives 1 conversations with an answer in the first 64 tokens (1 without one)" in found
    folder = make_folder(MARKED.replace("<|end|>", "<|im_end|>"), end="<|im_end|>")
    found = refusal(tmp_path, folder, [{"messages": LONG}] * 3)
    assert "talks.jsonl:1 needs the token '<|im_end|>', which only tokenizer_config.json of" in found
    assert f"add it to tokenizer.json, which has {TokenizerFile(folder).vocab_size} tokens" in found


def test_both_sides_get_a_conversation_and_each_one_marks_progress(tmp_path: Path, make_folder: Any) -> None:
    marks: list[int] = []
    for number in range(6):  # of which the hash holds half out, some first
        lines = [{"messages": LONG, "id": number}] * 2
        data = load(tmp_path, make_folder(PLAIN), lines, validation_percent=50, mark=lambda: marks.append(1))
        assert (data.train.num_samples, data.validation.num_samples) == (1, 1)
        assert len(marks) == 2 * (number + 1)
    line = "\ufeff" + json.dumps({"messages": LONG})  # a byte order mark is no part of a line
    assert "2 conversations" in load(tmp_path, make_folder(PLAIN), [line, {"messages": TALK}]).description


RUN = (
    "data=chat experiment=smoke precision=fp32 schedule=constant optim.lr=0.01 optim.compile=false report=false "
    "train.steps=6 train.eval_every=0 train.save_every=0 train.global_batch_size=2 train.micro_batch_size=2 "
    "train.log_every=1 train.sample_tokens=4 model.hidden_dim=16 model.max_seq_len=32 supervise.enabled=false "
    "launch.device=cpu launch.threads_per_rank=1"
)


def test_a_run_on_conversations_lowers_the_loss_and_counts_answers(tmp_path: Path, make_folder: Any) -> None:
    lines = [{"prompt": f"who is {number % 2}?", "completion": "nobody", "id": number} for number in range(20)]
    folder, run_dir = make_folder(MARKED), tmp_path / "run"
    data = load(tmp_path, folder, lines, 32)
    sources = [f"data.files={tmp_path}/*.jsonl", f"data.tokenizer={folder}", f"run_dir={run_dir}"]
    assert run_training(compose([*RUN.split(), *sources])) == 0
    found = [line for line in read_metrics(run_dir / "metrics.jsonl") if "loss" in line]
    targets = data.train.batch(data.train.order(RunConfig().seed, np.arange(12)))["targets"]
    assert found[-1]["tokens"] == int((targets != IGNORE_INDEX).sum())
    assert found[-1]["loss"] < found[0]["loss"] - 0.5
    assert (run_dir / "tokenizer" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_text_by_a_tokenizer(tmp_path: Path, make_folder: Any) -> None:
    folder = make_folder(None)
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"what is two plus {number}? é", encoding="utf-8")
    keys: dict[str, Any] = {"files": str(tmp_path / "*.txt"), "validation_percent": 20.0}
    data = load_dataset(TextDataConfig(tokenizer=str(folder / "tokenizer.json"), **keys), 8)
    tokenizer = TokenizerFile(folder)
    assert (data.task.num_outputs, data.codec.end_id) == (tokenizer.vocab_size, tokenizer.end_id)
    text = data.codec.decode(data.train.batch(np.arange(data.train.num_samples))["tokens"].flatten())
    assert re.search(r"<\|end\|>what is two plus \d+\? é<\|end\|>", text)
    bytes_only = load_dataset(TextDataConfig(**keys), 8)
    assert bytes_only.task.num_outputs == 257
    more = load_dataset(TextDataConfig(**keys | {"validation_percent": 30.0}), 8)
    assert len({dataset.fingerprint for dataset in (data, bytes_only, more)}) == 3
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    with pytest.raises(ConfigError, match=r"bad\.txt is not UTF-8 at byte 3, so it cannot be tokenized"):
        load_dataset(TextDataConfig(tokenizer=str(folder), **keys), 8)
    with pytest.raises(ConfigError, match=r"the tokenizer .*gone\.json cannot be read: No such file"):
        load_dataset(TextDataConfig(tokenizer=str(tmp_path / "gone.json"), **keys), 8)

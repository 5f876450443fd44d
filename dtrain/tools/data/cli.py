"""``dtrain data COMMAND key=value ...``: writes, describes and checks token shards, and trains tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from dtrain.distributed.startup.launch_env import num_cores
from dtrain.errors import ConfigError, nearest
from dtrain.tools.data.command_line import (
    REQUIRED,
    Command,
    Option,
    command_help,
    read_arguments,
    read_count,
    read_path,
    read_switch,
    read_text,
)

_FILES = Option("files", read_text, REQUIRED, "glob with ** and {a,b}; .jsonl, .parquet, others: text, a document each")
_TEXT_KEY = Option("text_key", read_text, "text", "key of the text in a line of .jsonl; column of .parquet")
_VOCAB_SIZE = Option("vocab_size", read_count, None, "of shards of llm.c or Megatron, which do not state it")
_PACKAGE = "dtrain.tools.data"

COMMANDS = {
    "tokenize": Command(
        "write token shards; interrupted, the same command resumes",
        "files='corpus/**/*.{jsonl,parquet,txt}' tokenizer=models/tokenizer.json out=tokens/",
        f"{_PACKAGE}.tokenize:run",
        (
            _FILES,
            Option("tokenizer", read_path, REQUIRED, "tokenizer.json, or the folder that holds it"),
            Option("out", read_path, REQUIRED, "folder of the shards: new, empty, or unfinished"),
            _TEXT_KEY,
            Option("workers", read_count, num_cores(), "processes, a core each", "the number of cores"),
            Option("append_end", read_switch, True, "whether a token follows every document"),
            Option("end_token", read_text, None, "name of that token", "found in the tokenizer"),
        ),
    ),
    "info": Command(
        "show what a folder of token shards holds", "tokens/", f"{_PACKAGE}.info:run", (_VOCAB_SIZE,), folder=True
    ),
    "verify": Command(
        "read and check every byte of token shards; exit code 1 if a file is bad",
        "tokens/",
        f"{_PACKAGE}.verify:run",
        (_VOCAB_SIZE,),
        folder=True,
    ),
    "pack": Command(
        "plan samples of whole documents, for data.pack=best_fit",
        "tokens/ seq_len=1024",
        f"{_PACKAGE}.pack:run",
        (Option("seq_len", read_count, REQUIRED, "tokens in a sample: model.max_seq_len"), _VOCAB_SIZE),
        folder=True,
    ),
    "train-tokenizer": Command(
        "train a byte-level BPE tokenizer with <|endoftext|>",
        "files='corpus/**/*.txt' out=tokenizer.json vocab_size=8192",
        f"{_PACKAGE}.train_tokenizer:run",
        (
            _FILES,
            Option("out", read_path, REQUIRED, "the tokenizer.json to write; it must not exist"),
            Option("vocab_size", read_count, 8192, "number of tokens"),
            _TEXT_KEY,
        ),
    ),
}


def main(argv: Sequence[str]) -> int:
    name, *words = list(argv) or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"dtrain data has no command '{name}'{nearest(name, COMMANDS)}")
    command = COMMANDS[name]
    if any(word in ("-h", "--help") for word in words):
        print(command_help(name, command))
        return 0
    values = read_arguments(name, command, words)
    module, function = command.run.split(":")
    run: Callable[[Mapping[str, Any]], int] = getattr(import_module(module), function)
    return run(values)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.meaning}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: dtrain data COMMAND ...", "", *lines, "", "More on one: dtrain data COMMAND --help"])

"""``dtrain bench data``: tokenizing, reading token shards, and packing documents against padding them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import dtrain
from dtrain.config.data import TokensDataConfig
from dtrain.config.schema import RunConfig, TrainConfig
from dtrain.config.tool_schema import DataBenchConfig, ModelSuite
from dtrain.data import BatchLoader, load_dataset
from dtrain.data.packing import Packing, pack_documents
from dtrain.data.shards.reader import TokenShards
from dtrain.data.text import stdlib_documents
from dtrain.data.token_samples import Int64, PackedDocuments, TokenStream
from dtrain.data.tokenizer import TokenizerFile
from dtrain.distributed.startup.setup import choose_device
from dtrain.distributed.transport.single_rank import SingleRank
from dtrain.errors import BenchError
from dtrain.measure.bench.operations.timing import Operation, measure_operations, time_rounds
from dtrain.measure.bench.records import OperationResults, OperationTiming
from dtrain.models import build_model
from dtrain.tasks import IGNORE_INDEX, num_targets
from dtrain.tools.processes import environment
from dtrain.tools.tables import plural
from dtrain.train.session import Session

_DESCRIPTION = (
    "{documents:,} documents of the standard library's text, cut to log-normal lengths with a median of {median} "
    "characters; one process on {device}, {threads}. tokenize: the library alone on texts in memory; the whole command "
    "with one worker, from its start, with JSON, files and hashes. read: the batches of {batch} samples that training "
    "takes, from the page cache; just opened: the checks of a first read included. learn: forward and backward of the "
    "same {learned} documents in batches of {batch}. Tokens of tokenize are without the ends of documents, those of "
    "learn are the targets that count."
)
_DOCUMENTS = 512  # that the library gets at a time
_LIBRARY, _PADDED = "library alone", "padded to {:,}"


def run_data_suite(config: ModelSuite[DataBenchConfig], command: str) -> Iterator[OperationResults]:
    """Measures in this process and in commands that it starts; its files are in a temporary folder."""
    bench, seq_len = config.bench, config.model.max_seq_len
    torch.set_num_threads(bench.threads)
    device = choose_device(bench.device, 0)
    with tempfile.TemporaryDirectory(prefix="dtrain-bench-") as name:
        corpus = _Corpus.write(Path(name), bench)
        description = _DESCRIPTION.format(
            documents=len(corpus.texts),
            median=bench.median_length,
            threads=plural(bench.threads, "thread"),
            device=device.type,
            batch=bench.micro_batch_size,
            learned=bench.documents,
        )

        def measure() -> Iterator[OperationTiming]:
            yield from _time_tokenizing(corpus, bench)
            _dtrain("data", "pack", str(corpus.shards), f"seq_len={seq_len}")
            yield from _time_reading(corpus, bench, seq_len)
            yield from _time_learning(corpus, config, device)

        yield from measure_operations(
            "data", command, config, description, measure, baselines=[_LIBRARY, _PADDED.format(seq_len)]
        )


@dataclass(frozen=True)
class _Corpus:
    """Documents, as a file of JSON lines and as texts; ``shards`` is where their tokens belong."""

    folder: Path
    texts: list[str]

    @property
    def lines(self) -> Path:
        return self.folder / "corpus.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer.json"

    @property
    def shards(self) -> Path:
        return self.folder / "tokens"

    @classmethod
    def write(cls, folder: Path, bench: DataBenchConfig) -> _Corpus:
        text = "".join(document.content.decode(errors="replace") for document in stdlib_documents())
        corpus = cls(folder, list(_cut(text * bench.copies, bench)))
        with corpus.lines.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in corpus.texts)
        _dtrain(
            *("data", "train-tokenizer", f"files={corpus.lines}", f"out={corpus.tokenizer}"),
            f"vocab_size={bench.vocab_size}",
        )
        return corpus


def _cut(text: str, bench: DataBenchConfig) -> Iterator[str]:
    random, start = np.random.default_rng(0), 0
    while start < len(text):
        length = max(2, round(random.lognormal(np.log(bench.median_length), bench.sigma)))
        yield text[start : start + length]
        start += length


def _dtrain(*arguments: str) -> None:
    command = [sys.executable, "-m", "dtrain", *arguments]
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BenchError(f"{' '.join(command[1:])} ended with exit code {done.returncode}: {reason}")


def _time_tokenizing(corpus: _Corpus, bench: DataBenchConfig) -> Iterator[OperationTiming]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read by the library: one core, as a worker has
    tokenizer = TokenizerFile(corpus.tokenizer)

    def command() -> None:
        shutil.rmtree(corpus.shards, ignore_errors=True)
        _dtrain(
            *("data", "tokenize", f"files={corpus.lines}", f"tokenizer={corpus.tokenizer}", f"out={corpus.shards}"),
            "workers=1",
        )

    def library() -> None:
        for first in range(0, len(corpus.texts), _DOCUMENTS):
            tokenizer.encode_batch(corpus.texts[first : first + _DOCUMENTS])

    operations = {
        _LIBRARY: Operation(library, 0),
        "dtrain data tokenize": Operation(command, 0),
    }
    timings = time_rounds(operations, bench.rounds, torch.device("cpu"))
    shards = TokenShards.open(corpus.shards)
    for timing in timings:
        yield _named(timing, "tokenize", shards.num_tokens - shards.num_documents)  # without the ends of documents


def _time_reading(corpus: _Corpus, bench: DataBenchConfig, seq_len: int) -> Iterator[OperationTiming]:
    starts = count(0, bench.reads * bench.micro_batch_size)  # each reads other samples

    def load(pack: str) -> BatchLoader:
        source = load_dataset(TokensDataConfig(path=str(corpus.shards), pack=pack), seq_len).train
        return BatchLoader(source, 0, bench.micro_batch_size, 1, cursor=next(starts))

    def read(loader: BatchLoader) -> None:
        for _ in range(bench.reads):
            next(loader)

    operations: dict[str, Operation] = {}
    for pack in ("windows", "best_fit"):
        operations[pack] = Operation(partial(read, load(pack)), 0)
        operations[f"{pack}, just opened"] = Operation(lambda pack=pack: read(load(pack)), 0)  # type: ignore[misc]
    tokens = bench.reads * bench.micro_batch_size * seq_len
    for timing in time_rounds(operations, bench.rounds, torch.device("cpu")):
        yield _named(timing, "read", tokens)


def _time_learning(
    corpus: _Corpus, config: ModelSuite[DataBenchConfig], device: torch.device
) -> Iterator[OperationTiming]:
    bench, seq_len = config.bench, config.model.max_seq_len
    shards = TokenShards.open(corpus.shards)
    ends = shards.document_ends.take(np.arange(min(bench.documents, shards.num_documents)))
    cases = learning_cases(shards, ends, seq_len, batch_size=bench.micro_batch_size)
    session = learner(config, shards.vocab_size, device)

    def learn(batches: list[dict[str, Tensor]]) -> None:
        assert session.step(batches).applied

    operations = {name: Operation(partial(learn, batches), 0) for name, batches in cases.items()}
    for timing in time_rounds(operations, bench.rounds, device):
        yield _named(timing, "learn", sum(num_targets(batch["targets"]) for batch in cases[timing.case]))


def learner(config: ModelSuite[DataBenchConfig], vocab_size: int, device: torch.device) -> Session:
    """Returns a training of the suite's model, whose micro-batches count by their targets."""
    precision = "bf16" if device.type == "cuda" else "fp32"
    run = RunConfig(model=config.model, train=TrainConfig(micro_batch_size=config.bench.micro_batch_size))
    model = build_model(config.model, vocab_size, 0)
    engine = dtrain.initialize(model, precision=precision, comm=SingleRank(device), audit=0, seed=0)
    return Session(engine, run)


def learning_cases(
    stream: TokenStream, document_ends: Int64, seq_len: int, *, batch_size: int
) -> dict[str, list[dict[str, Tensor]]]:
    """Returns the batches of these documents, padded and packed; their targets are the same."""
    packed = pack_documents(document_ends, seq_len)
    alone = Packing(packed.starts, packed.lengths, np.arange(len(packed.starts) + 1))
    padded = _batches(PackedDocuments(stream, alone, seq_len), batch_size)
    # without positions: what pads on the right needs no mask but the causal one
    padded = [{name: values for name, values in batch.items() if name != "positions"} for batch in padded]
    return {
        _PADDED.format(seq_len): padded,
        "padded to the longest": [_trimmed(batch) for batch in padded],
        "packed": _batches(PackedDocuments(stream, packed, seq_len), batch_size),
    }


def _batches(source: PackedDocuments, batch_size: int) -> list[dict[str, Tensor]]:
    order = np.random.default_rng(0).permutation(source.num_samples)
    return [source.batch(order[first : first + batch_size]) for first in range(0, len(order), batch_size)]


def _trimmed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    longest = int((batch["targets"] != IGNORE_INDEX).sum(dim=1).max())  # only the padding does not count
    return {name: values[:, :longest].contiguous() for name, values in batch.items()}


def _named(timing: OperationTiming, workload: str, tokens: int) -> OperationTiming:
    return OperationTiming(timing.case, timing.nbytes, timing.ms, workload, tokens=tokens)

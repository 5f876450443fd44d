"""The table of an acceptance: the parts of its page, and the commands of each goal in order of value. No torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dtrain.config.capabilities import CAPABILITIES
from dtrain.distributed.startup.launch_env import num_cores
from dtrain.measure.accept.job import PartJob
from dtrain.precision.hardware import GPUS

FACTS, FIGURES, ALL = "facts", "figures", "all"
LIMITS_S = {FACTS: 340.0, FIGURES: 280.0, ALL: 1500.0}
"""Time of a goal if ``limit_s`` is null."""

PARTS = {
    "environment": "First uses",
    "casts": "Bits of the FP8 casts",
    "curves": "Training against the CPU's FP32 curve",
    "tests": "Tests of `tests/gpu`",
    "compiled": "Compiled blocks, two layers of 1.2B",
    "streams": "Tests that measure time, alone",
    "optimizer": "Optimizer phase",
    "rates": "Matrix rates and copy bandwidth",
    "steps": "Training steps",
    "profile": "Profile of a training step",
    "memory": "Model states and the loss head",
}
"""Title by key, in the order of the page."""

_SMALL_GIB = 32.0  # less does not hold a 1.2B model with its optimizer states in all engines
_BOTH = (FACTS, FIGURES)
_FACTS_SHARE, _ALONE_S = 0.3, 110.0
_COMPILE_S = 75.0  # for the compilers, side by side, if there are no caches
_TEST_WORKERS, _TEST_S = 9, 75

_TINY = (
    "model=tiny model.num_layers=2 model.hidden_dim=64 model.num_heads=2 model.num_kv_heads=1 model.max_seq_len=64 "
    "model.vocab_size=512"
)
_NARROW = "model.num_layers=2 model.hidden_dim=128 model.max_seq_len=64"
_MODELS = {
    # Llama 3.2 1B with 16 heads of 128 instead of 32 of 64, which has as many parameters and is what larger models have
    "{1.2B}": "model=llama-1b model.num_heads=16 model.num_kv_heads=4 model.max_seq_len=4096 model.vocab_size=128256",
    "{3B}": "model=llama-3b model.vocab_size=128256",
    "{50M}": "model=llama-1b model.num_layers=8 model.hidden_dim=512 model.num_heads=4 model.num_kv_heads=2 "
    "model.ffn_dim=1408 model.max_seq_len=4096 model.vocab_size=50304",
}

_FILES = " ".join(
    f"{{root}}/tests/gpu/test_{name}.py"
    for name in (
        "kernels", "engine", "float8", "engines", "operations", "formats", "measurement", "offload", "optimizers",
        "attention", "graphs",
    )
)  # fmt: skip
"""The most fundamental first."""
# without the options of the project's configuration, some of which need plugins
_PYTEST = (
    "DTRAIN_RECORDS={out} HYPOTHESIS_STORAGE_DIRECTORY={out}.hypothesis "
    "pytest -o addopts= -p no:cacheprovider -q --tb=short --color=no "
    "--continue-on-collection-errors -p dtrain.measure.accept.recorder {plugins}"
)
_TIMED_TESTS = "{root}/tests/gpu/test_streams.py {root}/tests/gpu/test_float8.py::test_what_is_timed_is_never_slower"
_QUICK = "infinity_on or skip_names or resume_is or linalg"  # tests that take seconds if the CPU replaces the device
_USES = "dtrain.measure.accept.first_uses device={device} out={out}"
_STARTS = 20  # of pytest: a process without xdist ends with each error that the device does not survive


def _bench(
    name: str, part: str, words: str, limit_s: float, *, goals: tuple[str, ...] = (FIGURES,), **more: Any
) -> PartJob:
    if more.get("on_cpu"):
        more["on_cpu"] = f"dtrain bench {more['on_cpu']} bench.device=cpu bench.out={{out}}"
    command = f"dtrain bench {words} bench.device={{device}} bench.out={{out}}"
    return PartJob(name, part, command, limit_s, goals=goals, **more)


def _curves(engine: str, on_cpu: str = "") -> PartJob:
    """Returns the row of an engine; ``on_cpu`` has the stages of a dry run."""
    command = f"dtrain parity parity.reference=cpu parity.engines=[{engine}] parity.ranks=1 parity.device={{device}}"
    # the precisions in the first stage, then the others: a bug shows in the precision first
    large = "parity.stages=[2,3,0,1] parity.precisions=[bf16,fp32,fp8,fp16,tf32] parity.threads_per_rank=4"
    small = f"parity.stages={on_cpu} parity.precisions=[bf16,fp32,fp8] parity.global_batch_size=4 {_NARROW}"
    return PartJob(
        f"curves of {engine}",
        "curves",
        f"{command} {large} run_dir={{folder}}",
        on_cpu=on_cpu and f"{command} {small} run_dir={{folder}}",
        together=True,
        results="/report.json",
    )


def _compiled(name: str, cases: str) -> PartJob:
    """Returns a row that compiles the blocks of a model: a fact, and a filled cache."""
    words = f"step {{1.2B}} model.num_layers=2 model.compile=blocks bench.cases=[{cases}] bench.data=random"
    words += " bench.warmup_steps=1 bench.steps=1 bench.window_steps=1 bench.rounds=1"
    return _bench(f"compiled, {name}", "compiled", words, 140.0, goals=(FACTS,), on_cpu="", together=True)


def _steps(name: str, cases: str, size: int, words: str = "") -> PartJob:
    """Returns a row of training steps; each case has the GPU alone, and halves its sequences if it is out of memory."""
    model = f"{{{name.split(',')[0]}}}"
    large = f"step {model} {{compiled}} bench.cases=[{cases}] bench.micro_batch_size={size} {words}"
    short = "bench.micro_batch_size=2 bench.warmup_steps=1 bench.steps=4 bench.window_steps=2 bench.rounds=1"
    return _bench(name, "steps", large, 300.0, on_cpu=f"step {model} bench.cases=[{cases}] {short}")


def _profile(name: str, words: str, size: int, *, on_cpu: bool = True) -> PartJob:
    small = f"profile {{1.2B}} {words}" if on_cpu else ""
    large = f"profile {{1.2B}} {{compiled}} {words} bench.micro_batch_size={size}"
    return _bench(name, "profile", large, 90.0, on_cpu=small)


ROWS = (
    PartJob("first uses", "environment", _USES, 150.0, together=True, imported="-"),
    PartJob(
        "tests",
        "tests",
        f"{_PYTEST} -k 'not test_what_is_timed' {_FILES}",
        on_cpu=f"DTRAIN_GPU_TESTS_ON_CPU=1 {_PYTEST} -k '{_QUICK}' {_FILES}",
        together=True,
        starts=_STARTS,
        results=".jsonl",
    ),
    _curves("native", "[2,3]"),
    _curves("fsdp2"),
    _curves("deepspeed"),  # needs a compiler on a CPU
    _curves("ddp", "[0]"),
    PartJob("casts", "casts", f"{_USES} what=casts", 150.0, on_cpu="", together=True),
    _compiled("dtrain", "dtrain"),
    _compiled("FP8 tensorwise", "tensorwise"),
    _compiled("FP8 blockwise", "blockwise"),
    _compiled("FSDP2", "fsdp2"),
    _compiled("chunked loss", "chunked"),
    PartJob(
        "tests that measure time",
        "streams",
        f"{_PYTEST} {_TIMED_TESTS}",
        60.0,
        on_cpu=f"DTRAIN_GPU_TESTS_ON_CPU=1 {_PYTEST} -k 'dtype or gloo' {{root}}/tests/gpu/test_streams.py",
        results=".jsonl",
    ),
    _bench("optimizer", "optimizer", "profile {1.2B} bench.micro_batch_size=1", 60.0, goals=_BOTH),
    _bench(
        "products",
        "rates",
        "products {1.2B} bench.rows=8192 bench.squares=[4096,8192,16384] bench.copied=268435456 bench.case_s=0.4 "
        "bench.limit_s=25",
        50.0,
        goals=_BOTH,
        on_cpu="products {1.2B} bench.squares=[64,128] bench.limit_s=5",
    ),
    _steps("1.2B", "dtrain,fsdp2,tensorwise", 3),
    _steps("1.2B, chunked loss", "dtrain,chunked", 6),
    _profile("profile of bf16, chunked loss", "model.loss_chunk=auto", 6),
    _bench(
        "loss head",
        "memory",
        "loss-head bench.tokens=8192 bench.hidden_dim=2048 bench.vocab_size=128256 bench.dtypes=[bf16]",
        60.0,
        on_cpu="loss-head bench.tokens=256 bench.vocab_size=512 bench.compiled=false bench.rounds=2",
    ),
    _steps("1.2B, others", "dtrain,deepspeed,reproducible,plain", 3),
    _profile("profile of fp8", "bench.precisions=[fp8]", 3, on_cpu=False),
    _steps("3B", "dtrain,fsdp2,tensorwise", 1),
    _steps("1.2B, less memory", "eager,selective,full,offload", 2, "bench.rounds=1 bench.attempts=6"),
    _steps("1.2B, rowwise", "dtrain,rowwise,rowwise_bf16_wgrad", 3),
    replace(_steps("1.2B, blockwise", "dtrain,blockwise", 3), on_cpu=""),  # the small model has no blocks of 128
    _steps("3B, others", "dtrain,chunked,deepspeed,plain", 1, "bench.rounds=1"),
    _bench("states", "memory", "memory {50M}", 60.0),
    _profile("profile of bf16", "bench.precisions=[bf16]", 3, on_cpu=False),
)
"""In order of value."""


@dataclass(frozen=True)
class Machine:
    """The machine that a plan is made for; ``gib`` is the memory of its GPU, 0 on a CPU; ``name`` is the GPU's."""

    device: str
    gib: float = 0.0
    name: str = ""


@dataclass(frozen=True)
class Plan:
    """Jobs: some side by side, then each alone.

    Attributes:
        together_s: time of the first, from the start of the command.
        left_out: name of each row that cannot run here, with the reason.
    """

    together: list[PartJob] = field(default_factory=list)
    together_s: float = 0.0
    alone: list[PartJob] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def jobs(self) -> list[PartJob]:
        return [*self.together, *self.alone]


def make_plan(
    goal: str,
    machine: Machine,
    limit_s: float,
    *,
    parts: Sequence[str] | None = None,
    has_caches: bool = False,
    traces: str | None = None,
) -> Plan:
    """Returns the jobs of a goal.

    Args:
        goal: a key of ``LIMITS_S``.
        machine: where they run.
        limit_s: time of the command.
        parts: keys of ``PARTS``; None: all.
        has_caches: whether the compilers' caches are filled.
        traces: folder for raw traces of profiles; None: they are not kept.
    """
    goals = _BOTH if goal == ALL else (goal,)
    rows = [row for row in ROWS if row.part in (parts or PARTS) and set(row.goals) & set(goals)]
    if goal == FIGURES and not has_caches:  # compiled side by side, it costs less than one after the other
        rows += [row for row in ROWS if row.part == "compiled" and (parts is None or row.part in parts)]
    together_s = _COMPILE_S
    if FACTS in goals:
        limit_s = limit_s if goal == FACTS else min(LIMITS_S[FACTS], _FACTS_SHARE * limit_s)
        together_s = limit_s - (0.35 * limit_s if machine.device == "cpu" else min(_ALONE_S, limit_s / 3))
    jobs, left_out = {}, {}
    for row in rows:
        if reason := _missing(row, machine):
            left_out[row.name] = reason
        else:
            jobs[row] = _job(row, machine, together_s, traces)
    together = [job for row, job in jobs.items() if row.together]
    return Plan(
        together, together_s if together else 0.0, [job for row, job in jobs.items() if not row.together], left_out
    )


def _missing(row: PartJob, machine: Machine) -> str:
    if machine.device == "cpu" and row.on_cpu == "":
        return "no GPU"
    capability = next((gpu.capability for gpu in GPUS if machine.name in gpu.variants), (9, 0))
    if "blockwise" in row.command and capability != (9, 0):
        return "FP8 products of blocks need compute capability 9.0"
    if row.part == "curves":
        return CAPABILITIES[row.name.removeprefix("curves of ")].missing_requirement
    if row.results != ".jsonl":
        return ""
    if not (_root() / "tests/gpu").is_dir():
        return "this is an installed package, which has no tests; run dtrain accept in a checkout"
    return "" if find_spec("pytest") is not None else "pytest is not installed: pip install 'dtrain[test]'"


def _job(row: PartJob, machine: Machine, together_s: float, traces: str | None) -> PartJob:
    on_cpu, is_small = machine.device == "cpu", machine.gib < _SMALL_GIB
    texts = {
        "{device}": machine.device,
        "{compiled}": "model.compile=none" if on_cpu else "model.compile=blocks",  # of C++: it takes a minute for each
        "{plugins}": _plugins(1 if on_cpu or not row.together else max(1, min(_TEST_WORKERS, num_cores() - 4))),
        **{name: _TINY if is_small else keys for name, keys in _MODELS.items()},
    }
    command = row.on_cpu if on_cpu and row.on_cpu is not None else row.command
    if traces is not None and "bench profile" in command:
        command += f" bench.keep_trace={traces}/{row.name.replace(' ', '-').replace(',', '')}"
    for name, text in texts.items():
        command = command.replace(name, text)
    command = shlex.join(word.replace("{root}", str(_root())) for word in shlex.split(command))
    limit_s = together_s if row.limit_s == math.inf else row.limit_s
    return replace(row, command=command, limit_s=limit_s, threads=1 if row.together or on_cpu else num_cores())


def _plugins(workers: int) -> str:
    """Returns the options of pytest for several processes, and against a hang, as far as they are installed."""
    options = []
    if find_spec("pytest_timeout") is not None:  # a hang ends one process, not the time of all
        options.append(f"--timeout={_TEST_S} --timeout-method=thread")
    if find_spec("xdist") is not None:
        options.append(f"-n {workers} --dist load --maxschedchunk 2 --max-worker-restart 60")
    return " ".join(options)


def _root() -> Path:
    """Returns the root of the checkout."""
    return Path(__file__).resolve().parents[3]

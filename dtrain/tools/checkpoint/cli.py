"""``dtrain checkpoint VERB``: looks at checkpoints, compares, prunes, exports and imports them.

torch is imported once the arguments are right: a mistake in them is answered at once.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.errors import DtrainError

if TYPE_CHECKING:
    from dtrain.checkpoint.report import CheckpointReport
    from dtrain.tools.checkpoint.diff import Difference

_FOUND, _TROUBLE = 1, 2
_PATH_HELP = "a run directory, its checkpoints/ directory, or one step-... directory"
_NEWEST_HELP = "one step-... directory; of a run directory or its checkpoints/, the newest"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d{1,15})\s*([KMGT]?B?)", re.IGNORECASE)
_PLAIN_PATH = re.compile(r"[\w./-]*/[\w./-]*", re.ASCII)
_VALUE_WIDTH = 60

Verb = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str]) -> int:
    """Runs one verb.

    Returns:
        0: done, all good, equal; 1: a checkpoint is bad, or two differ; 2: bad usage, nothing there, or it failed.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said why
        return _TROUBLE if stop.code else 0
    from dtrain.checkpoint.format.container import DamageError
    from dtrain.distributed.consensus import describe

    run: Verb = arguments.run
    try:
        return run(arguments)
    except DtrainError as error:
        print(f"dtrain: {error}", file=sys.stderr)
        return _FOUND if isinstance(error, DamageError) else _TROUBLE
    except OSError as error:
        print(f"dtrain: {describe(error)}", file=sys.stderr)
        return _TROUBLE


def _say(text: str) -> None:
    """Prints lines; what a checkpoint says of itself can steer no terminal."""
    print("".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "dtrain checkpoint", description="Looks at checkpoints, compares, prunes, exports and imports them."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def add(name: str, run: Verb, help_text: str) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=help_text, description=help_text)
        verb.set_defaults(run=run)
        return verb

    verb = add("list", _list, "what is there, without reading the data")
    verb.add_argument("path", type=Path, help=_PATH_HELP)
    verb = add("verify", _verify, "read every byte and check it; exit 1 where one is bad")
    verb.add_argument("path", type=Path, help=_PATH_HELP)
    verb.add_argument("--fast", action="store_true", help="manifests, names, sizes and headers only")
    verb = add("diff", _diff, "which tensors differ, and by how much; exit 1 where some do")
    verb.add_argument("a", type=Path, help=_NEWEST_HELP)
    verb.add_argument("b", type=Path, help="the same")
    verb.add_argument(
        "--kind", action="append", default=[], help="only tensors of this kind, such as master; repeatable"
    )
    verb.add_argument("--bytes", action="store_true", help="read tensors whose fingerprints are equal too")
    verb = add("prune", _prune, "remove what no rule keeps; refused while a run saves there")
    verb.add_argument("path", type=Path, help="a run directory or its checkpoints/ directory")
    verb.add_argument("--keep-last", type=int, default=2, metavar="N", help="keep the newest N (2)")
    verb.add_argument("--keep-every", type=int, default=0, metavar="N", help="keep steps that are multiples of N")
    verb.add_argument("--keep-best", type=int, default=0, metavar="N", help="keep the N of least validation loss")
    verb.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")
    verb = add("export", _export, "write the weights as a Hugging Face folder (Llama, GPT-2)")
    verb.add_argument("path", type=Path, help=_NEWEST_HELP)
    verb.add_argument("out", type=Path, help="the folder to make; it must not exist")
    verb.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the weights (fp32)")
    verb.add_argument("--max-shard-size", type=_bytes, default=_bytes("5GB"), metavar="SIZE", help="of a file (5GB)")
    verb = add("import", _import, "begin a run from a Hugging Face folder (Llama, GPT-2)")
    verb.add_argument("folder", type=Path, metavar="hf_dir", help="holds config.json and safetensors")
    verb.add_argument("run_dir", type=Path, help="of the run to be; new or empty")
    return parser


def _bytes(text: str) -> int:
    """A size such as 500MB or 5GB, in bytes."""
    match = _SIZE.fullmatch(text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 500MB or 5GB")
    unit = match[2].upper()
    return int(match[1]) * _UNITS[unit if unit in _UNITS else f"{unit}B"]


def _list(arguments: argparse.Namespace) -> int:
    from dtrain.checkpoint.directory import of_run, quarantined
    from dtrain.checkpoint.report import holder, list_checkpoints

    path: Path = arguments.path
    head = ("name", "step", "saved", "size", "files", "world size", "engine", "train loss", "val loss", "status")
    rows = [head, *(_row(item) for item in list_checkpoints(path))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    for row in rows:
        _say("  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=True)), row[-1]]))
    for damaged in quarantined(of_run(path)):
        _say(f"set aside: {damaged.name}")
    owner = holder(path)
    if owner:
        _say(f"lease: {owner}")
    return 0


def _row(item: CheckpointReport) -> tuple[str, ...]:
    counts = ("?" if count is None else str(count) for count in (item.num_files, item.world_size))
    losses = ("-" if loss is None else f"{loss:.4f}" for loss in (item.train_loss, item.val_loss))
    status = "ok" if item.ok else f"BAD {item.problem}"
    step = "?" if item.step is None else str(item.step)
    saved, engine = item.saved_at or "?", item.engine or "?"
    return item.path.name, step, saved, _size(item.num_bytes), *counts, engine, *losses, status


def _verify(arguments: argparse.Namespace) -> int:
    from dtrain.checkpoint.report import verify

    report = verify(arguments.path, fast=arguments.fast)
    for item in report.checkpoints:
        _say(f"ok  {_brief(item)}" if item.ok else f"BAD {item.path.name} {item.problem}")
    return 0 if report.ok else _FOUND


def _diff(arguments: argparse.Namespace) -> int:
    from dtrain.tools.checkpoint.diff import diff

    found = diff(arguments.a, arguments.b, kinds=arguments.kind, every_byte=arguments.bytes)
    _say(f"a: {found.a}\nb: {found.b}")
    for line in _difference_lines(found):
        _say(line)
    return 0 if found.tensors_equal else _FOUND


def _difference_lines(found: Difference) -> list[str]:
    lines = [f"state {item.path}: {_short(item.a)} | {_short(item.b)}" for item in found.state]
    lines += [f"only in a: {label}" for label in found.only_a]
    lines += [f"only in b: {label}" for label in found.only_b]
    lines += [f"{label}: {a} | {b}" for label, a, b in found.reshaped]
    lines += [
        f"{item.label}: {item.num_different} of {item.numel} differ, the first at {item.first}; max abs "
        f"{item.max_abs:.3g}, max rel {item.max_rel:.3g}, norm of the difference {item.normwise:.3g} of b's"
        for item in found.values
    ]
    lines.append(
        f"{found.num_compared - len(found.values)} of {found.num_compared} tensors of both are equal bit for bit, "
        f"{found.num_compared - found.num_read} by their fingerprints alone"
    )
    return lines


def _short(value: object) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= _VALUE_WIDTH else f"{text[: _VALUE_WIDTH - 3]}..."


def _prune(arguments: argparse.Namespace) -> int:
    from dtrain.checkpoint.retention import Retention
    from dtrain.tools.checkpoint.prune import prune

    retention = Retention(arguments.keep_last, arguments.keep_every, arguments.keep_best)
    pruned = prune(arguments.path, retention, dry_run=arguments.dry_run)
    verb, total = ("would remove", "would free") if arguments.dry_run else ("removed", "freed")
    for item in pruned.retired:
        _say(f"{verb} {_brief(item)}")
    for item in pruned.kept:
        _say(f"kept {_brief(item)}" if item.ok else f"kept {item.path.name}, which is BAD: {item.problem}")
    _say(f"{total} {_size(sum(item.num_bytes or 0 for item in pruned.retired))}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from dtrain.checkpoint.huggingface.exporter import export

    out = export(arguments.path, arguments.out, "hf", arguments.dtype, arguments.max_shard_size)
    files = sorted(out.iterdir())
    _say(f"wrote {out}: {', '.join(file.name for file in files)} ({_size(sum(f.stat().st_size for f in files))})")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    import shlex

    from dtrain.checkpoint.huggingface.importer import import_hf

    imported = import_hf(arguments.folder, arguments.run_dir)
    _say(f"wrote {imported.checkpoint}; go on from it with")
    _say(shlex.join(["dtrain", "train", f"run_dir={_override_value(str(arguments.run_dir))}", *imported.overrides()]))
    return 0


def _override_value(path: str) -> str:
    """A path as the value of a ``key=value`` of ``dtrain train``: quoted for Hydra, which reads more than words."""
    if _PLAIN_PATH.fullmatch(path):
        return path
    # backslashes mean themselves but before a quote, and at the end; ${ begins the value of another key
    text = re.sub(r'(\\*)("|\Z)', lambda match: match[1] * 2 + match[2].replace('"', r"\""), path)
    return '"' + text.replace("${", r"\${") + '"'


def _brief(item: CheckpointReport) -> str:
    files = "1 file" if item.num_files == 1 else f"{item.num_files} files"
    return f"{item.path.name}  {_size(item.num_bytes)}  {files}"


def _size(count: int | None) -> str:
    if count is None:
        return "?"
    if count < 1000:
        return f"{count} B"
    power = min(4, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"

"""``dtrain checkpoint VERB``: lists, verifies, compares, prunes, exports and imports checkpoints.

torch is imported after the arguments are parsed, so that a mistake in them is reported at once.
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
    from dtrain.checkpoint.inspection import CheckpointStatus
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
        0: done, all good, equal; 1: a checkpoint is bad, or two differ; 2: bad usage, no checkpoint, or a failure.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the reason
        return _TROUBLE if stop.code else 0
    from dtrain.checkpoint.format.checked_file import DamageError
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


def _print(text: str) -> None:
    """Prints lines without control characters, because a checkpoint's content must not control the terminal."""
    print("".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in text))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "dtrain checkpoint", description="Lists, verifies, compares, prunes, exports and imports checkpoints."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def add(name: str, run: Verb, help_text: str) -> argparse.ArgumentParser:
        verb = verbs.add_parser(name, help=help_text, description=help_text)
        verb.set_defaults(run=run)
        return verb

    verb = add("list", _list, "list checkpoints without reading their data")
    verb.add_argument("path", type=Path, help=_PATH_HELP)
    verb = add("verify", _verify, "read and check every byte; exit code 1 if a checkpoint is bad")
    verb.add_argument("path", type=Path, help=_PATH_HELP)
    verb.add_argument("--fast", action="store_true", help="check manifests, names, sizes and headers only")
    verb = add("diff", _diff, "verify two checkpoints, compare tensors and state; exit code 1 if bad or different")
    verb.add_argument("a", type=Path, help=_NEWEST_HELP)
    verb.add_argument("b", type=Path, help="the same")
    verb.add_argument(
        "--kind", action="append", default=[], help="compare only tensors of this kind, such as master; repeatable"
    )
    verb.add_argument("--bytes", action="store_true", help="also compare the values where fingerprints are equal")
    verb.add_argument("--no-verify", action="store_true", help="trust the data of files that need not be compared")
    verb = add("prune", _prune, "delete checkpoints that no rule keeps; refused while a run saves there")
    verb.add_argument("path", type=Path, help="a run directory or its checkpoints/ directory")
    verb.add_argument("--keep-last", type=int, default=2, metavar="N", help="keep the newest N (2)")
    verb.add_argument("--keep-every", type=int, default=0, metavar="N", help="keep steps that are multiples of N")
    verb.add_argument("--keep-best", type=int, default=0, metavar="N", help="keep the N of lowest validation loss")
    verb.add_argument("--dry-run", action="store_true", help="only report what would be deleted")
    verb = add("export", _export, "write the trained model as a folder: for transformers, or for dtrain.load_exported")
    verb.add_argument("path", type=Path, help=_NEWEST_HELP)
    verb.add_argument("out", type=Path, help="the folder to create; it must not exist")
    verb.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="dtype of the weights (fp32)")
    verb.add_argument("--weights", choices=("master", "ema"), default="master", help="ema: the moving average (master)")
    verb.add_argument("--max-shard-size", type=_bytes, default=_bytes("5GB"), metavar="SIZE", help="of a file (5GB)")
    verb.add_argument("--merge", action="store_true", help="model.lora: write the whole model, adapters merged")
    verb.add_argument("--base", type=Path, metavar="FOLDER", help="model=hf: folder of the model, if it has moved")
    verb = add("import", _import, "start a run from a Hugging Face folder (Llama, GPT-2)")
    verb.add_argument("folder", type=Path, metavar="hf_dir", help="a folder with config.json and safetensors")
    verb.add_argument("run_dir", type=Path, help="directory of the new run; missing or empty")
    return parser


def _bytes(text: str) -> int:
    """Parses a size such as 500MB or 5GB; returns bytes."""
    match = _SIZE.fullmatch(text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 500MB or 5GB")
    unit = match[2].upper()
    return int(match[1]) * _UNITS[unit if unit in _UNITS else f"{unit}B"]


def _list(arguments: argparse.Namespace) -> int:
    from dtrain.checkpoint.directory import checkpoints_dir, quarantined_checkpoints
    from dtrain.checkpoint.inspection import lease_holder, list_checkpoints

    path: Path = arguments.path
    head = ("name", "step", "saved", "size", "files", "world size", "engine", "train loss", "val loss", "status")
    rows = [head, *(_row(item) for item in list_checkpoints(path))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    for row in rows:
        _print("  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=True)), row[-1]]))
    for damaged in quarantined_checkpoints(checkpoints_dir(path)):
        _print(f"quarantined: {damaged.name}")
    owner = lease_holder(path)
    if owner:
        _print(f"lease: {owner}")
    return 0


def _row(item: CheckpointStatus) -> tuple[str, ...]:
    counts = ("?" if count is None else str(count) for count in (item.num_files, item.world_size))
    losses = ("-" if loss is None else f"{loss:.4f}" for loss in (item.train_loss, item.val_loss))
    status = "ok" if item.ok else f"BAD {item.problem}"
    step = "?" if item.step is None else str(item.step)
    saved, engine = item.saved_at or "?", item.engine or "?"
    return item.path.name, step, saved, _size(item.num_bytes), *counts, engine, *losses, status


def _verify(arguments: argparse.Namespace) -> int:
    from dtrain.checkpoint.inspection import verify

    report = verify(arguments.path, fast=arguments.fast)
    for item in report.checkpoints:
        _print(f"ok  {_brief(item)}" if item.ok else f"BAD {item.path.name} {item.problem}")
    return 0 if report.ok else _FOUND


def _diff(arguments: argparse.Namespace) -> int:
    from dtrain.tools.checkpoint.diff import diff

    found = diff(
        arguments.a, arguments.b, kinds=arguments.kind, every_byte=arguments.bytes, verify=not arguments.no_verify
    )
    _print(f"a: {found.a}\nb: {found.b}")
    for line in _difference_lines(found):
        _print(line)
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
        + ("" if found.is_verified else ", which the manifests state; the files were not read")
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
    verb, total = ("would delete", "would free") if arguments.dry_run else ("deleted", "freed")
    for item in pruned.deleted:
        _print(f"{verb} {_brief(item)}")
    for item in pruned.kept:
        _print(f"kept {_brief(item)}" if item.ok else f"kept {item.path.name}, which is BAD: {item.problem}")
    _print(f"{total} {_size(sum(item.num_bytes or 0 for item in pruned.deleted))}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from dtrain.checkpoint.huggingface.exporter import export

    out = export(
        arguments.path,
        arguments.out,
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
        weights=arguments.weights,
        base=arguments.base,
        merge=arguments.merge,
    )
    files = sorted(out.iterdir())
    _print(f"wrote {out}: {', '.join(file.name for file in files)} ({_size(sum(f.stat().st_size for f in files))})")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    import shlex

    from dtrain.checkpoint.huggingface.importer import import_hf

    imported = import_hf(arguments.folder, arguments.run_dir)
    _print(f"wrote {imported.checkpoint}; train it with")
    _print(shlex.join(["dtrain", "train", f"run_dir={_override_value(str(arguments.run_dir))}", *imported.overrides()]))
    return 0


def _override_value(path: str) -> str:
    """Returns a path as the value of a ``key=value`` of ``dtrain train``, quoted for Hydra's grammar if needed."""
    if _PLAIN_PATH.fullmatch(path):
        return path
    # backslashes are literal except before a quote and at the end; ${ starts an interpolation
    text = re.sub(r'(\\*)("|\Z)', lambda match: match[1] * 2 + match[2].replace('"', r"\""), path)
    return '"' + text.replace("${", r"\${") + '"'


def _brief(item: CheckpointStatus) -> str:
    files = "1 file" if item.num_files == 1 else f"{item.num_files} files"
    return f"{item.path.name}  {_size(item.num_bytes)}  {files}"


def _size(count: int | None) -> str:
    if count is None:
        return "?"
    if count < 1000:
        return f"{count} B"
    power = min(4, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"

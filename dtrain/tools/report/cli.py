"""``dtrain report RUN [RUN ...] [out=FILE] [verify=true]``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dtrain.errors import ConfigError

_USAGE = """usage: dtrain report RUN [RUN ...] [out=FILE] [verify=true]

  RUN          directory of a run: finished, stopped, killed or running
  out=FILE     the page; default: report.html in the run's directory, or here for several runs
  verify=true  hash every byte of the checkpoints, instead of checking names and sizes

One HTML file without script or request. Several runs share axes; runs that differ only in their seed become a band."""


def main(argv: Sequence[str]) -> int:
    """Writes the report and prints where it is; returns 0."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    paths: list[Path] = []
    out, deep = "", False
    for word in argv:
        key, equals, value = word.partition("=")
        if word.startswith("-"):
            raise ConfigError(f"unknown option '{word}'; see dtrain report --help")
        if key == "out" and equals:
            out = value
        elif key == "verify" and equals:
            if value not in ("true", "false"):
                raise ConfigError(f"verify={value} must be true or false")
            deep = value == "true"
        else:
            paths.append(Path(word))
    if not paths:
        raise ConfigError("dtrain report needs the directory of a run, such as runs/mine")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("dtrain report was given a run twice; name each once")
    from dtrain.telemetry.report.page import REPORT_FILE, write_report
    from dtrain.telemetry.report.read import Run

    for path in paths:
        Run.open(path)  # its mistakes come first
    target = Path(out) if out else (paths[0] if len(paths) == 1 else Path()) / REPORT_FILE
    if not target.parent.is_dir():
        raise ConfigError(f"out={target}: {target.parent} is no folder; make it, or name another file")
    write_report(paths, target, deep=deep)
    print(target)
    return 0

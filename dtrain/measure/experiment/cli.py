"""``dtrain experiment [NAME] [--out FOLDER] [--from FILE.json]``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from dtrain.errors import ConfigError, nearest
from dtrain.measure.record import RecordHead, head, read_record, write_record

EXPERIMENTS = {
    "master-weights": "what does training lose if updates go to FP16 or BF16 weights, without FP32 masters?",
    "gradient-histogram": "how many activation gradients does FP16 flush to zero, and which scale recovers them?",
    "loss-scaling": "does a network that stops learning in FP16 follow FP32 once its loss is scaled?",
    "accumulation": "how far is a dot product of length n off if it is summed in FP16, BF16 or FP32?",
    "formats": "can BF16, FP16 and FP8 be told from FP32's own noise on each kind of task?",
}
"""Name -> question. The module of that name brings torch, so it is imported when it runs."""


def main(argv: Sequence[str]) -> int:
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the reason
        return 2 if stop.code else 0
    name: str | None = arguments.name
    if name is None and arguments.file is not None:
        raise ConfigError(f"--from needs the name of an experiment before it: {', '.join(EXPERIMENTS)}")
    if name is None:
        print(_listing())
        return 0
    if name not in EXPERIMENTS:
        raise ConfigError(f"unknown experiment '{name}'{nearest(name, EXPERIMENTS)}; valid: {', '.join(EXPERIMENTS)}")
    _run(name, arguments.out, arguments.file)
    return 0


@dataclass(frozen=True, kw_only=True)
class ExperimentRecord(RecordHead):
    """One run of an experiment, which has no configuration."""

    experiment: str
    threads: int
    wall_s: float
    result: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)


def load(name: str) -> ModuleType:
    """Returns the module of an experiment.

    Its ``run()`` returns a dataclass that is plain JSON; of it ``finding`` gives one sentence, also the title of the
    picture, ``tables`` the tables, and ``draw`` fills a figure. ``PAPER`` is what the paper found.
    """
    return import_module(f"dtrain.measure.experiment.{name.replace('-', '_')}")


def _run(name: str, out: Path | None, file: Path | None) -> None:
    import torch
    from matplotlib.figure import Figure

    from dtrain.config.dump import config_to_dict, from_plain
    from dtrain.tools.tables import show

    experiment = load(name)
    folder = out or Path(time.strftime(f"runs/experiment-{name}-%Y-%m-%d_%H-%M-%S"))
    if file is not None:
        record = read_record(file, ExperimentRecord, "experiment")
        if record.experiment != name:
            raise ConfigError(f"{file} is a result of '{record.experiment}'; give that name instead of '{name}'")
        result = from_plain(get_type_hints(experiment.run)["return"], record.result)
    folder.mkdir(parents=True, exist_ok=True)
    if file is None:
        torch.set_num_threads(1)  # the networks are so small that threads would wait for each other
        start, about = time.perf_counter(), head(f"dtrain experiment {name}")
        result = experiment.run()
        record = ExperimentRecord(
            **about,
            experiment=name,
            threads=torch.get_num_threads(),
            wall_s=round(time.perf_counter() - start, 1),
            result=config_to_dict(result),
        )
        write_record(folder / f"experiment-{name}.json", record)
    finding = experiment.finding(result)
    figure = Figure(dpi=110, layout="constrained")
    experiment.draw(figure, result)
    figure.suptitle(finding.replace("; ", ";\n", 1), fontsize=12)
    figure.savefig(folder / f"experiment-{name}.png")
    show(experiment.tables(result))
    print(f"{finding}.\nThe paper: {experiment.PAPER}.\nresults in {folder}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "dtrain experiment",
        description="Repeats an experiment of Micikevicius et al., Mixed Precision Training (ICLR 2018), on a small "
        "network. Prints a table, and writes a JSON file and a picture. Takes seconds to ten minutes on a CPU.",
        epilog=_listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="of the experiment; without it they are listed")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="for the files, by default runs/experiment-NAME-<date>"
    )
    parser.add_argument(
        "--from", dest="file", type=Path, metavar="FILE.json", help="draw an earlier result, and train nothing"
    )
    return parser


def _listing() -> str:
    width = max(map(len, EXPERIMENTS))
    return "experiments:\n" + "\n".join(f"  {name:{width}}  {question}" for name, question in EXPERIMENTS.items())

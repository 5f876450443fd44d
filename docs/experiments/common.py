"""What the experiments share: the loop of a training, colors, and the table, picture and JSON file of a result."""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure

import dtrain

BLOCK = 10  # steps whose losses are averaged
# the palette of Okabe and Ito, which color-blind readers can distinguish
GREY = "#7f7f7f"
COLORS = {"fp32": "#0072B2", "bf16": "#009E73", "fp16": "#D55E00", "fp8": "#CC79A7", "fp8 e5m2": "#E69F00"}


def nothing(engine):
    """Is called instead of an observer."""


def train(network, precision, steps, *, seed, lr=None, loss_scale="auto", on_start=nothing, on_step=nothing):
    """Trains on batches that depend only on ``seed``, which also draws the initial weights; 0 steps only evaluate.

    ``on_start`` is called before the first step, and ``on_step`` after each. ``losses`` of the result are means over
    ``BLOCK`` steps, and ``final`` is the mean over held-out batches, the same for every training.
    """
    engine = network.start(precision, seed, loss_scale, lr or network.lr)
    on_start(engine)
    losses, skipped, scale = [], 0, 1.0
    for inputs, targets in batches(network, seed, steps, engine.device):
        engine.backward(network.loss(engine(inputs), targets))
        outcome = engine.step()
        losses.append(outcome.loss)
        skipped += not outcome.applied
        scale = outcome.loss_scale
        on_step(engine)
    with engine.eval():
        held_out = batches(network, 2**40, 16, engine.device)
        final = statistics.fmean(network.loss(engine(inputs), targets).item() for inputs, targets in held_out)
    report(f"{network.name}, {precision}, seed {seed}: loss {final:.4g}")
    means = [statistics.fmean(losses[start : start + BLOCK]) for start in range(0, steps, BLOCK)]
    return {"losses": means, "final": final, "skipped": skipped, "loss_scale": scale}


def batches(network, seed, count, device):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        inputs, targets = network.draw(generator)
        yield inputs.to(device), targets.to(device)


def points(curve):
    """Returns the middle of each block of steps, and its loss."""
    return [BLOCK * (index + 0.5) for index in range(len(curve["losses"]))], curve["losses"]


def report(line):
    """Prints progress where a person watches."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def markdown(columns, rows):
    lines = [columns, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    texts = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    return "\n".join([texts[0], "| " + " | ".join("-" * width for width in widths) + " |", *texts[1:]])


def main(experiment):
    """Runs the module ``experiment``, or takes an earlier result; prints its table, and writes its files.

    Its ``run(**SMALL)`` is a short run, ``run()`` returns plain JSON. Of it ``finding`` gives one sentence, also the
    title of the picture, ``table`` a title, columns and rows, and ``draw`` fills a figure. ``PAPER`` is what the paper
    found.
    """
    name = Path(experiment.__file__).stem.replace("_", "-")
    parser = argparse.ArgumentParser(description=experiment.__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of the files; default: runs/experiment-NAME-<date>")
    parser.add_argument("--small", action="store_true", help="a short run, which shows only that the script works")
    parser.add_argument("--from", dest="file", type=Path, help="draw the result in this JSON file, and train nothing")
    args = parser.parse_args()
    out = args.out or Path(time.strftime(f"runs/experiment-{name}-%Y-%m-%d_%H-%M-%S"))
    out.mkdir(parents=True, exist_ok=True)
    if args.file:
        record = json.loads(args.file.read_text(encoding="utf-8"))
        if record["experiment"] != name:
            parser.error(f"{args.file} is a result of '{record['experiment']}', not of '{name}'")
    else:
        torch.set_num_threads(1)  # the networks are so small that threads would wait for each other
        start = time.perf_counter()
        result = experiment.run(**(experiment.SMALL if args.small else {}))
        record = {"experiment": name, "date": time.strftime("%Y-%m-%dT%H:%M:%S"), "host": host(), "threads": 1}
        record |= {"wall_s": round(time.perf_counter() - start, 1), "result": result}
        text = json.dumps(record, indent=1) + "\n"
        (out / f"experiment-{name}.json").write_text(text, encoding="utf-8")
        record = json.loads(text)  # an earlier result is read with the same keys
    result = record["result"]
    title, columns, rows = experiment.table(result)
    finding = experiment.finding(result)
    figure = Figure(dpi=110, layout="constrained")
    experiment.draw(figure, result)
    figure.suptitle(finding.replace("; ", ";\n", 1), fontsize=12)
    figure.savefig(out / f"experiment-{name}.png")
    print(f"## {title}\n\n{markdown(columns, rows)}\n")
    print(f"{finding}.\nThe paper: {experiment.PAPER}.\nresults in {out}")


def host():
    cpu = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    versions = {"python": platform.python_version(), "torch": torch.__version__, "dtrain": dtrain.__version__}
    return {"cpu": cpu, "gpus": gpus, "system": platform.system(), **versions}

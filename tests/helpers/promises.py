"""The table of ``docs/reliability.md``: each promise, the tests that hold it, and the last recorded figures.

After a full run of the fault suite, ``python -m tests.helpers.promises`` writes it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from dtrain.tools.tables import Table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results/faults"
PAGE = ROOT / "docs/reliability.md"


@dataclass(frozen=True)
class Promise:
    """A promise, the files of its tests from ``tests/``, and the numbers in the fault suite of its records."""

    name: str
    says: str
    tests: tuple[str, ...]
    faults: tuple[str, ...]


FAULTS = {
    "F1": "kills at random instants",
    "F2": "kills at named points",
    "F3": "stop signals",
    "F4": "hangs",
    "F5": "damaged files and manifests",
    "F6": "hostile files and leases",
    "F7": "Inf, NaN and huge values",
    "F8": "flipped bits",
    "F9": "mismatches of one rank",
    "F10": "I/O errors",
    "F11": "changes of engine and ranks",
    "F12": "world sizes, stages and precisions",
    "F13": "jobs that compete for a directory",
    "F14": "restarts after a crash",
    "F15": "states after a power cut",
    "P6": "samples through two kills and three numbers of ranks",
    "P9": "kills of ranks, launchers and hosts",
    "P11": "starts on a full disk",
    "P15": "launchers with a listening job",
    "P16": "planted secrets",
    "divergence": "pairs of methods that ranks are at",
}
"""What the count of a record counts."""


def promise(name: str, says: str, tests: str, faults: str) -> Promise:
    return Promise(name, says, tuple(tests.split()), tuple(faults.split()))


PROMISES = (
    promise(
        "P1 All or none",
        "A step is applied by all ranks, skipped by all, or the run stops before anything durable shows it.",
        "faults/test_vote_processes.py faults/test_mismatches.py faults/test_divergence_matrix.py",
        "F7 F9 divergence",
    ),
    promise(
        "P2 Named culprit",
        "A skip names rank, step, micro-batch, tensor, phase, and Inf or NaN with counts.",
        "faults/test_vote_processes.py engines/test_matrix.py",
        "F7",
    ),
    promise(
        "P3 Complete and verified, or not visible",
        "A checkpoint has its name only when all is on disk. A damaged one is refused by name; the one before is used.",
        "faults/test_checkpoint_corruption.py faults/test_checkpoint_damage.py faults/test_power_cut.py "
        "faults/test_kills.py faults/test_caching_folder.py",
        "F2 F5 F15",
    ),
    promise(
        "P4 Bit-exact resume",
        "A run that is killed at any instant resumes with the same bits on the same number of ranks.",
        "faults/test_kills.py faults/test_kill_resume.py",
        "F1",
    ),
    promise(
        "P5 World size changes nothing",
        "With `engine.reproducible=true`, 1 to 4 ranks and stages 0 to 3 give the same bits.",
        "parity/test_reproducible.py",
        "F12",
    ),
    promise(
        "P6 Same data",
        "Each sample is used once an epoch, whatever dies, restarts or changes size.",
        "unit/data/test_sampling.py faults/test_kill_resume.py",
        "P6",
    ),
    promise(
        "P7 Replicas proven",
        "Audits check replicas, compute weights, masters and optimizer states; a mismatch stops the run and is named.",
        "faults/test_bit_flips.py",
        "F8",
    ),
    promise(
        "P8 Reshard proven",
        "The fingerprints in the manifest are checked after a load at any world size and with any engine.",
        "engines/test_reshard_chain.py engines/test_matrix.py",
        "F11",
    ),
    promise(
        "P9 One fails, all end, named",
        "A crash ends all ranks. A hang ends them after its limit, with the rank, its phase, and the stacks of "
        "all that can write one.",
        "faults/test_hangs.py faults/test_host_kills.py distributed/test_launchers.py",
        "F4 P9",
    ),
    promise(
        "P10 Preemption",
        "After SIGTERM or SIGUSR1 the step ends on all ranks, is saved, and the exit code is 75.",
        "faults/test_stops.py distributed/test_launchers.py",
        "F3",
    ),
    promise(
        "P11 Disk full, read-only, slow",
        "They never damage the last good checkpoint; an asynchronous failure is raised by the next step.",
        "faults/test_checkpoint_io.py faults/test_full_disk_at_start.py faults/test_caching_folder.py",
        "F10 P11",
    ),
    promise(
        "P12 One writer",
        "One job at a time writes to a run directory; the others are refused or take over a stale lease.",
        "faults/test_lease.py faults/test_caching_folder.py",
        "F13",
    ),
    promise(
        "P13 No restart storm",
        "After three restarts without a newer checkpoint the next start is refused.",
        "faults/test_hangs.py",
        "F14",
    ),
    promise(
        "P14 Nothing is unpickled",
        "No bytes of a checkpoint, run directory or data set are unpickled or run.",
        "faults/test_checkpoint_hostile.py",
        "F6",
    ),
    promise(
        "P15 Loopback only",
        "On one host, dtrain listens on the loopback interface only; on several, on the one that is named "
        "([exception](running.md#launchers)).",
        "distributed/test_launchers.py distributed/test_hosts.py",
        "P15",
    ),
    promise(
        "P16 No secret leaves",
        "Config, logs, tracker files, checkpoints and reports are redacted.",
        "faults/test_secrets.py",
        "P16",
    ),
)


def counts() -> Counter[str]:
    """Number of faults in the recorded full runs, by number in the fault suite."""
    found: Counter[str] = Counter()
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        found[record["fault"]] += record["count"]
    return found


def promise_table() -> str:
    """Returns the table in Markdown."""
    recorded = counts()

    def figures(promise: Promise) -> str:
        return ", ".join(f"{recorded[fault]:,} {FAULTS[fault]}" for fault in promise.faults)

    columns = [
        ("promise", lambda promise: f"**{promise.name}.** {promise.says}"),
        ("`pytest` with", lambda promise: "<br>".join(f"`tests/{test}`" for test in promise.tests)),
        ("last full run", figures),
    ]
    return Table.of("", columns, PROMISES).markdown()


def in_page() -> re.Match[str]:
    """Returns the table in the page, between its markers."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r"(?<=<!-- promises -->\n).*?(?=\n<!-- end promises -->)", text, re.DOTALL)
    assert found is not None, f"{PAGE} has no table of promises"
    return found


if __name__ == "__main__":
    old = in_page()
    PAGE.write_text(old.string[: old.start()] + promise_table() + old.string[old.end() :], encoding="utf-8")

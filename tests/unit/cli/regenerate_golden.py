"""The resolved configurations stored under ``golden/``: a changed default shows up as a changed line of text.

After a change on purpose: ``python -m tests.unit.cli.regenerate_golden``, then read the diff.
"""

from __future__ import annotations

from pathlib import Path

from dtrain.cli.compose import config_folder
from dtrain.cli.resolve import compose
from dtrain.config.dump import config_to_dict, to_yaml

GOLDEN = Path(__file__).parent / "golden"


def cases() -> dict[str, list[str]]:
    """Name of the golden file -> its overrides: the default run, and every experiment and debug option."""
    found = {"default": []}
    for group in ("experiment", "debug"):
        for path in sorted((config_folder() / group).glob("*.yaml")):
            found[f"{group}-{path.stem}"] = [f"{group}={path.stem}"]
    return found


def resolved(overrides: list[str]) -> str:
    return to_yaml(config_to_dict(compose(overrides)))


if __name__ == "__main__":
    for stale in GOLDEN.glob("*.yaml"):
        stale.unlink()
    for name, overrides in cases().items():
        (GOLDEN / f"{name}.yaml").write_text(resolved(overrides), encoding="utf-8")

"""The documents name keys that exist, beside the option of the group that has them."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from dtrain.cli.help import documented_keys
from dtrain.config.commands import ACCEPT, PARITY, PROBE, SUITES, TRAIN
from tests.helpers.promises import ROOT

PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/start/notebooks/*.py"))
    if "decisions" not in page.parts
)
COMMANDS = (TRAIN, PROBE, PARITY, ACCEPT, *(suite.primary for suite in SUITES.values()))
_CODE = re.compile(r"```.*?\n(.*?)```|``?([^`\n]+)``?|(run_dtrain\(.*?\n\))", re.DOTALL)


def known_keys() -> dict[str, set[str]]:
    """Each key of any command: the options of its group that have it; empty if all do."""
    found: dict[str, list[set[str]]] = defaultdict(list)
    for command in COMMANDS:
        for group in documented_keys(command):
            for key in group.keys:
                found[key.path].append(set(key.options))
    found["bench.docs"] = [set()]  # of dtrain bench report
    return {path: set() if set() in options else set[str]().union(*options) for path, options in found.items()}


KNOWN = {path: options for path, options in known_keys().items() if "." in path}


def unknown(text: str) -> list[str]:
    """Returns the ``group.key=`` in a piece of code that no command takes, or not with the options beside it."""
    chosen = dict(re.findall(r"(?<![\w.])(\w+)=([\w-]+)(?![\w.|,{])", text))
    wrong = []
    for key in re.findall(r"(?<![\w./-])([a-z_]+(?:\.[a-z_0-9]+)+)=", text):
        group = key.split(".")[0]
        if not any(path.startswith(f"{group}.") for path in KNOWN):
            continue  # an attribute in a script
        within = [path for path in KNOWN if path == key or path.startswith(f"{key}.") or key.startswith(f"{path}.")]
        options = [KNOWN[path] for path in within]
        if not within or (group in chosen and not any(not names or chosen[group] in names for names in options)):
            wrong.append(f"{key} with {group}={chosen.get(group)}")
    return wrong


def test_wrong_keys_are_found() -> None:
    good = "dtrain train data=text data.files='*.txt' model.args.width=3 precision.rules.head=fp32 model.lora={r: 1}"
    assert unknown(good) == []
    assert unknown("data=text data.path=corpus") == ["data.path with data=text"]
    assert unknown("train.micro_batch=3") == ["train.micro_batch with train=None"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_keys_that_exist(page: str) -> None:
    found = []
    for pieces in _CODE.findall((ROOT / page).read_text(encoding="utf-8")):
        # a command a line, with its continuations
        for line in re.sub(r"\\\n *", "", "".join(pieces)).split("\n" if pieces[0] else "\0"):
            found += unknown(line)
    assert not found

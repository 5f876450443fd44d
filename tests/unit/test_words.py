"""The code and the documents use the field's words: the project's former private words do not come back."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted(
    page for glob in ("*.md", "*/*.md", "*/*/*.md", "*/*.py", "*/*/*.py") for page in ROOT.glob(f"docs/{glob}")
)
SOURCES = sorted(ROOT.glob("dtrain/**/*.py"))

# whole words; an identifier counts as the words between its underscores and humps
WORDS = (
    "leaf piece pieces plane planes settle settles settled settling settlement tally tallies island islands torn "
    "verdict verdicts blame blames blamed contender contenders entrant entrants rival rivals yardstick yardsticks "
    "shake shakes shaken wire wires anew cure cures cured suspect suspects shortcoming shortcomings obstacle "
    "obstacles twin twins grave graves lone news"
).replace(" ", "|")
STEMS = ("quantis", "initialis", "normalis", "serialis", "synchronis", "optimis", "recognis", "summaris")  # US: -iz-
PHRASES = ("for ever", "so many", "part company", "sign of life", "one rank alone", "(?:the|all|num) leaves")

# names of libraries and terms of the field that contain one of the words
ALLOWED = re.compile(
    r"tree_leaves|(?:is|non)_leaf|leaf tensors?|leaf modules?|torn (?:and reordered )?write|optimistic", re.I
)
_WORD = re.compile(rf"(?<![a-z])({WORDS}|(?:{'|'.join(STEMS)})[a-z]*|{'|'.join(PHRASES)})(?![a-z])")


def private_words(line: str) -> list[str]:
    """Private words in ``line``, with identifiers split at underscores and between humps."""
    line = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", ALLOWED.sub(" ", line))
    return _WORD.findall(line.replace("_", " ").lower())


def test_no_private_word_in_code_and_documents() -> None:
    assert private_words("own_pieces = leafBuffers; Quantised for ever") == ["pieces", "leaf", "quantised", "for ever"]
    assert private_words("tree_leaves(x); planet; wireless; deleaf; a torn write of a leaf tensor") == []
    found = [
        f"{page.relative_to(ROOT)}:{number}: {word}"
        for page in [*SOURCES, *PAGES]
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        for word in private_words(line)
    ]
    assert not found, f"{len(found)} private words:\n" + "\n".join(found)


def test_no_class_name_is_used_twice() -> None:
    files = defaultdict(list)
    for page in SOURCES:
        for name in re.findall(r"^class (\w+)", page.read_text(encoding="utf-8"), re.M):
            files[name].append(str(page.relative_to(ROOT)))
    twice = {name: paths for name, paths in files.items() if len(paths) > 1}
    assert not twice

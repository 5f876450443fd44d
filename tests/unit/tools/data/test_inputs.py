"""The files that ``dtrain data tokenize`` reads: which they are, how they are shared out, and what they hold."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from dtrain.errors import ConfigError, DataError
from dtrain.tools.data import inputs
from dtrain.tools.data.documents import documents
from dtrain.tools.data.inputs import Source, find_files, plan_units
from tests.helpers.corpora import write_jsonl, write_parquet


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")


def write_column(folder: Path, values: object, kind: pyarrow.DataType) -> None:
    column = pyarrow.array(values).cast(kind) if isinstance(values, list) else values
    parquet.write_table(pyarrow.table({"text": column}), folder / "x.parquet")


def test_globs_have_stars_and_braces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(*(tmp_path / name for name in ("b/x.jsonl", "a/deep/y.txt", "a/z.txt", "c/x.md", "a{b}.txt")))
    monkeypatch.chdir(tmp_path / "b")
    monkeypatch.setenv("HOME", str(tmp_path))
    every, two = ["a/deep/y.txt", "a/z.txt", "a{b}.txt", "b/x.jsonl"], ["a/z.txt", "c/x.md"]
    for glob, found in {
        f"{tmp_path}/**/*.{{jsonl,txt}}": every,
        f"{tmp_path}/{{a,c}}/{{*.txt,x.*}}": two,
        f"{{{tmp_path}/a,{tmp_path}/c}}/*.*": two,
        "../{a,c}/*.*": two,
        "{.,~/c}/*.*": ["b/x.jsonl", "c/x.md"],
        f"{tmp_path}/a/*.txt": ["z.txt"],
        f"{tmp_path}/a{{b}}.txt": ["a{b}.txt"],  # a file of that name, and no list of choices
    }.items():
        assert list(find_files(glob)) == found, glob


def test_units_are_groups_of_files_and_parts_of_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MIN_UNIT_BYTES", 1000)
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("x" * 400 * bool(number))
    write_jsonl(tmp_path / "m.jsonl", ["y" * 100] * 20)
    write_parquet(tmp_path / "p.parquet", [f"{number} " + "z" * 250 for number in range(20)], rows=2)
    units = plan_units(find_files(f"{tmp_path}/*"), "text")
    texts = [[str(source) for source in unit] for unit in units]
    assert texts[:2] == [["0.txt", "1.txt", "2.txt"], ["3.txt", "4.txt"]], "an empty file is one too"
    size = (tmp_path / "m.jsonl").stat().st_size
    parts = [f"m.jsonl bytes {start} to {min(start + 1000, size)}" for start in range(0, size, 1000)]
    groups = [source for unit in texts for source in unit if source.startswith("p.")]
    assert [source for unit in texts for source in unit if source.startswith("m.")] == parts
    assert groups[0].startswith("p.parquet row groups 0 to ")
    assert groups[-1].endswith("to 10")
    assert len(groups) > 2
    assert all(len(unit) == 1 or sum(source.size for source in unit) <= 1000 for unit in units)
    rows = [source for unit in units for source in unit if source.is_parquet]
    found = [text for source in rows for text, _ in documents(source, "text")]
    assert found == [f"{number} " + "z" * 250 for number in range(20)]


@settings(max_examples=40)
@given(lines=st.lists(st.text(max_size=12), min_size=1, max_size=12), step=st.integers(1, 40), end=st.booleans())
def test_byte_ranges_give_every_line_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], step: int, end: bool
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("lines") / "x.jsonl", lines)
    data = path.read_bytes() if end else path.read_bytes().rstrip(b"\n")
    path.write_bytes(data)
    sources = [Source("x", str(path), start, min(start + step, len(data)), step) for start in range(0, len(data), step)]
    assert [text for source in sources for text, _ in documents(source, "text")] == lines


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "b"', r"x\.jsonl, line 3: not readable as JSON: Expecting ',' delimiter \(column 13\)"),
        ('{"txt": "b", "id": 1}', r"line 3 has no key 'text'; did you mean 'txt'\? its keys: txt, id; set text_key"),
        ('{"text": null}', r"line 3: 'text' is null; expected text"),
        ('{"text": ["b"]}', r"line 3: 'text' is list \['b'\]; expected text"),
        ('["text"]', r"line 3: expected an object with the key 'text', got \[\"text\"\]"),
        ("[" * 100_000, r"line 3: not readable as JSON"),
        ('{"text": "\udcff"}', r"line 3 is not UTF-8 \(byte 10: 0xff\)"),
    ],
)
def test_mistakes_in_a_line(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(f'{{"text": "a"}}\n\n{line}\n'.encode(errors="surrogateescape"))
    size = path.stat().st_size
    for source in (Source("x.jsonl", str(path), 0, None, size), Source("x.jsonl", str(path), 10, size, size)):
        with pytest.raises(DataError, match=expected):
            list(documents(source, "text"))


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl"):
        content = "x" if name == "a.txt" else '{"text": "x"}'
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert list(documents(Source(name, str(tmp_path / name), 0, None, 1), "text")) == [("x", 0)]


def test_columns_that_are_text(tmp_path: Path) -> None:
    for kind in (pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        write_column(tmp_path, ["a", "b", "a"], kind)
        ((source,),) = plan_units(find_files(f"{tmp_path}/*"), "text")
        assert [text for text, _ in documents(source, "text")] == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("texts", "key", "expected"),
    [
        (["a"], "tex", r"has no column 'text'; did you mean 'tex'\? its keys: id, tex; set text_key"),
        ([], "text", "has only nulls in column 'text'|has no rows"),
        ([None, None], "text", "has only nulls in column 'text'"),
        ([1, 2], "text", "column 'text' has the type int64; expected text"),
        ([["a"], ["b"]], "text", "column 'text' has the type list<.*>; expected text"),
    ],
)
def test_mistakes_in_a_column(tmp_path: Path, texts: list[object], key: str, expected: str) -> None:
    write_parquet(tmp_path / "x.parquet", texts, key)
    with pytest.raises(ConfigError, match=expected):
        plan_units(find_files(f"{tmp_path}/*"), "text")


def test_kinds_of_columns_that_are_no_text(tmp_path: Path) -> None:
    string = pyarrow.string()
    for kind in (pyarrow.large_list(string), pyarrow.list_(string, 1), pyarrow.list_view(string)):
        with pytest.raises(ConfigError, match=r"column 'text' has the type .*<.*; expected text"):
            inputs._text_column(pyarrow.schema([("text", kind)]), "x.parquet", "text")
    write_column(tmp_path, pyarrow.array([None, None], string), string)
    with pytest.raises(ConfigError, match=r"x\.parquet has only nulls in column 'text'; remove it"):
        plan_units(find_files(f"{tmp_path}/*"), "text")
    path = write_parquet(tmp_path / "one.parquet", ["a", "b", "c", "d", None])
    with pytest.raises(DataError, match=r"one\.parquet, row 5: 'text' is null; expected text"):
        list(documents(Source("one.parquet", str(path), 1, 2, 1), "text"))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for name, message in (
        ("*.parquet", r"files=.*\*\.parquet matches no file \(working directory .*\)$"),
        ("", r"it is a folder: add '/\*\*/\*\.jsonl'"),
        ("*.json", r"matches .*a\.json; expected .*write one object a line into a \.jsonl"),
    ):
        touch(tmp_path / "a.json")
        with pytest.raises(ConfigError, match=message):
            find_files(f"{tmp_path}/{name}".rstrip("/"))
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.txt: No such file or directory; make it readable or"):
        plan_units({"gone.txt": tmp_path / "gone.txt"}, "text")
    touch(tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match=r"x\.parquet cannot be read as \.parquet: "):
        plan_units(find_files(f"{tmp_path}/*.parquet"), "text")
    (tmp_path / "x.txt").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"x\.txt is not UTF-8 \(byte 2: 0xff\); convert it, or narrow the glob"):
        list(documents(Source("x.txt", str(tmp_path / "x.txt"), 0, None, 3), "text"))

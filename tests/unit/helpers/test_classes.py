"""The members that the script on classes counts."""

from __future__ import annotations

from tests.measure.classes import classes_of

SOURCE = """
class Outer:
    name: str
    size, _sides = 1, 2

    def __init__(self):
        self.first, (self.second, local.third) = self.fourth = 1, (2, 3)

    @property
    def area(self):
        with open(self.first) as self.file:
            self.size += 1
        self.file.other = 2

    class Inner(Outer):
        pass
"""


def test_own_methods_and_attributes() -> None:
    attributes = {"name", "size", "_sides", "first", "second", "fourth", "file"}
    assert list(classes_of(SOURCE)) == [("Outer", {"__init__", "area"}, attributes), ("Inner", set(), set())]

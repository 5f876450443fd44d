"""The parts of a report, and how they are printed."""

from __future__ import annotations

from dataclasses import dataclass, field

from dtrain.measure.bench.records import AnyResults
from dtrain.redaction.redact import redact_text
from dtrain.tools.tables import Table, show


@dataclass(frozen=True)
class Report:
    """The report on one results file.

    Attributes:
        facts: paragraphs about command, machine and workload.
        tables: the first is the one that documents show.
        notes: paragraphs that explain the columns.
        conclusions: a line on each case, which tables do not show better.
    """

    facts: list[str]
    tables: list[Table]
    notes: list[str]
    conclusions: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        tables = [f"## {table.title}\n\n{table.markdown()}" for table in self.tables]
        return "\n\n".join([*self.facts, *tables, *self.notes])

    def summary(self) -> str:
        """Returns the facts and the first table, for a document that explains the columns itself."""
        return "\n\n".join([*self.facts, *(table.markdown() for table in self.tables[:1])])

    def print(self) -> None:
        """Prints all parts: on a terminal with drawn tables, elsewhere as ``markdown``."""
        print(redact_text("\n\n".join(self.facts)), end="\n\n")
        show(self.tables)
        print(redact_text("\n\n".join(self.notes)), flush=True)


def origin(results: AnyResults) -> list[str]:
    """Returns the command, and the date with the machine."""
    return [f"`{results.command}`", f"{results.date}, {results.host.summary()}."]

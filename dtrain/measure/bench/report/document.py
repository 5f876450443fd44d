"""Reports on any results, and the document that holds their tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from dtrain.errors import BenchError
from dtrain.measure.bench.records import AnyResults, OperationResults, TableResults
from dtrain.measure.bench.report.float8 import describe_float8
from dtrain.measure.bench.report.operations import describe_operations
from dtrain.measure.bench.report.report import Report, origin
from dtrain.measure.bench.report.step import describe_step
from dtrain.measure.bench.report.training import describe_training
from dtrain.telemetry.metrics import write_atomically


def describe(results: AnyResults) -> Report:
    if isinstance(results, OperationResults):
        return describe_operations(results)
    if isinstance(results, TableResults):
        return Report([*origin(results), results.description], results.tables, results.notes, results.conclusions)
    return {"float8": describe_float8, "step": describe_step}.get(results.suite, describe_training)(results)


def update_document(document: Path, results: Mapping[str, AnyResults]) -> None:
    """Writes the summary of each results file between its markers in ``document``; adds missing markers at the end.

    The markers are comments, ``<!-- results NAME -->`` and ``<!-- end NAME -->``. The rest of the document stays.

    Raises:
        BenchError: the folder of ``document`` does not exist, or a marker has no end.
    """
    if not document.parent.is_dir():
        raise BenchError(f"{document.parent} is not a folder; set bench.docs=PATH to the document to write")
    text = document.read_text(encoding="utf-8") if document.exists() else "# Benchmarks\n"
    for name, result in results.items():
        begin, end = f"<!-- results {name} -->", f"<!-- end {name} -->"
        if begin not in text:
            text = f"{text.rstrip()}\n\n## {name}\n\n{begin}\n{end}\n"
        if end not in text.partition(begin)[2]:
            raise BenchError(f"{document}: '{begin}' has no '{end}' after it; restore the marker")
        block = f"{begin}\n\n{describe(result).summary()}\n\n{end}"
        text = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, block=block: block, text, flags=re.S)  # type: ignore[misc]
    write_atomically(document, text)

"""What `slora-ref paper` gives out: a table of text, a CSV, and the JSON object. Ours beside theirs, row by row."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import Any

import numpy as np

from slora_ref.paper.play import Row

HEADER = ("point", "variant", "metric", "ours", "theirs", "null model", "error", "")


def as_json(
    experiment: str, seconds: float, rows: Seq[Row], studied: Seq[dict[str, Any]] = ()
) -> dict[str, Any]:
    """The JSON object: median and worst are of rows that nothing was fitted on. Rows of studies stand behind."""
    free = [abs(row.rel_error) for row in rows if row.rel_error is not None and not row.fitted]
    return {
        "experiment": experiment,
        "seconds": seconds,
        "rows": [*(asdict(row) for row in rows), *studied],
        "median_rel_error": float(np.median(free)) if free else None,
        "worst_rel_error": max(free, default=None),
    }


def as_csv(rows: Seq[dict[str, Any]]) -> str:
    """The rows under a header, an empty cell for what there is not."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0])
    writer.writerows([["" if value is None else value for value in row.values()] for row in rows])
    return text.getvalue()


def plain_table(rows: Seq[dict[str, Any]]) -> str:
    """Rows of a study in columns."""
    lines = [[name.replace("_", " ") for name in rows[0]]]
    lines += [[_number(value) if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    return _columns(lines, left=1)


def as_table(rows: Seq[Row]) -> str:
    """The rows in columns, for a terminal."""
    return _columns([HEADER, *(_cells(row) for row in rows)], left=3)


def _columns(lines: Seq[Seq[str]], left: int) -> str:
    """Cells padded to columns, the first ones to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.point,
        row.variant,
        row.metric,
        _number(row.ours),
        _number(row.theirs),
        _number(row.null_model),
        "" if row.rel_error is None else f"{100 * row.rel_error:+.1f} %",
        "fitted" if row.fitted else "",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"

"""The original's raw numbers: the CSV files in original/, as the authors published them beside their code.

Throughput in requests a second, latencies in seconds, attainment and satisfaction as fractions. An empty cell was not
measured. original/README.md says where each file comes from and what is odd in it.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources

Row = dict[str, str]


@cache
def table(name: str) -> list[Row]:
    """The rows of original/NAME.csv, every cell as text."""
    path = resources.files("slora_ref.paper") / "original" / f"{name}.csv"
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def number(cell: str) -> float | None:
    """A cell as a number; None where it is empty or says OOM."""
    return None if cell in ("", "OOM") else float(cell)


def pair(cell: str) -> tuple[float, float]:
    """A cell of two numbers, as in "1.69 / 0.842"."""
    first, second = cell.split(" / ")
    return float(first), float(second)

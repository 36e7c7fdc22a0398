"""Fills the ladder of kernels_cu/README.md: `python tests/kernel_readme.py`. Nobody writes a number by hand.

Texts are from the heads of the .cu files, numbers from the committed results of `slora-ref bench kernels`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from slora_ref.ops.ladder import ladder, operation_of  # noqa: E402
from slora_ref.ops.rungs import RUNGS  # noqa: E402

FOLDER = ROOT / "kernels_cu"
README = FOLDER / "README.md"
RESULTS = ROOT / "slora_ref" / "bench" / "results" / "KERNELS-H200.json"
PART = re.compile(r"(<!-- begin ladder -->\n).*?(<!-- end ladder -->)", re.DOTALL)


def new_here(kernel: str) -> str:
    """What a kernel's head says is new in it."""
    text = (FOLDER / f"{kernel}.cu").read_text(encoding="utf-8")
    found = re.search(r"^// new here: (.*?)^// limits:", text, re.DOTALL | re.MULTILINE)
    assert found, f"{kernel}.cu has no 'new here'"
    return " ".join(line.strip() for line in found[1].replace("//", "").splitlines())


def measured() -> dict[str, dict[str, str]]:
    """By title of a column, the text of each kernel whose ladder was timed: a time for each shape."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    texts: dict[str, list[str]] = {}
    for row in results["rows"]:
        for kernel, us in row.get("rungs", {}).items():
            company = ", with decode" if operation_of(kernel).endswith("merge") else ""
            texts.setdefault(kernel, []).append(f"{us:,.1f} ({shape_of(row)}{company})")
    title = f"us on an {results['machine']['gpu']} (shape)"
    return {title: {kernel: "; ".join(text) for kernel, text in texts.items()}}


def shape_of(row: Mapping[str, Any]) -> str:
    """What of a result's row a reader needs to place its time."""
    if "context" in row:
        return f"{row['batch']} x {row['context']}"
    if row["operation"] == "load_pages":
        return f"{row['bytes'] / 1e6:.1f} MB"
    popular = " by Zipf" if row["case"] == "zipf" else ""
    owners = f" of {row['adapters']} adapters{popular}, rank {row['rank']}" if "rank" in row else ""
    return f"{row['rows']:,} rows{owners}"


def table(measured: Mapping[str, Mapping[str, str]]) -> str:
    """The ladder in Markdown, an operation after the other, first rung first."""
    titles = list(measured)
    lines = [
        f"| kernel | new here |{''.join(f' {title} |' for title in titles)}",
        "| --- | --- |" + " ---: |" * len(titles),
    ]
    for operation in dict.fromkeys(map(operation_of, RUNGS)):
        dtype = next(rung.dtypes[-1] for kernel, rung in RUNGS.items() if operation_of(kernel) == operation)
        for kernel in ladder(operation, dtype):
            numbers = "".join(f" {measured[title].get(kernel, '')} |" for title in titles)
            lines.append(f"| [{kernel}]({kernel}.cu) | {new_here(kernel)} |{numbers}")
    return "\n".join(lines)


def filled(text: str) -> str:
    """`text` with the ladder replaced."""
    assert PART.search(text), "the README has no part for the ladder"
    return PART.sub(lambda found: f"{found[1]}{table(measured())}\n{found[2]}", text)


if __name__ == "__main__":
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")

"""The part of the results page on runs for real: from the committed results of `slora-ref paper all --device`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

FILES = {"PAPER-H200.json": "Llama-7B's shape", "PAPER-CPU.json": "the toy's shape"}
HEAD = """The baselines as engines of this project, each with one part swapped, with random weights and adapters of
ranks 64, 32, 16 and 8. All requests come at once, after a first round that prepares launches. "First tokens" is the
share of requests whose first token is the usual engine's. "Simulated" is the simulator, serving as this engine does,
with the constants fitted on the authors' system, whose host takes most of a step on so fast a GPU; "bound" is the
simulator with the data sheet's rates and a host that takes no time.
"""
TITLES = "| experiment | point | requests/s | ms a step | running (mean) | first tokens | simulated | bound |"


def real_part() -> str:
    """A table for each committed result, and what it shows."""
    return "\n".join([HEAD, *(_section(name, model) for name, model in FILES.items())])


def committed_run(name: str) -> dict[str, Any]:
    """A committed result."""
    path = resources.files("slora_ref.bench") / "results" / name
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _section(name: str, model: str) -> str:
    result = committed_run(name)
    rows, machine = result["rows"], result["machine"]
    where = f"one {machine['gpu']}" if machine["gpu"] else f"a CPU ({machine['cpu']}, {machine['cores']} cores)"
    lines = [f"{rows[0]['requests']} requests with {model} on {where}, by `{result['command']}`:", ""]
    lines += [TITLES, "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |", *map(_line, rows), ""]
    return "\n".join([*lines, *(f"- {told}" for told in comparisons(rows)), ""])


def _line(row: Mapping[str, Any]) -> str:
    numbers = (f"{row['requests_per_s']:.1f}", f"{row['step_ms']:.2f}", f"{row['mean_running']:.1f}")
    agreement = "-" if row["first_tokens_as_slora"] is None else f"{row['first_tokens_as_slora']:.0%}"
    simulated = (row["simulated_requests_per_s"], row["bound_requests_per_s"])
    others = ("-" if number is None else f"{number:.1f}" for number in simulated)
    return f"| {row['experiment']} | {row['point']} | {' | '.join([*numbers, agreement, *others])} |"


def comparisons(rows: list[dict[str, Any]]) -> list[str]:
    """What the paper claims of each baseline, in the numbers of a run."""
    by_name = {row["point"]: row for row in rows}
    told = []
    for adapters in (1, 5):
        ratio = _ratio(by_name, f"n={adapters} merge", f"n={adapters} slora", "requests_per_s")
        told.append(f"Merging serves {ratio:.2f} x the requests of computing on the fly with {_count(adapters)}.")
    for adapters in (5, 100):
        ratio = _ratio(by_name, f"n={adapters} bmm", f"n={adapters} slora", "step_ms")
        told.append(f"A step with padded adapters takes {ratio:.2f} x as long as a paged one with {_count(adapters)}.")
    for row in rows:
        if row["system"] == "split":
            ratio = _ratio(by_name, row["point"], "n=200 tight pool slora", "mean_running")
            told.append(f"Two pools, {row['adapter_share']:.0%} for adapters, run {ratio:.2f} x the requests of one.")
    return told


def _ratio(by_name: Mapping[str, Mapping[str, Any]], name: str, other: str, key: str) -> float:
    ratio: float = by_name[name][key] / by_name[other][key]
    return ratio


def _count(adapters: int) -> str:
    return "one adapter" if adapters == 1 else f"{adapters} adapters of mixed ranks"

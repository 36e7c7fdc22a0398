"""Figures like the paper's: a panel for each metric and setting, theirs hollow and dashed, ours filled.

Needs matplotlib (the `plots` extra).
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from slora_ref.errors import ConfigError, how_to_install
from slora_ref.paper.play import Row

MARKS = "osv^D*XP"
UNITS = {
    "throughput": "throughput (requests / s)",
    "latency": "latency (s)",
    "first_token": "first token (s)",
    "attainment": "SLO attainment",
    "satisfaction": "user satisfaction",
}


def check_picture() -> None:
    """Raises ConfigError where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"a picture needs matplotlib: {how_to_install('plots')}, or leave --svg out")


def draw(experiment: str, rows: Seq[Row], path: Path) -> None:
    """Writes the SVG; the same rows give the same file."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "slora_ref", "font.size": 8})
    from matplotlib import pyplot

    panels: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        panels[row.metric, _panel(row)].append(row)
    columns = min(len(panels), 4)
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(3.4 * columns, 2.6 * lines), squeeze=False)
    for axis, ((metric, title), members) in zip(axes.flat, panels.items(), strict=False):
        _draw_panel(axis, members)
        axis.set_title(title)
        axis.set_ylabel(UNITS[metric])
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(f"{experiment}: filled, this simulator; hollow, the authors")
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def _panel(row: Row) -> str:
    """The first words of a point's name that belong to the setting, not to the curve or the place on it."""
    return " ".join(word for word in row.point.split() if "=" not in word and word != _series(row))


def _series(row: Row) -> str:
    """The curve: the system or the policy, the last word of a name; or the clusters, which are the place."""
    last = row.point.split()[-1]
    return last if "=" not in last else ""


def _draw_panel(axis: Any, rows: Seq[Row]) -> None:
    curves: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        curves[_series(row), row.variant].append(row)
    places = list(dict.fromkeys(_place(row) for row in rows))
    for mark, ((series, variant), members) in zip(MARKS, curves.items(), strict=False):
        at = [places.index(_place(row)) for row in members]
        name = f"{series} {variant}".strip()
        (line,) = axis.plot(at, [row.ours for row in members], marker=mark, label=name)
        if variant == "original":
            theirs = [row.theirs for row in members]
            axis.plot(at, theirs, marker=mark, mfc="none", color=line.get_color(), linestyle="--", linewidth=0.8)
    axis.set_xticks(range(len(places)), places, rotation=60 if len(places) > 6 else 0, fontsize=6)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=6)


def _place(row: Row) -> str:
    """Where on the curve: everything of the form name=value."""
    return " ".join(word for word in row.point.split() if "=" in word)

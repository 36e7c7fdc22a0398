"""What the pool held over time, keys and values, adapters, free pages: the paper's Figure 3, from a real run."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np

from slora_ref.errors import ConfigError, how_to_install
from slora_ref.pager import PoolUsage
from slora_ref.shapes import Array, Float

# Told apart in grey too: dark, middle, light.
KV_COLOUR, ADAPTER_COLOUR, FREE_COLOUR, EDGE_COLOUR = "#1b4f72", "#f0a030", "#f4f6f7", "#85929e"
STYLE = {"svg.hashsalt": "slora_ref", "font.size": 9, "svg.fonttype": "path"}
MOST_POINTS = 2000  # of a picture; a run of more steps is thinned


def check_plot(path: Path) -> None:
    """Raises ConfigError before anything runs if the picture could not be drawn."""
    folder = path.resolve().parent
    if path.suffix != ".svg":
        raise ConfigError(f"--plot {path}: the picture is an SVG file, so its name must end in .svg")
    if not folder.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {folder}")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"--plot {path}: the file cannot be written there")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot needs matplotlib: {how_to_install('plots')}")


def draw_occupancy(axes: Any, usages: Seq[PoolUsage], edges: Float[Array, " edges"]) -> None:
    """Stacked areas: adapters below, keys and values above them, free pages on top.

    Args:
        axes: of matplotlib.
        usages: one more edge than these; usage i holds from edges[i] to edges[i + 1].
    """
    adapter, used = np.array([(u.adapter, u.adapter + u.kv) for u in usages]).reshape(-1, 2).T
    pages = [u.adapter + u.kv + u.free for u in usages]
    axes.stairs(adapter, edges, fill=True, color=ADAPTER_COLOUR)
    axes.stairs(used, edges, baseline=adapter, fill=True, color=KV_COLOUR)
    axes.stairs(pages, edges, baseline=used, fill=True, color=FREE_COLOUR)
    axes.set_ylabel("pages")
    axes.margins(0)


def plot_occupancy(path: Path, title: str, times: Seq[float], usages: Seq[PoolUsage]) -> None:
    """Draws the occupancy of one run.

    Args:
        times: seconds from the start; usage i was seen at times[i] and is drawn from then on.

    Raises:
        ConfigError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    every = -(-len(times) // MOST_POINTS)
    seen, shown = list(times[::every]), list(usages[::every])
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        axes = figure.subplots()
        draw_occupancy(axes, shown, np.array([*seen, times[-1] + 1e-9]))
        axes.set(title=title, xlabel="seconds")
        swatches = [
            Patch(facecolor=ADAPTER_COLOUR, label="adapter weights"),
            Patch(facecolor=KV_COLOUR, label="keys and values"),
            Patch(facecolor=FREE_COLOUR, edgecolor=EDGE_COLOUR, label="free"),
        ]
        figure.legend(handles=swatches, loc="outside lower center", ncols=3, frameon=False)
        numbers = np.array([(u.adapter, u.kv, u.free) for u in shown], "<i8")
        save_figure(figure, path, "sha256:" + hashlib.sha256(numbers.tobytes()).hexdigest())


def save_figure(figure: Any, path: Path, identifier: str) -> None:
    """Writes an SVG that names what it was drawn from, and no date.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        figure.savefig(path, format="svg", metadata={"Date": None, "Identifier": identifier})
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror or error}") from error

"""The pool of a real run as a picture: what it held over time, and which page was whose when sequences held most."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from slora_ref.demo.watch import PoolWatch
from slora_ref.errors import ConfigError
from slora_ref.pager.census import FREE, KV
from slora_ref.shapes import Array, Int

# Told apart in grey too: dark, middle, light.
KV_COLOUR, FREE_COLOUR = "#1b4f72", "#f4f6f7"
ADAPTER_COLOURS = ("#f5b041", "#eb984e", "#f8c471", "#dc7633", "#fad7a0")


def check_plot(path: Path) -> None:
    """Raises ConfigError before anything runs if the picture could not be drawn."""
    if path.suffix != ".svg":
        raise ConfigError(f"--plot {path}: the picture is an SVG file, so its name must end in .svg")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.resolve().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install slora_ref[plots]")


def plot_pool(watch: PoolWatch, path: Path) -> None:
    """Draws both pictures side by side. The same run gives the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "slora_ref", "font.size": 9, "svg.fonttype": "path"}):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        pages, history = figure.subplots(1, 2, width_ratios=(1, 1.25))
        _draw_pages(pages, watch.fullest)
        _draw_history(history, watch)
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw_pages(axes: Any, owners: Int[Array, " pages"]) -> None:
    from matplotlib.colors import ListedColormap

    colours = ListedColormap([FREE_COLOUR, KV_COLOUR, *ADAPTER_COLOURS])
    axes.imshow(
        page_image(owners), cmap=colours, vmin=0, vmax=1 + len(ADAPTER_COLOURS), aspect="auto", interpolation="none"
    )
    axes.set_title(f"one pool of {len(owners):,} pages, when sequences held most")
    axes.set_xlabel("page (100 a line)")
    axes.set_ylabel("line")


def _draw_history(axes: Any, watch: PoolWatch) -> None:
    usages = watch.occupancy.usages
    steps = np.arange(len(usages))
    layers = [[usage.adapter for usage in usages], [usage.kv for usage in usages], [usage.free for usage in usages]]
    labels = ["adapter weights (shades: different adapters)", "keys and values", "free"]
    axes.stackplot(steps, layers, colors=[ADAPTER_COLOURS[0], KV_COLOUR, FREE_COLOUR], labels=labels, step="post")
    axes.set_title(f"the same pool over {len(usages)} steps")
    axes.set_xlabel("step")
    axes.set_ylabel("pages")
    axes.margins(0)


def page_image(owners: Int[Array, " pages"], columns: int = 100) -> Int[Array, "rows columns"]:
    """Line by line, a colour number a page: 0 free, 1 keys and values, above adapters; the rest is free."""
    kinds = np.where(owners == FREE, 0, np.where(owners == KV, 1, 2 + owners % len(ADAPTER_COLOURS)))
    image = np.zeros((-(-len(kinds) // columns), columns), np.int32)
    image.ravel()[: len(kinds)] = kinds
    return image

"""The pool of a real run as a picture: what it held over time, and which page was whose when sequences held most."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from slora_ref.bench.occupancy import (
    ADAPTER_COLOUR,
    EDGE_COLOUR,
    FREE_COLOUR,
    KV_COLOUR,
    draw_occupancy,
    save_figure,
)
from slora_ref.demo.watch import PoolWatch
from slora_ref.pager.census import FREE, KV
from slora_ref.shapes import Array, Int

ADAPTER_COLOURS = (ADAPTER_COLOUR, "#e08a3c", "#e5984e", "#d0701c", "#e6ab5a")
COLOURS = (FREE_COLOUR, KV_COLOUR, *ADAPTER_COLOURS)


def plot_pool(watch: PoolWatch, path: Path) -> None:
    """Draws both pictures side by side. The same run gives the same bytes; the digest of what is drawn goes with them.

    Raises:
        ConfigError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    with mpl.rc_context({"svg.hashsalt": "slora_ref", "font.size": 9, "svg.fonttype": "path"}):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        pages, history = figure.subplots(1, 2, width_ratios=(1, 1.25))
        _draw_pages(pages, watch.fullest)
        usages = watch.occupancy.usages
        draw_occupancy(history, usages, np.arange(1, len(usages) + 2) - 0.5)  # step n from n - 1/2 to n + 1/2
        history.set(title=f"the same pool over {len(usages)} steps", xlabel="step")
        swatches = [
            Patch(facecolor=ADAPTER_COLOURS[0], label="adapter weights (left: shades tell neighbours apart)"),
            Patch(facecolor=KV_COLOUR, label="keys and values"),
            Patch(facecolor=FREE_COLOUR, edgecolor=EDGE_COLOUR, label="free"),
        ]
        figure.legend(handles=swatches, loc="outside lower center", ncols=3, frameon=False)
        save_figure(figure, path, drawn_digest(watch))


def drawn_digest(watch: PoolWatch) -> str:
    """SHA-256 of the numbers that are drawn: tells whether a picture is of this run, whatever drew it."""
    usages = [(usage.adapter, usage.kv, usage.free) for usage in watch.occupancy.usages]
    numbers = b"".join(np.ascontiguousarray(part, "<i8").tobytes() for part in (page_image(watch.fullest), usages))
    return "sha256:" + hashlib.sha256(numbers).hexdigest()


def _draw_pages(axes: Any, owners: Int[Array, " pages"]) -> None:
    """The pages as rectangles with sharp edges: viewers smooth pixels into colours that the legend does not have."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    image = page_image(owners)
    for kind, colour in enumerate(COLOURS):
        corners = stretches(image, kind)
        if len(corners):
            codes = np.tile([Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY], len(corners))
            outline = Outline(corners.reshape(-1, 2), codes)
            # the edge, a tenth of a page, closes the seams that smoothing leaves between neighbours
            axes.add_patch(PathPatch(outline, facecolor=colour, edgecolor=colour, linewidth=0.3, joinstyle="miter"))
    axes.set(xlim=(0, image.shape[1]), ylim=(image.shape[0], 0))
    axes.set_title(f"one pool of {len(owners):,} pages, when sequences held most")
    axes.set_xlabel("page (100 a line)")
    axes.set_ylabel("line")


def page_image(owners: Int[Array, " pages"], columns: int = 100) -> Int[Array, "rows columns"]:
    """Line by line, a colour number a page: 0 free, 1 keys and values, above adapters; -1 after the last page."""
    kinds = np.where(owners == FREE, 0, np.where(owners == KV, 1, 2 + owners % len(ADAPTER_COLOURS)))
    image = np.full((-(-len(kinds) // columns), columns), -1, np.int32)
    image.ravel()[: len(kinds)] = kinds
    return image


def stretches(image: Int[Array, "rows columns"], kind: int) -> Int[Array, "stretches 5 2"]:
    """A closed rectangle (x, y) around each stretch of neighbours of one kind in a row."""
    found = []
    for row, line in enumerate(image):
        changes = np.flatnonzero(np.diff(line == kind, prepend=False, append=False)).tolist()
        for start, end in zip(changes[::2], changes[1::2], strict=True):
            found.append([(start, row), (end, row), (end, row + 1), (start, row + 1), (start, row)])
    return np.array(found, np.int32).reshape(-1, 5, 2)

"""Boxes: an adapter's image to its pages by the copy engine, one command for each run of neighbouring pages.

A run is the same pages in every layer: a box of layers x pages x the numbers of a page. The copy engine moves it at the
link's full rate and takes no multiprocessor. A kernel that reads over the link gets nine tenths of that, waits while a
large product holds all multiprocessors, and delays what runs beside it (paper section 5.2: loads beside compute). For
speed alone: the kernel brings the same. It knows addresses and strides, and calls nothing.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

import numpy as np

from slora_ref.shapes import Array, Int

HOST, DEVICE = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE


class Side(ctypes.Structure):
    """Where a box lies: `address`, rows `pitch` bytes apart, layers `height` rows apart; the box begins at row y."""

    _fields_ = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("z", ctypes.c_size_t),
        ("level", ctypes.c_size_t),
        ("kind", ctypes.c_uint),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_void_p),
        ("array", ctypes.c_void_p),
        ("reserved", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Box(ctypes.Structure):
    """CUDA_MEMCPY3D: `width` bytes of `rows` pages in `layers` layers."""

    _fields_ = (
        ("source", Side),
        ("target", Side),
        ("width", ctypes.c_size_t),
        ("rows", ctypes.c_size_t),
        ("layers", ctypes.c_size_t),
    )


def runs(pages: Int[Array, " count"]) -> list[tuple[int, int]]:
    """[(first, end)] places in `pages` between which each id is the one before it and 1."""
    breaks = (np.flatnonzero(np.diff(pages) != 1) + 1).tolist()
    return list(pairwise([0, *breaks, len(pages)]))


def boxes(storage: Any, address: int, image: Array, pages: Int[Array, " count"]) -> list[Box]:
    """What copies image[:, i] to storage[:, pages[i]], for all i.

    Args:
        storage: [layers, pages, width] on the device, at `address`; image: [layers, count, width] in pinned memory.
        pages: [count] in host memory.
    """
    (layer_to, to), (layer_from, each) = storage.strides[:2], image.strides[:2]
    return [
        Box(
            source=Side(y=first, kind=HOST, host=image.ctypes.data, pitch=each, height=layer_from // each),
            target=Side(y=int(pages[first]), kind=DEVICE, device=address, pitch=to, height=layer_to // to),
            width=image.shape[2] * image.itemsize,
            rows=end - first,
            layers=image.shape[0],
        )
        for first, end in runs(pages)
    ]

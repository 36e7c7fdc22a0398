"""Boxes of neighbouring pages, copied here as the driver would, against the scatter that they stand for."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slora_ref.ops.boxes import Box, boxes, runs


def copy(box: Box) -> None:
    """What cuMemcpy3D does, from host to host."""
    for layer in range(box.layers):
        for row in range(box.rows):
            ends = []
            for side, start in ((box.target, box.target.device), (box.source, box.source.host)):
                ends.append(start + (layer * side.height + side.y + row) * side.pitch)
            ctypes.memmove(*ends, box.width)


@given(pages=st.lists(st.integers(0, 11), unique=True, min_size=1), gap=st.integers(0, 3))
def test_boxes_are_the_scatter(pages: list[int], gap: int) -> None:
    """Also where the pool's pages are further apart than the image's."""
    rng, ids = np.random.default_rng(0), np.array(pages, np.int32)
    image = rng.standard_normal((3, len(ids), 5)).astype(np.float32)
    storage = rng.standard_normal((3, 12, 5 + gap)).astype(np.float32)[:, :, :5]
    want = storage.copy()
    want[:, ids] = image
    made = boxes(storage, storage.ctypes.data, image, ids)
    for box in made:
        copy(box)
    assert (storage == want).all()
    assert len(made) == 1 + int((np.diff(ids) != 1).sum())


@pytest.mark.parametrize(
    ("pages", "found"), [([7], [(0, 1)]), ([3, 4, 5], [(0, 3)]), ([3, 4, 6, 5, 6], [(0, 2), (2, 3), (3, 5)])]
)
def test_runs_are_as_long_as_they_can_be(pages: list[int], found: list[tuple[int, int]]) -> None:
    assert runs(np.array(pages)) == found


def test_the_struct_is_the_drivers() -> None:
    """CUDA_MEMCPY3D of 64-bit systems, by the offsets in cuda.h."""
    assert ctypes.sizeof(Box) == 200
    offsets = {name: getattr(Box, name).offset for name in ("target", "width", "rows", "layers")}
    assert offsets == {"target": 88, "width": 176, "rows": 184, "layers": 192}

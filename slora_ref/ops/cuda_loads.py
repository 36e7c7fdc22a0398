"""CudaLoads: how adapters cross the link to the GPU, by the copy engine or by a kernel."""

from __future__ import annotations

import ctypes
from typing import Any

import cupy
import cupyx

from slora_ref.errors import KernelError
from slora_ref.ops.boxes import Box, boxes, runs
from slora_ref.ops.cuda_kernels import is_pinned
from slora_ref.ops.kernel_ops import KernelOps
from slora_ref.ops.tape import Work
from slora_ref.shapes import Array, Float, Int

PAGES_A_BOX = 12
"""From this mean length of runs on the copy engine is the faster one: each box costs it some 3 us more."""


class CudaLoads(KernelOps):
    """The part of KernelOps on CuPy arrays that loads adapters."""

    def readable(self, array: Array) -> Array:
        """Itself, or a copy in pinned memory."""
        if is_pinned(array):
            return array
        pinned = cupyx.empty_pinned(array.shape, array.dtype)
        pinned[...] = array
        return pinned

    def prepared_load(
        self,
        storage: Float[Array, "layers pages width"],
        image: Float[Array, "layers count width"],
        page_ids: Int[Array, " count"],
        on_host: Int[Array, " count"] | None = None,
    ) -> Work:
        """Boxes, if the pages are neighbours enough; else one launch. On the stream that is current now."""
        if on_host is None or PAGES_A_BOX * len(runs(on_host)) > len(on_host):
            return super().prepared_load(storage, image, page_ids)
        there: Any = storage
        return _copies(boxes(storage, there.data.ptr, image, on_host), cupy.cuda.get_current_stream().ptr)


def _copies(all_boxes: list[Box], stream: int) -> Work:
    """What has the copy engine move the boxes."""
    copy, on = ctypes.CDLL("libcuda.so.1").cuMemcpy3DAsync_v2, ctypes.c_void_p(stream)

    def start() -> None:
        for box in all_boxes:
            failed = copy(ctypes.byref(box), on)
            if failed:
                raise KernelError(f"the driver refuses a copy with error {failed}")

    return start

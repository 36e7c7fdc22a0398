"""The arguments of pad_adapter, the copy that paging saves; only the padded baseline launches it."""

from __future__ import annotations

import numpy as np

from slora_ref.ops.launch import Arguments, check_array, row_stride
from slora_ref.ops.lora_arguments import LORA_WORDS
from slora_ref.shapes import Array, Float, Int


def pad_adapter(
    out: Float[Array, "entries targets columns length"],
    pages: Float[Array, "pages width"],
    page_table: Int[Array, "adapter_slots table"],
    lora: Int[Array, "targets capacity 4"],
    of_b: bool,
) -> Arguments:
    """pad_adapter: the first entries' columns of A, or their rows of B times the scale, in one dense array."""
    entries, targets, columns, length = out.shape
    return {
        "out": check_array("out", out, pages.dtype, out.shape),
        "pages": check_array("pages", pages, pages.dtype, (None, None), strided=True),
        "page_table": check_array("page_table", page_table, np.int32, (None, None)),
        "lora": check_array("lora", lora, np.int32, (targets, None, LORA_WORDS)),
        "entries": np.int32(entries),
        "targets": np.int32(targets),
        "columns": np.int32(columns),
        "length": np.int32(length),
        "width": np.int32(pages.shape[1]),
        "capacity": np.int32(lora.shape[1]),
        "page_stride": row_stride(pages),
        "of_b": np.int32(of_b),
    }

"""The arguments of the sampling kernels, in the order in which every rung of an operation takes them.

What the arrays mean is written in the head of the operation's first rung. It knows no backend.
"""

from __future__ import annotations

import numpy as np

from slora_ref.ops.launch import Arguments, check_array, row_stride
from slora_ref.shapes import Array, Float, Int, Num


def sample_threshold(
    keep: Int[Array, "rows 2"],
    logits: Float[Array, "rows vocab"],
    token: Int[Array, " rows"],
    temperature: Float[Array, " rows"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
) -> Arguments:
    """sample_threshold: which logits top-k and top-p leave."""
    rows, vocab = logits.shape
    return {
        "keep": check_array("keep", keep, np.int32, (rows, 2)),
        "logits": check_array("logits", logits, np.float32, (rows, vocab), strided=True),
        "token": check_array("token", token, np.int32, (rows,)),
        "temperature": check_array("temperature", temperature, np.float32, (rows,)),
        "top_k": check_array("top_k", top_k, np.int32, (rows,)),
        "top_p": check_array("top_p", top_p, np.float32, (rows,)),
        "rows": np.int32(rows),
        "vocab": np.int32(vocab),
        "logits_stride": row_stride(logits),
    }


def sample_draw(
    token: Int[Array, " rows"],
    logits: Float[Array, "rows vocab"],
    keep: Int[Array, "rows 2"],
    temperature: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
    seeds: Num[Array, " rows"],
    positions: Num[Array, " rows"],
) -> Arguments:
    """sample_draw: a token from what is left."""
    rows, vocab = logits.shape
    return {
        "token": check_array("token", token, np.int32, (rows,)),
        "logits": check_array("logits", logits, np.float32, (rows, vocab), strided=True),
        "keep": check_array("keep", keep, np.int32, (rows, 2)),
        "temperature": check_array("temperature", temperature, np.float32, (rows,)),
        "min_p": check_array("min_p", min_p, np.float32, (rows,)),
        "seeds": check_array("seeds", seeds, np.uint64, (rows,)),
        "positions": check_array("positions", positions, np.uint64, (rows,)),
        "rows": np.int32(rows),
        "vocab": np.int32(vocab),
        "logits_stride": row_stride(logits),
    }

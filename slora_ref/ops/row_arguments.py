"""The arguments of the kernels that work on rows or pages alone, in the order in which every rung takes them.

What the arrays mean is written in the head of the operation's first rung. It knows no backend.
"""

from __future__ import annotations

import numpy as np

from slora_ref.ops.launch import Arguments, check_array, row_stride
from slora_ref.ops.layouts import by_layout
from slora_ref.shapes import Array, Float, Int


@by_layout
def rms_norm(
    out: Float[Array, "rows hidden"],
    x: Float[Array, "rows hidden"],
    delta: Float[Array, "rows hidden"] | None,
    weight: Float[Array, " hidden"],
    eps: float,
) -> Arguments:
    """rms_norm: x += delta (unless there is none), then out = x / rms(x) * weight."""
    rows, hidden = x.shape
    if delta is not None:
        check_array("delta", delta, x.dtype, (rows, hidden), strided=True)
    return {
        "out": check_array("out", out, x.dtype, (rows, hidden), strided=True),
        "x": check_array("x", x, x.dtype, (rows, hidden), strided=True),
        "delta": delta,
        "weight": check_array("weight", weight, x.dtype, (hidden,)),
        "rows": np.int32(rows),
        "hidden": np.int32(hidden),
        "eps": np.float32(eps),
        "out_stride": row_stride(out),
        "x_stride": row_stride(x),
        "delta_stride": np.int32(0) if delta is None else row_stride(delta),
    }


@by_layout
def silu_mul(out: Float[Array, "rows ffn"], gate_up: Float[Array, "rows two_ffn"]) -> Arguments:
    """silu_mul: out = silu(gate) * up."""
    rows, ffn = out.shape
    return {
        "out": check_array("out", out, gate_up.dtype, (rows, ffn), strided=True),
        "gate_up": check_array("gate_up", gate_up, gate_up.dtype, (rows, 2 * ffn), strided=True),
        "rows": np.int32(rows),
        "ffn": np.int32(ffn),
        "out_stride": row_stride(out),
        "gate_up_stride": row_stride(gate_up),
    }


@by_layout
def gather_rows(
    out: Float[Array, "rows columns"], source: Float[Array, "source_rows columns"], ids: Int[Array, " rows"]
) -> Arguments:
    """gather_rows: out = source[ids]."""
    rows, columns = out.shape
    return {
        "out": check_array("out", out, source.dtype, (rows, columns), strided=True),
        "source": check_array("source", source, source.dtype, (None, columns), strided=True),
        "ids": check_array("ids", ids, np.int32, (rows,)),
        "rows": np.int32(rows),
        "columns": np.int32(columns),
        "out_stride": row_stride(out),
        "source_stride": row_stride(source),
    }


def enter_tokens(token_ids: Int[Array, " rows"], sampled: Int[Array, "two most"], own: slice) -> Arguments:
    """enter_tokens: the tokens that the step before has sampled, in place of their placeholders; then rows of `own`."""
    return {
        "token_ids": check_array("token_ids", token_ids, np.int32, (None,)),
        "sampled": check_array("sampled", sampled, np.int32, (2, None)),
        "rows": np.int32(len(token_ids)),
        "most": np.int32(sampled.shape[1]),
        "first": np.int32(own.start),
        "own": np.int32(own.stop - own.start),
    }


def enter_pages(
    sequence_pages: Int[Array, "sequence_slots two positions"],
    slots: Int[Array, " rows"],
    places: Int[Array, " rows"],
    k_pages: Int[Array, " rows"],
    v_pages: Int[Array, " rows"],
) -> Arguments:
    """enter_pages: a step's new pages of keys and values, into the table of sequences."""
    arrays = {"slots": slots, "places": places, "k_pages": k_pages, "v_pages": v_pages}
    return {
        "sequence_pages": check_array("sequence_pages", sequence_pages, np.int32, (None, 2, None)),
        **{name: check_array(name, array, np.int32, (len(slots),)) for name, array in arrays.items()},
        "rows": np.int32(len(slots)),
        "positions": np.int32(sequence_pages.shape[2]),
    }


def argmax(token: Int[Array, " rows"], finite: Int[Array, " rows"], logits: Float[Array, "rows vocab"]) -> Arguments:
    """argmax: the first largest logit of each row, and whether the row is finite."""
    rows, vocab = logits.shape
    return {
        "token": check_array("token", token, np.int32, (rows,)),
        "finite": check_array("finite", finite, np.int32, (rows,)),
        "logits": check_array("logits", logits, logits.dtype, (rows, vocab), strided=True),
        "rows": np.int32(rows),
        "vocab": np.int32(vocab),
        "logits_stride": row_stride(logits),
    }


def load_pages(
    storage: Float[Array, "layers pages width"],
    image: Float[Array, "layers count width"],
    page_ids: Int[Array, " count"],
) -> Arguments:
    """load_pages: storage[:, page_ids] = image, the image in pinned host memory where storage is on a GPU.

    Layers and pages of `storage` and `image` may have gaps between rows, the same gap everywhere.
    """
    layers, count, width = image.shape
    itemsize = image.dtype.itemsize
    for layer in range(min(layers, 1)):
        check_array("storage", storage[layer], image.dtype, (None, width), strided=True)
        check_array("image", image[layer], image.dtype, (count, width), strided=True)
    return {
        "storage": storage,
        "image": image,
        "page_ids": check_array("page_ids", page_ids, np.int32, (count,)),
        "count": np.int32(count),
        "layers": np.int32(layers),
        "width": np.int32(width),
        "image_stride": np.int32(image.strides[1] // itemsize),
        "page_stride": np.int32(storage.strides[1] // itemsize),
        "layer_stride": np.int64(storage.strides[0] // itemsize),
    }

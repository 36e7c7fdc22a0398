"""The arguments of kernels that do the work of two, from the arguments of those two.

Each takes what the one kernel takes, and of the LoRA kernel's arguments those that the first does not have already. It
knows no backend.
"""

from __future__ import annotations

import numpy as np

from slora_ref.ops.launch import Arguments, check_array
from slora_ref.shapes import Array, Float

LORA = ("t", "pages", "page_table", "lora", "width", "targets", "t_columns", "splits", "page_stride")


def rms_norm_shrink(norm: Arguments, shrink: Arguments) -> Arguments:
    """rms_norm_shrink: rms_norm, then mbgmv_shrink of its result."""
    return norm | {name: shrink[name] for name in LORA}


def rms_norm_expand(norm: Arguments, expand: Arguments) -> Arguments:
    """rms_norm_expand: mbgmv_expand into delta, then rms_norm; delta itself is left as it was."""
    return norm | {name: expand[name] for name in LORA}


def rope_store_expand(rope: Arguments, expand: Arguments) -> Arguments:
    """rope_store_expand: mbgmv_expand into qkv, then rope_store; of qkv, only q is written."""
    return rope | {name: expand[name] for name in LORA if name not in ("pages", "page_stride")}


def paged_attention_decode_shrink(
    decode: Arguments, shrink: Arguments, t: Float[Array, "splits rows targets t_columns"]
) -> Arguments:
    """paged_attention_decode_shrink: decode attention, then mbgmv_shrink of its result; one split of t a block.

    Args:
        t: takes the place of the shrink's own, which has one split.
    """
    shape = (None, *shrink["t"].shape[1:])
    more = {"t": check_array("t", t, np.float32, shape)} | {name: shrink[name] for name in ("page_table", "lora")}
    return decode | more | {name: shrink[name] for name in ("width", "t_columns")}

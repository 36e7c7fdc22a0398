"""Products of stacks of matrices in NumPy: what a vendor's batched product does, for the CPU backends."""

from __future__ import annotations

import numpy as np

from slora_ref.shapes import Array, Float


def multiply_stacks(
    y: Float[Array, "batch rows columns"],
    x: Float[Array, "batch rows inner"],
    w: Float[Array, "batch inner columns"],
    scale: float = 1.0,
    add: bool = False,
) -> None:
    """y = scale x w for each of the batch, or y += scale x w; in float32 at least, rounded once."""
    kind = np.promote_types(np.float32, y.dtype) if y.dtype.kind == "f" else np.dtype(np.float32)
    product = scale * (x.astype(kind) @ w.astype(kind))
    y[...] = y.astype(kind) + product if add else product

"""Attention of one sequence in NumPy, over keys and values that have been gathered from their pages."""

from __future__ import annotations

import numpy as np

from slora_ref.shapes import Array, Float


def attend(
    q: Float[Array, "length heads head_dim"],
    keys: Float[Array, "context kv_heads head_dim"],
    values: Float[Array, "context kv_heads head_dim"],
) -> Float[Array, "length q_width"]:
    """Attention of the last `length` tokens of a sequence over all its `context` tokens; heads are a batch axis."""
    length, heads, head_dim = q.shape
    context, kv_heads, _ = keys.shape
    grouped = q.reshape(length, kv_heads, heads // kv_heads, head_dim).transpose(1, 2, 0, 3)
    scores = (grouped * head_dim**-0.5).reshape(kv_heads, -1, head_dim) @ keys.transpose(1, 2, 0)
    scores = scores.reshape(kv_heads, heads // kv_heads, length, context)
    if length > 1:
        future = np.arange(context) > np.arange(context - length, context)[:, None]
        scores[..., future] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)  # every row sees at least itself, so the maximum is finite
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed = scores.reshape(kv_heads, -1, context) @ values.transpose(1, 0, 2)
    by_head = mixed.reshape(heads, length, head_dim)
    return np.ascontiguousarray(by_head.transpose(1, 0, 2)).reshape(length, -1)

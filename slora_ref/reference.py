"""Reference: the textbook forward pass with the adapter merged into dense weights, W + s B A. One request, no pages.

What everything else is checked against. It shares no code with ops, pager or model, so that no fault can hide in both;
it takes only the weights, the adapter and the RoPE table. Slow on purpose: it recomputes the whole text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from slora_ref.adapter import Adapter
from slora_ref.checkpoint import ModelWeights
from slora_ref.config import TARGETS, ModelConfig
from slora_ref.rope import rope_table
from slora_ref.shapes import Array, Float


class Reference:
    """A dense Llama, with one adapter merged or none.

    Args:
        config, weights: the base model; the weights are copied, never changed.
        adapter: merged into the copy; None: the base model.
        dtype: of the computation.
        xp: the array library of the weights: numpy, or cupy for a model on a GPU.
        cast: brings an array of weights to `dtype`, where the library's own conversion cannot.
        keep: keep the merged matrices; False: merge a layer when it is needed, for a model that fits only once.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        adapter: Adapter | None = None,
        dtype: Any = np.float32,
        xp: Any = np,
        cast: Callable[[Any], Any] | None = None,
        keep: bool = True,
    ) -> None:
        self.config, self.weights, self.adapter, self.dtype, self.xp = config, weights, adapter, dtype, xp
        self.cast = cast or (lambda array: array.astype(dtype))
        self._most_kept = config.num_layers if keep else 1
        self._kept: dict[int, dict[str, Any]] = {}

    def _projections(self, layer: int) -> dict[str, Float[Array, "d_out d_in"]]:
        """Each target's matrix in a layer, merged when it is first needed."""
        if layer not in self._kept:
            if len(self._kept) >= self._most_kept:
                self._kept.clear()
            self._kept[layer] = self._merged(layer)
        return self._kept[layer]

    def _merged(self, layer: int) -> dict[str, Float[Array, "d_out d_in"]]:
        """Each target's own dense matrix, W + s B A where the adapter has it."""
        weights, adapter, xp = self.weights.layers[layer], self.adapter, self.xp
        q, kv = self.config.q_width, self.config.kv_width
        parts = {
            "q_proj": weights.qkv[:q],
            "k_proj": weights.qkv[q : q + kv],
            "v_proj": weights.qkv[q + kv :],
            "o_proj": weights.o,
            "gate_proj": weights.gate_up[: self.config.intermediate_size],
            "up_proj": weights.gate_up[self.config.intermediate_size :],
            "down_proj": weights.down,
        }
        merged = {name: self.cast(part) for name, part in parts.items()}
        for index, name in enumerate(TARGETS):
            if adapter is not None and adapter.header.ranks[layer, index]:
                b, a = (xp.asarray(side[layer, index].astype(np.float64)) for side in (adapter.b, adapter.a))
                merged[name] = (merged[name] + float(adapter.header.scales[layer, index]) * (b @ a)).astype(self.dtype)
        return merged

    def logits(self, ids: list[int]) -> Float[Array, "tokens vocab"]:
        """The logits after every token of one text."""
        x = self.cast(self.weights.embed[self.xp.asarray(ids)])
        for layer, weights in enumerate(self.weights.layers):
            x = x + self._attention(self._norm(x, weights.input_norm), layer)
            x = x + self._feed_forward(self._norm(x, weights.post_norm), layer)
        logits: Float[Array, "tokens vocab"] = self._norm(x, self.weights.norm) @ self.cast(self.weights.lm_head).T
        return logits[:, : self.config.vocab_size]

    def greedy(self, prompt_ids: list[int], max_tokens: int, eos: tuple[int, ...] = ()) -> list[int]:
        """Generates by taking the likeliest token, until an end token or max_tokens."""
        ids = list(prompt_ids)
        for _ in range(max_tokens):
            ids.append(int(self.logits(ids)[-1].argmax()))
            if ids[-1] in eos:
                break
        return ids[len(prompt_ids) :]

    def _norm(self, x: Float[Array, "tokens hidden"], weight: Float[Array, " hidden"]) -> Float[Array, "tokens hidden"]:
        size = self.xp.sqrt((x**2).mean(axis=-1, keepdims=True) + self.config.rms_norm_eps)
        normed: Float[Array, "tokens hidden"] = (x / size * self.cast(weight)).astype(self.dtype)
        return normed

    def _project(self, x: Float[Array, "tokens d_in"], layer: int, target: str) -> Float[Array, "tokens d_out"]:
        y: Float[Array, "tokens d_out"] = x @ self._projections(layer)[target].T
        bias = self._bias(layer, target)
        return y if bias is None else y + self.cast(bias)

    def _bias(self, layer: int, target: str) -> Float[Array, " d_out"] | None:
        weights, ffn = self.weights.layers[layer], self.config.intermediate_size
        q, kv = self.config.q_width, self.config.kv_width
        qkv, gate_up = weights.qkv_bias, weights.gate_up_bias
        return {
            "q_proj": None if qkv is None else qkv[:q],
            "k_proj": None if qkv is None else qkv[q : q + kv],
            "v_proj": None if qkv is None else qkv[q + kv :],
            "o_proj": weights.o_bias,
            "gate_proj": None if gate_up is None else gate_up[:ffn],
            "up_proj": None if gate_up is None else gate_up[ffn:],
            "down_proj": weights.down_bias,
        }[target]

    def _attention(self, x: Float[Array, "tokens hidden"], layer: int) -> Float[Array, "tokens hidden"]:
        """Causal attention head by head."""
        config, tokens, xp = self.config, len(x), self.xp
        q = self._rotate(self._project(x, layer, "q_proj").reshape(tokens, config.num_heads, config.head_dim))
        k = self._rotate(self._project(x, layer, "k_proj").reshape(tokens, config.num_kv_heads, config.head_dim))
        v = self._project(x, layer, "v_proj").reshape(tokens, config.num_kv_heads, config.head_dim)
        future = xp.triu(xp.ones((tokens, tokens), np.bool_), 1)
        heads = []
        for head in range(config.num_heads):
            shared = head * config.num_kv_heads // config.num_heads
            scores = q[:, head] @ k[:, shared].T / np.sqrt(self.dtype(config.head_dim))
            scores[future] = -np.inf
            weights = xp.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, shared])
        return self._project(xp.concatenate(heads, axis=1), layer, "o_proj")

    def _rotate(self, x: Float[Array, "tokens _ head_dim"]) -> Float[Array, "tokens _ head_dim"]:
        """RoPE by complex numbers: pair (i, i + head_dim / 2) is one number, turned by its angle."""
        half = self.config.head_dim // 2
        cos, sin = map(self.xp.asarray, rope_table(self.config, len(x)))
        turned = (x[..., :half] + 1j * x[..., half:]) * (cos + 1j * sin)[:, None]
        return self.xp.concatenate([turned.real, turned.imag], axis=-1).astype(self.dtype)

    def _feed_forward(self, x: Float[Array, "tokens hidden"], layer: int) -> Float[Array, "tokens hidden"]:
        gate = self._project(x, layer, "gate_proj")
        with np.errstate(over="ignore"):
            inner = gate / (1 + self.xp.exp(-gate)) * self._project(x, layer, "up_proj")
        return self._project(inner, layer, "down_proj")

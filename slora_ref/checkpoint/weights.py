"""The weights of a Llama model as the forward pass wants them: merged where one product can do the work of several.

q, k and v lie in one matrix, gate and up in another, so that a layer's base products are four, not seven. All matrices
are [d_out, d_in], as checkpoints store them: y = x W.T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slora_ref.checkpoint.tensors import float_dtype
from slora_ref.config import ModelConfig
from slora_ref.shapes import Array, Float

BLOCK = 1 << 20  # random numbers drawn at once


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Rows of `qkv` are q, then k, then v; rows of `gate_up` are gate, then up."""

    input_norm: Float[Array, " hidden"]
    qkv: Float[Array, "qkv_width hidden"]
    qkv_bias: Float[Array, " qkv_width"] | None
    o: Float[Array, "hidden q_width"]
    o_bias: Float[Array, " hidden"] | None
    post_norm: Float[Array, " hidden"]
    gate_up: Float[Array, "two_ffn hidden"]
    gate_up_bias: Float[Array, " two_ffn"] | None
    down: Float[Array, "hidden ffn"]
    down_bias: Float[Array, " hidden"] | None

    def placed(self, place: Callable[[Array], Array]) -> LayerWeights:
        """The same, each array where `place` puts it."""
        arrays: dict[str, Any] = {name: None if array is None else place(array) for name, array in vars(self).items()}
        return replace(self, **arrays)


@dataclass(frozen=True)
class ModelWeights:
    """A whole model. Rows of `embed` and `lm_head` past the vocabulary are padding; tied, the two are one object."""

    embed: Float[Array, "vocab_rows hidden"]
    layers: tuple[LayerWeights, ...]
    norm: Float[Array, " hidden"]
    lm_head: Float[Array, "head_rows hidden"]


Draw = Callable[[tuple[int, ...], float], Array]
"""From a shape and a standard deviation to an array of normal numbers of mean 0."""


def random_weights(config: ModelConfig, seed: int, dtype: npt.DTypeLike = np.float32) -> ModelWeights:
    """Weights from a seed, of a size that keeps every layer's output near 1 and gives logits of 1 to 10."""
    rng, chosen = np.random.default_rng(seed), float_dtype(dtype)
    return drawn_weights(
        config, lambda shape, sd: _normal(rng, shape, sd, chosen), lambda width: _norm(rng, width, chosen)
    )


def drawn_weights(
    config: ModelConfig,
    draw: Draw,
    draw_norm: Callable[[int], Array],
    keep: Callable[[LayerWeights], LayerWeights] = lambda layer: layer,
) -> ModelWeights:
    """Random weights, wherever `draw` and `draw_norm` (from a width) make them; of each layer what `keep` returns."""
    head_size = 2 * config.hidden_size**-0.5
    embed = draw((config.vocab_size, config.hidden_size), head_size)
    layers = tuple(keep(_drawn_layer(config, draw, draw_norm)) for _ in range(config.num_layers))
    head = embed if config.tie_word_embeddings else draw(embed.shape, head_size)
    return ModelWeights(embed, layers, draw_norm(config.hidden_size), head)


def _drawn_layer(config: ModelConfig, draw: Draw, draw_norm: Callable[[int], Array]) -> LayerWeights:
    """One layer: matrices of variance 1 / d_in, biases of size 0.1 where the config has them, norms near 1."""
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv_width = config.q_width + 2 * config.kv_width

    def matrix(d_out: int, d_in: int) -> Array:
        return draw((d_out, d_in), d_in**-0.5)

    def bias(width: int, present: bool) -> Array | None:
        return draw((width,), 0.1) if present else None

    return LayerWeights(
        input_norm=draw_norm(hidden),
        qkv=matrix(qkv_width, hidden),
        qkv_bias=bias(qkv_width, config.attention_bias),
        o=matrix(hidden, config.q_width),
        o_bias=bias(hidden, config.attention_bias),
        post_norm=draw_norm(hidden),
        gate_up=matrix(2 * inner, hidden),
        gate_up_bias=bias(2 * inner, config.mlp_bias),
        down=matrix(hidden, inner),
        down_bias=bias(hidden, config.mlp_bias),
    )


def _norm(rng: np.random.Generator, width: int, dtype: np.dtype[np.generic]) -> Array:
    """A norm's weight: 1 and a little noise."""
    return (1 + 0.1 * rng.standard_normal(width)).astype(dtype)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], sd: float, dtype: np.dtype[np.generic]) -> Array:
    """Normal numbers of standard deviation `sd`, drawn in blocks, so that a large matrix needs no second one."""
    out = np.empty(shape, dtype)
    flat = out.reshape(-1)
    for start in range(0, flat.size, BLOCK):
        part = flat[start : start + BLOCK]
        part[...] = rng.standard_normal(part.size, dtype=np.float32) * np.float32(sd)
    return out

"""Rotary position embedding (RoPE): the table of cosines and sines that turns position into rotation.

Half-split ("NeoX") convention, as in Hugging Face's Llama: dimension i of a head is paired with i + head_dim/2, and the
pair is turned by position * inv_freq[i]. The four kinds differ in inv_freq alone (and yarn in a factor on cos and sin),
so keys in the cache never change: a key's rotation is a function of its own position.

Formulas: linear (kaiokendev), yarn (Peng et al., arXiv 2309.00071, section 3), llama3 (Llama 3.1's release). It knows
neither batches nor caches. Rounding is transformers' own, to float32 at every stage: at position 5,000 the last bit of
inv_freq moves a logit by 2e-4 of the largest one.
"""

from __future__ import annotations

import math

import numpy as np

from slora_ref.config import ModelConfig, RopeConfig
from slora_ref.shapes import Array, Float32


def inverse_frequencies(config: ModelConfig) -> tuple[Float32[Array, " half"], float]:
    """inv_freq `[head_dim/2]` in radians a position, and the factor on cos and sin (1 except for yarn)."""
    rope = config.rope
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    waves = (np.float64(np.float32(rope.theta)) ** exponents).astype(np.float32)  # NumPy's own float32 power is coarser
    plain = np.float32(1) / waves
    if rope.kind == "linear":
        return plain / np.float32(rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(waves, rope, config.head_dim), _yarn_attention_scale(rope)
    return plain, 1.0


def rope_table(
    config: ModelConfig, positions: int
) -> tuple[Float32[Array, "positions half"], Float32[Array, "positions half"]]:
    """cos and sin, each float32 `[positions, head_dim/2]`, already times the attention scale.

    The angle is rounded to float32 as it is in transformers.
    """
    frequencies, scale = inverse_frequencies(config)
    angles = (np.arange(positions, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)


def _llama3(plain: Float32[Array, " half"], rope: RopeConfig) -> Float32[Array, " half"]:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated by their rotations."""
    rotations = rope.original_positions / (2 * math.pi / plain)  # over the original context
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(waves: Float32[Array, " half"], rope: RopeConfig, head_dim: int) -> Float32[Array, " half"]:
    """Dimensions below `low` keep their frequency, above `high` are divided by `factor`, a linear ramp between."""
    low = _yarn_dimension(rope.beta_fast, rope, head_dim)
    high = _yarn_dimension(rope.beta_slow, rope, head_dim)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    width = high - low if high != low else 0.001
    kept = 1 - np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / width, 0.0, 1.0)
    return np.asarray(1 / (rope.factor * waves) * (1 - kept) + 1 / waves * kept)


def _yarn_dimension(rotations: float, rope: RopeConfig, head_dim: int) -> float:
    """The (fractional) dimension whose wave turns `rotations` times within the original context."""
    return head_dim * math.log(rope.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_scale(rope: RopeConfig) -> float:
    """The factor on cos and sin: given, or 0.1 ln(factor) + 1, or a ratio of two such (DeepSeek's mscales)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    """YaRN's temperature for one weight; 1 when the context was not stretched."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

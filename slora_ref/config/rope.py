"""RopeConfig: which rotary embedding a model was trained with, from every spelling that transformers has used.

Three generations of config.json say the same thing: `rope_theta` beside `rope_scaling: {"type": ...}`, the same with
`rope_type`, and transformers 5's `rope_parameters` that holds all of it. The formulas are in slora_ref/rope.py.

Kinds whose frequencies change with the length of the sequence (`dynamic`, `longrope`) are refused: keys that lie in the
pool were rotated with the frequencies of an earlier length, so an answer would depend on when it was cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slora_ref.config.fields import Fields, show
from slora_ref.errors import UnsupportedModel

KINDS = ("default", "linear", "yarn", "llama3")
REASONS = {
    "dynamic": "its frequencies change with the length, so keys already in the cache would be wrong",
    "longrope": "its frequencies change at the original length, so keys already in the cache would be wrong",
    "su": "it is longrope: its frequencies change at the original length",
}
KNOWN_KEYS = {
    "type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "partial_rotary_factor", "finetuned",
}  # fmt: skip
LARGEST = 1e12


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding; a field that its kind does not use keeps its default.

    `theta` is the base; `factor` how far the context was stretched; `original_positions` the length before that.
    llama3: wavelengths above original/low_freq_factor are stretched, below original/high_freq_factor kept.
    yarn: `beta_fast` and `beta_slow` are the rotations over the original length that bound the ramp; `attention_factor`
    multiplies cos and sin (None: derived from factor and the two mscales).
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_positions: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


def parse_rope(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """The rope of a config.json. Raises UnsupportedModel with the name of a kind or key that is not implemented."""
    block = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(block, Mapping):
        raise UnsupportedModel(f"config.json: the rope block is {show(block)}; an object or null is needed")
    fields = Fields(block, "config.json: rope", UnsupportedModel)
    kind = _kind(fields)
    _check_keys(fields, config)
    theta = fields.number("rope_theta", 1.0001, LARGEST, _top_theta(config))
    if kind == "default":
        return RopeConfig("default", theta)
    if kind == "linear":
        return RopeConfig("linear", theta, fields.number("factor", 1e-3, LARGEST))
    original = _original_positions(fields, config, max_positions)
    return (_llama3 if kind == "llama3" else _yarn)(fields, theta, original, max_positions)


def _top_theta(config: Mapping[str, Any]) -> float:
    """`rope_theta` beside the block, where transformers 4 wrote it; 10000 when absent."""
    return Fields(config, "config.json", UnsupportedModel).number("rope_theta", 1.0001, LARGEST, 10000.0)


def _kind(fields: Fields) -> str:
    """The kind under either of its two names. Raises when they contradict, or when it is not implemented."""
    names = [fields.values[key] for key in ("rope_type", "type") if key in fields.values] or ["default"]
    if any(name != names[0] for name in names):
        raise fields.refuse("rope_type", f"but type is {show(fields.values['type'])}; remove one of them")
    kind = names[0]
    if not isinstance(kind, str) or kind not in KINDS:
        reason = REASONS.get(kind, "unknown kind") if isinstance(kind, str) else "unknown kind"
        raise UnsupportedModel(f"RoPE of kind {show(kind)} is not supported: {reason}; supported: {', '.join(KINDS)}")
    return kind


def _check_keys(fields: Fields, config: Mapping[str, Any]) -> None:
    """Refuse keys that nobody here knows, and rotating only a part of each head."""
    unknown = [key for key, value in fields.values.items() if key not in KNOWN_KEYS and value]
    if unknown:
        raise UnsupportedModel(f"config.json: rope option {show(unknown[0])} is not supported; remove it if it is idle")
    for values in (fields.values, config):
        if values.get("partial_rotary_factor") not in (None, 1):
            raise UnsupportedModel("config.json: partial_rotary_factor is not 1; only whole heads are rotated here")


def _original_positions(fields: Fields, config: Mapping[str, Any], max_positions: int) -> int:
    """The trained length: beside the block, in it, or max_position_embeddings, in transformers' order."""
    name = "original_max_position_embeddings"
    inside = fields.integer(name, 1, 1 << 31, max_positions)
    return Fields(config, "config.json", UnsupportedModel).integer(name, 1, 1 << 31, inside)


def _llama3(fields: Fields, theta: float, original: int, max_positions: int) -> RopeConfig:
    """Llama 3.1's rope; all three factors must be there."""
    low = fields.number("low_freq_factor", 1e-3, LARGEST)
    high = fields.number("high_freq_factor", 1e-3, LARGEST)
    if high <= low:
        raise fields.refuse("high_freq_factor", f"more than low_freq_factor ({low:g}) is needed")
    factor = fields.number("factor", 1e-3, LARGEST)
    return RopeConfig("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)


def _yarn(fields: Fields, theta: float, original: int, max_positions: int) -> RopeConfig:
    """YaRN; a factor of null means max_position_embeddings / original, an absent one is refused, as in transformers."""
    stretched = max_positions / original if "factor" in fields.values else None
    attention = fields.values.get("attention_factor")
    return RopeConfig(
        "yarn",
        theta,
        fields.number("factor", 1e-3, LARGEST, stretched),
        original,
        beta_fast=fields.number("beta_fast", 0.0, LARGEST, 32.0) or 32.0,
        beta_slow=fields.number("beta_slow", 0.0, LARGEST, 1.0) or 1.0,
        attention_factor=None if attention is None else fields.number("attention_factor", 0.0, LARGEST),
        mscale=fields.number("mscale", 0.0, LARGEST, 0.0),
        mscale_all_dim=fields.number("mscale_all_dim", 0.0, LARGEST, 0.0),
        truncate=fields.flag("truncate", "truncate" not in fields.values),  # a null is false here, as in transformers
    )

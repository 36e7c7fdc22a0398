"""Shapes of known models by name, for runs with random weights: what they say does not change what they cost."""

from __future__ import annotations

from slora_ref.config.model import ModelConfig
from slora_ref.errors import ConfigError


def llama_shape(hidden: int, inner: int, layers: int, heads: int, positions: int) -> ModelConfig:
    """A Llama without grouped queries, in float16: widths of a row and of a feed-forward layer, longest sequence."""
    return ModelConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=positions,
        dtype="float16",
    )


PRESETS = {
    "llama-7b": llama_shape(4096, 11008, 32, 32, 4096),
    "llama-13b": llama_shape(5120, 13824, 40, 40, 4096),
    "llama-30b": llama_shape(6656, 17920, 60, 52, 4096),
}


def preset(name: str) -> ModelConfig:
    """The shape of this name.

    Raises:
        ConfigError: there is none; says which there are.
    """
    if name not in PRESETS:
        raise ConfigError(f"no model shape is called {name[:60]!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def parameters(config: ModelConfig) -> int:
    """Weights of the model, norms and biases left out: they are a thousandth."""
    hidden, layer = config.hidden_size, config.q_width + 2 * config.kv_width
    per_layer = hidden * (layer + config.q_width + 3 * config.intermediate_size)
    heads = 1 if config.tie_word_embeddings else 2
    return config.num_layers * per_layer + heads * config.vocab_size * hidden

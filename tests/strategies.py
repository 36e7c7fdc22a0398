"""What Hypothesis draws for the tests of every module: models, adapter shapes, requests.

Sizes are small, so that a counterexample can be read, and awkward, so that nothing divides by accident.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from tiny import tiny_config

from slora_ref.config import TARGETS, ModelConfig
from slora_ref.pager import AdapterShape


@st.composite
def model_configs(draw: st.DrawFn, layers: int | None = None) -> ModelConfig:
    """A shape of model: one KV head or several, widths that divide into pages or do not."""
    kv_heads = draw(st.integers(1, 3))
    return tiny_config(
        num_layers=layers or draw(st.integers(1, 3)),
        hidden_size=draw(st.integers(1, 40)),
        intermediate_size=draw(st.integers(1, 60)),
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 3)),
        head_dim=2 * draw(st.integers(1, 5)),
    )


@st.composite
def adapter_shapes(draw: st.DrawFn, layers: int, max_rank: int = 4) -> AdapterShape:
    """Ranks by layer and target, many of them 0 but never all; scales that are 0 exactly where the rank is."""
    drawn = st.lists(st.one_of(st.just(0), st.integers(1, max_rank)), min_size=layers * 7, max_size=layers * 7)
    ranks = np.array(draw(drawn.filter(any)), np.int32).reshape(layers, len(TARGETS))
    scale = draw(st.sampled_from([0.5, 1.0, 4.0]))
    return AdapterShape(ranks, np.where(ranks, np.float32(scale), np.float32(0)))


@dataclass(frozen=True)
class Ask:
    """A request to come.

    Args:
        adapter: index of the adapter in the test's list; None: the base model.
        prompt: tokens of the prompt.
        max_tokens: most tokens to generate.
        stops_after: generated tokens after which it stops by itself; at max_tokens it ends by its length.
    """

    adapter: int | None
    prompt: int
    max_tokens: int
    stops_after: int


@st.composite
def asks(draw: st.DrawFn, adapters: int, longest: int = 12) -> Ask:
    """A request for one of `adapters` adapters or the base model, of at most `longest` tokens each way."""
    adapter = draw(st.one_of(st.none(), st.integers(0, adapters - 1))) if adapters else None
    max_tokens = draw(st.integers(1, longest))
    stops_after = draw(st.one_of(st.just(max_tokens), st.integers(1, max_tokens)))
    return Ask(adapter, draw(st.integers(1, longest)), max_tokens, stops_after)

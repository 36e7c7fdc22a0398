"""The weights that one shard of a model holds (paper section 6): what tp/split.py says, applied to whole matrices.

Peak memory while a checkpoint is read is the shard's weights and one whole layer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slora_ref.checkpoint.weights import LayerWeights, ModelWeights
from slora_ref.config import TARGETS, ModelConfig
from slora_ref.shapes import Array, Float
from slora_ref.tp import Shard
from slora_ref.tp.split import output_slice, vocab_rows


def cut_weights(weights: ModelWeights, config: ModelConfig, shard: Shard) -> ModelWeights:
    """A whole model's weights -> those of one shard, in memory of their own, on the same device."""
    layers = (cut_layer(layer, config, shard) for layer in weights.layers)
    return replace(cut_vocabularies(weights, config, shard), layers=tuple(layers))


def cut_vocabularies(weights: ModelWeights, config: ModelConfig, shard: Shard) -> ModelWeights:
    """Cuts embedding and head alone; where they are one, they stay so."""
    embed, tied = cut_vocabulary(weights.embed, config, shard), weights.lm_head is weights.embed
    head = tied_head(embed, shard) if tied else cut_head(weights.lm_head, config, shard)
    return replace(weights, embed=embed, lm_head=head)


def cut_layer(weights: LayerWeights, config: ModelConfig, shard: Shard) -> LayerWeights:
    """q, k, v, gate, up: this shard's rows as stored; o, down: its columns. A bias of o or down is shard 0's alone."""
    if shard.count == 1:
        return weights
    first = shard.index == 0
    return LayerWeights(
        input_norm=weights.input_norm,
        qkv=_cut_outputs(weights.qkv, TARGETS[:3], config, shard),
        qkv_bias=None if weights.qkv_bias is None else _cut_outputs(weights.qkv_bias, TARGETS[:3], config, shard),
        o=_cut_inputs(weights.o, shard),
        o_bias=weights.o_bias if first else None,
        post_norm=weights.post_norm,
        gate_up=_cut_outputs(weights.gate_up, TARGETS[4:6], config, shard),
        gate_up_bias=(
            None if weights.gate_up_bias is None else _cut_outputs(weights.gate_up_bias, TARGETS[4:6], config, shard)
        ),
        down=_cut_inputs(weights.down, shard),
        down_bias=weights.down_bias if first else None,
    )


def cut_vocabulary(
    matrix: Float[Array, "vocab_rows hidden"], config: ModelConfig, shard: Shard
) -> Float[Array, "part_and_one hidden"]:
    """This shard's rows of the embedding, zeros past the vocabulary, and one more row of zeros.

    That one is what the tokens of other shards look up, so that the sum over shards is each token's own row.
    """
    if shard.count == 1:
        return matrix
    rows = vocab_rows(config.vocab_size, shard)
    own = matrix[rows.start : min(rows.stop, config.vocab_size)]
    part = np.zeros_like(matrix, shape=(rows.stop - rows.start + 1, matrix.shape[1]))
    part[: len(own)] = own
    return part


def cut_head(
    matrix: Float[Array, "head_rows hidden"], config: ModelConfig, shard: Shard
) -> Float[Array, "part hidden"]:
    """This shard's rows of the head, zeros past the vocabulary."""
    return tied_head(cut_vocabulary(matrix, config, shard), shard)


def tied_head(embed: Float[Array, "rows hidden"], shard: Shard) -> Float[Array, "part hidden"]:
    """The head in the memory of a shard's embedding."""
    return embed if shard.count == 1 else embed[:-1]


def _cut_outputs(
    merged: Float[Array, "d_outs ..."], targets: tuple[str, ...], config: ModelConfig, shard: Shard
) -> Float[Array, "part ..."]:
    """The shard's outputs of projections that lie below each other, in the same order."""
    parts, start = [], 0
    for target in targets:
        width = config.target_shape(target)[1]
        parts.append(merged[start : start + width][output_slice(config, TARGETS.index(target), shard)])
        start += width
    return np.concatenate(parts)


def _cut_inputs(weight: Float[Array, "hidden d_in"], shard: Shard) -> Float[Array, "hidden part"]:
    return weight[:, shard.part(weight.shape[1])].copy()

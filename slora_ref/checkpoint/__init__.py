"""Checkpoints: a folder of safetensors -> weights in memory."""

from __future__ import annotations

from slora_ref.checkpoint.load import check_checkpoint, load_checkpoint
from slora_ref.checkpoint.shard import cut_weights
from slora_ref.checkpoint.tensors import float_dtype
from slora_ref.checkpoint.weights import LayerWeights, ModelWeights, drawn_weights, random_weights

__all__ = [
    "LayerWeights",
    "ModelWeights",
    "check_checkpoint",
    "cut_weights",
    "drawn_weights",
    "float_dtype",
    "load_checkpoint",
    "random_weights",
]

"""Checkpoints: a folder of safetensors -> weights in memory."""

from __future__ import annotations

from slora_ref.checkpoint.load import load_checkpoint
from slora_ref.checkpoint.weights import LayerWeights, ModelWeights, random_weights

__all__ = ["LayerWeights", "ModelWeights", "load_checkpoint", "random_weights"]

"""Checkpoints: a folder of safetensors -> weights in memory."""

from __future__ import annotations

from slora_ref.checkpoint.load import check_checkpoint, load_checkpoint
from slora_ref.checkpoint.weights import LayerWeights, ModelWeights, random_weights

__all__ = ["LayerWeights", "ModelWeights", "check_checkpoint", "load_checkpoint", "random_weights"]

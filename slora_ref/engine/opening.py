"""What every shard does first: get its part of the weights, from a checkpoint folder or from a seed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from slora_ref.checkpoint import ModelWeights, load_checkpoint
from slora_ref.config import EngineConfig, ModelConfig, RopeConfig
from slora_ref.engine.devices import Device
from slora_ref.engine.orders import Order
from slora_ref.tp import Shard


def folder_order(folder: Path, config: EngineConfig) -> Order:
    """The order to read a shard's part of a checkpoint."""
    return Order("open", {"folder": str(folder.resolve()), "config": asdict(config)})


def random_order(model: ModelConfig, seed: int, config: EngineConfig) -> Order:
    """The order to draw a shard's part of random weights: of the same as on every other shard, and without shards."""
    return Order("open", {"model": asdict(model), "seed": seed, "config": asdict(config)})


def open_model(order: Order, device: Device, shard: Shard) -> tuple[ModelConfig, ModelWeights]:
    """The whole model's config, and this shard's weights on the device.

    Raises:
        CheckpointError, UnsupportedModel: see load_checkpoint.
    """
    values = order.values
    if "folder" in values:
        model = ModelConfig.from_folder(Path(values["folder"]))
        dtype = values["config"]["dtype"]
        return model, load_checkpoint(Path(values["folder"]), model, dtype, device.place, shard)
    model = _model_config(values["model"])
    return model, device.random_weights(model, values["seed"], shard)


def _model_config(values: dict[str, Any]) -> ModelConfig:
    """What asdict and JSON have made of it, turned back."""
    tokens = tuple(values["eos_token_ids"])
    return ModelConfig(**values | {"rope": RopeConfig(**values["rope"]), "eos_token_ids": tokens})

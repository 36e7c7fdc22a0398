"""Base: a base model whose weights are loaded once, and engines on it, whole or with one part swapped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slora_ref.checkpoint import ModelWeights, load_checkpoint
from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.engine import Engine
from slora_ref.engine.build import MakePool, Parts, assemble
from slora_ref.engine.devices import Device, open_device
from slora_ref.errors import ConfigError
from slora_ref.ops import Ops
from slora_ref.pager import PagePool
from slora_ref.policy import Policy
from slora_ref.tokenizer import Tokenizer
from slora_ref.tp import WHOLE


@dataclass(frozen=True)
class Base:
    """Weights on a device.

    Args:
        tokenizer: for texts; None: token ids only.
    """

    model: ModelConfig
    weights: ModelWeights
    device: Device
    tokenizer: Tokenizer | None = None

    @classmethod
    def load(cls, folder: Path, config: EngineConfig) -> Base:
        """A checkpoint folder on the device that the options name.

        Raises:
            CheckpointError, UnsupportedModel, TokenizerError, ConfigError: see Engine.from_pretrained.
        """
        model, device = ModelConfig.from_folder(folder), _open(config)
        tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None
        return cls(model, load_checkpoint(folder, model, config.dtype, device.place), device, tokenizer)

    @classmethod
    def random(cls, model: ModelConfig, config: EngineConfig, seed: int = 0) -> Base:
        """Random weights, made on the device."""
        device = _open(config)
        return cls(model, device.random_weights(model, seed, WHOLE), device)

    def engine(self, config: EngineConfig, policy: Policy | None = None) -> Engine:
        """The usual engine."""
        return Engine(*self.parts(config, policy))

    def parts(
        self,
        config: EngineConfig,
        policy: Policy | None = None,
        ops: Ops | None = None,
        make_pool: MakePool = PagePool,
    ) -> Parts:
        """What Engine takes, in its order; with other operations or another pool than the usual ones."""
        device = self.device if ops is None else self.device.with_ops(ops)
        return assemble(self.model, self.weights, self.tokenizer, device, config, policy, make_pool=make_pool)


def _open(config: EngineConfig) -> Device:
    if config.shards > 1:
        raise ConfigError(f"the baselines run on one device; shards is {config.shards}")
    return open_device(config)

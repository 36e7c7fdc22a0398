"""Configuration: what the model is (from config.json) and how the engine runs it."""

from __future__ import annotations

from slora_ref.config.engine import EngineConfig
from slora_ref.config.model import TARGETS, ModelConfig
from slora_ref.config.rope import RopeConfig

__all__ = ["TARGETS", "EngineConfig", "ModelConfig", "RopeConfig"]

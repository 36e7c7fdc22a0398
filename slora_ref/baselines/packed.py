"""Packed: a merged model for each adapter, side by side in one memory (the paper's vLLM-packed)."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

from slora_ref.adapter import load_adapter, read_header
from slora_ref.baselines.base import Base
from slora_ref.baselines.merge import merged_weights
from slora_ref.checkpoint import ModelWeights, load_checkpoint
from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.engine import Completion, Engine
from slora_ref.engine.devices import open_device
from slora_ref.engine.inputs import Prompt
from slora_ref.errors import ConfigError
from slora_ref.request import SamplingParams
from slora_ref.shapes import Array
from slora_ref.tokenizer import Tokenizer


class Packed:
    """n engines, one for each adapter, each with an n-th of the pool.

    Args:
        folder: the base model's.
        adapters: folders by name.
        config: `pool_pages` are those of all engines together.

    Raises:
        ConfigError: the parts of the pool are too small, or its size is not given in pages.
    """

    def __init__(self, folder: Path, adapters: dict[str, Path], config: EngineConfig) -> None:
        if config.pool_pages is None:
            raise ConfigError("packed engines divide pool_pages; give it")
        model, device = ModelConfig.from_folder(folder), open_device(config)
        weights = load_checkpoint(folder, model, config.dtype)
        own = replace(config, pool_pages=config.pool_pages // len(adapters))
        tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").exists() else None
        self.engines: dict[str, Engine] = {}
        for name, path in adapters.items():
            adapter = load_adapter(read_header(path, model), model, weights.embed.dtype)
            merged = _placed(merged_weights(model, weights, adapter), device.place)
            self.engines[name] = Base(model, merged, device, tokenizer).engine(own)

    def generate(self, prompts: Seq[Prompt], params: SamplingParams, adapters: Seq[str]) -> list[Completion]:
        """Serves all prompts, the engines taking turns; completions in the order of the prompts."""
        places: dict[tuple[str, int], int] = {}
        for place, (prompt, name) in enumerate(zip(prompts, adapters, strict=True)):
            places[name, self.engines[name].add_request(prompt, params)] = place
        done: dict[int, Completion] = {}
        while len(done) < len(places):
            for name, engine in self.engines.items():
                for news in engine.step() if engine.has_work else ():
                    if news.completion is not None:
                        done[places[name, news.request_id]] = news.completion
        return [done[place] for place in range(len(places))]


def _placed(weights: ModelWeights, place: Callable[[Array], Array]) -> ModelWeights:
    """Weights on the device."""
    layers = tuple(layer.placed(place) for layer in weights.layers)
    return ModelWeights(place(weights.embed), layers, place(weights.norm), place(weights.lm_head))

"""ScaleOptions: what the demo at scale can be told, and what does not fit, said before anything is made."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.config.engine import DTYPES
from slora_ref.config.presets import PRESETS, parameters
from slora_ref.errors import ConfigError
from slora_ref.options import check_whole
from slora_ref.synthetic import AdapterKind
from slora_ref.workload import Arrival, SyntheticTrace, original_trace

POPULARITY = 0.3  # alpha of the power law over the names
LENGTHS = (8, 512)  # [low, high) of prompts, and of answers, in tokens: the paper's
SLO_SECONDS = 6.0  # the paper's: the first token within it
MOST = 100_000
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """What can be told.

    Args:
        model: name of a shape, for random weights, or a checkpoint folder.
        adapters: names to register.
        distinct: sets of weights that the names share; each name has pages of its own.
        kind: of the adapters.
        requests: how many are sent.
        rate: requests a second; None: all at once.
        seed: of lengths, prompts, popularity, arrivals and weights.
        dtype: of weights, activations and pool.
        pool_pages: pages of the pool; None: all memory that is left.
        memory_fraction: of the GPU's memory, see EngineConfig.
        checked: answers that are checked against dense merged weights, all where there are fewer.
        lengths: [low, high) of prompts, and of answers, in tokens; less where the model has not twice as many.
        device: where the model runs: a shape needs a GPU, a folder that is small runs on the CPU, too.
        shards, communicator: see EngineConfig.
    """

    model: str = "llama-7b"
    adapters: int = 2000
    distinct: int = 64
    kind: AdapterKind = field(default_factory=AdapterKind)
    requests: int = 1000
    rate: float | None = None
    seed: int = 0
    dtype: str = "float16"
    pool_pages: int | None = None
    memory_fraction: float = 0.9
    checked: int = 8
    lengths: tuple[int, int] = LENGTHS
    device: Literal["cpu", "cuda"] = "cuda"
    shards: int = 1
    communicator: Literal["auto", "threads", "mpi", "nccl"] = "auto"

    def __post_init__(self) -> None:
        """Raises ConfigError with the value and the limits."""
        for name in ("adapters", "distinct", "requests"):
            check_whole(ConfigError, name, getattr(self, name), 1, MOST)
        check_whole(ConfigError, "checked", self.checked, 0, MOST)
        check_whole(ConfigError, "seed", self.seed, 0, (1 << 32) - 1)
        if self.model not in PRESETS and not Path(self.model).is_dir():
            names = ", ".join(PRESETS)
            raise ConfigError(f"--model {self.model!r:.80} is no folder; shapes: {names}; without --model: the toy")
        if self.is_shape and self.device != "cuda":
            raise ConfigError(f"--model {self.model} needs a GPU: add --device cuda")
        if self.dtype not in DTYPES[self.device]:
            raise ConfigError(f"dtype is {self.dtype!r}; on {self.device} it can be {' or '.join(DTYPES[self.device])}")

    @property
    def is_shape(self) -> bool:
        """Whether the model is a shape, its weights random."""
        return self.model in PRESETS

    def config(self) -> ModelConfig:
        """The model's shape."""
        return PRESETS[self.model] if self.is_shape else ModelConfig.from_folder(self.model)

    @property
    def sets(self) -> int:
        """Sets of weights that there are."""
        return min(self.distinct, self.adapters)

    @property
    def bounds(self) -> tuple[int, int]:
        """`lengths`, within the model's positions."""
        low, high = self.lengths
        return low, min(high, self.config().max_position_embeddings // 2)

    def engine_config(self) -> EngineConfig:
        """Large steps, and host memory for all sets."""
        host = self.kind.folder_bytes(self.config(), self.sets) * ITEM_BYTES[self.dtype] // 2
        return EngineConfig(
            device=self.device,
            dtype=self.dtype,
            shards=self.shards,
            communicator=self.communicator,
            pool_pages=self.pool_pages,
            memory_fraction=self.memory_fraction,
            max_running=256,
            max_batched_tokens=2048,
            max_length=2 * self.bounds[1],
            max_adapters=1024,
            host_bytes=host + host // 8 + (1 << 20),
            seed=self.seed,
        )

    def trace(self) -> list[Arrival]:
        """The paper's synthetic workload: Power(alpha) over the names, uniform lengths, a Poisson process."""
        rate = self.rate or 1.0
        drawn = SyntheticTrace(
            adapters=self.adapters,
            rate=rate,
            alpha=POPULARITY,
            duration=(self.requests + 0.5) / rate,
            prompt=self.bounds,
            output=self.bounds,
            seed=self.seed,
        )
        return original_trace(drawn)[: self.requests]

    def check_host(self) -> None:
        """Raises ConfigError when the adapters' host memory is more than the machine has."""
        needed, memory = self.engine_config().host_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > memory:
            raise ConfigError(
                f"{self.sets} sets of adapter weights take {needed / 1e9:,.1f} GB of host memory; this machine has "
                f"{memory / 1e9:,.1f} GB: lower --distinct or --ranks"
            )

    def check_device(self, total: int, used: int) -> None:
        """Raises ConfigError when weights and the largest request do not fit into the GPU's memory."""
        item, config = ITEM_BYTES[self.dtype] / self.shards, self.config()  # of a shard
        weights = parameters(config) * item
        adapter = max(self.kind.numbers(config, rank) for rank in self.kind.ranks) * item
        tokens = 4 * self.bounds[1] * config.num_layers * config.kv_width * item
        room = int(self.memory_fraction * total) - used
        if weights + adapter + tokens > room:
            raise ConfigError(
                f"the weights take {weights / 1e9:,.1f} GB, the largest adapter {adapter / 1e9:,.2f} GB, the longest "
                f"request {tokens / 1e9:,.2f} GB; of the GPU's {total / 1e9:,.1f} GB, {used / 1e9:,.1f} GB are in use "
                f"and a fraction of {self.memory_fraction} leaves {max(0, room) / 1e9:,.1f} GB: take a smaller --model"
            )

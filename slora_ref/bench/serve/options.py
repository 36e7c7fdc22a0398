"""ServeOptions: what `bench serve` and `bench load` can be told, and what they refuse before anything is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slora_ref.bench.peft_baseline.process import check_peft
from slora_ref.checkpoint import float_dtype
from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.config.presets import preset
from slora_ref.errors import ConfigError
from slora_ref.options import check_choice, check_real, check_whole, is_finite
from slora_ref.prefetch import EVICTIONS, Eviction
from slora_ref.synthetic import AdapterKind
from slora_ref.toy import MODEL_FOLDER

Popularity = Literal["uniform", "zipf"]
TOY_LENGTHS, PAPER_LENGTHS = (8, 64), (8, 512)
TOY_POOL_PAGES, TOY_RESIDENT = 16_000, 128  # a few times as many adapters as can run, as on a large GPU


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """One row for each number of registered adapters.

    Args:
        model: "toy", or a shape of config.presets with random weights.
        device, dtype: where and in what it runs.
        registered: adapters, by name; 0: the base model alone.
        requests: in each run; the same lengths in all of them.
        rate: requests a second (a Poisson process); None: all at once.
        popularity: "uniform" is the paper's alpha = 1; "zipf" gives adapter i a share in proportion to 1 / i.
        kind: of the adapters, which have random weights.
        distinct: folders on disk, shared by the names in turn; pages are never shared.
        own_copies: each name has its own entry in host memory, as if its folder were its own.
        host_gb: size of the host memory.
        lengths: [low, high) of prompts and of answers, in tokens; None: the paper's 8 to 512, shorter for the toy.
        eviction: policies; `bench_serve` takes the first.
        prefetch: see EngineConfig.
        max_running, max_batched_tokens: see EngineConfig; None: 128 and 2048, for the toy 16 and 256.
        join_every: see EngineConfig; beside decoding requests, prefill is the cheaper the more of it comes at once.
        shards: tensor-parallel workers.
        peft: seconds for which transformers and PEFT serve the traffic of each run; None: they do not.
        seed: of lengths, popularity, arrivals and weights.
    """

    model: str = "toy"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "auto"
    registered: tuple[int, ...] = (5, 100, 2000, 10000)
    requests: int = 300
    rate: float | None = None
    popularity: Popularity = "uniform"
    kind: AdapterKind = AdapterKind()
    distinct: int = 100
    own_copies: bool = False
    host_gb: float = 1.0
    lengths: tuple[int, int] | None = None
    eviction: tuple[Eviction, ...] = EVICTIONS
    prefetch: int = 16
    max_running: int | None = None
    max_batched_tokens: int | None = None
    join_every: int = 1
    shards: int = 1
    peft: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for what cannot be measured."""
        if not self.is_toy:
            preset(self.model)
            if self.device == "cpu":
                raise ConfigError(f"model is {self.model}; it needs a GPU: add --device cuda, or measure the toy")
        if not self.registered or not self.eviction:
            raise ConfigError("registered and eviction are lists; give at least one of each")
        for count in self.registered:
            check_whole(ConfigError, "registered", count, 0, 100_000)
        check_whole(ConfigError, "requests", self.requests, 1, 1_000_000)
        check_whole(ConfigError, "distinct", self.distinct, 1, 100_000)
        check_whole(ConfigError, "join_every", self.join_every, 1, 1_000_000)
        for name in ("max_running", "max_batched_tokens"):
            if getattr(self, name) is not None:
                check_whole(ConfigError, name, getattr(self, name), 1, 1_000_000)
        if self.rate is not None:
            bounds = is_finite(self.rate) and 0.001 <= self.rate <= 1e6
            check_real(ConfigError, "rate", self.rate, bounds, "from 0.001 to 1,000,000 requests a second")
        if self.peft is not None:
            check_real(ConfigError, "peft", self.peft, is_finite(self.peft) and self.peft > 0, "above 0, in seconds")
            if 0 in self.registered:
                raise ConfigError("registered is 0; PEFT is measured with adapters only: measure the base model apart")
            check_peft(self.shards)
        check_real(ConfigError, "host_gb", self.host_gb, is_finite(self.host_gb) and self.host_gb > 0, "above 0")
        check_choice(ConfigError, "popularity", self.popularity, ("uniform", "zipf"))
        for policy in self.eviction:
            check_choice(ConfigError, "eviction", policy, EVICTIONS)
        if len(self.bounds) != 2:
            raise ConfigError(f"lengths are {', '.join(map(str, self.bounds))}; give two numbers, LOW,HIGH")
        low, high = self.bounds
        if not 1 <= low < high:
            raise ConfigError(f"lengths are {low} to {high}; the first must be at least 1 and below the second")
        self.engine_config()  # it refuses what an engine would, before anything is made

    @property
    def is_toy(self) -> bool:
        """Whether the model is the one that comes with the package."""
        return self.model == "toy"

    @property
    def bounds(self) -> tuple[int, int]:
        """[low, high) of the lengths."""
        return self.lengths or (TOY_LENGTHS if self.is_toy else PAPER_LENGTHS)

    def model_config(self) -> ModelConfig:
        """The model's shape."""
        return ModelConfig.from_folder(MODEL_FOLDER) if self.is_toy else preset(self.model)

    def engine_config(self) -> EngineConfig:
        """The engine's options."""
        return EngineConfig(
            device=self.device,
            dtype=self.dtype,
            pool_pages=TOY_POOL_PAGES if self.is_toy else None,
            max_adapters=TOY_RESIDENT if self.is_toy else 1024,
            max_running=self.max_running or (16 if self.is_toy else 128),
            max_batched_tokens=self.max_batched_tokens or (256 if self.is_toy else 2048),
            max_length=2 * self.bounds[1],
            host_bytes=int(self.host_gb * 1e9),
            share_host_copies=not self.own_copies,
            prefetch=self.prefetch,
            join_every=self.join_every,
            shards=self.shards,
            eviction=self.eviction[0],
            seed=self.seed,
        )

    def check_host(self) -> None:
        """Raises ConfigError when host memory cannot hold the largest adapter."""
        engine, numbers = self.engine_config(), max(self.kind.numbers(self.model_config(), r) for r in self.kind.ranks)
        needed = numbers * float_dtype(engine.dtype).itemsize
        if needed > engine.host_bytes:
            raise ConfigError(f"host_gb is {self.host_gb}; the largest adapter takes {needed / 1e9:.2g}: raise it")

"""DemoOptions: what the demo can be told, and what it refuses before anything is made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from slora_ref.adapter import read_header
from slora_ref.config import ModelConfig
from slora_ref.demo.questions import LONGEST_ANSWER, LONGEST_PROMPT
from slora_ref.errors import ConfigError
from slora_ref.options import check_whole
from slora_ref.pager import AdapterShape, PageLayout
from slora_ref.tokenizer import Tokenizer
from slora_ref.toy import ADAPTERS_FOLDER, MODEL_FOLDER
from slora_ref.tp import Shard

MOST = {"adapters": 100_000, "requests": 100_000, "pool_pages": 1_000_000}
"""Upper limits, for a laptop's memory: 3 kB a registered header, 27 kB of kept logits a request, 512 bytes a page in
float64, so at most about 4 GB."""
SLOWEST, FASTEST = 1e-3, 1e6  # requests a second


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What `demo` can be told.

    Args:
        adapters: names to register.
        requests: how many are sent.
        pool_pages: pages of the pool; the default holds a few dozen adapters beside the sequences.
        seed: of words, popularity and arrivals.
        rate: requests a second; None: all at once.
        device, dtype, shards, communicator: see EngineConfig.
    """

    adapters: int = 2000
    requests: int = 256
    pool_pages: int = 7000
    seed: int = 0
    rate: float | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "float32"
    shards: int = 1
    communicator: Literal["auto", "threads", "mpi", "nccl"] = "auto"

    def __post_init__(self) -> None:
        """Raises ConfigError with the value and the limits."""
        for name, most in MOST.items():
            value, option = getattr(self, name), "--" + name.replace("_", "-")
            if not 1 <= value <= most:
                raise ConfigError(f"{name} is {value}; {option} must be at least 1 and at most {most:,}")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}; it must be 0 or above")
        if self.rate is not None and not SLOWEST <= self.rate <= FASTEST:
            raise ConfigError(f"rate is {self.rate}; it must be from {SLOWEST:g} to {FASTEST:,.0f} requests a second")


def check_pool(pool_pages: int, tasks: Iterable[str], shards: int = 1) -> None:
    """Raises ConfigError if the largest request there can be (largest adapter, longest sequence) would not fit.

    Also if the model cannot be split over so many shards.
    """
    config = ModelConfig.from_folder(MODEL_FOLDER)
    check_whole(ConfigError, "--shards", shards, 1)
    layout = PageLayout(config, Shard(0, shards))
    pages = {task: _adapter_pages(task, config, layout) for task in tasks}
    largest = max(pages, key=pages.__getitem__)
    # the last token of an answer is never fed back, so it has no key and value
    tokens = len(Tokenizer.from_folder(MODEL_FOLDER).encode(LONGEST_PROMPT)) + LONGEST_ANSWER - 1
    needed = pages[largest] + layout.token_pages(tokens)
    if pool_pages < needed:
        raise ConfigError(
            f"the pool has {pool_pages} pages, but the largest request takes {needed}: {pages[largest]} for the "
            f"adapter {largest} and {layout.token_pages(tokens)} for {tokens} tokens; enlarge it: "
            f"--pool-pages {needed} or more"
        )


def _adapter_pages(task: str, config: ModelConfig, layout: PageLayout) -> int:
    header = read_header(ADAPTERS_FOLDER / task, config)
    return layout.adapter_pages(AdapterShape(header.ranks, header.scales).page_ranks)

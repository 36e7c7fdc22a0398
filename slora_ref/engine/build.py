"""The usual engine's parts for a checkpoint folder: real model, FCFS, adapters loaded on the spot, the real clock."""

from __future__ import annotations

from pathlib import Path

from slora_ref.checkpoint import load_checkpoint
from slora_ref.clock import Clock, MonotonicClock
from slora_ref.config import EngineConfig, ModelConfig
from slora_ref.errors import ConfigError
from slora_ref.executor import Executor, ModelExecutor
from slora_ref.model import LlamaModel
from slora_ref.ops import NumpyOps
from slora_ref.pager import PageLayout, PagePool
from slora_ref.policy import FCFS, Policy
from slora_ref.prefetch import ImmediateLoader, Prefetcher
from slora_ref.scheduler import Scheduler
from slora_ref.store import AdapterStore
from slora_ref.tokenizer import Tokenizer

Parts = tuple[Scheduler, Prefetcher, Executor, Clock, ModelConfig, Tokenizer | None]


def build_parts(folder: Path, config: EngineConfig, policy: Policy | None = None) -> Parts:
    """What Engine takes, in its order.

    Raises:
        CheckpointError, UnsupportedModel, TokenizerError, ConfigError: see Engine.from_pretrained.
    """
    model_config = ModelConfig.from_folder(folder)
    weights = load_checkpoint(folder, model_config, config.dtype)
    has_tokenizer = (folder / "tokenizer.json").exists()
    tokenizer = Tokenizer.from_folder(folder) if has_tokenizer else None
    pool = build_pool(model_config, config)
    model = LlamaModel(model_config, weights, NumpyOps(config.dtype), pool, pool.max_positions)
    store = AdapterStore(model_config, pool.layout, config.dtype, config.host_bytes)
    prefetcher = Prefetcher(pool, store, ImmediateLoader(pool, store), config.eviction)
    scheduler = Scheduler(pool, prefetcher, policy or FCFS(), config)
    return scheduler, prefetcher, ModelExecutor(model), MonotonicClock(), model_config, tokenizer


def build_pool(model: ModelConfig, config: EngineConfig) -> PagePool:
    """The page pool that the options ask for.

    Raises:
        ConfigError: it could not hold a single token of prompt and one of answer, or max_length exceeds the model's.
    """
    layout = PageLayout(model)
    page_bytes = layout.num_layers * layout.row_stride(_itemsize(config.dtype)) * _itemsize(config.dtype)
    pages = config.pool_pages if config.pool_pages is not None else config.pool_bytes // page_bytes
    if pages < layout.token_pages(2):
        raise ConfigError(
            f"a pool of {pages} pages ({page_bytes} bytes each) cannot hold two tokens, which take "
            f"{layout.token_pages(2)}: "
            "raise pool_pages or pool_bytes"
        )
    longest = model.max_position_embeddings
    if config.max_length is not None and config.max_length > longest:
        raise ConfigError(f"max_length {config.max_length} is above the model's max_position_embeddings {longest}")
    in_pool = pages // layout.token_pages(1) + 1  # the last token of a sequence takes no pages
    return PagePool(
        layout,
        num_pages=pages,
        max_sequences=config.max_running,
        max_positions=min(config.max_length or longest, in_pool),
        max_adapters=config.max_adapters,
        dtype=config.dtype,
        poison=config.poison,
        shuffle_seed=config.page_order_seed,
    )


def _itemsize(dtype: str) -> int:
    return {"float32": 4, "float64": 8}[dtype]
